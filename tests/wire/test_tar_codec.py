"""The tar codec against GNU tar and Python's tarfile, as readers of our output and writers of our input."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oci_builder.model.errors import OciBuilderError
from oci_builder.wire.tar import END_OF_ARCHIVE, Kind, TarEntry, TarReader, encode_header, ignore, padding
from oci_builder.wire.tar.pax import parse_records

names = (
    st.binary(min_size=1, max_size=80)
    .map(lambda b: b.replace(b"\0", b"n"))
    .filter(lambda b: b.strip(b"/.") and b".." not in b.split(b"/"))
)


def read_all(data: bytes, size: int = 700, **options: object) -> list[tuple[TarEntry, bytes]]:
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    reader = TarReader(chunks, **options)  # type: ignore[arg-type]
    return [(entry, b"".join(bytes(part) for part in reader.data())) for entry in reader]


def write_all(items: list[tuple[TarEntry, bytes]]) -> bytes:
    return b"".join(encode_header(e) + d + padding(len(d)) for e, d in items) + END_OF_ARCHIVE


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(
            names, st.binary(max_size=1500), st.integers(0, 0o7777), st.integers(0, 2**32 - 2), st.integers(-100, 2**33)
        ),
        max_size=6,
    ),
    st.integers(1, 3000),
)
def test_round_trip(items: list[tuple[bytes, bytes, int, int, int]], size: int) -> None:
    written = [
        (
            TarEntry(name=b"/".join(p for p in n.split(b"/") if p not in (b"", b".")), kind=Kind.FILE, size=len(d), mode=m,
                     uid=u, gid=u, mtime_ns=t * 10**9, xattrs={b"user.x": d[:50]} if d else {}),
            d,
        )
        for n, d, m, u, t in items
    ]  # fmt: skip
    got = read_all(write_all(written), size, strict=True)
    assert [(e.name, e.mode, e.uid, e.mtime_ns, dict(e.xattrs), d) for e, d in got] == [
        (e.name, e.mode, e.uid, e.mtime_ns, dict(e.xattrs), d) for e, d in written
    ]


@pytest.mark.parametrize("length", [99, 100, 101, 155, 156, 255, 256, 257, 300, 1000])
def test_b111_long_names_and_links_read_by_gnu_tar(tmp_path: Path, length: int) -> None:
    """B111: names and link names over the ustar limits."""
    name = (b"d" * 60 + b"/") * (length // 61) + b"f" * (length % 61 or 1)
    items = [
        (TarEntry(name=name, kind=Kind.FILE, size=3), b"abc"),
        (TarEntry(name=b"s", kind=Kind.SYMLINK, link=name, mode=0o777), b""),
        (TarEntry(name=b"h", kind=Kind.HARDLINK, link=name), b""),
    ]
    data = write_all(items)
    subprocess.run(["tar", "xf", "-"], input=data, cwd=tmp_path, check=True)
    assert (tmp_path / "h").read_bytes() == b"abc"
    assert (tmp_path / "s").readlink().as_posix().encode() == name
    assert [(e.name, e.link) for e, _ in read_all(data)] == [(e.name, e.link) for e, _ in items]


@pytest.mark.parametrize("form", ["gnu", "pax", "ustar", "v7", "oldgnu"])
def test_gnu_tar_output_is_read(tmp_path: Path, form: str) -> None:
    (tmp_path / "t/sub").mkdir(parents=True)
    (tmp_path / "t/sub/file").write_bytes(b"x" * 1000)
    (tmp_path / "t/link").symlink_to("sub/file")
    (tmp_path / "t/hard").hardlink_to(tmp_path / "t/sub/file")
    out = subprocess.run(
        ["tar", f"--format={form}", "-cf", "-", "t"], cwd=tmp_path, check=True, capture_output=True
    ).stdout
    got = {e.name: (e.kind, len(d)) for e, d in read_all(out)}
    assert got[b"t/sub"] == (Kind.DIR, 0)
    assert got[b"t/link"][0] is Kind.SYMLINK
    assert sorted(got[n] for n in (b"t/hard", b"t/sub/file")) == [(Kind.FILE, 1000), (Kind.HARDLINK, 0)]


@pytest.mark.parametrize(
    "form", [["--format=gnu"], *[["--format=pax", f"--sparse-version={v}"] for v in ("0.0", "0.1", "1.0")]]
)
def test_sparse_files_are_expanded(tmp_path: Path, form: list[str]) -> None:
    want = bytearray(9_000_000)
    with open(tmp_path / "f", "wb") as file:
        file.truncate(len(want))
        for at in range(0, len(want), 300_000):
            file.seek(at)
            file.write(b"%08d" % at)
            want[at : at + 8] = b"%08d" % at
    out = subprocess.run(
        ["tar", "-S", *form, "-cf", "-", "f", "f"], cwd=tmp_path, check=True, capture_output=True
    ).stdout
    assert len(out) < 2_000_000
    (entry, data), _ = read_all(out, 65536)
    assert (entry.name, entry.size, data) == (b"f", len(want), bytes(want))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_c7_02_every_truncation_is_found(draw: st.DataObject) -> None:
    whole = write_all(
        [(TarEntry(name=b"n" * 120, kind=Kind.FILE, size=700), b"q" * 700), (TarEntry(name=b"d", kind=Kind.DIR), b"")]
    )
    cut = draw.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(OciBuilderError) as error:
        read_all(whole[:cut])
    assert error.value.code == "tar.truncated"


def test_b112_a_size_above_8_gib_is_in_the_header() -> None:
    """B112: the size is written before the content, above what ustar can say."""
    header = encode_header(TarEntry(name=b"big", kind=Kind.FILE, size=9 << 30))
    info = tarfile.TarFile.open(fileobj=io.BytesIO(header + bytes(1024))).next()
    assert info is not None
    assert info.size == 9 << 30


def test_bytes_are_pinned() -> None:
    """Golden: a change of these bytes changes every digest that users have pinned."""
    import hashlib

    items = [
        (TarEntry(name=b"", kind=Kind.DIR, mode=0o755), b""),
        (
            TarEntry(name=b"caf\xe9/" + b"x" * 200, kind=Kind.FILE, size=3, mtime_ns=123456789 * 10**9, mode=0o4755),
            b"abc",
        ),
        (
            TarEntry(
                name=b"dev", kind=Kind.CHAR, major=1, minor=3, uid=2**31, xattrs={b"user.b": b"\0\n", b"user.a": b""}
            ),
            b"",
        ),
    ]
    assert hashlib.sha256(write_all(items)).hexdigest() == (
        "e82852f2bc7fda5c654a9a0c3896382bd6e39376ea8581722f4a4eae4716ec1b"
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 1), min_size=5, max_size=5), st.lists(st.integers(0, 1), min_size=5, max_size=5))
def test_a_header_does_not_depend_on_the_headers_before_it(one: list[int], two: list[int]) -> None:
    """Number fields are remembered from entry to entry: other numbers must not be taken for them."""
    values = ((0o644, 0o755), (0, 1), (0, 2), (0, 5), (0, 7_000_000_000))

    def header(choice: list[int]) -> bytes:
        mode, uid, gid, size, mtime = (pair[pick] for pair, pick in zip(values, choice, strict=True))
        return encode_header(
            TarEntry(name=b"n", kind=Kind.FILE, size=size, mode=mode, uid=uid, gid=gid, mtime_ns=mtime)
        )

    header(one)
    info = tarfile.TarInfo.frombuf(header(two), "utf-8", "strict")
    want = tuple(pair[pick] for pair, pick in zip(values, two, strict=True))
    assert (info.mode, info.uid, info.gid, info.size, int(info.mtime) * 10**9) == want


@pytest.mark.parametrize("most", [1, 2, 7])
def test_a_header_has_as_many_records_as_the_limit_says_and_not_one_more(most: int) -> None:
    record = b"8 a%d=bc\n"
    good = b"".join(record % i for i in range(most))
    assert len(parse_records(good, "x", ignore, most).values) == most
    with pytest.raises(OciBuilderError) as caught:
        parse_records(good + record % 9, "x", ignore, most)
    assert caught.value.code == "limit.record"
