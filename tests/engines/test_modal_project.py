"""What travels to a container and back, and what the container does around a stage; no client needed."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oci_builder.engines import modal_container, modal_inputs
from oci_builder.engines.modal_inputs import unpack
from oci_builder.engines.modal_project import arrived, pack, take_folder
from oci_builder.engines.modal_request import localized
from oci_builder.engines.stages import STAGES, Request
from oci_builder.engines.stages_options import FILES
from oci_builder.model.errors import PolicyError, SpecError, TransportError
from oci_builder.model.events import Event
from oci_builder.model.receipts import Host


def write_spec(folder: Path, **changes: Any) -> Path:
    value = {"name": "x", "tag": "t", "base": {"scratch": True}, "prefix": "/opt/rt", "tiers": {"one": {"path": "one"}}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(json.dumps({**value, **changes}))
    return folder / "spec.json"


def request(spec: Path, **changes: Any) -> Request:
    return Request(**{"spec": str(spec), "out": "/here/dist", "cache": "/here/cache", **changes})


def round_trip(asked: Request, tmp_path: Path, *mounts: str, whole: bool = True) -> dict[str, Any]:
    sent = json.loads(json.dumps(pack(asked, tmp_path / "inputs.tar", mounts, whole=whole)))
    unpack(tmp_path / "inputs.tar", tmp_path / "there")
    return arrived(sent, tmp_path / "there")


def test_links_modes_and_empty_folders_arrive_as_they_were(tmp_path: Path) -> None:
    tier = tmp_path / "here/one"
    (tier / "bin").mkdir(parents=True)
    (tier / "empty").mkdir()
    (tier / "bin/run").write_text("#!/bin/sh\n")
    (tier / "bin/run").chmod(0o755)
    os.link(tier / "bin/run", tier / "bin/same")
    (tier / "link").symlink_to("bin/run")
    got = round_trip(request(write_spec(tmp_path / "here")), tmp_path)
    there = Path(got["spec"]).parent / "one"
    assert os.readlink(there / "link") == "bin/run"
    assert (there / "bin/run").stat().st_ino == (there / "bin/same").stat().st_ino
    assert (there / "bin/run").stat().st_mode & 0o777 == 0o755
    assert (there / "empty").is_dir()


def test_the_same_inputs_are_the_same_bytes(tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "here")
    (tmp_path / "here/one").mkdir()
    for name in ("b", "a"):
        (tmp_path / "here/one" / name).write_text(name)
    pack(request(spec), tmp_path / "first.tar")
    pack(request(spec), tmp_path / "second.tar")
    assert (tmp_path / "first.tar").read_bytes() == (tmp_path / "second.tar").read_bytes()


def test_files_of_options_and_the_release_folder_go_along_and_the_key_does_not(tmp_path: Path) -> None:
    for name in ("trust.json", "key", "releases/r1/portable.json"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    asked = request(
        write_spec(tmp_path / "here", tiers={"one": {"path": "/vol/one"}}), release=str(tmp_path / "releases/r1"),
        key=str(tmp_path / "key"), options={"trust": str(tmp_path / "trust.json"), "jobs": 3},
    )  # fmt: skip
    got = round_trip(asked, tmp_path, "/vol")
    assert Path(got["options"]["trust"]).read_text() == "trust.json"
    assert got["options"]["jobs"] == 3
    assert (Path(got["release"]) / "portable.json").read_text() == "releases/r1/portable.json"
    assert Path(got["release"]).name == "r1"
    assert got["key"] == ""
    assert not [p for p in (tmp_path / "there").rglob("*") if p.is_file() and p.read_text() == "key"]


def test_every_option_that_is_a_file_goes_along(tmp_path: Path) -> None:
    """But roots, which are whole systems of this machine."""
    files = {name: tmp_path / f"{name}.json" for name in FILES if not name.startswith("root")}
    for path in files.values():
        path.write_text(path.name)
    (tmp_path / "here/one").mkdir(parents=True)
    asked = request(write_spec(tmp_path / "here"), options={name: str(path) for name, path in files.items()})
    got = round_trip(asked, tmp_path)["options"]
    assert {name: Path(path).read_text() for name, path in got.items()} == {n: p.name for n, p in files.items()}
    assert {"trust", "checks", "helper", "allow"} <= set(files)


@pytest.mark.parametrize("path", ["/elsewhere/one", "../one", "a/../../one", "/volume/one", "/vol", "/vol/../etc"])
def test_what_lies_outside_the_spec_s_folder_is_refused(path: str, tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "here", tiers={"one": {"path": path}})
    with pytest.raises(SpecError) as error:
        pack(request(spec), tmp_path / "inputs.tar", ["/vol"])
    assert (error.value.code, error.value.fields["where"]) == ("modal.project", "tiers.one.path")


def test_a_stage_that_reads_no_tiers_gets_none(tmp_path: Path) -> None:
    spec = write_spec(tmp_path / "here", files="layers")
    for name in ("one/big", "layers/files/a"):
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_text(name)
    got = Path(round_trip(request(spec), tmp_path, whole=False)["spec"]).parent
    assert (got / "layers/files/a").exists() and not (got / "one").exists()


@pytest.mark.parametrize(
    ("there", "tier", "said"),
    [
        ([], {"path": "one"}, "one"),
        (["RL"], {"project": "RL"}, "git submodule update"),
        (["RL/sub"], {"project": "RL"}, "RL/uv.lock"),
        (["RL/sub"], {"project": "RL", "lock": "RL/other.lock"}, "RL/other.lock"),
    ],
    ids=["tier", "empty-submodule", "no-lock", "named-lock"],
)
def test_an_input_that_is_not_there_costs_no_machine(
    there: list[str], tier: dict[str, str], said: str, tmp_path: Path
) -> None:
    spec = write_spec(tmp_path / "here", tiers={"one": tier})
    for name in there:
        (tmp_path / "here" / name).mkdir(parents=True)
    with pytest.raises(SpecError) as error:
        pack(request(spec), tmp_path / "inputs.tar")
    assert error.value.code == "spec.path" and said in error.value.message
    pack(request(spec), tmp_path / "inputs.tar", whole=False)


def test_inputs_have_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modal_inputs, "LARGEST", 1000)
    (tmp_path / "here/one").mkdir(parents=True)
    (tmp_path / "here/one/big").write_bytes(bytes(1001))
    with pytest.raises(SpecError) as error:
        pack(request(write_spec(tmp_path / "here")), tmp_path / "inputs.tar")
    assert error.value.code == "modal.project" and "big" in error.value.message


def test_unpacking_again_starts_from_the_sender_s_state(tmp_path: Path) -> None:
    """A preempted stage runs again on the same input, not on what the first run made of it."""
    (tmp_path / "here/one").mkdir(parents=True)
    pack(request(write_spec(tmp_path / "here")), tmp_path / "inputs.tar")
    unpack(tmp_path / "inputs.tar", tmp_path / "there")
    (tmp_path / "there/spec/half").write_text("x")
    unpack(tmp_path / "inputs.tar", tmp_path / "there")
    assert not (tmp_path / "there/spec/half").exists()


def test_inputs_that_are_not_whole(tmp_path: Path) -> None:
    (tmp_path / "inputs.tar").write_bytes(b"x" * 600)
    with pytest.raises(TransportError) as error:
        unpack(tmp_path / "inputs.tar", tmp_path / "there")
    assert error.value.code == "modal.project"


@pytest.mark.parametrize("name", ["r q;id", "a b", ".hidden", "é"])
def test_a_release_folder_with_an_odd_name_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "spec.json").write_text(json.dumps({"name": "n", "tag": "t", "base": {"scratch": True}, "prefix": "/p",
                                                    "tiers": {"base": {"requirements": "r.txt"}}}))  # fmt: skip
    with pytest.raises(SpecError) as caught:
        pack(Request(str(tmp_path / "spec.json"), "out", "cache", release=str(tmp_path / name)), tmp_path / "inputs.tar")
    assert caught.value.code == "modal.project"


@pytest.mark.parametrize("home", ["spec", "spec/train/b200"], ids=["alone", "in-a-repository"])
def test_paths_of_the_container_become_the_sender_s(home: str, tmp_path: Path) -> None:
    asked = request(write_spec(tmp_path / "here"), release=str(tmp_path / "releases/r1"))
    far = "/tmp/oci-builder/inputs"
    result = {
        "notes": [f"recorded in {far}/releases/r1", f"{far}/releases/r10 and {far}/specs are not it"], "inputs": far,
        "receipt_path": f"{far}/releases/r1/receipts/a.json",
        "error": {"code": "spec.path", "message": f"cannot read '{far}/{home}/RL/uv.lock'", "exit": 2},
    }  # fmt: skip
    got = localized(result, asked, {"spec": f"{home}/spec.json", "release": "releases/r1"})
    assert got == {
        "notes": [f"recorded in {tmp_path}/releases/r1", f"{far}/releases/r10 and {far}/specs are not it"],
        "receipt_path": f"{tmp_path}/releases/r1/receipts/a.json",
        "error": {"code": "spec.path", "message": f"cannot read '{tmp_path}/here/RL/uv.lock'", "exit": 2},
    }


@pytest.mark.parametrize("variables", [{}, {"OCI_BUILDER_KEY": ""}])
def test_a_secret_without_the_key_is_told_before_the_stage_runs(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the longest CPU stage would pass and record nothing."""
    monkeypatch.delenv("OCI_BUILDER_KEY", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(modal_container, "prove_no_network", dict)
    monkeypatch.setattr(modal_container.tempfile, "gettempdir", lambda: str(tmp_path))
    found = modal_container.answer("container", {"release": "releases/r1"})
    assert (found["error"]["code"], found["exit"]) == ("modal.missing", 2)
    assert "modal secret create" in found["error"]["message"]


def test_a_release_folder_that_cannot_be_read_is_an_answer_and_no_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "releases/r1").mkdir(parents=True)
    os.mkfifo(tmp_path / "releases/r1/pipe")
    sent = pack(
        request(write_spec(tmp_path / "here"), release=str(tmp_path / "releases/r1")), tmp_path / "inputs.tar", whole=False
    )
    monkeypatch.setattr(modal_container, "ARCHIVE", str(tmp_path / "inputs.tar"))
    monkeypatch.setattr(modal_container, "find_stage", lambda _n: replace(STAGES["build"], needs=STAGES["nccl8"].needs))
    monkeypatch.setattr(modal_container, "require_gpus", lambda *_a: None)
    monkeypatch.setattr(modal_container, "prove_no_network", dict)
    monkeypatch.setattr(modal_container.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    found = modal_container.answer("nccl8", {**sent, "out": "r1"})
    assert (found["error"]["code"], found["outcome"]) == ("modal.project", "error")


def build_record(folder: Path, digit: str) -> None:
    folder.mkdir(parents=True)
    (folder / "portable.json").write_text(json.dumps({"sha256": digit * 64}))


def digest(folder: Path) -> str:
    return str(json.loads((folder / "portable.json").read_text())["sha256"])[0]


def test_a_repack_that_nobody_heard_of_is_put_back(tmp_path: Path) -> None:
    build_record(tmp_path / "release", "a")
    build_record(tmp_path / "dist/r1", "b")
    build_record(tmp_path / "dist" / f"r1.{'a' * 12}", "a")
    for _ in range(2):
        modal_container.undo_repack(tmp_path / "dist/r1", tmp_path / "release")
        assert digest(tmp_path / "dist/r1") == "a"
        assert digest(tmp_path / "dist" / f"r1.{'b' * 12}.unheard") == "b"


def test_a_repack_cut_between_its_two_renames_is_put_back(tmp_path: Path) -> None:
    build_record(tmp_path / "release", "a")
    build_record(tmp_path / "dist" / f"r1.{'a' * 12}", "a")
    modal_container.undo_repack(tmp_path / "dist/r1", tmp_path / "release")
    assert digest(tmp_path / "dist/r1") == "a"


@pytest.mark.parametrize(("release", "dist", "kept"), [("a", "a", "c"), ("a", "b", "c"), ("", "a", "b")])
def test_any_other_state_is_left_alone(release: str, dist: str, kept: str, tmp_path: Path) -> None:
    if release:
        build_record(tmp_path / "release", release)
    build_record(tmp_path / "dist/r1", dist)
    build_record(tmp_path / "dist" / f"r1.{(release or 'a') * 12}", kept)
    modal_container.undo_repack(tmp_path / "dist/r1", tmp_path / "release")
    assert digest(tmp_path / "dist/r1") == dist


def test_an_open_network_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr(modal_container, "_FAR", (("127.0.0.1", server.getsockname()[1]),))
        with pytest.raises(PolicyError) as error:
            modal_container.prove_no_network()
    assert error.value.code == "modal.network"


def test_a_silent_address_is_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modal_container, "_FAR", (("127.0.0.1", 1),))
    assert list(modal_container.prove_no_network()) == ["127.0.0.1:1"]


def test_a_used_container_is_refused_by_stages_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "oci-builder").mkdir()
    monkeypatch.setattr(modal_container.tempfile, "gettempdir", lambda: str(tmp_path))
    found = modal_container.answer("qualification", {})
    assert (found["error"]["code"], found["exit"], found["facts"]["modal"]["fresh"]) == ("modal.fresh", 4, False)


def test_the_key_of_a_secret_is_a_file_of_this_user_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCI_BUILDER_KEY", "text")
    path = Path(modal_container._key(tmp_path))
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("text", 0o600)
    assert "OCI_BUILDER_KEY" not in os.environ, "programs that the stage starts do not inherit it"


def test_a_volume_that_cannot_be_committed_is_an_error_of_the_stage(tmp_path: Path) -> None:
    """B234: Modal's own commit comes after the answer, where nobody hears that it failed."""
    modal_container.commit("")
    modal_container.commit(str(tmp_path))
    with pytest.raises(TransportError) as error:
        modal_container.commit(str(tmp_path / "gone"))
    assert error.value.code == "io.error"


def test_a_gpu_that_is_not_seen_is_told_with_driver_and_sandbox(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B202, B203."""
    host = Host(driver="580.95.05", sandbox="gvisor")
    monkeypatch.setattr(modal_container, "this_host", lambda: host)
    monkeypatch.setattr(modal_container, "find_gpus", tuple)
    monkeypatch.setattr(modal_container, "prove_no_network", dict)
    monkeypatch.setattr(modal_container.tempfile, "gettempdir", lambda: str(tmp_path))
    found = modal_container.answer("single", {})
    assert (found["error"]["code"], found["exit"]) == ("needs.gpu", 4)
    assert "driver 580.95.05, sandbox gvisor" in found["error"]["message"]
    assert "--on modal" not in found["error"]["message"], "it is there"
    assert found["facts"]["modal"]["driver"] == "580.95.05"


@pytest.mark.parametrize(("limit", "said"), [(10, 0), (1_900_000, 1_900_000)], ids=["folder", "with-the-result"])
def test_an_answer_that_is_too_large_stays_on_the_volume(
    limit: int, said: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container without network can answer with one message only; the stage's work is not lost with it."""
    (tmp_path / "releases/r1/receipts").mkdir(parents=True)
    (tmp_path / "here/one").mkdir(parents=True)
    (tmp_path / "releases/r1/portable.json").write_text("{}")
    sent = pack(
        request(write_spec(tmp_path / "here"), release=str(tmp_path / "releases/r1"), attempt="a"), tmp_path / "inputs.tar"
    )
    monkeypatch.setattr(modal_container, "ARCHIVE", str(tmp_path / "inputs.tar"))
    monkeypatch.setattr(modal_container, "LARGEST_ANSWER", limit)
    monkeypatch.setattr(modal_container, "find_stage", lambda _n: replace(STAGES["build"], needs=STAGES["nccl8"].needs))
    monkeypatch.setattr(modal_container, "require_gpus", lambda *_a: None)
    monkeypatch.setattr(modal_container, "prove_no_network", dict)
    monkeypatch.setattr(modal_container.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))

    def stage(_name: str, asked: dict[str, Any], *_rest: object) -> dict[str, Any]:
        (Path(asked["release"]) / "receipts/new.json").write_text("made here")
        return {"outcome": "pass", "exit": 0, "notes": ["x" * said], "receipt_path": "", "kept": "", "error": None}

    monkeypatch.setattr(modal_container, "run_stage", stage)
    found = modal_container.answer("nccl8", {**sent, "out": "r1"})
    assert (found["outcome"], found["error"]["code"], found["release"]) == ("error", "modal.result", "")
    (kept,) = (tmp_path / "tmp/oci-builder/cache/answers").iterdir()
    take_folder(kept.read_text(), tmp_path / "taken", {})
    assert (tmp_path / "taken/receipts/new.json").read_text() == "made here"


def test_log_lines_are_lines(capsys: pytest.CaptureFixture[str]) -> None:
    emit = modal_container.log_lines()
    for event in (
        Event("start", "layer base", total=10), Event("advance", "layer base", 5), Event("done", "layer base"),
        Event("note", "x", message="a\x1b[31mb\nc"),
    ):  # fmt: skip
        emit(event)
    assert capsys.readouterr().err == "… layer base\n✓ layer base\nx a\\x1b[31mb\\nc\n"
