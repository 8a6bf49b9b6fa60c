"""GPU stages around a driver of our own making: the real installer, the real checks' runner, a namespace without
network; what CUDA itself would have to do fails, and the receipt says so (issue 8, items 4 to 6)."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chroot_exec.protocol import Check
from oci_builder.engines.run import run_stage
from oci_builder.engines.stages import find_stage
from oci_builder.engines.stages_first import before
from oci_builder.execution.run import load_checks
from oci_builder.model.errors import PolicyError
from oci_builder.model.receipts import PORTABLE
from oci_builder.release.host import os_name
from tests.engines.stages_lab import LAYER, NCCL, ROOT, Lab, make_lab
from tests.engines.test_local_limits import DRIVER, driver
from tests.release.helpers import checks, gpus, receipt, signed

SHIPPED = ("checks", "runtime_check", "ensure_runtime.sh", "check_runtime.py", "activate.sh")
PYTHON = '#!/bin/sh\nexec /usr/bin/env python3 "$@"\n'


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A release whose tiers have a Python that is the machine's, and which ships the project's own checks."""
    found = make_lab(tmp_path_factory.mktemp("gpu"), gates=[NCCL])
    for name in SHIPPED:
        source, target = ROOT / "layers/files" / name, found.root / "layers/files" / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, target)
    entries = "".join(f'[[file]]\nfrom = "files/{n}"\nto = "{n}"\n' for n in SHIPPED if f'to = "{n}"' not in LAYER)
    (found.root / "layers/runtime.toml").write_text(LAYER + entries)
    for tier in ("one", "two"):
        python = found.root / "envs" / tier / "bin/python3"
        python.write_text(PYTHON)
        python.chmod(0o755)
    done = found.stage("container")
    assert done.returncode == 0, done.stderr
    return found


def eight(tmp_path: Path) -> dict[str, str]:
    return driver(tmp_path, DRIVER.replace("*n = 2", "*n = 8"))


def outcomes(result: dict[str, Any]) -> dict[str, str]:
    return {c["name"]: c["outcome"] for c in result["checks"]}


def test_the_checks_run_without_network_on_the_installed_archive(lab: Lab, tmp_path: Path) -> None:
    done = lab.stage("nccl8", "--json", env=eight(tmp_path))
    if "needs.network" in done.stderr:
        pytest.skip("needs network namespaces")
    assert done.stdout, done.stderr
    # nccl8-u24 is not started after a no.
    found = json.loads(done.stdout)
    assert (found["stage"], found["outcome"], done.returncode) == ("nccl8", "fail", 1)
    assert outcomes(found) == {"network-blocked": "pass", "caches-empty": "pass", "nccl": "fail"}
    predicate = found["receipt"]["predicate"]
    assert [g["name"] for g in predicate["host"]["gpus"]] == ["NVIDIA B200"] * 8
    assert [s["name"] for s in found["receipt"]["subject"]] == [PORTABLE]
    assert predicate["host"]["os"] == os_name(Path("/"))
    assert (Path(found["kept"]) / "checks.log").stat().st_size > 0


def test_single_has_a_second_prefix_and_leaves_none(lab: Lab, tmp_path: Path) -> None:
    found = lab.result("single", env=eight(tmp_path))
    assert found["outcome"] == "fail"
    assert {"relocation", "jit", "training", "imports:one", "imports:two"} <= set(outcomes(found))
    assert outcomes(found)["caches-empty"] == "pass"
    prefix = next((lab.root / "cache/installed").iterdir())
    assert sorted(p.name for p in prefix.iterdir() if not p.name.startswith(".")) == ["runtime"]


def test_a_spec_without_a_runtime_has_no_gpu_stage(tmp_path: Path) -> None:
    bare = make_lab(tmp_path / "lab", base={"scratch": True})
    assert bare.stage("package").returncode == 0
    (tmp_path / "cuda").mkdir()
    found = bare.result("single", env=eight(tmp_path / "cuda"))
    assert (found["error"]["code"], found["exit"]) == ("stage.checks", 2)


def test_u24_runs_on_ubuntu_24_only(lab: Lab, tmp_path: Path) -> None:
    if os_name(Path("/")) == "ubuntu 24.04":
        pytest.skip("this is one")
    first = receipt("nccl8", host={"os": "ubuntu 22.04", "gpus": gpus(8)}, checks=checks(nccl="pass"), engine="modal",
                    finished="2026-05-01T10:05:00Z")  # fmt: skip
    place = write_first(lab, first)
    try:
        found = lab.result("nccl8-u24", env=eight(tmp_path))
        assert (found["error"]["code"], found["exit"]) == ("stage.os", 4)
    finally:
        place.unlink()


def without_gpus(path: Path) -> list[Check]:
    """The list; in place of the relocation check, which wants a GPU: is the runtime at the second prefix, too?"""
    script = 'test "$2" != "$4" && test -x "$4/envs/one/bin/hello"'
    return [
        replace(c, gpus=0, argv=("/bin/sh", "-c", script, "sh", *c.argv[3:]), result="exit")
        if c.name == "relocation" else replace(c, gpus=0) for c in load_checks(path)
    ]  # fmt: skip


def in_process(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, **options: str) -> dict[str, Any]:
    """A stage in a chroot, where no GPU can be shown: neither the sandbox nor a check asks for one."""
    place = "oci_builder.engines.stages_chroot"
    monkeypatch.setattr(f"{place}.gpu_selection", lambda: (None, {}))
    monkeypatch.setattr(f"{place}.load_checks", without_gpus)
    request = lab.request(release="", key="", scratch=str(tmp_path), options=options)
    return run_stage(name, request.to_json(), "local")


def test_in_another_root_the_installed_archive_shows_at_two_prefixes(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = lab.out / "runtime.oci.tar"
    found = in_process(lab, tmp_path, monkeypatch, "single", where="root", root=str(root))
    assert {c["name"] for c in found["checks"]} >= {"container-exec", "relocation", "jit"}, found["error"]
    assert {outcomes(found)[n] for n in ("network-blocked", "caches-empty")} == {"pass"}
    assert outcomes(found)["relocation"] == "pass", found["checks"]
    assert [s["name"] for s in found["receipt"]["subject"]] == [PORTABLE]


def test_in_the_image_its_own_folder_shows_twice(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = in_process(lab, tmp_path, monkeypatch, "single", where="image")
    assert outcomes(found)["container-archive"] == "pass", found["error"]
    assert outcomes(found)["relocation"] == "pass", found["checks"]
    assert {s["name"] for s in found["receipt"]["subject"]} == {PORTABLE, "runtime.oci.tar"}


def test_a_root_of_another_system_is_no_ubuntu_24(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = str(lab.out / "runtime.oci.tar")
    found = in_process(lab, tmp_path, monkeypatch, "nccl8-u24", where="root", root24=root)
    assert found["error"]["code"] in ("stage.os",) or os_name(Path("/")) == "ubuntu 24.04"
    assert in_process(lab, tmp_path, monkeypatch, "nccl8-u24", where="root")["error"]["code"] == "stage.option"


def test_there_are_three_places(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_process(lab, tmp_path, monkeypatch, "single", where="moon")["error"]["code"] == "stage.option"


@pytest.mark.parametrize(
    "changes",
    [{"engine": "fake"}, {"checks": checks(nccl="fail")}, {"host": {"os": "ubuntu 24.04", "gpus": gpus(8)}},
     {"host": {"os": "ubuntu 22.04", "gpus": gpus(7)}}, {"host": {"os": "ubuntu 22.04", "gpus": gpus(8, "NVIDIA H200", "9.0")}},
     {"subjects": {PORTABLE: "a" * 64}}],
)  # fmt: skip
def test_the_first_ubuntu_s_receipt_must_be_a_good_one(lab: Lab, changes: dict[str, Any]) -> None:
    """Another engine, outcome, system, machine or archive is no reason to go on to the second."""
    good = {"host": {"os": "ubuntu 22.04", "gpus": gpus(8)}, "checks": checks(nccl="pass"), "engine": "modal"}
    subjects = changes.get("subjects")
    made = receipt("nccl8", **{**good, **{k: v for k, v in changes.items() if k != "subjects"}})
    place = write_first(lab, made, subjects)
    try:
        with pytest.raises(PolicyError) as caught:
            before(find_stage("nccl8-u24"), lab.request(options={"trust": str(lab.trust)}))
        assert caught.value.code == "stage.first"
    finally:
        place.unlink()


def write_first(lab: Lab, made: Any, subjects: dict[str, str] | None = None) -> Path:
    from oci_builder.release.folder import ReleaseFolder
    from oci_builder.release.signing import load_key

    about = subjects or {PORTABLE: ReleaseFolder(lab.release).subjects()[PORTABLE]}
    path = lab.release / "receipts/nccl8-first.json"
    path.write_bytes(signed(load_key(lab.key), made, about))
    return path
