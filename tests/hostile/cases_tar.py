"""C4 to C8 and group D of the field reports: what a layer's tar can hold, as data.

A case is (id, what, layers, outcome): the code of the refusal, or the tree that must come of it. A tree is a dict from
path to content (bytes), ``("link", target)``, ``("dir",)`` or ``("fifo",)``; folders that are implied need no mention.
"""

from __future__ import annotations

from tests.lab.tarlang import (
    END,
    GNU,
    V7,
    base256,
    file,
    folder,
    hardlink,
    header,
    long_name,
    pad,
    pax,
    record,
    sparse,
    symlink,
    tar,
)  # fmt: skip

Outcome = str | dict[bytes, object]
Case = tuple[str, str, list[bytes], Outcome]

DIR: object = ("dir",)
F = file(b"f", b"data")


def to(target: bytes) -> object:
    return ("link", target)


def one(*parts: bytes, end: bytes = END) -> list[bytes]:
    return [tar(*parts, end=end)]


def with_pax(*records: bytes) -> list[bytes]:
    return one(pax(*records), F)


WHITEOUTS: list[Case] = [
    ("C4-01a", "an empty whiteout name", one(file(b".wh.")), "entry.whiteout"),
    ("C4-01b", "an empty whiteout name in a folder", one(file(b"d/.wh.")), "entry.whiteout"),
    ("C4-02a", "a whiteout of the root's dot", one(file(b".wh..")), "entry.whiteout"),
    ("C4-02b", "a whiteout of dot in a folder", one(file(b"d/.wh..")), "entry.whiteout"),
    ("C4-02c", "a whiteout of the folder above", one(file(b"d/.wh...")), "entry.whiteout"),
    ("C4-04a", "opaque before its siblings", [
        tar(file(b"a/old", b"1"), file(b"a/sub/deep", b"2")), tar(file(b"a/.wh..wh..opq"), file(b"a/new", b"3"))],
        {b"a/new": b"3"}),
    ("C4-04b", "opaque after its siblings (B102)", [
        tar(file(b"a/old", b"1"), file(b"a/sub/deep", b"2")), tar(file(b"a/new", b"3"), file(b"a/.wh..wh..opq"))],
        {b"a/new": b"3"}),
    ("C4-04c", "opaque after a sibling in a folder that lies below", [
        tar(file(b"a/sub/old", b"1")), tar(file(b"a/sub/new", b"2"), file(b"a/.wh..wh..opq"))], {b"a/sub/new": b"2"}),
    ("C4-04d", "an opaque root", [tar(F, file(b"d/x")), tar(file(b".wh..wh..opq"), file(b"n", b"1"))], {b"n": b"1"}),
    ("C4-05", "a reserved name", one(file(b".wh..wh.plnk")), "entry.whiteout"),
    ("C4-06a", "a file, then its whiteout", [tar(file(b"f", b"old")), tar(file(b"f", b"new"), file(b".wh.f"))],
        {b"f": b"new"}),
    ("C4-06b", "a folder, then its whiteout", [
        tar(file(b"d/old", b"1")), tar(folder(b"d"), file(b"d/new", b"2"), file(b".wh.d"))], {b"d/new": b"2"}),
    ("C4-06c", "the whiteout, then the folder", [
        tar(file(b"d/old", b"1")), tar(file(b".wh.d"), folder(b"d"), file(b"d/new", b"2"))], {b"d/new": b"2"}),
    ("C4-08", "a whiteout of a link", [tar(F, symlink(b"l", b"f")), tar(file(b".wh.l"))], {b"f": b"data"}),
    ("C4-09", "a folder named like a whiteout", one(folder(b".wh.x"), file(b".wh.x/y")), "entry.whiteout"),
    ("C4-10a", "a whiteout that is a folder", one(folder(b".wh.x")), "entry.whiteout"),
    ("C4-10b", "a whiteout that is a link", one(symlink(b".wh.x", b"y")), "entry.whiteout"),
    ("C4-10c", "a whiteout that is a device", one(header(b".wh.x", kind=b"3", major=1, minor=3)), "entry.whiteout"),
    ("C4-10d", "a whiteout with data", one(file(b".wh.x", b"data")), "entry.whiteout"),
    ("C4-11", "a whiteout of nothing that is there", one(file(b".wh.x"), file(b"no/.wh.y"), F), {b"f": b"data"}),
    ("C4-12", "an overwritten file wins, a hidden folder goes", [
        tar(file(b"f", b"1"), file(b"d/x")), tar(file(b"f", b"2"), file(b".wh.d"))], {b"f": b"2"}),
    ("B097", "the name is hidden, a hard link of it stays", [
        tar(F, hardlink(b"g", b"f")), tar(file(b".wh.f"))], {b"g": b"data"}),
]  # fmt: skip

NAMES: list[Case] = [
    ("C5-01a", "parents in the name", one(file(b"../x")), "path.escape"),
    ("C5-01b", "parents within the name", one(file(b"a/../../x")), "path.escape"),
    ("C5-01c", "a name that is only parents", one(folder(b"..")), "path.escape"),
    ("B127", "a link whose own name escapes", one(symlink(b"../../x", b"y")), "path.escape"),
    ("C5-02", "an absolute name", one(file(b"/x", b"1")), {b"x": b"1"}),
    ("C5-03a", "a drive letter", one(file(b"C:\\x", b"1")), {b"C:\\x": b"1"}),
    ("C5-03b", "a backslash", one(file(b"..\\x", b"1")), {b"..\\x": b"1"}),
    ("C5-04a", "an empty name", one(file(b"")), "path.empty"),
    ("C5-04b", "the root as a folder", one(header(b"./", kind=b"5", mode=0o755), F), {b"f": b"data"}),
    ("C5-04c", "doubled slashes", one(file(b"a//./b", b"1")), {b"a/b": b"1"}),
    ("C5-04d", "a slash after a file's name", one(file(b"x/", b"1")), "entry.name"),
    ("C5-04e", "an old tar's folder", one(header(b"x/", kind=b"\0", magic=V7)), {b"x": DIR}),
    ("C5-05", "a NUL in a PAX name", with_pax(record(b"path", b"a\0b")), "path.nul"),
    ("C5-06", "a NUL in a GNU long name", one(long_name(b"a\0b\0"), F), "path.nul"),
    ("C5-07a", "newline, escape and quotes", one(file(b"a\n\x1b[1m'\"", b"1")), {b"a\n\x1b[1m'\"": b"1"}),
    ("C5-07b", "a component of 255 bytes", one(long_name(b"n" * 255 + b"\0"), F), {b"n" * 255: b"data"}),
    ("C5-07c", "a component of 256 bytes", one(long_name(b"n" * 256 + b"\0"), F), "limit.name"),
    ("C5-07d", "a name of over 4096 bytes", with_pax(record(b"path", b"d/" * 2048 + b"f")), "limit.name"),
    ("C5-08a", "not UTF-8 in a header (B114)", one(file(b"caf\xe9", b"1")), {b"caf\xe9": b"1"}),
    ("C5-08b", "not UTF-8 in a record", with_pax(record(b"path", b"caf\xe9")), {b"caf\xe9": b"data"}),
    ("C5-10", "dots that are no parent", one(file(b"..git", b"1"), file(b"...", b"2")), {b"..git": b"1", b"...": b"2"}),
    ("C5-11a", "a parent that is a file", one(F, file(b"f/x", b"1")), {b"f/x": b"1"}),
    ("C5-11b", "a parent that is a file below", [tar(F), tar(file(b"f/x", b"1"))], {b"f/x": b"1"}),
    ("C5-11c", "a parent that links to a file", one(F, symlink(b"l", b"f"), file(b"l/x")), "path.parent"),
    ("C5-12a", "a link as the root", one(symlink(b".", b"/etc")), "entry.root"),
    ("C5-12b", "a file as the root", one(file(b"./.", b"x")), "entry.root"),
]  # fmt: skip

LINKS: list[Case] = [
    *[(f"C6-01{tag}", f"through a link to {target!r}", one(symlink(b"l", target), file(b"l/f", b"1")),
        {b"l": to(target), b"f": b"1"})
      for tag, target in zip("abcde", (b"/", b"/..", b"../../../../..", b"..", b"/./../."), strict=True)],
    ("C6-01f", "through a link to a place that is not there", one(symlink(b"l", b"/a/b"), file(b"l/f", b"1")),
        {b"l": to(b"/a/b"), b"a/b/f": b"1"}),
    ("C6-02a", "a file through a link to the victim", one(symlink(b"l", b"../victim"), file(b"l/secret", b"1")),
        {b"l": to(b"../victim"), b"victim/secret": b"1"}),
    ("C6-02b", "a hard link to the victim", one(hardlink(b"h", b"../victim/secret")), "path.escape"),
    ("C6-02c", "a hard link through a link to the victim",
        one(symlink(b"l", b"../victim"), hardlink(b"h", b"l/secret")), "entry.link_target"),
    ("C6-02d", "a file over a link to the victim", one(symlink(b"l", b"../victim/secret"), file(b"l", b"1")),
        "entry.duplicate"),
    ("C6-02e", "a folder over a link to the victim", one(symlink(b"l", b"../victim"), folder(b"l"), file(b"l/s", b"1")),
        "entry.duplicate"),
    ("C6-02f", "a whiteout through a link to the victim", [
        tar(symlink(b"l", b"../victim")), tar(file(b"l/.wh.secret"), file(b"l/.wh..wh..opq"))],
        {b"l": to(b"../victim")}),
    ("C6-03", "a folder that becomes a link and a folder again", one(
        folder(b"d"), symlink(b"d", b"../victim"), file(b"d/a", b"1"), folder(b"d"), file(b"d/b", b"2")),
        "entry.duplicate"),
    ("C6-05a", "links in a circle", one(symlink(b"a", b"b"), symlink(b"b", b"a"), file(b"a/x")), "path.loop"),
    ("C6-05b", "41 links in a row", one(
        symlink(b"l0", b"."), *(symlink(b"l%d" % n, b"l%d" % (n - 1)) for n in range(1, 41)), file(b"l40/x")),
        "path.loop"),
    ("C6-06", "a file through a link, then the link replaced", one(
        folder(b"d"), symlink(b"l", b"d"), file(b"l/x", b"1"), file(b"l", b"2")), "entry.duplicate"),
    ("C6-07", "links that are legal", one(symlink(b"a/abs", b"/etc/alternatives/x"), symlink(b"a/up", b"../b")),
        {b"a/abs": to(b"/etc/alternatives/x"), b"a/up": to(b"../b")}),
    ("C6-09", "a hard link to a link", one(symlink(b"l", b"no/such"), hardlink(b"h", b"l")),
        {b"l": to(b"no/such"), b"h": to(b"no/such")}),
    ("C6-10a", "hard links before their target", one(hardlink(b"a", b"b"), hardlink(b"b", b"f"), F),
        {b"a": b"data", b"b": b"data", b"f": b"data"}),
    ("C6-10b", "a hard link without a target", one(hardlink(b"a", b"no")), "entry.link_target"),
    ("C6-11a", "a hard link to itself", one(hardlink(b"a", b"a")), "entry.link_target"),
    ("C6-11e", "a hard link to itself where the file is", [tar(F), tar(hardlink(b"f", b"f"))], {b"f": b"data"}),
    ("C6-11b", "a hard link to a folder", one(folder(b"d"), hardlink(b"a", b"d")), "entry.link_target"),
    ("C6-11c", "a hard link to the root", one(hardlink(b"a", b".")), "entry.link_target"),
    ("C6-11d", "a hard link in place of its target's folder", one(file(b"d/f"), hardlink(b"d", b"d/f")),
        "entry.link_target"),
    ("C6-13", "a hard link to a lower layer (B096)", [tar(F), tar(hardlink(b"h", b"f"))],
        {b"f": b"data", b"h": b"data"}),
    ("C6-14a", "a hard link with data", one(F, hardlink(b"h", b"f", size=4) + pad(b"evil")), "tar.link_data"),
    ("C6-14b", "a link with data", one(symlink(b"l", b"f", size=4) + pad(b"evil")), "tar.link_data"),
    ("C6-14c", "a folder with data", one(folder(b"d", size=4) + pad(b"evil")), "tar.link_data"),
    ("B104", "a folder's file where lib is a link to usr/lib", [
        tar(file(b"usr/lib/libc", b"1"), symlink(b"lib", b"usr/lib")), tar(file(b"lib/x", b"2"))],
        {b"usr/lib/libc": b"1", b"usr/lib/x": b"2", b"lib": to(b"usr/lib")}),
    ("B126", "a link planted first, written through later", one(symlink(b"x", b"/tmp/out"), file(b"x/f", b"1")),
        {b"x": to(b"/tmp/out"), b"tmp/out/f": b"1"}),
]  # fmt: skip

STRUCTURE: list[Case] = [
    ("C7-01a", "the first header's checksum", one(file(b"a", checksum="wrong"), F), "tar.checksum"),
    ("C7-01b", "a later header's checksum", one(F, file(b"a", checksum="wrong"), F), "tar.checksum"),
    ("C7-01c", "a checksum that is no number", one(file(b"a", checksum=b"hello")), "tar.checksum"),
    ("C7-01d", "a checksum of signed bytes", one(file(b"caf\xe9", b"1", checksum="signed")), {b"caf\xe9": b"1"}),
    ("C7-02a", "cut in a header", one(F, end=header(b"g")[:300]), "tar.truncated"),
    ("C7-02b", "cut in content", one(end=file(b"g", b"x" * 2000)[:1500]), "tar.truncated"),
    ("C7-02c", "cut in padding", one(end=file(b"g", b"x" * 20)[:800]), "tar.truncated"),
    ("C7-03a", "one zero block", one(F, end=bytes(512)), "tar.trailing"),
    ("C7-03b", "no end marker", one(F, end=b""), "tar.truncated"),
    ("C7-03c", "bytes after the end", one(F, end=END + b"x"), "tar.trailing"),
    ("C7-03d", "members after the end", one(F, end=END + file(b"hidden") + END), "tar.trailing"),
    ("C7-03e", "an entry after one zero block", one(F, bytes(512), F), "tar.trailing"),
    ("C7-03f", "zeros up to GNU tar's record size", one(F, end=bytes(10240 - 1024)), {b"f": b"data"}),
    ("C7-05", "a file, then a folder of its name", [tar(F), tar(folder(b"f"), file(b"f/x", b"1"))], {b"f/x": b"1"}),
    ("C7-06", "a child before its parent", one(file(b"d/x", b"1"), folder(b"d", mode=0o700)), {b"d/x": b"1"}),
    ("C7-07a", "a negative size", one(header(b"a", size=base256(-1, 12))), "tar.size"),
    ("C7-07b", "a negative size in a record", with_pax(record(b"size", b"-1")), "tar.size"),
    ("C7-07c", "a size of 2**62", one(header(b"a", size=base256(2**62, 12))), "limit.entry"),
    ("C7-07d", "a size that is text", one(header(b"a", size=b"hello")), "tar.size"),
    ("C7-10", "a record's size counts", one(pax(record(b"size", b"4")), header(b"f", size=0) + pad(b"data")),
        {b"f": b"data"}),
    *[(f"C7-11{tag}", f"a record with {what}", with_pax(text), "tar.pax") for tag, what, text in (
        ("a", "length 0", b"0 path=x\n"), ("b", "too short a length", b"5 path=x\n"),
        ("c", "too long a length", b"99 path=x\n"), ("d", "no =", b"8 pathx\n"), ("e", "no newline", b"9 path=xx"),
        ("f", "leading zeros", b"010 path=x\n"), ("g", "a negative length", b"-9 path=x\n"), ("h", "no key", b"5 =x\n"),
        ("i", "a huge length", b"99999999999999999999 path=x\n"))],
    ("C7-13a", "10,000 PAX headers before a file", one(*[pax(record(b"comment", b"x"))] * 10_000, F), "tar.pax"),
    ("C7-13b", "10,000 global headers", one(*[pax(record(b"comment", b"x"), kind=b"g")] * 10_000, F),
        "limit.pax_headers"),
    ("C7-13c", "a global header that changes names", one(pax(record(b"path", b"x"), kind=b"g"), F), "tar.global"),
    ("C7-13d", "a global header that changes sizes", one(pax(record(b"size", b"0"), kind=b"g"), F), "tar.global"),
    ("B109", "a global header with a comment", one(pax(record(b"comment", b"commit"), kind=b"g"), F), {b"f": b"data"}),
    ("B110", "a record of 4 kB", with_pax(record(b"comment", b"x" * 4096)), {b"f": b"data"}),
    ("C7-14a", "a key twice", with_pax(record(b"path", b"x"), record(b"path", b"y")), {b"y": b"data"}),
    ("C7-14b", "a PAX and another GNU name", one(pax(record(b"path", b"x")), long_name(b"y\0"), F), "tar.ambiguous"),
    ("C7-14c", "two GNU names", one(long_name(b"x\0"), long_name(b"y\0"), F), "tar.ambiguous"),
    *[(f"C7-14{tag}", f"a sparse file's name for what is {what}", one(F, pax(
        record(b"path", b"good"), record(b"GNU.sparse.name", b"evil")), part), "tar.ambiguous") for tag, what, part in (
        ("d", "a folder", folder(b"d")), ("e", "a symbolic link", symlink(b"l", b"f")),
        ("f", "a hard link", hardlink(b"h", b"f")), ("g", "a fifo", header(b"p", kind=b"6")),
        ("h", "an old sparse file", sparse(b"s", b"x", [(0, 1)], 5)))],
    ("C7-15", "a PAX header at the end", one(F, pax(record(b"path", b"x"))), "tar.pax"),
    ("C7-16", "a PAX header of 2 MiB", with_pax(record(b"comment", b"x" * (2 << 20))), "limit.record"),
    *[(f"C7-17{tag}", f"type {kind!r}", one(header(b"a", kind=kind)), "entry.type") for tag, kind in zip(
        "abcdef", (b"Z", b"V", b"M", b"D", b"7", b"N"), strict=True)],
    ("C7-18a", "an old tar", one(file(b"a", b"1", magic=V7)), {b"a": b"1"}),
    ("C7-18b", "GNU with junk for a prefix", one(file(b"a", b"1", magic=GNU, prefix=b"junk")), "tar.ambiguous"),
    ("C7-18c", "a prefix", one(file(b"a", b"1", prefix=b"p/q")), {b"p/q/a": b"1"}),
    ("C7-19", "folders 200 deep", one(file(b"d/" * 40 + b"f"), pax(record(b"path", b"d/" * 200 + b"f")), F),
        "limit.depth"),
    ("C7-20a", "a sparse file", one(sparse(b"s", b"abcd", [(2, 2), (8, 2)], 12)), {b"s": b"\0\0ab\0\0\0\0cd\0\0"}),
    ("C7-20b", "sparse pieces that overlap", one(sparse(b"s", b"abcd", [(2, 2), (1, 2)], 12)), "entry.sparse"),
    ("C7-20c", "sparse pieces beyond the size", one(sparse(b"s", b"abcd", [(2, 2), (11, 2)], 12)), "entry.sparse"),
    ("C7-20d", "sparse pieces unlike what is stored", one(sparse(b"s", b"abcd", [(2, 2)], 12)), "entry.sparse"),
    ("C7-20e", "a hole of 2**40 bytes", one(sparse(b"s", b"", [], 2**33 - 1), *[
        sparse(b"s%d" % n, b"", [], 2**33 - 1) for n in range(9)]), "limit.layer"),
]  # fmt: skip

METADATA: list[Case] = [
    *[(f"C8-01{tag}", f"uid {what}", layers, "entry.owner") for tag, what, layers in (
        ("a", "2**32 - 1", one(file(b"a", uid=base256(2**32 - 1, 8)))),
        ("b", "2**32", one(file(b"a", uid=base256(2**32, 8)))), ("c", "-2", one(file(b"a", uid=base256(-2, 8)))),
        ("d", "2**40 in a record", with_pax(record(b"uid", b"%d" % 2**40))),
        ("e", "root in a record", with_pax(record(b"uid", b"root"))), ("f", "text", one(file(b"a", uid=b"root"))),
        ("g", "negative in a record", with_pax(record(b"gid", b"-2"))))],
    ("C8-02a", "a negative device number", one(header(b"n", kind=b"3", major=base256(-1, 8))), "entry.device"),
    ("C8-02b", "a device number of 40 bits", one(header(b"n", kind=b"3", major=base256(2**40, 8))), "entry.device"),
    ("C8-03a", "a disk", one(header(b"sda", kind=b"4", major=8)), "entry.device"),
    ("C8-03b", "kernel memory", one(header(b"mem", kind=b"3", major=1, minor=1)), "entry.device"),
    ("C8-03c", "a fifo is made and never opened", one(header(b"p", kind=b"6"), F), {b"p": ("fifo",), b"f": b"data"}),
    ("C8-06a", "another type's bits in the mode", one(file(b"a", mode=0o120644)), "entry.mode"),
    ("C8-06b", "its own type's bits in the mode", one(file(b"a", b"1", mode=0o100644)), {b"a": b"1"}),
    ("C8-06c", "a folder without any permission", one(folder(b"d", mode=0), file(b"d/x", b"1")), {b"d/x": b"1"}),
    *[(f"C8-07{tag}", f"a time of {text!r}", with_pax(record(b"mtime", text)), "entry.mtime") for tag, text in zip(
        "abcdef", (b"nan", b"inf", b"1e300", b"9" * 19, b"", b"0x10"), strict=True)],
    ("C8-07g", "a negative time with a fraction", with_pax(record(b"mtime", b"-1.5")), {b"f": b"data"}),
    ("C8-09a", "an attribute without a name", with_pax(record(b"SCHILY.xattr.", b"x")), "entry.xattr"),
    ("C8-09b", "a NUL in an attribute's name", with_pax(record(b"SCHILY.xattr.user.a\0b", b"x")), "tar.pax"),
    ("C8-09c", "an attribute above 64 KiB", with_pax(record(b"SCHILY.xattr.user.a", b"x" * 65537)), "limit.xattr"),
    ("C8-09d", "labels of another machine", with_pax(
        record(b"SCHILY.xattr.security.selinux", b"x"), record(b"SCHILY.xattr.trusted.overlay.opaque", b"y"),
        record(b"SCHILY.xattr.system.nfs4_acl", b"z")), {b"f": b"data"}),
]  # fmt: skip

CASES = [*WHITEOUTS, *NAMES, *LINKS, *STRUCTURE, *METADATA]
