"""Fixes in installed packages: there before a worker starts, so that upstream has nothing to write (NeMo RL issue 3913)."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import SpecError
from oci_builder.model.spec import Spec
from oci_builder.payload import runtime as runtime_module
from oci_builder.payload.overlay import fix_packages
from oci_builder.payload.runtime import Runtime, assemble_runtime
from oci_builder.payload.tiers import realize_tiers
from tests.payload.test_overlay import OVERLAY, UPSTREAM, load

SITE = "lib/python3.13/site-packages"
BEFORE, AFTER = b"import os\nbegin()\nend()\n", b"import os\nimport sys\nbegin(sys.executable)\nend()\n"
FIX = {
    "package": "engine-x", "version": "1.0", "path": "engine_x/start.py", "why": "a test",
    "sha256": hashlib.sha256(BEFORE).hexdigest(), "patched": hashlib.sha256(AFTER).hexdigest(),
    "insert": [
        {"after": 1, "drop": 1, "lines": ["begin(sys.executable)"]}, {"after": 1, "lines": ["import sys"]},
    ],
}  # fmt: skip
# A checkout's tier of vLLM 0.20.0, or any environment with it.
VLLM = os.environ.get("NEMO_RL_VLLM_ENV", "")


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    place = tmp_path / "files/source_overlay"
    shutil.copytree(OVERLAY, place, ignore=shutil.ignore_patterns("__pycache__"))
    (place / "overlay.json").write_text(
        json.dumps({"name": "stand-in", "commit": "0" * 40, "files": [], "new": [], "packages": [FIX]})
    )
    return place


def install(env: Path, version: str = "1.0", start: bytes = BEFORE) -> Path:
    """A package as an installer leaves it."""
    info = env / SITE / f"engine_x-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: engine_x\nVersion: {version}\n\nVersion: of the text\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(start).digest()).rstrip(b"=").decode()
    (info / "RECORD").write_text(f"engine_x/start.py,sha256={digest},{len(start)}\nengine_x/other.py,,\n")
    file = env / SITE / "engine_x/start.py"
    file.parent.mkdir()
    file.write_bytes(start)
    os.utime(file, (5, 5))
    return file


def test_a_fix_is_there_once_and_another_name_of_the_file_keeps_the_old_one(tmp_path: Path, overlay: Path) -> None:
    """B134: the file is uv's too."""
    file = install(tmp_path / "env")
    os.link(file, tmp_path / "uvs")
    for _ in range(2):
        said = fix_packages(tmp_path / "env", overlay)
        assert file.read_bytes() == AFTER and file.stat().st_mtime == 5
        assert [(f["path"], f["package"]) for f in said["fixed"]] == [(f"{SITE}/engine_x/start.py", "engine-x")]
    assert (tmp_path / "uvs").read_bytes() == BEFORE


def test_another_version_stays_as_it_is_and_is_named(tmp_path: Path, overlay: Path) -> None:
    file = install(tmp_path / "env", version="1.1")
    assert fix_packages(tmp_path / "env", overlay) == {"fixed": [], "other": ["engine-x 1.1"]}
    assert file.read_bytes() == BEFORE


def test_other_content_of_the_version_is_refused(tmp_path: Path, overlay: Path) -> None:
    file = install(tmp_path / "env", start=BEFORE + b"mine()\n")
    with pytest.raises(SpecError, match=r"engine_x/start\.py") as caught:
        fix_packages(tmp_path / "env", overlay)
    assert caught.value.code == "payload.overlay" and file.read_bytes() == BEFORE + b"mine()\n"


def test_an_environment_without_the_package_needs_no_fix(tmp_path: Path, overlay: Path) -> None:
    (tmp_path / "env" / SITE).mkdir(parents=True)
    assert fix_packages(tmp_path / "env", overlay) == {"fixed": [], "other": []}


@pytest.fixture
def spec(tmp_path: Path, overlay: Path) -> Spec:
    (overlay.parent.parent / "runtime.toml").write_text('name = "runtime"\ndescription = "d"\n')
    (tmp_path / "base.txt").write_text("")
    return Spec.model_validate(
        {"name": "n", "tag": "t", "base": {"host": True}, "prefix": "/opt/x", "files": ".",
         "tiers": {"base": {"requirements": "base.txt"}}}
    )  # fmt: skip


def assembled(spec: Spec, place: Path) -> Runtime:
    tiers = realize_tiers(spec, place, place / "work")
    (env,) = tiers.values()
    if not list(env.glob("lib/*/site-packages/engine_x")):
        (env / SITE).parent.mkdir(parents=True, exist_ok=True)
        install(env)
        found = json.loads((env.parent / "inventory.json").read_text())
        found["packages"].append({"name": "engine-x", "version": "1.0"})
        (env.parent / "inventory.json").write_text(json.dumps(found))
    return assemble_runtime(spec, place, place / "work", tiers, 2)


def test_a_build_fixes_its_packages_and_says_so(tmp_path: Path, spec: Spec, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = assembled(spec, tmp_path)
    env = runtime.tiers["base"]
    assert (env / SITE / "engine_x/start.py").read_bytes() == AFTER
    digest = base64.urlsafe_b64encode(hashlib.sha256(AFTER).digest()).rstrip(b"=").decode()
    record = (env / SITE / "engine_x-1.0.dist-info/RECORD").read_text().splitlines()
    assert record == [f"engine_x/start.py,sha256={digest},{len(AFTER)}", "engine_x/other.py,,"]
    monkeypatch.setattr(runtime_module, "_make", lambda *_: pytest.fail("made again"))
    for found in (runtime, assembled(spec, tmp_path)):
        packages = json.loads(found.files["inventory-base.json"])["packages"]
        fixed = {p["name"]: p["fixes"] for p in packages if "fixes" in p}
        own = {k: FIX[k] for k in ("sha256", "patched", "why")}
        assert fixed == {"engine-x": [{"path": f"{SITE}/engine_x/start.py", **own}]}


def test_the_bill_of_materials_says_what_was_patched(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")
    from oci_builder.release.packages import read_packages
    from oci_builder.release.sbom import sbom

    install(tmp_path / "envs/base")
    fix = {"path": f"{SITE}/engine_x/start.py", **{k: FIX[k] for k in ("sha256", "patched", "why")}}
    package: dict[str, Any] = {"name": "engine-x", "version": "1.0", "fixes": [fix]}
    inventory = {"tier": "base", "omitted": {}, "packages": [package]}
    (tmp_path / "inventory-base.json").write_text(json.dumps(inventory))
    tier = read_packages(tmp_path).tiers["base"]
    made = json.loads(sbom(tier, subject="image", version="r1", epoch=0))
    (component,) = made["components"]
    assert component["pedigree"]["patches"] == [{"type": "unofficial"}]
    assert all(word in component["pedigree"]["notes"] for word in (fix["path"], fix["patched"], fix["sha256"]))
    package["fixes"] = [{**fix, "patched": "no digest"}]
    (tmp_path / "inventory-base.json").write_text(json.dumps(inventory))
    assert "fixes" not in read_packages(tmp_path).tiers["base"]["packages"][0]


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """The files of a real vLLM 0.20.0 that the fixes are for."""
    found = next(Path(VLLM).glob("lib/python3*/site-packages/vllm-0.20.0.dist-info"), None) if VLLM else None
    if found is None:
        pytest.skip("NEMO_RL_VLLM_ENV names no environment with vLLM 0.20.0")
    env = tmp_path / "env"
    shutil.copytree(found, env / SITE / found.name)
    fixes = json.loads((OVERLAY / "overlay.json").read_text())["packages"]
    for name in [*(fix["path"] for fix in fixes), "vllm/tool_parsers/hermes_tool_parser.py"]:
        (env / SITE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(found.parent / name, env / SITE / name)
    (env / SITE / "vllm/__init__.py").touch()
    return env


@contextlib.contextmanager
def first_on_path(place: Path) -> Iterator[None]:
    sys.path.insert(0, str(place))
    try:
        yield
    finally:
        sys.path.remove(str(place))
        sys.modules.pop("vllm", None)


@pytest.mark.skipif(not UPSTREAM, reason="NEMO_RL_UPSTREAM names no checkout of NeMo RL v0.7.0")
def test_upstreams_own_patcher_finds_them_done(vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On real files, with real code: it writes into pristine ones, and into fixed ones nothing."""

    class Log:
        said: list[str]

        def info(self, text: str, *_: object) -> None:
            self.said.append(text)

        warning = info

    def patch(env: Path) -> tuple[set[str], list[str]]:
        patches, log = load(Path(UPSTREAM) / "nemo_rl/models/generation/vllm/patches.py"), Log()
        log.said = []
        before = {p: p.read_bytes() for p in env.rglob("*.py")}
        with first_on_path(env / SITE):
            patches._patch_vllm_init_workers_ray("/rt/envs/vllm/bin/python", None)
            patches._patch_vllm_llama_eagle3_own_lm_head(log)
            patches._patch_vllm_hermes_tool_parser_thread_safety(log)
        return {p.name for p, data in before.items() if p.read_bytes() != data}, log.said

    shutil.copytree(vllm, vllm.with_name("pristine"))
    assert patch(vllm.with_name("pristine"))[0] == {"ray_executor.py", "llama_eagle3.py"}
    assert {Path(fix["path"]).name for fix in fix_packages(vllm, OVERLAY)["fixed"]} == {
        "ray_executor.py", "llama_eagle3.py",
    }  # fmt: skip
    changed, said = patch(vllm)
    assert changed == set() and "already applied" in said[0]
    # This version has nothing that the third is for.
    assert "hermes" in said[1] and len(said) == 2


def test_the_fixed_executor_starts_its_workers_with_its_own_interpreter(vllm: Path) -> None:
    """Wherever the prefix is: no path stands in the file."""
    fix_packages(vllm, OVERLAY)
    text = (vllm / SITE / "vllm/v1/executor/ray_executor.py").read_text()
    start = text.index("        self._init_workers_ray(\n")
    call = "import sys\n" + text[start : text.index("\n\n", start)].replace("        self.", "self.", 1)
    code = f"""
class self:
    _init_workers_ray = staticmethod(lambda group, **more: print(group, more["runtime_env"]["py_executable"]))
placement_group = 1
{call}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["1", sys.executable] and "\nimport sys\n" in text
