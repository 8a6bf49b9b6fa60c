"""Licence texts of what a runtime ships: each once, none forgotten silently, and no metadata harms anybody."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from oci_builder.payload.licences import MOST_BYTES, MOST_FILES, collect_licences, python_texts

SITE = "lib/python3.13/site-packages"


def package(env: Path, name: str, files: Mapping[str, str], headers: str = "", record: str | None = None) -> Path:
    """A distribution with these files below site-packages; its RECORD lists them unless another one is given."""
    site = env / SITE
    info = site / f"{name.replace(' ', '-')}.dist-info"
    info.mkdir(parents=True)
    plain, _, version = name.partition(" ")
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {plain}\nVersion: {version}\n{headers}\nText\n")
    for path, text in files.items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_text(text)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files) if record is None else record)
    return info


def collect(envs: Mapping[str, Path], extra: Mapping[str, bytes] | None = None) -> tuple[dict[str, bytes], Any]:
    out = collect_licences(envs, extra)
    return out, json.loads(out["licences/index.json"])


def test_each_text_lies_once_whoever_brings_it(tmp_path: Path) -> None:
    package(tmp_path / "a", "one 1", {"one-1.dist-info/licenses/LICENSE": "MIT text"}, "License-Expression: MIT\n")
    package(tmp_path / "b", "one 1", {"one-1.dist-info/licenses/LICENSE": "MIT text"}, "License-Expression: MIT\n")
    package(tmp_path / "b", "two 2", {"two-2.dist-info/COPYING": "MIT text", "two/NOTICE.txt": "by me"})
    out, index = collect({"base": tmp_path / "a", "vllm": tmp_path / "b"})
    assert sorted(v for k, v in out.items() if k.startswith("licences/texts/")) == [b"MIT text", b"by me"]
    one, two = index["packages"]
    assert (one["name"], one["version"], one["tiers"], one["licence"]) == ("one", "1", ["base", "vllm"], "MIT")
    assert one["texts"][0]["text"] == two["texts"][1]["text"] or one["texts"][0]["text"] == two["texts"][0]["text"]
    assert all(f"licences/{t['text']}" in out for p in index["packages"] for t in p["texts"])


def test_two_versions_are_two_rows(tmp_path: Path) -> None:
    """The tiers' transformers are 5.5.0 and 5.8.1."""
    package(tmp_path / "a", "t 5.5.0", {"t-5.5.0.dist-info/LICENSE": "x"})
    package(tmp_path / "b", "t 5.8.1", {"t-5.8.1.dist-info/LICENSE": "x"})
    _, index = collect({"a": tmp_path / "a", "b": tmp_path / "b"})
    assert [(p["version"], p["tiers"]) for p in index["packages"]] == [("5.5.0", ["a"]), ("5.8.1", ["b"])]


def test_what_brings_no_text_is_said_in_both_lists(tmp_path: Path) -> None:
    package(tmp_path, "bare 1", {"bare/license.py": "code", "bare/licenses_db.json": "{}", "bare/data.txt": ""})
    package(tmp_path, "blank 1", {"blank-1.dist-info/LICENSE": " \n"})
    out, index = collect({"base": tmp_path}, {"CUDA": b""})
    assert index["without_text"] == ["bare 1", "blank 1", "CUDA"]
    page = out["licences/THIRD-PARTY.md"].decode()
    assert all(f"- {name}\n" in page for name in ("bare 1", "blank 1", "CUDA"))


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("nv-1.dist-info/License.txt", True), ("nv-1.dist-info/licenses/AUTHORS", True), ("nv/LICENCE", True),
        ("nv/LICENSE-APACHE", True), ("nv/LICENSE_DOP", True), ("nv/UNLICENSE", True), ("nv/COPYING.LESSER", True),
        ("nv/THIRD-PARTY-NOTICES.txt", True), ("nv/ThirdPartyLicenses.rst", True), ("nv/EULA.txt", True),
        ("nv-1.dist-info/METADATA", False), ("nv/copyingtools.txt", False), ("nv/noticeable.md", False),
        ("nv/license.cpython-313-x86_64-linux-gnu.so", False), ("nv/LICENSE.py", False),
    ],
)  # fmt: skip
def test_what_counts_as_a_text(tmp_path: Path, path: str, found: bool) -> None:
    package(tmp_path, "nv 1", {path: "terms"} if not path.endswith("METADATA") else {})
    _, index = collect({"base": tmp_path})
    assert [t["path"] for t in index["packages"][0]["texts"]] == ([path] if found else [])


def test_a_text_that_metadata_declares_counts_whatever_its_name(tmp_path: Path) -> None:
    package(tmp_path, "a 1", {"a-1.dist-info/terms.rst": "terms"}, "License-File: terms.rst\n")
    _, index = collect({"base": tmp_path})
    assert index["packages"][0]["texts"][0]["path"] == "a-1.dist-info/terms.rst"


@pytest.mark.parametrize(
    "row",
    ["../../../../LICENSE", "/etc/LICENSE", "out/LICENSE", "LICENSE\0", '"LICENSE', "gone/LICENSE", "fifo/LICENSE",
     "dir/LICENSE", "x" * 300 + "/LICENSE", "\udcff/LICENSE"],
)  # fmt: skip
def test_a_record_reaches_nothing_outside_and_hangs_on_nothing(tmp_path: Path, row: str) -> None:
    env = tmp_path / "env"
    package(env, "evil 1", {}, record=f"{row.encode('utf-8', 'surrogateescape').decode('latin-1')},,\n")
    (tmp_path / "LICENSE").write_text("secret")
    (env / SITE / "out").symlink_to(tmp_path)
    (env / SITE / "dir/LICENSE").mkdir(parents=True)
    (env / SITE / "fifo").mkdir()
    os.mkfifo(env / SITE / "fifo/LICENSE")
    out, index = collect({"base": env})
    assert not any(b"secret" in data for data in out.values())
    assert index["without_text"] == ["evil 1"]


def test_a_text_of_absurd_size_is_named_not_carried(tmp_path: Path) -> None:
    info = package(tmp_path, "big 1", {"big-1.dist-info/LICENSE": ""})
    os.truncate(info / "LICENSE", MOST_BYTES + 1)
    _, index = collect({"base": tmp_path})
    assert index["packages"][0]["left_out"][0]["path"] == "big-1.dist-info/LICENSE"
    assert index["without_text"] == ["big 1"]


def test_a_package_of_nothing_but_licences_ends(tmp_path: Path) -> None:
    package(tmp_path, "many 1", {f"many-1.dist-info/licenses/{n}": "x" for n in range(MOST_FILES + 5)})
    _, index = collect({"base": tmp_path})
    found = index["packages"][0]
    assert len(found["texts"]) == MOST_FILES and "more than" in found["left_out"][0]["reason"]


def test_names_cannot_draw_on_the_page(tmp_path: Path) -> None:
    package(tmp_path, "a 1", {}, "License-Expression: x | [y](http://z) <script>\n")
    out, _ = collect({"base": tmp_path}, {"b\nc": b"t"})
    page = out["licences/THIRD-PARTY.md"].decode()
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(rows) == 4 and r"x \| \[y\]\(http://z\) \<script\>" in rows[2]


def test_metadata_that_is_missing_or_nonsense_is_no_reason_to_stop(tmp_path: Path) -> None:
    info = package(tmp_path, "a 1", {"a-1.dist-info/LICENSE": "t"})
    (info / "METADATA").unlink()
    info = package(tmp_path, "b 1", {})
    (info / "METADATA").write_bytes(b"\xff\xfe\0")
    old = tmp_path / SITE / "c-3.egg-info"
    old.mkdir()
    (old / "PKG-INFO").write_text("Name: c\nVersion: 3\n")
    _, index = collect({"base": tmp_path})
    assert [(p["name"], p["version"]) for p in index["packages"]] == [("a", "1"), ("b", "1"), ("c", "3")]


def test_the_same_environments_give_the_same_bytes_elsewhere(tmp_path: Path) -> None:
    for place in ("x", "y"):
        for name in ("one 1", "two 2") if place == "x" else ("two 2", "one 1"):
            package(tmp_path / place, name, {f"{name.replace(' ', '-')}.dist-info/LICENSE": name})
    assert collect_licences({"t": tmp_path / "x"}) == collect_licences({"t": tmp_path / "y"})


def test_pythons_own_terms_and_its_libraries(tmp_path: Path) -> None:
    for path, text in {"lib/python3.13/LICENSE.txt": "psf", "share/licences/libssl.so.3.txt": "apache",
                       "share/licences/libx.so.1.txt": "", "share/licences/common/GPL-3.txt": "gpl"}.items():  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    _, index = collect({}, python_texts(tmp_path))
    assert [(o["name"], bool(o["text"])) for o in index["others"]] == [
        ("GPL-3, as Python's libraries name it", True), ("Python", True), ("Python's library libssl.so.3", True),
        ("Python's library libx.so.1", False),
    ]  # fmt: skip
    assert python_texts(tmp_path / "nothing") == {"Python": b""}
