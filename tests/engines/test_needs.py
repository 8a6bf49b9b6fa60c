"""What a stage needs, and what is refused before anything starts (requirements section 9; issue 8, items 1 and 3)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oci_builder.cli.stages import NAMES
from oci_builder.engines.needs import Needs, validate
from oci_builder.engines.stages import STAGES, find_stage, sequence
from oci_builder.model.errors import SpecError

CPU = Needs("build-u22", 2, 4096, 10, 600)
GPU = Needs("check-u22", 2, 4096, 10, 600, gpu="B200")


@pytest.mark.parametrize("gpu", ["B200", "b200", "B200:1", "B200:8", "H100!", "RTX-PRO-6000", "A10:4"])
def test_gpus_that_there_are(gpu: str) -> None:
    assert validate(replace(GPU, gpu=gpu)).gpu == gpu


@pytest.mark.parametrize("gpu", ["B2000", "B200:9", "A10:5", "B200:0", "B200:-1", "B200:", "B200:x", ":8", "B200:8:1", " B200"])
def test_gpus_that_the_client_takes_and_nobody_has(gpu: str) -> None:
    with pytest.raises(SpecError) as caught:
        validate(replace(GPU, gpu=gpu))
    assert caught.value.code == "needs.gpu"


def test_a_gpu_machine_can_always_be_taken_away() -> None:
    with pytest.raises(SpecError) as caught:
        validate(replace(GPU, preemptible=False))
    assert caught.value.code == "needs.preemptible"


@pytest.mark.parametrize(
    ("code", "changes"),
    [
        ("needs.retries", {"gpu": "B200", "image": "check-u22", "retries": 1}), ("needs.retries", {"retries": 11}),
        ("needs.image", {"image": "debian"}), ("needs.size", {"cpu": 0}), ("needs.size", {"memory_mib": 64}),
        ("needs.size", {"scratch_gib": 4000}), ("needs.timeout", {"timeout_s": 0}), ("needs.timeout", {"timeout_s": 86401}),
        ("needs.volume", {"volumes": {"/": "x"}}), ("needs.volume", {"volumes": {"/root": "x"}}),
        ("needs.volume", {"volumes": {"vol": "x"}}), ("needs.volume", {"volumes": {"/a/../b": "x"}}),
        ("needs.volume", {"volumes": {"/vol": "a b"}}), ("needs.secret", {"secrets": ("",)}),
    ],
)  # fmt: skip
def test_what_else_is_refused(code: str, changes: dict[str, object]) -> None:
    with pytest.raises(SpecError) as caught:
        validate(replace(CPU, **changes))
    assert caught.value.code == code


@pytest.mark.parametrize(("gpu", "name", "count"), [("", "", 0), ("b200", "B200", 1), ("B200:8", "B200", 8)])
def test_name_and_count(gpu: str, name: str, count: int) -> None:
    needs = replace(GPU, gpu=gpu)
    assert (needs.gpu_name, needs.gpu_count) == (name, count)


def test_the_stages_are_those_of_section_9() -> None:
    assert tuple(STAGES) == NAMES


def test_the_needs_that_section_9_names() -> None:
    container, publish = STAGES["container"].needs, STAGES["publish"].needs
    assert (container.preemptible, container.timeout_s, publish.preemptible, publish.timeout_s) == (False, 5400, False, 3600)
    gpu = {name: stage.needs for name, stage in STAGES.items() if stage.needs.gpu}
    assert {name: (n.gpu, n.image) for name, n in gpu.items()} == {
        "single": ("B200", "check-u22"), "nccl8": ("B200:8", "check-u22"), "nccl8-u24": ("B200:8", "check-u24"),
    }  # fmt: skip
    assert not any(n.network or n.retries or n.secrets or n.volumes for n in gpu.values())
    assert {name for name, stage in STAGES.items() if stage.needs.network} == {"build", "package", "publish"}
    assert STAGES["repack"].needs.image == "repack"
    assert all(stage.needs.retries == 0 for stage in STAGES.values())


def test_nccl8_is_each_ubuntu_in_turn() -> None:
    assert [s.name for s in sequence("nccl8")] == ["nccl8", "nccl8-u24"]
    assert [s.name for s in sequence("nccl8-u24")] == ["nccl8-u24"]


def test_an_unknown_stage_names_those_there_are() -> None:
    with pytest.raises(SpecError) as caught:
        find_stage("deploy")
    assert caught.value.code == "stage.name"
    assert "container-check" in caught.value.message
