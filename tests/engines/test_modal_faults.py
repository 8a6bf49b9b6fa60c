"""What can go wrong on Modal: which error it becomes, what is left, and that the next run goes on from there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("modal", reason="needs the extra 'modal'")

from tests.engines.modal_lab import MAIN, Lab, running_lab
from tests.lab.modal_plane_client import ROOT, Ran, why_not
from tests.lab.modal_plane_project import VOLUME

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("modal")) as lab:
        yield lab


@pytest.fixture
def lab(running: Lab) -> Iterator[Lab]:
    running.plane.faults()
    yield running
    running.plane.faults()


def refused(ran: Ran, status: int, code: str) -> None:
    """The error, once, with its status, and no traceback of ours (the client's own uploads may leave one of theirs)."""
    assert (ran.status, ran.text.count(f"error[{code}]")) == (status, 1), ran.text
    assert not [line for line in ran.err.splitlines() if line.startswith("  File") and "/oci_builder/" in line], ran.err


@pytest.mark.parametrize(
    ("faults", "status", "code"),
    [
        ({"rpc": {"AppCreate": ["UNAUTHENTICATED", "Token ID not found"]}}, 5, "modal.auth"),
        ({"rpc": {"FunctionCreate": ["RESOURCE_EXHAUSTED", "spend limit reached"]}}, 5, "modal.quota"),
        ({"rpc": {"FunctionCreate": ["INVALID_ARGUMENT", "no such GPU"]}}, 2, "modal.invalid"),
        ({"rpc": {"AppCreate": ["INTERNAL", "it broke"]}}, 5, "modal.service"),
        ({"image": "apt-get: exit 100"}, 5, "modal.image"),
        ({"volumes": {VOLUME: 1}}, 2, "modal.volume"),
    ],
    ids=["auth", "budget", "invalid", "service", "image", "volume-v1"],
)
def test_refusals_of_the_service_are_our_errors_and_nothing_runs(
    lab: Lab, faults: dict[str, object], status: int, code: str
) -> None:
    before = lab.plane.mark
    lab.plane.faults(**faults)
    refused(lab.stage("build"), status, code)
    assert lab.plane.events("container", before) == []


@pytest.mark.parametrize("size", [10, 6 << 20], ids=["message", "blob"])
def test_inputs_that_cannot_be_uploaded_end_the_stage_with_the_cause(lab: Lab, size: int) -> None:
    """B233, B235: a small file goes in a message, a large one over HTTP."""
    before = lab.plane.mark
    extra = lab.project.spec.parent / "layers/files/extra"
    extra.write_bytes(os.urandom(size))
    lab.plane.faults(rpc={"MountPutFile": ["INTERNAL", "no room"]} if size < 1 << 20 else {}, uploads=99)
    ran = lab.stage("build")
    refused(ran, 5, "modal.service")
    assert ("no room" if size < 1 << 20 else "503") in ran.err
    assert lab.plane.events("container", before) == []


def test_a_server_that_fails_once_is_asked_again(lab: Lab) -> None:
    """B233."""
    (lab.project.spec.parent / "layers/files/extra").write_bytes(os.urandom(6 << 20))
    lab.plane.faults(uploads=1)
    ran = lab.stage("build")
    assert ran.status == 0, ran.text


def test_an_unknown_profile(lab: Lab) -> None:
    before = lab.plane.mark
    ran = lab.stage("build", MODAL_PROFILE="nobody")
    refused(ran, 5, "modal.auth")
    assert "'nobody'" in ran.err and "MODAL_PROFILE" in ran.err
    assert lab.plane.mark == before, "nobody was asked"


def test_the_profile_is_the_user_s(lab: Lab) -> None:
    """MODAL_PROFILE alone decides whose account is used, under ``modal run`` as well."""
    config = lab.plane.root / "two.toml"
    config.write_text((lab.plane.root / "modal.toml").read_text().replace("[lab]", "[other]").replace("ak-lab", "ak-two"))
    before = lab.plane.mark
    env = {"MODAL_CONFIG_PATH": str(config), "MODAL_PROFILE": "other"}
    ran = lab.plane.run("run", "-q", "modal_build.py", "--stage", "build", *lab.project.words, **env)
    assert ran.status == 0, ran.text
    assert [app["token"] for app in lab.plane.events("app", before)] == ["ak-two", "ak-two"]
    ran = lab.plane.run("run", "modal_build.py", "--stage", "build", MODAL_CONFIG_PATH=str(config), MODAL_PROFILE="lab")
    assert ran.status == 1 and "'lab' was not found" in ran.text


def test_a_missing_secret_names_the_command_that_makes_it(lab: Lab) -> None:
    ran = lab.stage("publish")
    refused(ran, 2, "modal.missing")
    assert "modal secret create" in ran.err and "'huggingface'" in ran.err


def test_an_unknown_frozen_image(lab: Lab) -> None:
    refused(lab.stage("repack", NRL_REPACK_IMAGE_ID="im-gone"), 2, "modal.missing")


def test_nothing_starts_without_a_yes(lab: Lab) -> None:
    before = lab.plane.mark
    ran = lab.stage("container", agree=False)
    refused(ran, 4, "budget.agreed")
    assert "not preemptible (CPU and memory billed 3 times)" in ran.err
    assert lab.plane.mark == before, "nobody was asked"


def test_modal_run_checks_the_budget_before_any_image(lab: Lab, tmp_path: Path) -> None:
    budget = tmp_path / "budget.toml"
    budget.write_text('[rates]\ncpu = 1.0\nmemory = 1.0\n[limits]\nstage = 0.5\n')
    before = lab.plane.mark
    ran = lab.plane.run(
        "run", "modal_build.py", "--stage", "build", *lab.project.words, "--budget", str(budget)
    )
    refused(ran, 4, "budget.limit")
    assert [e["kind"] for e in map(json.loads, (lab.plane.root / "events.jsonl").read_text().splitlines()[before:])] == [
        "app", "disconnect",
    ]  # fmt: skip


def test_the_result_alone_is_on_standard_output_and_the_log_streams_beside_it(lab: Lab) -> None:
    ran = lab.stage("package", "--json")
    assert ran.status == 0, ran.text
    found = json.loads(ran.out)
    assert (found["stage"], found["outcome"], found["engine"]) == ("package", "pass", "fake")
    assert found["facts"]["modal"]["image"].startswith("im-")
    assert "Created Function package" in ran.err
    assert "✓ write runtime.oci.tar" in ran.err or "unchanged" in ran.err


def test_a_timeout_ends_the_stage_and_the_next_run_goes_on(lab: Lab) -> None:
    before = lab.plane.mark
    lab.plane.faults(deadline=0.2)
    ran = lab.stage("build")
    refused(ran, 1, "stage.timeout")
    assert "it has 180 minutes" in ran.err
    assert [e["late"] for e in lab.plane.events("exit", before)] == [True]
    lab.plane.faults()
    assert lab.stage("build").status == 0


def test_an_exception_comes_back_with_its_log_and_the_volume_is_committed(lab: Lab) -> None:
    before = lab.plane.mark
    broken = "def run_stage(*_):\n    open('/vol/half', 'w').write('x')\n    raise RuntimeError('it broke')\n"
    lab.plane.faults(files={"/root/oci_builder/engines/run.py": broken})
    ran = lab.stage("build")
    assert (ran.status, ran.err.count("error[modal.remote]")) == (5, 1), ran.text
    assert "RuntimeError: it broke" in ran.text
    assert [e["volume"] for e in lab.plane.events("commit", before)] == [VOLUME]
    (lab.volume / "half").unlink()


def test_a_preempted_stage_runs_again_on_the_same_input(lab: Lab) -> None:
    before = lab.plane.mark
    lab.plane.faults(preempt=["package"])
    ran = lab.stage("package")
    assert ran.status == 0, ran.text
    ends, starts = lab.plane.events("exit", before), lab.plane.events("container", before)
    assert [e["preempted"] for e in ends] == [True, False]
    assert len({e["input"] for e in starts}) == 1
    assert lab.plane.events("retry", before) == []


def test_a_stage_that_may_not_be_preempted_is_not(lab: Lab) -> None:
    assert lab.stage("package").status == 0
    before = lab.plane.mark
    lab.plane.faults(preempt=["container"])
    assert lab.stage("container").status == 0
    assert [e["preempted"] for e in lab.plane.events("exit", before)] == [False]


def test_a_package_that_was_not_shipped_is_named(lab: Lab) -> None:
    code = f"import oci_builder.engines.modal_app as m; m.SOURCES = ('oci_builder',); {MAIN}"
    ran = lab.stage("build", code=code)
    assert (ran.status, ran.err.count("error[modal.source]")) == (2, 1), ran.text
    assert "'chroot_exec'" in ran.err


def test_another_version_in_the_container(lab: Lab) -> None:
    lab.plane.faults(files={"/root/oci_builder/__init__.py": "__version__ = '0.0.1'\n"})
    refused(lab.stage("build"), 2, "stage.version")


def test_what_a_failed_stage_left_is_on_the_volume(lab: Lab) -> None:
    """Local disk goes with its container; logs are moved to where people can look."""
    assert lab.stage("package").status == 0
    checks = lab.project.spec.parent / "no.json"
    checks.write_text(json.dumps([{"name": "no", "argv": ["/bin/sh", "-c", "exit 3"]}]))
    ran = lab.stage("container-check", "-o", f"checks={checks}")
    assert ran.status == 1, ran.text
    place = next(line.split(": ")[1] for line in ran.err.splitlines() if line.startswith("kept for diagnosis"))
    assert place.startswith("/vol/cache/failed/container-check-")
    kept = lab.volume / Path(place).relative_to("/vol")
    assert kept.is_dir()


def test_what_a_failed_gpu_stage_left_comes_back(lab: Lab, tmp_path: Path) -> None:
    """It has no volume, and its disk is gone: here the driver gives a B200, and the image has no runtime."""
    assert [lab.stage(name).status for name in ("package", "container")] == [0, 0]
    limits = ROOT / "oci_builder/engines/local_limits.py"
    gpu = "\ndef find_gpus(*_):\n    return ({'name': 'NVIDIA B200', 'uuid': 'GPU-1'},)\n"
    lab.plane.faults(files={f"/root/{limits.relative_to(ROOT)}": limits.read_text() + gpu})
    ran = lab.stage("single", XDG_CACHE_HOME=str(tmp_path))
    refused(ran, 1, "stage.install")
    place = next(line.split(": ")[1] for line in ran.err.splitlines() if line.startswith("kept for diagnosis"))
    assert Path(place).is_relative_to(tmp_path)
    assert (Path(place) / "install.log").read_text()


def test_a_gpu_stage_needs_the_record_of_package(lab: Lab, tmp_path: Path) -> None:
    before = lab.plane.mark
    refused(lab.stage("single", "--release", str(tmp_path / "none")), 2, "stage.order")
    assert lab.plane.mark == before
