"""examples/quickstart through every stage that needs no GPU: uv, three tiers, the host's Python, the checks in a chroot."""

from __future__ import annotations

import json
import shutil

import pytest

from oci_builder.model.receipts import DOCKER, OCI, PORTABLE
from tests.engines.stages_lab import ROOT, Lab, make_lab

pytestmark = [pytest.mark.network, pytest.mark.slow]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """The example as it is, with a key, and gates that ask for its checks."""
    place = tmp_path_factory.mktemp("quickstart")
    made = make_lab(place)
    shutil.rmtree(place / "layers")
    shutil.copytree(ROOT / "examples/quickstart", place, dirs_exist_ok=True)
    spec = json.loads((place / "spec.json").read_text())
    checks = ["container-exec", "base", "automodel", "vllm", "relocation"]
    gates = [{"name": "runs", "stage": "container-check", "checks": checks}]
    (place / "spec.json").write_text(json.dumps({**spec, "release": "v1-r1", "gates": gates}))
    return made


def test_the_example_becomes_a_release(lab: Lab) -> None:
    pytest.importorskip("uv", reason="needs uv")
    results = {name: lab.result(name) for name in ("build", "package", "container", "container-check", "qualification")}
    assert {name: r["outcome"] for name, r in results.items()} == dict.fromkeys(results, "pass"), [
        r["error"] for r in results.values()
    ]
    assert {f"inventory-{tier}.json" for tier in ("base", "automodel", "vllm")} <= set(results["build"]["outputs"])
    assert set(results["package"]["outputs"]) == {PORTABLE, OCI, DOCKER}
    assert results["package"]["outputs"] == results["container"]["outputs"]
    assert results["qualification"]["details"]["state"] == "pass"
    assert any(lab.release.glob("*.cdx.json"))
    single = lab.stage("single")
    assert single.returncode == 4 and "needs.gpu" in single.stderr
