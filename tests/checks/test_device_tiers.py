"""The device script's tiers, made from a small environment in place of the machine's: links, overlays, omissions."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from checks_lab import FILES


def package(site: Path, name: str, version: str, *files: str) -> None:
    """A package with metadata and a record of its files."""
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    listed = [f"{info.name}/METADATA", *files]
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).write_text(f"# {name} {version}\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*listed, f"{info.name}/RECORD"]))


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """The script with its places below a folder of the test, after it made the tiers."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield assembled(tmp_path_factory.mktemp("tiers"), monkeypatch)


def assembled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FILES.parents[1] / "tests/device"))
    import tiers_gpu

    env = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    own = next(iter(env.glob("lib/python3*/site-packages")))
    package(own, "transformers", "5.17.0", "transformers/__init__.py", "transformers/old.py")
    package(own, "accelerate", "1.0", "accelerate/deep/__init__.py")
    given = tmp_path / "given"
    package(given / "common", "ray", "2.55.1", "ray/__init__.py")
    package(given / "shared", "transformers", "5.8.1", "transformers/__init__.py")
    package(given / "automodel", "transformers", "5.5.0", "transformers/__init__.py")
    package(given / "built", "mamba_ssm", "2.3", "mamba_ssm/__init__.py")
    (given / "source/nemo_rl").mkdir(parents=True)
    monkeypatch.setattr(tiers_gpu, "ENV", env)
    monkeypatch.setattr(tiers_gpu, "PREFIX", str(tmp_path / "rt"))
    monkeypatch.setattr(tiers_gpu, "ENVS", tmp_path / "rt/envs")
    tiers_gpu.assemble(given)
    return tiers_gpu


def versions(tiers: ModuleType, tier: str) -> dict[str, str]:
    found = importlib.metadata.distributions(path=[str(tiers.site(tier))])
    return {d.metadata["Name"]: d.version for d in found}


def test_tiers_are_told_apart_by_what_lies_over_them(tiers: ModuleType) -> None:
    assert versions(tiers, "base") == {"ray": "2.55.1", "transformers": "5.8.1"}
    assert versions(tiers, "automodel") == {"ray": "2.55.1", "transformers": "5.5.0", "mamba_ssm": "2.3"}
    assert (tiers.site("automodel") / "transformers/__init__.py").read_text() == "# transformers 5.5.0\n"
    assert (tiers.site("vllm") / "transformers/__init__.py").read_text() == "# transformers 5.8.1\n"


def test_what_was_dropped_leaves_neither_file_nor_folder(tiers: ModuleType) -> None:
    """An empty folder is a namespace package without a version: transformers asked for one and failed."""
    for tier in tiers.TIERS:
        assert not (tiers.site(tier) / "accelerate").exists()
        assert not (tiers.site(tier) / "transformers/old.py").exists()


def test_the_machine_s_environment_stays_as_it_was(tiers: ModuleType) -> None:
    own = next(iter(tiers.ENV.glob("lib/python3*/site-packages")))
    assert (own / "transformers/__init__.py").read_text() == "# transformers 5.17.0\n"
    assert (own / "accelerate/deep/__init__.py").exists()


def test_common_content_is_one_file(tiers: ModuleType) -> None:
    inodes = {(tiers.site(tier) / "ray/__init__.py").stat().st_ino for tier in tiers.TIERS}
    assert len(inodes) == 1


def test_inventories_name_what_is_not_there(tiers: ModuleType) -> None:
    value = json.loads(Path(tiers.PREFIX, "inventory-automodel.json").read_text())
    assert "flash-attn" in value["omitted"]
    assert "mamba-ssm" not in value["omitted"]
    assert {p["name"] for p in value["packages"]} == {"ray", "transformers", "mamba_ssm"}
