"""What a stage needs of the machine that runs it: pure data, checked before anything starts.

``validate`` refuses what Modal's client accepts without a word and its servers reject, bill or ignore later: unknown
GPU names, GPU counts that no machine has, a GPU that may not be preempted. The same values tell ``LocalRunner`` what
it must enforce here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from oci_builder.model.errors import SpecError

# Modal's guide (guide/gpu) lists these. The client upper-cases a name and sends whatever it is.
GPU_NAMES = (
    "T4", "L4", "A10", "L40S", "A100", "A100-40GB", "A100-80GB", "RTX-PRO-6000", "H100", "H100!", "H200", "B200",
    "B200+",
)  # fmt: skip
# The same guide: A10 machines have four at most, the others eight.
_MOST_GPUS = {"A10": 4}
_GPU = re.compile(r"(?P<name>[A-Za-z0-9+!-]+)(:(?P<count>[1-9][0-9]?))?\Z")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}\Z")
# Documented bounds that the client does not check: a day a call, 3 TiB of disk (guide/timeouts, guide/resources).
LONGEST = 24 * 3600
LARGEST_SCRATCH = 3 * 1024
IMAGES = ("build-u22", "check-u22", "check-u24", "repack")


@dataclass(frozen=True, slots=True)
class Needs:
    """What one stage needs.

    Attributes:
        image: family of the root file system: ``build-u22``, ``check-u22``, ``check-u24`` or ``repack``.
        cpu: cores.
        memory_mib: MiB of memory.
        scratch_gib: GiB of local disk, beside what is mounted.
        timeout_s: seconds, start-up not counted.
        gpu: ``""``, a name, or ``NAME:COUNT``.
        preemptible: the machine may be taken away; the stage then runs again on the same input.
        retries: after an error of the stage itself; preemption is not one.
        network: the stage may reach the network.
        volumes: mount point -> name of a volume.
        secrets: names of secrets whose variables the stage gets.
    """

    image: str
    cpu: float
    memory_mib: int
    scratch_gib: int
    timeout_s: int
    gpu: str = ""
    preemptible: bool = True
    retries: int = 0
    network: bool = False
    volumes: Mapping[str, str] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    @property
    def gpu_name(self) -> str:
        """The GPU's name, upper case; empty for none."""
        return self.gpu.partition(":")[0].upper()

    @property
    def gpu_count(self) -> int:
        """How many GPUs; 0 for none."""
        if not self.gpu:
            return 0
        count = self.gpu.partition(":")[2]
        return int(count) if count.isdecimal() else 1

    def to_json(self) -> dict[str, Any]:
        """The needs as JSON, for receipts."""
        return {**asdict(self), "volumes": dict(self.volumes), "secrets": list(self.secrets)}


def validate(needs: Needs, where: str = "needs") -> Needs:
    """The same needs, when a machine can have them.

    Raises:
        SpecError: ``needs.gpu`` (unknown name, bad count), ``needs.preemptible`` (GPU machines can always be taken
            away), ``needs.retries`` (GPU stages repeat no error), ``needs.image``, ``needs.size`` (cpu, memory,
            scratch), ``needs.timeout``, ``needs.volume``, ``needs.secret``.
    """
    for code, problem in _problems(needs):
        raise SpecError(code, f"{where}: {problem}", where=where)
    return needs


def _problems(needs: Needs) -> list[tuple[str, str]]:
    found = [
        ("needs.image", _image(needs)), ("needs.gpu", _gpu(needs)), ("needs.preemptible", _preemptible(needs)),
        ("needs.retries", _retries(needs)), ("needs.size", _size(needs)), ("needs.timeout", _timeout(needs)),
        ("needs.volume", _volumes(needs)), ("needs.secret", _secrets(needs)),
    ]  # fmt: skip
    return [(code, problem) for code, problem in found if problem]


def _image(needs: Needs) -> str:
    return "" if needs.image in IMAGES else f"no image family {needs.image!r}; known: {', '.join(IMAGES)}"


def _gpu(needs: Needs) -> str:
    if not needs.gpu:
        return ""
    match = _GPU.match(needs.gpu)
    if not match:
        return f"a GPU is NAME or NAME:COUNT with a count of 1 or more, not {needs.gpu!r}"
    if needs.gpu_name not in GPU_NAMES:
        return f"no GPU is called {match['name']!r}; known: {', '.join(GPU_NAMES)}"
    most = _MOST_GPUS.get(needs.gpu_name, 8)
    return "" if needs.gpu_count <= most else f"one machine has at most {most} {needs.gpu_name}, not {needs.gpu_count}"


def _preemptible(needs: Needs) -> str:
    if needs.gpu and not needs.preemptible:
        return "a machine with a GPU can always be preempted; only CPU stages may ask for one that stays"
    return ""


def _retries(needs: Needs) -> str:
    if not 0 <= needs.retries <= 10:
        return f"retries are 0 to 10, not {needs.retries}"
    return "a GPU stage repeats no error of its own: retries must be 0" if needs.gpu and needs.retries else ""


def _size(needs: Needs) -> str:
    # The least that a container gets; the most is the server's word, which it says when the function is made.
    if not 0.125 <= needs.cpu < 1024:
        return f"cpu is 0.125 cores or more, not {needs.cpu}"
    if needs.memory_mib < 128:
        return f"memory_mib is 128 or more, not {needs.memory_mib}"
    if not 0 <= needs.scratch_gib <= LARGEST_SCRATCH:
        return f"scratch_gib is 0 to {LARGEST_SCRATCH}, not {needs.scratch_gib}"
    return ""


def _timeout(needs: Needs) -> str:
    return "" if 1 <= needs.timeout_s <= LONGEST else f"timeout_s is 1 to {LONGEST}, not {needs.timeout_s}"


def _volumes(needs: Needs) -> str:
    for mount, name in needs.volumes.items():
        if not mount.startswith("/") or mount.rstrip("/") in ("", "/root", "/tmp") or "/../" in f"{mount}/":
            return f"a volume cannot be mounted at {mount!r}"
        if not _WORD.match(name):
            return f"{name!r} is no name of a volume"
    return ""


def _secrets(needs: Needs) -> str:
    bad = [name for name in needs.secrets if not _WORD.match(name)]
    return f"{bad[0]!r} is no name of a secret" if bad else ""
