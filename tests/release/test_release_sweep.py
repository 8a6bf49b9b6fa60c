"""Where a secret may stand in an archive: beside texts in layers of one image (issue 7, item 8). All made up here."""

from __future__ import annotations

import base64
import bz2
import gzip
import hashlib
import io
import json
import lzma
import marshal
import pickle
import random
import string
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from oci_builder.release.scan import scan_archives, scan_file, scan_files
from oci_builder.release.search import WINDOW, Window
from oci_builder.release.secrets import ScanOptions
from oci_builder.release.shapes import RULES, WORD, Rule
from oci_builder.release.signing import new_key, save_key
from tests.lab.archives import Lab, entry, tar, together, write, write_layout
from tests.lab.oracle import within

RANDOM = random.Random(23)
TOKEN = b"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"
PLAIN = tar(entry("bin/tool", b"#!/bin/sh\n"))


def letters(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(RANDOM.choice(alphabet) for _ in range(count))


def kinds(data: bytes, path: bytes = b"opt/rt/a", cut: int = 1 << 20, options: ScanOptions | None = None) -> list[str]:
    chunks = [data[i : i + cut] for i in range(0, len(data), cut)]
    return [f.message.split(" in ")[0] for f in scan_file(path, len(data), chunks, options=options)]


def found(archive: Path, options: ScanOptions | None = None) -> list[str]:
    scan = scan_archives([archive], options or ScanOptions())
    assert all(secret not in str(scan.to_json()) for secret in (TOKEN.decode(), TOKEN[3:30].decode()))
    return [f.code for f in scan.findings]


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("k") / "k"
    save_key(new_key(), path)
    return path.read_bytes()


# -- forms of data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["utf-16-le", "utf-16-be", "utf-16"])
@pytest.mark.parametrize("before", ["", "x", "a long line before it\r\n"])
def test_utf_16_is_searched(form: str, before: str, pem: bytes) -> None:
    """A settings file from a machine of another kind."""
    assert kinds(f"{before} HF_TOKEN={TOKEN.decode()}\r\nOTHER=1\r\n".encode(form)) == ["Hugging Face token"]
    assert kinds((before + "\r\n" + pem.decode()).encode(form)) == ["private key"]
    assert kinds((before + "words of documentation, hf_" + "x" * 34).encode(form)) == []


@pytest.mark.parametrize("text", ["T", "T " + "x" * 60, "see T", "a T z"])
@pytest.mark.parametrize("after", ["zebra", 1, (), None, b"s", "A" * 65])
def test_constants_of_bytecode_are_searched(text: str, after: object) -> None:
    """Strings stand there with their length in front and the next object right behind."""
    value = compile("x = 1", "f", "exec").replace(co_consts=(text.replace("T", TOKEN.decode()), after))
    assert kinds(bytes(16) + marshal.dumps(value), b"a/__pycache__/b.cpython-311.pyc") == ["Hugging Face token"]


@pytest.mark.parametrize("protocol", range(2, 6))
def test_pickles_are_searched(protocol: int) -> None:
    assert kinds(pickle.dumps({"token": TOKEN.decode(), "n": 1}, protocol)) == ["Hugging Face token"]


def test_strings_of_a_program_are_searched() -> None:
    strings = b"\0".join((b"GCC: (Debian)", TOKEN, b"_ZN5torch"))
    assert kinds(b"\x7fELF" + RANDOM.randbytes(70_000) + b"\0" + strings + b"\0") == ["Hugging Face token"]


def test_machine_code_and_symbols_hold_none() -> None:
    names = b"\0".join(b"_ZN2at6native" + letters(60).encode() for _ in range(20_000))
    base = base64.b64encode(RANDOM.randbytes(2 << 20))
    assert kinds(b"\x7fELF" + RANDOM.randbytes(4 << 20) + names + base) == []


@pytest.mark.parametrize("at", [WINDOW - 900, WINDOW - 100, WINDOW - 10, WINDOW - 33_000])
def test_a_key_that_two_windows_share_is_found_once(at: int, pem: bytes) -> None:
    data = b"\n" * at + pem + b"\n" * 5000
    assert kinds(data, cut=70_001) == ["private key"]


def test_a_long_key_is_one_whatever_the_cut() -> None:
    body = base64.b64encode(b"\x30\x82\x1f\x00" + RANDOM.randbytes(0x1F00)).decode()
    text = "\n".join(body[i : i + 64] for i in range(0, len(body), 64))
    key = f"-----BEGIN RSA PRIVATE KEY-----\n{text}\n-----END RSA PRIVATE KEY-----\n".encode()
    assert {tuple(kinds(b"x" * before + key, cut=cut)) for before in (0, WINDOW - 5000) for cut in (777, 1 << 22)} == {
        ("private key",)
    }


@pytest.mark.parametrize(
    "wrap",
    [
        lambda key: json.dumps({"private_key": key.decode()}).encode(),
        lambda key: b'KEY="' + key.replace(b"\n", b"\\n") + b'"\n',
        lambda key: b"\r\n".join(key.splitlines()) + b"\r\n",
        lambda key: b"    client-key-data: " + base64.b64encode(key) + b"\n",
        lambda key: b"\n".join(b'    "' + line + b'\\n"' for line in key.splitlines()),
    ],
    ids=["json", "env", "crlf", "kubeconfig", "source"],
)
def test_a_key_is_one_however_it_is_written(wrap: Callable[[bytes], bytes], pem: bytes) -> None:
    assert kinds(wrap(pem)) == ["private key"]


def test_nothing_that_the_rules_match_is_passed_over() -> None:
    """The short cuts of the search against each rule applied to every byte."""
    from oci_builder.release.search import _apply
    from tests.release.test_release_secrets import TOKENS as FIRST
    from tests.release.test_release_shapes import TOKENS as FURTHER

    marks = [rule.literal for rule in RULES]
    tokens = [t.encode() for t in (*FIRST.values(), *FURTHER.values())]
    for _ in range(400):
        parts: list[bytes] = []
        for _ in range(RANDOM.randrange(1, 12)):
            noise = (RANDOM.randbytes(30), letters(30).encode(), b"some_long_name_in_lower_case", b" = '", RANDOM.choice(marks))
            parts += [RANDOM.choice(noise), RANDOM.choice((b"", b" ", b"\n", b"\0", b"'")), RANDOM.choice(tokens), b" "]
        window = b"".join(parts)
        every = {hit for rule in RULES for hit in _apply(rule, window)}
        # Within a word, where a length byte happens to fit, is no place to look for one.
        every = {hit for hit in every if hit[1] == 0 or window[hit[1] - 1] not in WORD}
        assert every <= set(hits := list(Window(window).find())) and all(hit[2] == window[hit[1] :][: len(hit[2])] for hit in hits)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.literal.decode("ascii"))
def test_marks_without_end_take_no_time(rule: Rule) -> None:
    """What an attacker writes: a mark over and over, with much or little behind it, or near misses of it."""
    from tests.release.test_release_secrets import TOKENS as FIRST
    from tests.release.test_release_shapes import TOKENS as FURTHER

    tokens = [t.encode() for t in (*FIRST.values(), *FURTHER.values()) if rule.literal in t.encode()]
    for piece in (rule.literal, rule.literal + b"-----\nA1b2" * 4, rule.literal + b"2: a\n", *(b"x" + t + b"x\0" for t in tokens)):
        data = piece * (300_000 // len(piece))
        with within(60):
            assert len(kinds(data)) < 10_001


def test_a_putty_key_is_one() -> None:
    mac = letters(64, "0123456789abcdef")
    key = f"PuTTY-User-Key-File-3: ssh-ed25519\nEncryption: none\nPrivate-Lines: 1\n{letters(44)}\nPrivate-MAC: {mac}\n"
    assert kinds(key.encode()) == ["private key"]


# -- places in an archive --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["oci", "docker", "layout", "tree"])
@pytest.mark.parametrize(
    "planted",
    [
        [entry(f"etc/{TOKEN.decode()}", b"x")],
        [entry(f"srv/{TOKEN.decode()}/a/b", b"x")],
        [entry("etc/link", type=tarfile.SYMTYPE, linkname=f"https://host/{TOKEN.decode()}")],
        [entry("a", b"x"), entry("b", type=tarfile.LNKTYPE, linkname=f"a/../{TOKEN.decode()}"[5:])],
        [entry("etc/x", b"1", pax_headers={"SCHILY.xattr.user.note": f"token {TOKEN.decode()}"})],
        [entry("etc/x", b"1", pax_headers={"comment": f"by {TOKEN.decode()}"})],
        [entry("etc/x", b"1", pax_headers={"VENDOR.key": TOKEN.decode()})],
    ],
    ids=["name", "folder", "symlink", "hardlink", "xattr", "comment", "vendor"],
)  # fmt: skip
def test_metadata_is_searched(tmp_path: Path, planted: list[tarfile.TarInfo], form: str) -> None:
    layer, place = tar(*planted), tmp_path / "i"
    if form == "tree":
        place.write_bytes(layer)
    elif form == "layout":
        write_layout(place, Lab([layer]).oci())
    else:
        write(place, getattr(Lab([layer]), form)())
    assert set(found(place)) == {"policy.secret"}


@pytest.mark.parametrize("where", ["config", "layer", "index", "descriptor", "layout", "extra", "name"])
def test_documents_and_members_are_searched(tmp_path: Path, where: str) -> None:
    note = {"note": f"made with {TOKEN.decode()}"}
    edits: dict[str, object] = {}
    if where == "config":
        edits["edit_manifest"] = lambda m: {**m, "config": {**m["config"], "annotations": note}}
    if where == "layer":
        edits["edit_manifest"] = lambda m: {**m, "layers": [{**layer, "annotations": note} for layer in m["layers"]]}
    blobs = dict(Lab([PLAIN], **edits).oci())  # type: ignore[arg-type]
    index = json.loads(blobs["index.json"])
    if where == "index":
        index["annotations"] = note
    if where == "descriptor":
        index["manifests"][0]["annotations"] = note
    blobs["index.json"] = json.dumps(index).encode()
    if where == "layout":
        blobs["oci-layout"] = json.dumps({"imageLayoutVersion": "1.0.0", **note}).encode()
    if where == "extra":
        statement = json.dumps({"predicate": {"args": [TOKEN.decode()]}}).encode()
        blobs["blobs/sha256/" + hashlib.sha256(statement).hexdigest()] = statement
    if where == "name":
        blobs[f"blobs/{TOKEN.decode()}"] = b"x"
    assert found(write(tmp_path / "i", blobs)) == ["policy.secret"]


def test_every_image_of_an_archive_is_searched(tmp_path: Path) -> None:
    """Two of one platform, and one of another that nobody asked for: all are shipped."""
    secret = tar(entry("etc/app.env", b"T=" + TOKEN))
    one = Lab([PLAIN], name="lab/one:1")
    for other in (Lab([PLAIN, secret]), Lab([PLAIN, secret], platform=("linux", "arm64"))):
        assert found(write(tmp_path / other.platform[1], together(one.oci(), other.oci()))) == ["policy.secret"]


def test_verify_searches_also_where_no_image_is_meant(tmp_path: Path) -> None:
    """Which of two is for --image to say; that one of them has a secret is true whichever it is."""
    from tests.release.test_release_scan import cli

    one, two = Lab([PLAIN], name="lab/one:1"), Lab([tar(entry("etc/app.env", b"T=" + TOKEN))], name="lab/two:1")
    archive = write(tmp_path / "i", together(one.oci(), two.oci()))
    cli("verify", archive, "--secrets", "--json", tmp_path / "r.json")
    codes = {f["code"] for f in json.loads((tmp_path / "r.json").read_text())["findings"]}
    assert codes >= {"platform.ambiguous", "policy.secret"}
    assert cli("verify", archive, "--secrets", "--image", "lab/one:1").returncode == 4


def test_a_blob_that_nothing_names_is_searched(tmp_path: Path) -> None:
    layer = gzip.compress(tar(entry("etc/app.env", b"T=" + TOKEN)))
    blobs = {**Lab([PLAIN]).oci(), "blobs/sha256/" + hashlib.sha256(layer).hexdigest(): layer}
    assert found(write(tmp_path / "i", blobs)) == ["policy.secret"]


def test_names_of_records_are_searched(tmp_path: Path) -> None:
    path = tmp_path / f"{TOKEN.decode()}.json"
    path.write_text("{}")
    assert [f.code for f in scan_files([path], ScanOptions()).findings] == ["policy.secret"]


# -- files within files ----------------------------------------------------------------------------------------------


def zipped(*members: tuple[str, bytes], method: int = zipfile.ZIP_DEFLATED, stream: bool = False) -> bytes:
    class Pipe(io.RawIOBase):
        def __init__(self) -> None:
            self.data = bytearray()

        def writable(self) -> bool:
            return True

        def write(self, data: object) -> int:
            self.data += bytes(data)  # type: ignore[call-overload]
            return len(bytes(data))  # type: ignore[call-overload]

    pipe: io.BytesIO | Pipe = Pipe() if stream else io.BytesIO()
    with zipfile.ZipFile(pipe, "w", method) as out:  # type: ignore[arg-type]
        for name, data in members:
            out.writestr(name, data)
    return bytes(pipe.data) if isinstance(pipe, Pipe) else pipe.getvalue()


LINE = b"HF_TOKEN=" + TOKEN + b"\n"
HELD = {
    "gzip": gzip.compress(LINE), "two members": gzip.compress(b"first\n") + gzip.compress(LINE),
    "xz": lzma.compress(LINE), "bzip2": bz2.compress(LINE), "two streams": bz2.compress(b"a") + bz2.compress(LINE),
    "zstd": zstandard.compress(LINE), "zip": zipped(("a.txt", b"a" * 9999), ("b/.env", LINE)),
    "stored": zipped(("a", b"a"), ("b", LINE), method=zipfile.ZIP_STORED),
    "streamed": zipped(("a", b"a" * 9999), ("b", LINE), stream=True),
    "program": b"#!/usr/bin/env python3\n" + zipped(("__main__.py", LINE)), "launcher": b"MZ" + bytes(700) + zipped(("b", LINE)),
    "tar": tar(entry("b", LINE)), "tar.gz": gzip.compress(tar(entry("a", b"1"), entry("b", LINE))),
    "tar.xz": lzma.compress(tar(entry(TOKEN.decode(), b"1"))), "wheel in a tar": tar(entry("a.whl", zipped(("b", LINE)))),
    "gzip in a zip": zipped(("a.gz", gzip.compress(LINE))), "comment": zipped((TOKEN.decode(), b"1")),
    "second": zipped(("a", b"1")) + b"junk" + zipped(("b", LINE)),
}  # fmt: skip


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("cut", [1, 1000, 1 << 20])
def test_compressed_files_are_opened(held: str, cut: int) -> None:
    assert kinds(HELD[held], cut=cut) == ["Hugging Face token"]


@pytest.mark.parametrize(
    "data",
    [
        gzip.compress(LINE * 50)[:60], gzip.compress(LINE) + b"junk", lzma.compress(RANDOM.randbytes(5000))[:2000],
        b"7z\xbc\xaf\x27\x1c" + bytes(60), b"BZh9" + bytes(60), b"PK\3\4\x14\0\1\0\x08\0" + bytes(90),
        bytes(257) + b"ustar" + bytes(900),
    ],
    ids=["cut", "junk", "cut xz", "7z", "no bzip2", "encrypted", "no tar"],
)  # fmt: skip
def test_what_cannot_be_opened_is_said(tmp_path: Path, data: bytes) -> None:
    archive = write(tmp_path / "i", Lab([tar(entry("opt/file", data))]).oci())
    scan = scan_archives([archive], ScanOptions())
    told = [f for f in scan.findings if f.code == "policy.unsearched"]
    assert [(f.severity, f.actual) for f in told] == [("warning", "1")] and "opt/file" in told[0].message
    said: list[str] = []
    scan.warn(lambda event: said.append(event.message), "publish")
    assert (scan.looked_at()["unsearched"], len(said)) == (1, 1)
    scan.require()


def test_a_secret_before_the_fault_and_one_behind_it_are_found() -> None:
    broken = gzip.compress(LINE + bytes(5000) + RANDOM.randbytes(5000))[:4000]
    assert kinds(broken)[0] == "Hugging Face token"
    assert kinds(gzip.compress(b"x") + b"\n" + LINE)[0] == "Hugging Face token"


def test_a_bomb_is_opened_so_far_and_no_further() -> None:
    bomb = gzip.compress(gzip.compress(bytes(64 << 20)))
    said = list(scan_file(b"a.gz", len(bomb), [bomb], options=ScanOptions(opened=1 << 20)))
    assert [f.code for f in said] == ["policy.unsearched"]
    nest = LINE
    for _ in range(12):
        nest = gzip.compress(nest)
    assert [f.code for f in scan_file(b"a.gz", len(nest), [nest])] == ["policy.unsearched"]


def test_a_fault_of_the_layer_is_none_of_the_file_in_it(tmp_path: Path) -> None:
    from oci_builder.model.errors import OciBuilderError

    layer = tar(entry("a.gz", gzip.compress(RANDOM.randbytes(20_000))))[:9000]
    with pytest.raises(OciBuilderError) as caught:
        scan_archives([write(tmp_path / "i", Lab([layer]).oci())], ScanOptions())
    assert caught.value.code == "tar.truncated"


def test_paths_inside_are_allowed_like_others() -> None:
    options = ScanOptions(allow_paths={r"opt/data\.zip!.*": "examples"})
    assert kinds(HELD["zip"], b"opt/data.zip", options=options) == []
