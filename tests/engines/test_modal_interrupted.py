"""What is cut off: a client that is told to end or is killed, containers that are taken away or run out of memory, and
two stages at once. Nothing of it may lose a receipt or leave half an archive (issue 8, item 4)."""

from __future__ import annotations

import hashlib
import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("modal", reason="needs the extra 'modal'")

from oci_builder.model.receipts import DOCKER, OCI, PORTABLE
from tests.engines.modal_lab import Lab, ended, running_lab
from tests.lab.modal_plane_client import ROOT, Ran, why_not
from tests.lab.modal_plane_project import CHECKS
from tests.lab.waits import until

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
]
# All archives are whole in their staging folder, and none has its name yet.
HELD = "\nimport time\ndef _held(*_):\n    open('/vol/held', 'w').close()\n    time.sleep(3600)\nOutputs.publish = _held\n"
KILLED = "\nimport os\ndef _killed(*_):\n    os.kill(os.getpid(), 9)\nOutputs.publish = _killed\n"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    with running_lab(tmp_path_factory.mktemp("modal")) as lab:
        yield lab


@pytest.fixture
def lab(running: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lab]:
    running.plane.faults()
    (running.volume / "held").unlink(missing_ok=True)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield running
    running.plane.faults()


def instead(lab: Lab, more: str) -> None:
    """Containers run ``build.py`` with these lines at its end, and find something to do."""
    change(lab)
    path = ROOT / "oci_builder/build.py"
    lab.plane.faults(files={f"/root/{path.relative_to(ROOT)}": path.read_text() + more})


def change(lab: Lab) -> None:
    """The spec's inputs are others than those of the test before: there is something to do."""
    path = lab.project.spec.parent / "layers/files/checks.json"
    path.write_text(json.dumps([*json.loads(path.read_text()), {**CHECKS[0], "name": f"more-{lab.plane.mark}"}]))


def held(lab: Lab) -> None:
    """Wait until a container has got to where it is held."""
    until((lab.volume / "held").exists)


def dist(lab: Lab) -> Path:
    return lab.volume / "dist" / lab.project.release.name


def archives(lab: Lab) -> set[str]:
    return {p.name for p in dist(lab).glob("*") if not p.name.startswith(".")}


def whole(lab: Lab, ran: Ran) -> None:
    """The stage passed, and the volume has what its answer says."""
    assert ran.status == 0, ran.text
    said = dict(reversed(line.split()) for line in ran.out.splitlines() if line.endswith((PORTABLE, OCI, DOCKER)))
    assert set(said) == {PORTABLE, OCI, DOCKER}
    assert {name: hashlib.sha256((dist(lab) / name).read_bytes()).hexdigest() for name in said} == said
    assert not list(dist(lab).glob(".staging-*")), "what the dead one left is cleared away"


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(signal.SIGTERM, id="SIGTERM"),
        pytest.param(signal.SIGINT, id="SIGINT"),
        pytest.param(signal.SIGHUP, id="SIGHUP", marks=pytest.mark.soak),
    ],
)
def test_a_client_that_is_told_to_end_ends_its_app_and_leaves_no_inputs(
    number: signal.Signals, lab: Lab, tmp_path: Path
) -> None:
    before = lab.plane.mark
    instead(lab, HELD)
    process = lab.start("package")
    held(lab)
    assert list(tmp_path.glob("oci-builder-inputs-*/inputs.tar"))
    process.send_signal(number)
    ran = ended(process)
    assert (ran.status, f"interrupted by {number.name}" in ran.err) == (128 + number, True), ran.text
    assert list(tmp_path.iterdir()) == []
    assert [e["reason"] for e in lab.plane.events("disconnect", before)] == ["APP_DISCONNECT_REASON_KEYBOARD_INTERRUPT"]
    until(lambda: lab.plane.events("exit", before))


def test_a_client_that_is_killed_leaves_half_a_run_and_the_next_one_goes_on(lab: Lab, tmp_path: Path) -> None:
    """Its inputs go with the next run; the volume has no archive of it, and what it compressed is found again."""
    before, there = lab.plane.mark, archives(lab)
    instead(lab, HELD)
    process = lab.start("package")
    held(lab)
    process.kill()
    process.communicate()
    until(lambda: lab.plane.events("exit", before))
    assert [e["why"] for e in lab.plane.events("ended", before)] == ["lost"]
    assert archives(lab) == there
    assert list(tmp_path.glob("oci-builder-inputs-*/inputs.tar")), "nobody could remove them"
    lab.plane.faults()
    ran = lab.stage("package")
    whole(lab, ran)
    assert list(tmp_path.iterdir()) == []
    layers = ran.err.count("✓ layer ")
    assert layers > 2 and ran.err.count("taken from the cache") == layers, "no layer is compressed again"


def test_a_container_that_is_killed_for_its_memory(lab: Lab) -> None:
    before, there = lab.plane.mark, archives(lab)
    instead(lab, KILLED)
    ran = lab.stage("package")
    assert (ran.status, ran.err.count("error[modal.remote]")) == (5, 1), ran.text
    assert "16384 MiB" in ran.err and "137" in ran.err
    assert [e["status"] for e in lab.plane.events("exit", before)] == [137]
    assert archives(lab) == there
    lab.plane.faults()
    whole(lab, lab.stage("package"))


def test_two_stages_that_write_archives_at_once(lab: Lab) -> None:
    """One of them is told to wait; the other's archives are whole."""
    instead(lab, HELD)
    first = lab.start("package")
    held(lab)
    lab.plane.faults()
    ran = lab.stage("package")
    assert (ran.status, ran.err.count("error[stage.busy]")) == (6, 1), ran.text
    first.send_signal(signal.SIGTERM)
    assert ended(first).status == 143
    whole(lab, lab.stage("package"))


def test_a_preempted_gpu_stage_runs_again_on_the_same_input(lab: Lab) -> None:
    """It cannot be kept from that: Modal has no GPUs that stay."""
    for name in ("package", "container"):
        assert lab.stage(name).status == 0
    before = lab.plane.mark
    lab.plane.faults(preempt=["single"])
    ran = lab.stage("single")
    assert (ran.status, ran.err.count("error[needs.gpu]")) == (4, 1), ran.text
    assert [e["preempted"] for e in lab.plane.events("exit", before)] == [True, False]
    assert len({e["input"] for e in lab.plane.events("container", before)}) == 1
    assert lab.plane.events("retry", before) == []
    assert not list((lab.project.release / "receipts").glob("single-*"))


def test_two_stages_of_a_release_at_once_keep_both_receipts(lab: Lab) -> None:
    """The release folder of each came back whole; neither is what the other saw."""
    for name in ("package", "container"):
        assert lab.stage(name).status == 0
    receipts = lab.project.release / "receipts"
    before = set(receipts.iterdir())
    processes = [lab.start(name, "--json") for name in ("container-check", "container")]
    results = []
    for ran in map(ended, processes):
        assert ran.status == 0, ran.text
        results.append(json.loads(ran.out))
    assert {r["stage"] for r in results} == {"container-check", "container"}
    made = set(receipts.iterdir()) - before
    assert {Path(r["receipt_path"]).name for r in results} <= {p.name for p in made}
    assert all(Path(r["receipt_path"]).is_file() for r in results)
