"""More inputs of the catalogue's kinds: shapes that its rows do not name, in the notation of the other tables."""

from __future__ import annotations

import base64
import gzip
import struct
import zlib
from collections.abc import Callable
from typing import Any

import zstandard

from tests.hostile import cases_archive as archive
from tests.hostile import cases_documents as documents
from tests.hostile import cases_tar as tars
from tests.hostile.cases_tar import F, one, to, with_pax
from tests.lab.archives import Lab, dump, entry, files, with_
from tests.lab.archives import tar as archive_tar
from tests.lab.tarlang import (
    END,
    GNU,
    base256,
    file,
    folder,
    hardlink,
    header,
    long_name,
    pad,
    pax,
    record,
    symlink,
    tar,
)

V = b"../victim"
TARS: list[tars.Case] = [
    ("C4-10e", "a whiteout that is a hard link", one(F, hardlink(b".wh.x", b"f")), "entry.whiteout"),
    ("C4-10f", "a whiteout that is a fifo", one(header(b".wh.x", kind=b"6")), "entry.whiteout"),
    ("C4-10g", "an opaque mark that is a folder", one(folder(b"d/.wh..wh..opq")), "entry.whiteout"),
    ("C4-10h", "an opaque mark with data", one(file(b"d/.wh..wh..opq", b"x")), "entry.whiteout"),
    ("C4-05c", "a whiteout of a whiteout's name", one(file(b"d/.wh..wh.x")), "entry.whiteout"),
    ("C4-09b", "a file below a whiteout's name, deep", one(file(b"a/.wh.b/c/d", b"1")), "entry.whiteout"),
    ("C4-08b", "a whiteout below a link to a folder removes what is inside the root", [
        tar(folder(b"d"), file(b"d/x", b"1"), symlink(b"l", b"d")), tar(file(b"l/.wh.x"))],
        {b"d": tars.DIR, b"l": to(b"d")}),
    ("C4-12b", "a folder over a file that an upper layer replaces again", [
        tar(F), tar(folder(b"f"), file(b"f/x", b"1")), tar(file(b"f", b"2"))], {b"f": b"2"}),
    ("C5-01d", "parents after a dot", one(file(b"./../x")), "path.escape"),
    ("C5-01e", "parents in a PAX name", with_pax(record(b"path", b"a/../../x")), "path.escape"),
    ("C5-01f", "parents in a GNU long name", one(long_name(b"../x\0"), F), "path.escape"),
    ("C5-01g", "parents in a prefix", one(file(b"x", b"1", prefix=b"..")), "path.escape"),
    ("C5-01h", "absolute and with parents", one(file(b"/../../etc/x")), "path.escape"),
    ("C5-01i", "parents in a hard link's PAX target", one(F, pax(record(b"linkpath", V + b"/secret")),
        hardlink(b"h", b"f")), "path.escape"),
    ("C5-01j", "parents in the name of a sparse file", with_pax(
        record(b"GNU.sparse.major", b"1"), record(b"GNU.sparse.minor", b"0"), record(b"GNU.sparse.name", b"../x"),
        record(b"GNU.sparse.realsize", b"4")), "path.escape"),
    ("C5-04f", "a slash alone as a file", one(file(b"/", b"1")), "entry.name"),
    ("C5-05b", "a NUL in a link's target", one(pax(record(b"linkpath", b"a\0b")), symlink(b"l", b"x")), "path.nul"),
    ("C5-07e", "a link's target of over 4096 bytes", one(
        long_name(b"t" * 5000 + b"\0", b"K"), symlink(b"l", b"x")), "limit.name"),
    ("C5-07f", "names that differ in case or in their Unicode form", one(
        file(b"\xc3\xa9", b"1"), file(b"e\xcc\x81", b"2"), file(b"A", b"3"), file(b"a", b"4")),
        {b"\xc3\xa9": b"1", b"e\xcc\x81": b"2", b"A": b"3", b"a": b"4"}),
    ("C6-01g", "through a chain of links that goes up and out", one(
        folder(b"a/b"), symlink(b"a/b/up", b"../../.."), symlink(b"l", b"a/b/up/victim"), file(b"l/secret", b"1")),
        {b"a/b/up": to(b"../../.."), b"l": to(b"a/b/up/victim"), b"victim/secret": b"1"}),
    ("C6-02g", "a fifo through a link to the victim", one(symlink(b"l", V), header(b"l/p", kind=b"6")),
        {b"l": to(V), b"victim/p": ("fifo",)}),
    ("C6-02h", "a link through a link to the victim", one(symlink(b"l", V), symlink(b"l/s", b"x")),
        {b"l": to(V), b"victim/s": to(b"x")}),
    ("C6-02i", "a whole folder put over the victim by links of two layers", [
        tar(symlink(b"l", V)), tar(folder(b"l/d"), file(b"l/d/f", b"1"))], {b"l": to(V), b"victim/d/f": b"1"}),
    ("C6-02j", "a link to /proc/self/root", one(
        symlink(b"l", b"/proc/self/root"), file(b"l/f", b"1")), {b"l": to(b"/proc/self/root"), b"proc/self/root/f": b"1"}),
    ("C6-10c", "a hard link whose target comes in an upper layer", [tar(hardlink(b"h", b"f")), tar(F)],
        "entry.link_target"),
    ("C6-11f", "two hard links to each other", one(hardlink(b"a", b"b"), hardlink(b"b", b"a")), "entry.link_target"),
    ("C6-11g", "a hard link to what its own layer hides", [tar(F), tar(file(b".wh.f"), hardlink(b"h", b"f"))],
        "entry.link_target"),
    ("C6-14d", "a fifo with data", one(header(b"p", kind=b"6", size=4) + pad(b"evil")), "tar.link_data"),
    ("C7-01e", "a header of ones", one(b"\xff" * 512), "tar.checksum"),
    ("C7-03g", "the end marker in the middle of a block", one(F, end=END[:700]), "tar.truncated"),
    ("C7-07e", "an overflow of octal digits in a record", with_pax(record(b"size", b"9" * 30)), "tar.size"),
    ("C7-07f", "a size in a record that is not decimal", with_pax(record(b"size", b"0x10")), "tar.size"),
    ("C7-07g", "a size in a record with a sign", with_pax(record(b"size", b"+4")), "tar.size"),
    ("C7-07h", "a size in digits of another script", with_pax(record(b"size", "٤".encode())), "tar.size"),
    ("C7-11j", "a record's length in digits of another script", with_pax("٩ path=x\n".encode()), "tar.pax"),
    ("C7-11k", "a record's length with a sign", with_pax(b"+9 path=x\n"), "tar.pax"),
    ("C7-13e", "a global header that changes owners", one(pax(record(b"uid", b"0"), kind=b"g"), F), "tar.global"),
    ("C7-13f", "the last of several volumes", one(pax(
        record(b"GNU.volume.filename", b"f"), record(b"GNU.volume.size", b"4"), record(b"GNU.volume.offset", b"9"),
        kind=b"g"), file(b"GNUFileParts/f.3", b"rest")), "tar.global"),
    ("C7-13g", "a volume's label, which is none of a file", one(pax(record(b"GNU.volume.label", b"x"), kind=b"g"), F),
        {b"f": b"data"}),
    ("C6-05c", "a link over 2,000 folders", one(
        pax(record(b"linkpath", b"a/" * 2000 + b"b")), symlink(b"l", b"x")), "limit.depth"),
    ("C8-09f", "attributes in libarchive's records alone", with_pax(
        record(b"LIBARCHIVE.xattr.security.capability", b"AQAAAg==")), {b"f": b"data"}),
    ("C7-16b", "a GNU long name of 2 MiB", one(long_name(b"x" * (2 << 20)), F), "limit.record"),
    ("C7-16c", "a PAX header of 2**60 bytes that are not there", one(
        header(b"PaxHeaders/x", kind=b"x", size=base256(2**60, 12))), "limit.entry"),
    ("C7-17g", "a type of all bits", one(header(b"a", kind=b"\xff")), "entry.type"),
    ("C7-20f", "a PAX sparse file whose map is text", one(pax(
        record(b"GNU.sparse.major", b"1"), record(b"GNU.sparse.minor", b"0"), record(b"GNU.sparse.name", b"s"),
        record(b"GNU.sparse.realsize", b"4")), file(b"s", b"one\n0\n4\n" + b"x" * 508)), "entry.sparse"),
    ("C7-20g", "a PAX sparse file of 2**60 bytes", one(pax(
        record(b"GNU.sparse.major", b"1"), record(b"GNU.sparse.minor", b"0"), record(b"GNU.sparse.name", b"s"),
        record(b"GNU.sparse.realsize", b"%d" % 2**60)), file(b"s", b"0\n".ljust(512, b"\0"))), "entry.sparse"),
    ("C8-01h", "a uid with a sign in a record", with_pax(record(b"uid", b"+1")), "entry.owner"),
    ("C8-01i", "a uid with underscores in a record", with_pax(record(b"uid", b"1_0")), "entry.owner"),
    ("C8-03d", "a device of a disk below another name", one(header(b"dev/x", kind=b"4", major=259)), "entry.device"),
    ("C8-06d", "a mode of all bits", one(file(b"a", mode=base256(-1, 8))), "entry.mode"),
    ("C8-07h", "a time with a second point", with_pax(record(b"mtime", b"1.5.5")), "entry.mtime"),
    ("C8-07i", "a time in digits of another script", with_pax(record(b"mtime", "٤".encode())), "entry.mtime"),
    ("C8-07j", "a time long before 1970", with_pax(record(b"mtime", b"-62135596800")), "entry.mtime"),
    ("C8-09e", "a thousand attributes", with_pax(*(record(b"SCHILY.xattr.security.x%d" % n, b"v")
        for n in range(1000))), {b"f": b"data"}),
    ("C7-18d", "GNU magic with a base-256 owner", one(file(b"a", b"1", magic=GNU, uid=base256(7, 8))), {b"a": b"1"}),
]  # fmt: skip


def blob(change: Callable[[bytes], bytes], pack: str = "gzip", tar_bytes: bytes = b"") -> Lab:
    layer = tar_bytes or files(a=bytes(range(256)) * 40)
    return Lab(layers=[layer], pack=pack, edit_layer=lambda _n, data: change(data))


def member(data: bytes, flags: int = 0, extra: bytes = b"", method: int = 8) -> bytes:
    """A gzip member with this flag byte and what it announces, put together by hand."""
    packer = zlib.compressobj(6, zlib.DEFLATED, -15)
    body = packer.compress(data) + packer.flush()
    head = b"\x1f\x8b" + bytes([method, flags]) + bytes(4) + b"\0\xff" + extra
    return head + body + struct.pack("<LL", zlib.crc32(data), len(data) & 0xFFFFFFFF)


def gz(**fields: Any) -> Lab:
    return blob(lambda packed: member(gzip.decompress(packed), **fields))


def zframe(window_log: int = 0, **fields: Any) -> Callable[[bytes], bytes]:
    def change(data: bytes) -> bytes:
        params = zstandard.ZstdCompressionParameters(window_log=window_log, **fields) if window_log else None
        packer = zstandard.ZstdCompressor(compression_params=params) if params else zstandard.ZstdCompressor(**fields)
        out = packer.compressobj()
        return out.compress(zstandard.decompress(data)) + out.flush()

    return change


OB = b"OB\x04\x00"
LABS: list[documents.Case] = [
    ("C2-02b", "a blob one byte longer", Lab(edit_layer=lambda _n, b: b, edit_members=lambda m: {
        k: v + b"\0" if k.startswith("blobs/") and v[:2] == b"\x1f\x8b" else v for k, v in m.items()}), "blob.size"),
    ("C2-08f", "a digest with a newline behind", Lab(edit_descriptor=lambda d: d | {"digest": d["digest"] + "\n"}),
        "json.digest"),
    ("C2-08g", "a digest with spaces", Lab(edit_manifest=with_(layers__0__digest=" sha256:" + "a" * 64)), "json.digest"),
    ("C2-08h", "a digest that is a number", Lab(edit_manifest=with_(layers__0__digest=7)), "json.digest"),
    ("C2-08i", "digits of another script in a diff_id", Lab(
        edit_config=with_(rootfs__diff_ids__0="sha256:" + "٤" * 64)), "json.digest"),
    ("C2-09b", "a diff_id as a path", Lab(edit_config=with_(rootfs__diff_ids__0="sha256:../../../x")), "json.digest"),
    ("C2-04b", "a layer of negative size", Lab(edit_manifest=with_(layers__0__size=-1)), "json.field"),
    ("C2-04c", "a size that is a fraction", Lab(edit_manifest=with_(layers__0__size=1.5)), "json.field"),
    ("C2-04d", "a size that is true", Lab(edit_manifest=with_(layers__0__size=True)), "json.field"),
    ("C2-12e", "embedded data of a layer that is other bytes", Lab(edit_manifest=with_(
        layers__0__data=base64.b64encode(b"x").decode())), "blob.size"),
    ("C3-05f", "a lone half of a surrogate pair in an annotation", Lab(edit_members=documents.replaced(
        b'"schemaVersion":', b'"x":"\\ud800","schemaVersion":')), "json.syntax"),
    ("C3-05g", "infinity", Lab(edit_members=documents.replaced(b'"size":', b'"x":-Infinity,"size":')), "json.number"),
    ("C3-05h", "a byte order mark", Lab(edit_members=lambda m: m | {"index.json": b"\xef\xbb\xbf" + m["index.json"]}),
        "json.syntax"),
    ("C3-05i", "UTF-16", Lab(edit_members=lambda m: m | {
        "index.json": m["index.json"].decode().encode("utf-16")}), "json.syntax"),
    ("C3-05j", "a second document behind the first", Lab(edit_members=lambda m: m | {
        "index.json": m["index.json"] + b"{}"}), "json.syntax"),
    ("C3-05k", "an empty document", Lab(edit_members=documents.raw_index(b"")), "json.syntax"),
    ("C3-05l", "a list instead of an object", Lab(edit_members=documents.raw_index(b"[]")), "json.field"),
    ("C3-05m", "a key twice, deep inside the config", Lab(edit_config=lambda c: dump(c).replace(
        b'"Env":', b'"Env":["A=b"],"Env":')), "json.duplicate"),
    ("C3-06g", "layers null", Lab(edit_manifest=with_(layers=None)), "json.field"),
    ("C3-06h", "diff_ids as text", Lab(edit_config=with_(rootfs__diff_ids="sha256:" + "1" * 64)), "json.field"),
    ("C3-06i", "an environment of numbers", Lab(edit_config=with_(config__Env=[1])), "json.field"),
    ("C3-06j", "annotations of lists", Lab(edit_manifest=with_(annotations={"x": ["y"]})), "json.field"),
    ("C3-08b", "fewer diff_ids than layers", Lab(edit_config=lambda c: with_(
        rootfs__diff_ids=c["rootfs"]["diff_ids"][:1], history=c["history"][:1])(c)), "config.layers"),
    ("C3-10b", "the diff_ids in another order", Lab(edit_config=lambda c: with_(
        rootfs__diff_ids=c["rootfs"]["diff_ids"][::-1])(c)), "layer.diff_id"),
    ("C3-13c", "an encrypted layer", Lab(edit_manifest=with_(
        layers__0__mediaType="application/vnd.oci.image.layer.v1.tar+gzip+encrypted")), "media.mismatch"),
    ("C3-20b", "Docker's foreign layer", Lab(edit_manifest=with_(
        layers__0__mediaType="application/vnd.docker.image.rootfs.foreign.diff.tar.gzip")), "media.foreign"),
    ("C3-17d", "a layout version that is a number", Lab(edit_members=lambda m: m | {
        "oci-layout": b'{"imageLayoutVersion":1}'}), "layout.version"),
    ("C9-03d", "a reserved flag of gzip", gz(flags=0x20), "gzip.header"),
    ("C9-03e", "another method than deflate", gz(method=7), "gzip.header"),
    ("C9-03f", "a name and a comment in the header", gz(flags=0x18, extra=b"name\0comment\0"), None),
    ("C9-03g", "an extra field that is longer than the blob", gz(flags=4, extra=b"\xff\xff"), "gzip.truncated"),
    ("C9-03h", "our own length field, and it lies", gz(flags=4, extra=b"\x08\0" + OB + b"\xff\xff\xff\x7f"), None),
    ("C9-03i", "our own length field of zero", gz(flags=4, extra=b"\x08\0" + OB + bytes(4)), None),
    ("C9-04e", "an empty member behind", blob(lambda b: b + gzip.compress(b"")), None),
    ("C9-05d", "a NUL and a member behind it", blob(lambda b: b + b"\0" + gzip.compress(b"")), "gzip.trailing"),
    ("C9-07b", "a window of 256 MiB", blob(zframe(window_log=28, enable_ldm=True), "zstd"), "zstd.window"),
    ("C9-07c", "a frame without its size and its checksum", blob(zframe(write_content_size=False), "zstd"), None),
    ("C9-07d", "a dictionary that nobody has", blob(lambda b: zstandard.ZstdCompressor(
        dict_data=zstandard.ZstdCompressionDict(bytes(range(256)) * 8)).compress(zstandard.decompress(b)), "zstd"), "zstd.data"),
    ("C9-08e", "one byte", blob(lambda _b: b"\x1f"), "tar.truncated"),
    ("C9-08f", "a zstd magic only", blob(lambda b: b[:4], "zstd"), "zstd.truncated"),
    ("C9-08g", "a skippable frame alone", blob(lambda _b: b"\x50\x2a\x4d\x18\4\0\0\0skip", "zstd"), "tar.truncated"),
    ("C9-08h", "a member of nothing", blob(lambda _b: gzip.compress(b"")), "tar.truncated"),
    ("C9-08i", "an LZ4 frame", blob(lambda _b: b"\x04\x22\x4d\x18" + bytes(600)), "media.mismatch"),
]  # fmt: skip


def docker_edit(**changes: Any) -> Any:
    return archive.docker(archive.items(lambda items: [items[0] | changes]))


ARCHIVES: list[archive.Case] = [
    ("C10-01e", "manifest.json of an object", archive.docker(lambda m: m | {"manifest.json": b"{}"}), "json.field"),
    ("C10-01f", "no Config", docker_edit(Config=None), "json.field"),
    ("C10-01g", "a Config outside", docker_edit(Config="../../etc/passwd"), "archive.missing"),
    ("C10-01h", "Layers null", docker_edit(Layers=None), "config.layers"),
    ("C10-01i", "a layer that is a path outside", docker_edit(Layers=["../a", "/etc/passwd"]), "archive.missing"),
    ("C10-02h", "a member that leads out", archive.raw(archive.plus(entry("../x", b"x"))), "path.escape"),
    ("C10-02i", "an absolute member", archive.raw(archive.plus(entry("/x", b"x"))), None),
    ("C10-04c", "index.json twice", archive.raw(lambda: archive_tar(
        *(entry(n, d) for n, d in Lab().oci().items()), entry("index.json", b"{}"))), "archive.duplicate"),
    ("C10-04d", "a folder of the name of manifest.json", archive.raw(archive.plus(
        entry("manifest.json", type=b"5", mode=0o755))), "archive.duplicate"),
    ("C10-05b", "an extra folder", archive.raw(archive.plus(entry("extra", type=b"5", mode=0o755))), None),
    ("C10-09b", "the outer gzip's CRC", archive.raw(lambda: _flipped(gzip.compress(archive.plus()(), mtime=0), -6)),
        "gzip.crc"),
    ("C10-09c", "the outer gzip twice", archive.raw(lambda: gzip.compress(gzip.compress(archive.plus()()))),
        "tar.checksum"),
]  # fmt: skip


def _flipped(data: bytes, at: int) -> bytes:
    out = bytearray(data)
    out[at] ^= 1
    return bytes(out)

