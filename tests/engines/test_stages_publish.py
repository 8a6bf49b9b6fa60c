"""The stage ``publish``: to the Hub stand-in and to a real registry, through the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oci_builder.model.receipts import PORTABLE
from tests.engines.stages_lab import Lab, make_lab
from tests.lab.dockerregistry import docker_registry, needs_registry
from tests.lab.hub import TOKEN, FakeHub

HELPER = ("-o", "helper=layers/files/activate.sh")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    made = make_lab(tmp_path_factory.mktemp("publish"), base={"scratch": True})
    found = made.result("container")
    assert found["outcome"] == "pass", found["error"]
    return made


def test_to_the_hub(lab: Lab) -> None:
    with FakeHub() as hub:
        env = {"HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}
        found = lab.result("publish", "-o", "repo=o/r", "-o", f"endpoint={hub.url}", *HELPER, env=env)
        assert found["outcome"] == "pass", found["error"]
        sent = set(hub.files)
    assert {f"v1-r1/{PORTABLE}", "README.md", f"v1-r1/receipts/{Path(found['details']['receipt']).name}"} <= sent
    assert Path(found["details"]["receipt"]).parent == lab.release / "receipts"
    assert TOKEN not in json.dumps(found)


@needs_registry
def test_to_a_registry(lab: Lab, tmp_path: Path) -> None:
    with docker_registry(tmp_path) as registry:
        found = lab.result("publish", "-o", f"registry={registry.host}/lab/stages:t1", *HELPER)
    assert found["outcome"] == "pass", found["error"]
    assert found["details"]["manifest"].startswith("sha256:")


@pytest.mark.parametrize("given", [(), ("-o", "repo=o/r", "-o", "registry=localhost:1/x:t")])
def test_one_place_at_a_time(lab: Lab, given: tuple[str, ...]) -> None:
    found = lab.result("publish", *HELPER, *given)
    assert (found["error"]["code"], found["exit"]) == ("stage.option", 2)


def test_a_secret_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    """``container`` records a release only when the scan of its files found nothing."""
    made = make_lab(tmp_path, base={"scratch": True})
    text = "-----BEGIN OPENSSH " + "PRIVATE KEY-----\n" + "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ\n" * 20
    (tmp_path / "envs/one/lib/id_ed25519").write_text(text + "-----END OPENSSH " + "PRIVATE KEY-----\n")
    found = made.result("container")
    assert (found["error"]["code"], found["exit"]) == ("policy.secret", 4)
    assert not (made.release / "portable.json").exists()
