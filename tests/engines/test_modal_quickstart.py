"""examples/quickstart as a release on the stand-in, every stage by the real ``modal run``: uv makes three environments
on the volume, as on Modal. Each test is one step; those before it must have passed.

What is not Modal's own is said by every receipt: ``engine: fake``.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("modal", reason="needs the extra 'modal'")

from oci_builder.model.receipts import DOCKER, OCI, PORTABLE
from oci_builder.receipt import make_key
from tests.lab.dockerregistry import docker_registry, needs_registry
from tests.lab.envelopes import statement_of
from tests.lab.hub import TOKEN, FakeHub
from tests.lab.modal_plane_client import ROOT, Ran, RunningPlane, bare_python, why_not
from tests.lab.modal_plane_project import VOLUME

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.network,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or "it can"),
]
CHECKS = ["container-exec", "base", "automodel", "vllm", "relocation"]
GATES = [
    {"name": "archive", "stage": "container", "subjects": [PORTABLE, OCI], "checks": ["container-archive"]},
    {"name": "runs", "stage": "container-check", "checks": CHECKS},
]  # fmt: skip
HUB = {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}  # the stand-in of the Hub has no xet
# The parent of the program that goes online writes down where it connects to itself.
WATCHED = """
import sys
def _seen(event, args):
    if event == "socket.connect" and isinstance(args[1], tuple):
        open("/vol/connected", "a").write(repr(args[1]) + "\\n")
sys.addaudithook(_seen)
"""


class Release:
    """A copy of the example with a release folder, gates, a key, and the stand-in."""

    def __init__(self, folder: Path) -> None:
        self.python = bare_python(folder / "python")
        self.plane = RunningPlane(folder / "plane", self.python)
        self.project, self.image = folder / "project", ""
        shutil.copytree(ROOT / "examples/quickstart", self.project)
        spec = json.loads((self.project / "spec.json").read_text())
        (self.project / "spec.json").write_text(json.dumps({**spec, "release": "quickstart-r1", "gates": GATES}))
        public = make_key(self.project / "key")["public"]
        valid = {"not_before": "2020-01-01T00:00:00Z", "not_after": "2099-01-01T00:00:00Z"}
        trust = {"keys": [{"name": "lab", "public": public, **valid}]}
        (self.project / "trust.json").write_text(json.dumps(trust))
        key = (self.project / "key").read_text()
        self.plane.secrets = {"oci-builder-key": {"OCI_BUILDER_KEY": key}, "huggingface": HUB}
        self.plane.faults()

    @property
    def folder(self) -> Path:
        return self.project / "releases/quickstart-r1"

    @property
    def dist(self) -> Path:
        return self.plane.volume(VOLUME) / "dist/quickstart-r1"

    def run(self, script: str, stage: str, *words: str, **env: str) -> Ran:
        """``modal run SCRIPT --stage STAGE`` with the options of docs/modal.md."""
        given = ["--spec", self.project / "spec.json", "--release", self.folder, "--trust", self.project / "trust.json",
                 "--key", self.project / "key", "--yes"]  # fmt: skip
        return self.plane.run("run", "-q", script, "--stage", stage, *map(str, given), *words, **env)

    def passed(self, script: str, stage: str, *words: str, **env: str) -> str:
        """Run it; its output, once it has passed."""
        ran = self.run(script, stage, *words, **env)
        assert (ran.status, f"{stage}: pass (fake)" in ran.out) == (0, True), ran.text
        return ran.out

    def statements(self, stage: str) -> dict[str, dict[str, Any]]:
        """The receipts of a stage that the folder holds now: file name -> statement."""
        return {p.name: statement_of(p) for p in sorted((self.folder / "receipts").glob(f"{stage}-2*.json"))}

    def verdict(self) -> dict[str, Any]:
        """What ``qualification`` recorded."""
        found: dict[str, Any] = json.loads((self.folder / "qualification.json").read_text())
        return found


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    made = Release(tmp_path_factory.mktemp("quickstart"))
    try:
        yield made
    finally:
        made.plane.stop()


def test_01_build(release: Release) -> None:
    said = release.passed("modal_build.py", "build")
    release.image = next(line.split()[1] for line in said.splitlines() if line.startswith("image im-"))


def test_02_tiers_share_files_by_hard_links_on_the_volume(release: Release) -> None:
    tiers = release.plane.volume(VOLUME) / "cache/tiers"
    linked = [p for p in tiers.rglob("*.py") if p.is_file() and p.stat().st_nlink > 1]
    assert len(linked) > 100


@pytest.mark.parametrize("stage", ["package", "container", "container-check"])
def test_03_the_archives_and_their_checks(release: Release, stage: str) -> None:
    release.passed("modal_build.py", stage)


def test_04_container_recorded_the_release_here(release: Release) -> None:
    records = {"portable.json", "container.json"}
    assert all((release.folder / n).read_bytes() == (release.dist / n).read_bytes() for n in records)
    assert len(list(release.folder.glob("*.cdx.json"))) >= 3, "an SBOM for each tier"
    (statement,) = release.statements("container").values()
    subjects = {s["name"]: s["digest"]["sha256"] for s in statement["subject"]}
    for name in (PORTABLE, OCI, DOCKER):
        assert subjects[name] == hashlib.sha256((release.dist / name).read_bytes()).hexdigest()


def test_05_the_same_stage_here_makes_the_same_portable_archive(release: Release, tmp_path: Path) -> None:
    """The same code on both engines: other paths, another process, the same bytes."""
    code = "from oci_builder.cli import main; main()"
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{release.python.parent}:{os.environ['PATH']}"}
    words = ["stage", "package", "--spec", release.project / "spec.json", "--out", tmp_path / "dist"]
    command = [release.python, "-c", code, *words, "--cache", tmp_path / "cache"]
    done = subprocess.run([str(w) for w in command], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    far = json.loads((release.dist / "portable.json").read_text())
    near = json.loads((tmp_path / "dist/portable.json").read_text())
    assert near["sha256"] == far["sha256"]
    assert (tmp_path / "dist" / PORTABLE).stat().st_size == near["size"]


def test_06_a_stage_on_a_gpu_is_refused_where_there_is_none(release: Release) -> None:
    ran = release.run("modal_qualify.py", "single", "-o", "helper=layers/files/ensure_runtime.sh")
    assert (ran.status, ran.err.count("error[needs.gpu]")) == (4, 1), ran.text
    assert "gives 0 GPUs" in ran.err and "B200" in ran.err
    assert release.statements("single") == {}


def test_07_qualification_says_candidate_and_why(release: Release) -> None:
    said = release.passed("modal_build.py", "qualification")
    assert release.verdict()["state"] == "candidate"
    assert {gate["name"]: gate["state"] for gate in release.verdict()["gates"]} == {"archive": "open", "runs": "open"}
    assert said.count("engine fake, wanted local or modal") == 2


def repack(release: Release, *words: str) -> Ran:
    return release.run("modal_repack.py", "repack", *words, NRL_REPACK_IMAGE_ID=release.image)


def test_08_repack_of_nothing_is_refused(release: Release) -> None:
    ran = repack(release)
    assert (ran.status, ran.err.count("error[repack.nothing]")) == (2, 1), ran.text


def test_09_repack_takes_a_changed_packaging_file_and_begins_anew(release: Release) -> None:
    """The image is another one, the old one is kept, and what was proved about it is not said of the new."""
    old, before = json.loads((release.dist / "portable.json").read_text())["sha256"], release.statements("container-check")
    image = hashlib.sha256((release.dist / OCI).read_bytes()).hexdigest()
    tiers = release.project / "layers/files/tiers.py"
    tiers.write_text(tiers.read_text() + "# repaired\n")
    ran = repack(release)
    assert (ran.status, "repack: pass (fake)" in ran.out) == (0, True), ran.text
    new = json.loads((release.folder / "portable.json").read_text())["sha256"]
    assert new != old == json.loads((release.folder / f"superseded/{old[:12]}/portable.json").read_text())["sha256"]
    assert hashlib.sha256((release.dist / OCI).read_bytes()).hexdigest() != image
    kept = release.dist.with_name(f"{release.dist.name}.{old[:12]}")
    assert hashlib.sha256((kept / OCI).read_bytes()).hexdigest() == image
    assert before and not before.keys() & release.statements("container-check").keys()
    assert (release.folder / "superseded" / old[:12] / "receipts" / next(iter(before))).is_file()


def test_10_the_new_archive_is_judged_by_receipts_of_its_own(release: Release) -> None:
    said = release.passed("modal_build.py", "qualification")
    assert said.count("no valid receipt of stage") == 2 and "engine fake" not in said
    for stage in ("container", "container-check", "qualification"):
        said = release.passed("modal_build.py", stage)
    assert release.verdict()["state"] == "candidate"
    assert said.count("engine fake, wanted local or modal") == 2


def test_11_publish_to_the_hub_goes_online_in_its_child_only(release: Release) -> None:
    path = ROOT / "oci_builder/engines/modal_container.py"
    release.plane.faults(files={f"/root/{path.relative_to(ROOT)}": path.read_text() + WATCHED})
    words = ["-o", "repo=o/r", "-o", "helper=layers/files/ensure_runtime.sh"]
    with FakeHub() as hub:
        said = release.passed("modal_build.py", "publish", *words, "-o", f"endpoint={hub.url}")
        sent = hub.files
    release.plane.faults()
    assert hashlib.sha256(sent[f"quickstart-r1/{PORTABLE}"]).hexdigest() == json.loads(
        (release.folder / "portable.json").read_text()
    )["sha256"]
    assert not (release.plane.volume(VOLUME) / "connected").exists()
    assert TOKEN not in said and not any(TOKEN in p.read_text() for p in release.folder.rglob("*.json"))


@needs_registry
def test_12_publish_to_a_registry(release: Release, tmp_path: Path) -> None:
    with docker_registry(tmp_path) as registry:
        words = ["-o", f"registry={registry.host}/lab/quickstart:r1", "-o", "helper=layers/files/ensure_runtime.sh"]
        said = release.passed("modal_build.py", "publish", *words)
    assert "manifest sha256:" in said


def test_13_every_receipt_says_fake(release: Release) -> None:
    found = {name: s for stage in ("container", "repack", "publish") for name, s in release.statements(stage).items()}
    engines = {name: statement["predicate"]["engine"] for name, statement in found.items()}
    assert len(engines) >= 4 and set(engines.values()) == {"fake"}, engines
    assert release.plane.events("unknown") == [], "the stand-in knew every request of the client"
