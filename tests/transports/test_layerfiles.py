"""Layer definitions: what somebody wrote there is judged before anything of it is in an image."""

from __future__ import annotations

import os
import socket
import tarfile
from pathlib import Path

import pytest

from oci_builder.build import BuildOptions, _Build, build
from oci_builder.model.errors import OciBuilderError, SpecError
from oci_builder.model.events import Event, silent
from oci_builder.model.spec import load_spec
from oci_builder.payload.runtime import Runtime
from oci_builder.rootfs.layers_plan import NO_BASE
from oci_builder.store.blobs import DirStore
from oci_builder.store.cache import BuildCache
from oci_builder.transports import layerfiles
from oci_builder.transports.layerfiles import read_definitions
from tests.conftest import small_tiers, write_spec

ONE = '[[file]]\nfrom = "x"\nto = "a/x"\n'


def folder_of(tmp_path: Path, text: str, name: str = "one.toml") -> Path:
    """A folder with a definition, a file ``x`` and a folder ``d``."""
    folder = tmp_path / "layers"
    (folder / "d/e").mkdir(parents=True)
    (folder / "x").write_text("x\n")
    (folder / "d/run").write_text("#!/bin/sh\n")
    (folder / "d/run").chmod(0o700)
    (folder / "d/e/data").write_text("data\n")
    (folder / name).write_text(text)
    return folder


def test_files_and_folders_go_where_the_definition_says(tmp_path: Path) -> None:
    text = 'name = "mine"\n' + ONE + '[[file]]\nfrom = "d"\nto = "deep/d/"\n[[file]]\nfrom = "x"\nto = "y"\nmode = "600"\n'
    (found,) = [read_definitions(folder_of(tmp_path, text))["mine"]]
    assert {path: (file.data, file.mode) for path, file in found.items()} == {
        b"a/x": (b"x\n", 0o644), b"deep/d/run": (b"#!/bin/sh\n", 0o755), b"deep/d/e/data": (b"data\n", 0o644),
        b"y": (b"x\n", 0o600),
    }  # fmt: skip


@pytest.mark.parametrize("text", [
    "file = 3", "file = [1]", "file = [[1]]", "[file]\nfrom = 'x'\nto = 'y'", "name = 5\n" + ONE,
    'name = "a/../b"\n' + ONE, 'name = "a\\nb"\n' + ONE, 'name = ""\n' + ONE, "nome = 'x'\n" + ONE, ONE + "extra = 1",
    ONE + "mode = 755", ONE + 'mode = "999"', ONE + 'mode = "4755"', ONE + 'mode = "rwx"', ONE + 'mode = ""',
    '[[file]]\nfrom = "d"\nto = "d"\nmode = "755"', '[[file]]\nfrom = "x"', "a" * 5 + "[" * 5000, "é".encode().hex(),
    *(f'[[file]]\nfrom = {place}\nto = "y"' for place in
      ("5", '["x"]', '"/etc/hostname"', '"../layers/x"', '"d/../../layers/x"', '""', '"x\\u0000"', f'"{"n" * 300}"')),
    *(f'[[file]]\nfrom = "x"\nto = {place}' for place in
      ("5", '["x"]', '"/y"', '"../../etc/x"', '"a/../b"', '""', '"."', '"./"', '"b\\u0000c"', '"a/.wh.b"',
       '".wh..wh..opq"', f'"{"n" * 300}"')),
])  # fmt: skip
def test_a_definition_that_makes_no_sense_is_a_wrong_input(tmp_path: Path, text: str) -> None:
    with pytest.raises(SpecError) as caught:
        read_definitions(folder_of(tmp_path, text))
    assert caught.value.code == "layers.definition"


def test_bytes_that_are_no_text_and_a_pipe_are_no_definitions(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, ONE)
    (folder / "one.toml").write_bytes(b'name = "caf\xe9"\n')
    with pytest.raises(SpecError, match="utf-8") as caught:
        read_definitions(folder)
    assert caught.value.code == "layers.definition"
    (folder / "one.toml").unlink()
    os.mkfifo(folder / "one.toml")
    with pytest.raises(SpecError, match="not a file"):
        read_definitions(folder)


@pytest.mark.parametrize(("name", "code"), [("fifo", "entry.special"), ("setuid", "entry.setuid"), (".wh.x", "layers.whiteout")])
def test_b123_a_folder_of_files_is_held_to_the_rules_of_a_tier(tmp_path: Path, name: str, code: str) -> None:
    folder = folder_of(tmp_path, '[[file]]\nfrom = "d"\nto = "d"\n')
    place = folder / "d" / name
    if name == "fifo":
        os.mkfifo(place)
    else:
        place.write_text("x")
        place.chmod(0o4755 if name == "setuid" else 0o644)
    with pytest.raises(OciBuilderError) as caught:
        read_definitions(folder)
    assert caught.value.code == code


def test_b114_a_name_that_is_no_text_survives(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, '[[file]]\nfrom = "d"\nto = "d"\n')
    Path(os.fsdecode(os.fsencode(folder) + b"/d/caf\xe9")).write_text("x")
    assert b"d/caf\xe9" in read_definitions(folder)["one"]


def test_c8_14_a_link_to_a_secret_stays_a_link_and_cannot_be_what_is_shipped(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("SECRET")
    folder = folder_of(tmp_path, '[[file]]\nfrom = "d"\nto = "d"\n')
    (folder / "d/link").symlink_to(secret)
    file = read_definitions(folder)["one"][b"d/link"]
    assert (file.link, file.data) == (os.fsencode(secret), b"")
    (folder / "link").symlink_to(secret)
    (folder / "one.toml").write_text('[[file]]\nfrom = "link"\nto = "y"\n')
    with pytest.raises(SpecError, match="leads out of the folder") as caught:
        read_definitions(folder)
    assert caught.value.code == "layers.definition"


def test_a_link_within_the_folder_is_followed_and_its_target_is_watched(tmp_path: Path) -> None:
    """All that an image is made of lies where the fingerprint looks: a changed file never passes for an old one."""
    folder = folder_of(tmp_path, '[[file]]\nfrom = "link"\nto = "y"\n')
    (folder / "link").symlink_to("d/e/data")
    spec = write_spec(tmp_path, small_tiers(tmp_path), files="layers")
    contents = []
    for text in ("data\n", "other\n"):
        (folder / "d/e/data").write_text(text)
        assert not build(spec, tmp_path / "out", BuildOptions(tmp_path / "cache")).unchanged
        with tarfile.open(tmp_path / "out/runtime.tar.gz") as tar:
            contents.append((tar.extractfile("opt/rt/y") or pytest.fail()).read().decode())
    assert contents == ["data\n", "other\n"]


def test_a_definition_that_is_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    """The folder's fingerprint sees the link alone: a definition that changed there would pass for an old one."""
    folder = folder_of(tmp_path, '[[file]]\nfrom = "d"\nto = "d"\n')
    (folder / "one.toml").rename(tmp_path / "one.toml")
    (folder / "one.toml").symlink_to("../one.toml")
    with pytest.raises(SpecError, match="leads out of the folder") as caught:
        read_definitions(folder)
    assert caught.value.code == "layers.definition"


@pytest.mark.parametrize("link", ["here", "folder", "through", "definition"])
def test_an_absolute_link_within_the_folder_leads_nowhere_in_a_copy_of_it(link: str, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, f'[[file]]\nfrom = "{link}/e/data"\nto = "y"\n')
    if link == "here":
        (folder / "one.toml").write_text('[[file]]\nfrom = "here"\nto = "y"\n')
        (folder / "here").symlink_to(folder / "d/e/data")
    elif link == "definition":
        (folder / "one.toml").rename(folder / "one")
        (folder / "one.toml").symlink_to(folder / "one")
        (folder / "one").write_text('[[file]]\nfrom = "d"\nto = "d"\n')
    else:
        (folder / "folder").symlink_to(folder / "d")
        (folder / "through").symlink_to("d/../folder")
    assert len(read_definitions(folder)["one"]) >= 1
    with pytest.raises(SpecError, match="ln -sr") as caught:
        read_definitions(folder, moved=True)
    assert caught.value.code == "layers.definition"


def test_links_that_are_content_and_relative_ones_stay_whatever_they_say(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, '[[file]]\nfrom = "d"\nto = "d"\n[[file]]\nfrom = "near"\nto = "y"\n')
    (folder / "d/absolute").symlink_to("/opt/rt/d/e")
    (folder / "near").symlink_to("d/e/../e/data")
    assert read_definitions(folder, moved=True) == read_definitions(folder)


def test_a_socket_is_left_out_with_a_warning_and_much_content_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = folder_of(tmp_path, '[[file]]\nfrom = "d"\nto = "d"\n')
    events: list[Event] = []
    with socket.socket(socket.AF_UNIX) as one:
        monkeypatch.chdir(folder / "d")  # such a name has 107 bytes at most
        one.bind("s")
        assert sorted(read_definitions(folder, emit=events.append)["one"]) == [b"d/e/data", b"d/run"]
    assert any(event.kind == "warning" and "sockets" in event.message for event in events)
    monkeypatch.setattr(layerfiles, "_MOST", 12)
    with pytest.raises(SpecError, match="a tier can hold them"):
        read_definitions(folder)


def test_a_definition_cannot_take_the_name_of_a_layer_that_the_build_makes(tmp_path: Path) -> None:
    folder_of(tmp_path, 'name = "inventory"\n' + ONE)
    spec = write_spec(tmp_path, small_tiers(tmp_path), files="layers")
    with DirStore(tmp_path / "store") as store, BuildCache(tmp_path / "cache.sqlite") as cache:
        options = BuildOptions(tmp_path / "cache")
        job = _Build(load_spec(spec), tmp_path, tmp_path / "out", options, store, cache, silent)
        with pytest.raises(SpecError) as caught:
            job._own_layers(Runtime({}, files={"sbom/base.json": b"{}"}, made=True), NO_BASE)
    assert caught.value.code == "layers.overlap"
