"""What a build left out is said, with its reason, and is never a pass."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checks_lab import FILES, distribution, write_inventory
from nrl_checks import imports, inventory, kernels, operators, runner, training
from nrl_checks.common import CheckFailed, Result


def run_isolated(path: str, *argv: str) -> dict[str, Any]:
    """A check in an interpreter that sees the packages of ``path`` only; its result."""
    env = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "HOME": "/nonexistent", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-S", str(FILES / "checks"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    return dict(json.loads(done.stdout.rstrip().splitlines()[-1]))


@pytest.mark.parametrize(
    ("module", "package"),
    [("flash_attn", "Flash_Attn"), ("grouped_gemm", "nv-grouped-gemm"), ("transformer_engine.pytorch", "transformer-engine"),
     ("vllm._C", "vllm"), ("mooncake.engine", "mooncake-transfer-engine-cuda13"), ("flashinfer", "flashinfer-python")],
)  # fmt: skip
def test_a_module_is_left_out_when_its_package_is(tmp_path: Path, module: str, package: str) -> None:
    listed = inventory.read(write_inventory(tmp_path / "i", {"torch": "1"}, {package: "needs nvcc"}))
    assert "needs nvcc" in listed.omission(module)
    assert listed.omission("torch") == ""


def test_imports_name_what_was_left_out_and_import_the_rest(tmp_path: Path) -> None:
    path = distribution(tmp_path / "site", "alpha", "1")
    listed = write_inventory(tmp_path / "i", {"alpha": "1"}, {"beta": "needs nvcc"})
    argv = ("imports", "--tier", "t", "--inventory", str(listed), "--module", "alpha", "--module", "beta")
    result = run_isolated(str(path), *argv)
    assert result["details"]["imported"] == {"alpha": "1"}
    assert "needs nvcc" in result["details"]["omitted"]["beta"]
    assert "beta" not in result["reason"]


def test_a_module_from_elsewhere_is_not_the_tier_s(tmp_path: Path) -> None:
    """Without metadata no inventory sees it, and it would hide the tier's own."""
    path = distribution(tmp_path / "rt/site", "alpha", "1")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/alpha.py").write_text("")
    listed = write_inventory(tmp_path / "rt/i", {"alpha": "1"})
    argv = ("imports", "--tier", "t", "--inventory", str(listed), "--module", "alpha")
    assert "comes from" not in run_isolated(str(path), *argv)["reason"]
    result = run_isolated(f"{tmp_path / 'elsewhere'}:{path}", *argv)
    assert result["outcome"] == "fail"
    assert f"alpha comes from {tmp_path / 'elsewhere/alpha.py'}" in result["reason"]


def test_an_empty_folder_is_no_package(tmp_path: Path) -> None:
    """It imports, whatever was in it: the packages of a tier are whole."""
    path = distribution(tmp_path / "rt/site", "alpha", "1")
    (path / "alpha.py").unlink()
    (path / "alpha").mkdir()
    listed = write_inventory(tmp_path / "rt/i", {"alpha": "1"})
    result = run_isolated(str(path), "imports", "--tier", "t", "--inventory", str(listed), "--module", "alpha")
    assert "alpha is a folder without a package" in result["reason"]


def test_a_driver_linked_module_must_be_a_package_of_the_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU, the folder that a package left behind imported, and cleared its deferral."""
    monkeypatch.setattr(imports, "gpu_facts", lambda: {"gpus": []})
    monkeypatch.setattr(imports, "network", lambda result: None)
    monkeypatch.setattr(imports, "caches", lambda result: None)
    (tmp_path / "nrl_hollow").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    result = imports.driver_linked("nrl_hollow", gpu=True)
    assert "nrl_hollow is a folder without a package" in "; ".join(result.reasons)


def test_a_library_that_ldd_cannot_read_is_not_deferred(tmp_path: Path) -> None:
    """Cut off by a full disk, say: it has no missing libraries, since it has none at all."""
    (tmp_path / "broken.so").write_bytes(b"\x7fELF" + bytes(60))
    with pytest.raises(CheckFailed, match="ldd ended with"):
        imports.unresolved(tmp_path / "broken.so")


def test_an_absent_module_that_nobody_left_out_fails(tmp_path: Path) -> None:
    path = distribution(tmp_path / "site", "alpha", "1")
    listed = write_inventory(tmp_path / "i", {"alpha": "1"}, {"gamma": "needs nvcc"})
    argv = ("imports", "--tier", "t", "--inventory", str(listed), "--module", "alpha", "--module", "beta")
    result = run_isolated(str(path), *argv)
    assert result["outcome"] == "fail"
    assert "beta is absent" in result["reason"]


def test_a_tier_of_which_everything_was_left_out_does_not_pass(tmp_path: Path) -> None:
    path = distribution(tmp_path / "site", "alpha", "1")
    listed = write_inventory(tmp_path / "i", {"alpha": "1"}, {"beta": "why"})
    result = run_isolated(str(path), "imports", "--tier", "t", "--inventory", str(listed), "--module", "beta")
    assert result["outcome"] == "fail"
    assert "every module" in result["reason"]


def test_what_was_left_out_must_not_be_there(tmp_path: Path) -> None:
    """An inventory that says both is wrong about one of them."""
    path = distribution(tmp_path / "site", "alpha", "1")
    listed = write_inventory(tmp_path / "i", {"alpha": "1"}, {"alpha": "needs nvcc"})
    result = run_isolated(str(path), "imports", "--tier", "t", "--inventory", str(listed), "--module", "alpha")
    assert "left out by the inventory, and installed" in result["reason"]


def test_of_two_versions_the_one_that_is_imported_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = distribution(tmp_path / "a", "alpha", "2"), distribution(tmp_path / "b", "alpha", "1")
    monkeypatch.setattr(sys, "path", [str(first), str(second)])
    assert inventory.installed() == {"alpha": "2"}


def test_a_driver_linked_module_that_was_left_out_is_skipped(tmp_path: Path) -> None:
    listed = write_inventory(tmp_path / "i", {"torch": "1"}, {"deep-ep": "needs nvcc"})
    result = imports.driver_linked("deep_ep", gpu=False, inventory=str(listed))
    assert result.outcome == "skipped"
    assert "needs nvcc" in result.to_json()["reason"]


def test_a_skipped_check_exits_as_a_failure_and_counts_as_one(tmp_path: Path) -> None:
    listed = write_inventory(tmp_path / "i", {"torch": "1"}, {"deep-ep": "needs nvcc"})
    argv = [sys.executable, str(FILES / "checks"), "import", "deep_ep", "--inventory", str(listed)]
    row = runner.run_one({"name": "import:deep_ep", "argv": argv, "timeout": 300, "deferrable": True})
    assert (row["outcome"], row["exit"]) == ("fail", 1)
    assert "needs nvcc" in row["reason"]


def ran(found: object) -> operators.Operator:
    def operator() -> dict[str, Any]:
        if isinstance(found, Exception):
            raise found
        return {"errors": found}

    return operator


@pytest.mark.parametrize(
    ("found", "outcome"),
    [({"output": 0.001}, "pass"), ({"output": 0.5}, "fail"), ({"output": float("nan")}, "fail"), ({}, "fail"),
     ({"output": 0.001, "gradient 0": float("inf")}, "fail"), (RuntimeError("no kernel image"), "fail"),
     (ImportError("undefined symbol"), "fail")],
)  # fmt: skip
def test_an_operator_passes_only_with_small_errors(tmp_path: Path, found: object, outcome: str) -> None:
    listed = inventory.read(write_inventory(tmp_path / "i", {"torch": "1"}))
    result = Result()
    operators.run_all(result, {"json": ran(found)}, listed)
    assert result.outcome == outcome


def test_an_operator_that_was_left_out_is_said_and_the_others_run(tmp_path: Path) -> None:
    listed = inventory.read(write_inventory(tmp_path / "i", {"torch": "1"}, {"flash-attn": "needs nvcc"}))
    result = Result()
    wanted = {"flash_attn": ran({"output": 9.0}), "json": ran({"output": 0.0})}
    operators.run_all(result, wanted, listed)
    assert result.outcome == "pass"
    assert "needs nvcc" in result.details["omitted"]["flash_attn"]
    assert "flash_attn" not in result.details


def test_operators_that_were_all_left_out_are_no_pass(tmp_path: Path) -> None:
    listed = inventory.read(write_inventory(tmp_path / "i", {"torch": "1"}, {"flash-attn": "needs nvcc"}))
    result = Result()
    operators.run_all(result, {"flash_attn": ran({"output": 0.0})}, listed)
    assert result.outcome == "skipped"


def test_an_absent_operator_fails_with_its_name(tmp_path: Path) -> None:
    listed = inventory.read(write_inventory(tmp_path / "i", {"torch": "1"}))
    result = Result()
    operators.run_all(result, {"no_such_operator": ran({"output": 0.0})}, listed)
    assert "no_such_operator is absent" in result.to_json()["reason"]


@pytest.mark.parametrize(("omitted", "outcome"), [({"no-such-module": "needs nvcc"}, "pass"), ({}, "fail")])
def test_training_says_what_it_could_not_try(tmp_path: Path, omitted: dict[str, str], outcome: str) -> None:
    listed = write_inventory(tmp_path / "i", {"torch": "1"}, omitted)
    result = Result()
    assert training.present(result, "json", str(listed), False)
    assert not training.present(result, "no_such_module", str(listed), False)
    assert result.outcome == outcome
    assert "no_such_module" in result.details["omitted"]


@pytest.mark.parametrize(
    "content", ["{}", "[]", "3", '{"packages": [{}]}', '{"packages": 3}', "{", '{"packages": [], "omitted": 3}']
)
def test_an_inventory_that_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "i").write_text(content)
    with pytest.raises(CheckFailed):
        inventory.read(tmp_path / "i")


@pytest.mark.parametrize(
    ("marker", "omitted"), [('{"source": null}', True), ('{"source": "81aa43d"}', False), ("{}", False)]
)
def test_a_runtime_without_a_project_brings_no_source(tmp_path: Path, marker: str, omitted: bool) -> None:
    (tmp_path / "runtime.json").write_text(marker)
    listed = inventory.read(write_inventory(tmp_path / "i", {"torch": "1"}, {}))
    assert bool(listed.omission("nemo_rl")) is omitted


def test_libraries_that_torch_loads_first_are_not_missing(tmp_path: Path) -> None:
    for folder in ("torch/lib", "nvidia/cu13/lib", "vllm"):
        (tmp_path / "site-packages" / folder).mkdir(parents=True)
    site = tmp_path / "site-packages"
    assert imports.loaded_before(site / "vllm/_C.abi3.so") == [site / "torch/lib", site / "nvidia/cu13/lib"]
    assert imports.loaded_before(tmp_path / "elsewhere.so") == []


def test_what_this_python_does_not_load_is_left_out_and_said(tmp_path: Path) -> None:
    """vLLM's wheel has its DeepGEMM for Python 3.12 only; under 3.13 vLLM itself does without."""

    def operator() -> dict[str, Any]:
        raise kernels.NotForThisPython("an extension for another Python")

    listed = inventory.read(write_inventory(tmp_path / "i", {"torch": "1"}))
    result = Result()
    operators.run_all(result, {"json": operator, "math": ran({"output": 0.0})}, listed)
    assert result.outcome == "pass"
    assert result.details["omitted"] == {"json": "an extension for another Python"}
    alone = Result()
    operators.run_all(alone, {"json": operator}, listed)
    assert alone.outcome == "skipped"
