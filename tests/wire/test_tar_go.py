"""C7, kinds that the rows do not name: what Go's archive/tar, and so every client, refuses or reads otherwise is no good
layer, whatever other readers make of it. umoci is the arbiter where it is installed.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError
from oci_builder.wire.tar import TarReader
from tests.lab import tarlang as t
from tests.lab.archives import Lab, with_, write_layout

TIMES = b"00000000005\0" * 2
SPARSE = (b"GNU.sparse.size", b"4"), (b"GNU.sparse.numblocks", b"1"), (b"GNU.sparse.map", b"0,4")


def after(*records: tuple[bytes, bytes], entry: bytes = t.file(b"f", b"data")) -> bytes:
    return t.pax(*(t.record(*record) for record in records)) + entry


def sparse_of(magic: bytes) -> bytes:
    piece = b"00000000000\0" + b"00000000004\0"
    return t.header(b"s", kind=b"S", size=4, magic=magic, patch={386: piece, 483: piece[12:]}) + t.pad(b"data")


REFUSED = [
    ("digits, a blank, a NUL and more", t.file(b"f", b"data", size=b"4 \0 7"), "tar.size"),
    ("the same in an owner", t.file(b"f", uid=b"5 \0 7"), "entry.owner"),
    ("a checksum in base 256", t.file(b"f", checksum=t.base256(0o5000, 8)), "tar.checksum"),
    ("a device number of a file that is none", t.file(b"f", major=b"junk\0\0\0\0"), "entry.device"),
    ("a minor number of a folder with a digit 9", t.folder(b"d", minor=b"09\0\0\0\0\0\0"), "entry.device"),
    ("a name's beginning in GNU's header", t.file(b"f", magic=t.GNU, prefix=b"junk"), "tar.ambiguous"),
    ("times that are none in star's header", t.file(b"f", patch={508: b"tar\0", 476: b"junk"}), "entry.mtime"),
    ("a time of access that is none", after((b"atime", b"nan")), "entry.mtime"),
    ("a time of change beyond 64 bits", after((b"ctime", b"9" * 20)), "entry.mtime"),
    ("the half of a sparse map before a folder", after((b"GNU.sparse.offset", b"0"), entry=t.folder(b"d")), "tar.ambiguous"),
    ("GNU's type S in a ustar header", sparse_of(t.USTAR), "entry.sparse"),
    ("a sparse map of another length than said", after(SPARSE[0], (b"GNU.sparse.numblocks", b"2"), SPARSE[2]), "entry.sparse"),
]  # fmt: skip
DIFFERENT = [
    ("two sizes of one sparse file", after(*SPARSE, (b"GNU.sparse.realsize", b"9")), "entry.sparse"),
    ("two maps of one sparse file", after(
        *SPARSE, (b"GNU.sparse.offset", b"0"), (b"GNU.sparse.numbytes", b"4")), "entry.sparse"),
    ("a number behind a NUL in front", t.file(b"f", b"data", size=b"\0 4\0 7"), "tar.size"),
]  # fmt: skip
ACCEPTED = [
    ("times in GNU's header", t.file(b"f", b"data", magic=t.GNU, prefix=TIMES)),
    ("no text in GNU's header", t.file(b"f", b"data", magic=t.GNU, prefix=b"\xff\xfe")),
    ("times in star's header", t.file(b"f", b"data", patch={508: b"tar\0", 476: TIMES})),
    ("device numbers of a file", t.file(b"f", b"data", major=5, minor=b"     7 \0")),
    ("blanks for device numbers", t.file(b"f", b"data", major=b" " * 8, minor=b" " * 8)),
    ("times of access and change", after((b"atime", b"-1.5"), (b"ctime", b""))),
    ("several NULs behind a GNU long name", t.long_name(b"f\0\0\0") + t.file(b"x", b"data")),
    ("a sparse file in records", after(*SPARSE)),
]  # fmt: skip


def read(layer: bytes) -> dict[bytes, bytes]:
    reader = TarReader([layer])
    return {entry.name: b"".join(reader.data()) for entry in reader}


@pytest.mark.parametrize(("what", "part", "code"), [*REFUSED, *DIFFERENT], ids=[c[0] for c in [*REFUSED, *DIFFERENT]])
def test_what_other_readers_refuse_or_read_otherwise(what: str, part: bytes, code: str) -> None:
    with pytest.raises(OciBuilderError) as refusal:
        read(t.tar(part))
    assert refusal.value.code == code, what


@pytest.mark.parametrize(("what", "part"), ACCEPTED, ids=[what for what, _ in ACCEPTED])
def test_what_all_read_alike(what: str, part: bytes) -> None:
    assert read(t.tar(part)) == {b"f": b"data"}, what


def test_a_sparse_file_of_the_old_form_is_a_warning() -> None:
    said: list[str] = []
    list(TarReader([t.tar(sparse_of(t.GNU))], warn=lambda code, _message: said.append(code)))
    assert said == ["entry.sparse"]


@pytest.mark.skipif(not shutil.which("umoci"), reason="needs umoci")
@pytest.mark.parametrize(("what", "part"), [case[:2] for case in REFUSED] + ACCEPTED)
def test_umoci_agrees(what: str, part: bytes, tmp_path: Path) -> None:
    named = with_(annotations={"org.opencontainers.image.ref.name": "1"})
    layout = write_layout(tmp_path / "layout", Lab(layers=[t.tar(part)], pack="identity", edit_descriptor=named).oci())
    call = ["umoci", "raw", "unpack", "--rootless", "--image", f"{layout}:1", str(tmp_path / "tree")]
    good = subprocess.run(call, capture_output=True).returncode == 0 and (tmp_path / "tree/f").is_file()
    assert good == ((what, part) in ACCEPTED)
