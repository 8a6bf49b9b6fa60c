"""The stages of a release: each a plain function of a request, the same on this machine and on Modal.

The order of a release is that of ``STAGES``. ``build`` makes the environments and the runtime in the cache, ``package``
makes all archives from them in one compression pass, ``container`` proves that a second pass changes nothing and that
every byte is what the records say, ``container-check`` runs the image, the GPU stages run the portable archive.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from oci_builder.engines.needs import Needs, validate
from oci_builder.engines.stages_build import build_stage, check_stage, container_stage, package_stage
from oci_builder.engines.stages_gpu import nccl_stage, second_ubuntu_stage, single_stage
from oci_builder.engines.stages_release import publish_stage, qualification_stage, repack_stage
from oci_builder.engines.stages_request import Outcome, Request, Stage
from oci_builder.model.errors import SpecError, show

__all__ = ["KEY_SECRET", "STAGES", "Outcome", "Request", "Stage", "find_stage", "sequence"]

_VOLUME = {"/vol": "oci-builder"}
_MINUTE = 60
# For stages that sign what they did themselves; the receipts of all others are signed by the sender.
KEY_SECRET = "oci-builder-key"
_GPU_OPTIONS = ("where", "root", "prefix", "sha256", "helper", "tiers", "isolation")


def _cpu(timeout: int, *, cpu: float = 4, memory: int = 8192, scratch: int = 0, stays: bool = False,
         network: bool = False, secrets: tuple[str, ...] = (), image: str = "build-u22") -> Needs:  # fmt: skip
    return Needs(
        image, cpu, memory, scratch, timeout * _MINUTE, preemptible=not stays, network=network, volumes=_VOLUME,
        secrets=secrets,
    )  # fmt: skip


def _gpu(gpu: str, image: str, timeout: int, cpu: float, memory: int) -> Needs:
    # No volume: the archive is part of the image, and the result is small enough to be returned.
    return Needs(image, cpu, memory, 64, timeout * _MINUTE, gpu=gpu)


_ALL = (
    # Compiling what upstream has no wheels for takes cores and memory.
    Stage("build", _cpu(180, cpu=16, memory=65536, scratch=256, network=True), build_stage,
          "environments from the lock, then the runtime: relocated, compiled, audited"),
    Stage("package", _cpu(120, cpu=8, memory=16384, scratch=256, network=True), package_stage,
          "all archives from the finished environments, in one compression pass", ("jobs",)),
    Stage("container", _cpu(90, cpu=8, memory=16384, scratch=256, stays=True, secrets=(KEY_SECRET,)), container_stage,
          "the image archives: unchanged by a second pass, every byte verified; the release recorded",
          ("jobs", "trust", "allow")),
    Stage("container-check", _cpu(60, memory=16384, scratch=256), check_stage,
          "verify, readiness and the offline CPU checks in a chroot", ("checks", "isolation")),
    Stage("single", _gpu("B200", "check-u22", 60, 16, 131072), single_stage,
          "the checks on one GPU", _GPU_OPTIONS),
    Stage("nccl8", _gpu("B200:8", "check-u22", 60, 32, 262144), nccl_stage,
          "the checks on eight GPUs, on Ubuntu 22.04 and then on 24.04",
          (*_GPU_OPTIONS, "root24"), then="nccl8-u24"),
    Stage("nccl8-u24", _gpu("B200:8", "check-u24", 60, 32, 262144), second_ubuntu_stage,
          "only the second of them, once the first has a valid receipt for the same archive",
          (*_GPU_OPTIONS, "root24", "trust")),
    Stage("qualification", _cpu(10, cpu=1, memory=2048), qualification_stage,
          "what the release folder's receipts prove, judged and recorded", ("trust",)),
    Stage("repack", _cpu(60, cpu=8, memory=16384, scratch=256, image="repack", secrets=(KEY_SECRET,)), repack_stage,
          "repair packaging files of a candidate; nothing is compiled again",
          ("trust", "checks", "isolation", "marker", "jobs", "allow")),
    Stage("publish", _cpu(60, scratch=64, stays=True, network=True, secrets=("huggingface", KEY_SECRET)), publish_stage,
          "send it to the Hub or to a registry, read it back, sign the delivery",
          ("repo", "endpoint", "registry", "helper", "trust", "allow")),
)  # fmt: skip
for _stage in _ALL:
    validate(_stage.needs, f"stage {_stage.name}")

STAGES: Mapping[str, Stage] = MappingProxyType({stage.name: stage for stage in _ALL})


def find_stage(name: str) -> Stage:
    """The stage of that name.

    Raises:
        SpecError: ``stage.name``.
    """
    if name not in STAGES:
        raise SpecError("stage.name", f"no stage {show(name)}; there are {', '.join(STAGES)}")
    return STAGES[name]


def sequence(name: str) -> tuple[Stage, ...]:
    """The stages that a name stands for, in turn; the next one runs only when the one before passed.

    Raises:
        SpecError: ``stage.name``.
    """
    stage = find_stage(name)
    return (stage, *(sequence(stage.then) if stage.then else ()))
