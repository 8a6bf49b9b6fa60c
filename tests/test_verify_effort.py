"""Names by the hundred thousand: what the judge remembers of each is a few bytes, and what one name can make is counted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.model.errors import OciBuilderError
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.verify import VerifyOptions, verify_archives
from oci_builder.wire.tar import KeySet, name_key
from tests.lab import tarlang as t
from tests.lab.archives import Lab, write
from tests.lab.oracle import bounded

_PLAIN = t.header(b"")


def quick_header(name: bytes, kind: bytes = b"0", link: bytes = b"") -> bytes:
    """As ``t.header``, ten times as fast."""
    block = bytearray(_PLAIN)
    block[: len(name)] = name
    block[156:157] = kind
    block[157 : 157 + len(link)] = link
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@contextmanager
def cheap(entries: int, bytes_each: int) -> Iterator[None]:
    """At most 60 us of this process's own time an entry (idle, 12 are enough), and that much memory."""
    with bounded(60e-6 * entries, (entries * bytes_each) >> 20):
        yield


def verdicts(tmp_path: Path, layers: list[bytes], limits: Limits = DEFAULT_LIMITS) -> tuple[str, str]:
    """The first error's code in verify and in unpack; empty where they accept."""
    archive = write(tmp_path / "a.tar", Lab(layers=layers).oci())
    errors = verify_archives([archive], VerifyOptions(threads=1, limits=limits)).errors
    try:
        unpack_image(archive, tmp_path / "out", UnpackOptions(threads=1, limits=limits))
    except OciBuilderError as error:
        return errors[0].code if errors else "", error.code
    return errors[0].code if errors else "", ""


def test_links_before_their_target_cost_little(tmp_path: Path) -> None:
    """300,000 took 19 s and 177 MiB."""
    count = 60_000
    layer = b"".join(quick_header(b"l%d" % n, b"1", b"t") for n in range(count)) + quick_header(b"t") + t.END
    archive = write(tmp_path / "a.tar", Lab(layers=[layer]).oci())
    del layer
    verify_archives([write(tmp_path / "warm.tar", Lab().oci())])
    with cheap(count, 150):
        assert verify_archives([archive], VerifyOptions(threads=1)).ok


@pytest.mark.parametrize(("layer", "code"), [
    ([t.hardlink(b"a", b"b"), t.hardlink(b"b", b"c"), t.file(b"c")], ""),
    ([t.hardlink(b"b", b"c"), t.hardlink(b"a", b"b"), t.file(b"c")], ""),
    ([t.hardlink(b"a", b"b"), t.hardlink(b"b", b"a")], "entry.link_target"),
    ([t.hardlink(b"b", b"a"), t.hardlink(b"c", b"b"), t.hardlink(b"a", b"c")], "entry.link_target"),
    ([t.hardlink(b"a", b"l/f"), t.symlink(b"l", b"d"), t.file(b"d/f")], ""),
    ([t.hardlink(b"a", b"d"), t.folder(b"d")], "entry.link_target"),
    ([t.hardlink(b"a", b".wh.x"), t.file(b".wh.x")], "entry.link_target"),
    ([t.file(b".wh.x"), t.hardlink(b"a", b".wh.x")], "entry.link_target"),
])  # fmt: skip
def test_links_that_wait_for_links(tmp_path: Path, layer: list[bytes], code: str) -> None:
    """C6-10: whatever waits for what, verify and unpack agree; a whiteout is no file that one could link to."""
    assert verdicts(tmp_path, [t.tar(*layer)]) == (code, code)


def test_one_name_makes_many_folders(tmp_path: Path) -> None:
    """C7-19: 60 names of 48 folders each are 2,880 folders, in memory and on the disk."""
    names = [b"/".join([b"%02d" % n, *[b"d"] * 47, b"f"]) for n in range(60)]
    lab = Lab(layers=[t.tar(*(t.file(name) for name in half)) for half in (names[:30], names[30:])])
    archive = write(tmp_path / "a.tar", lab.oci())
    for most, code in ((2880, None), (2879, "limit.folders")):
        limits = replace(DEFAULT_LIMITS, folders=most)
        errors = verify_archives([archive], VerifyOptions(threads=1, limits=limits)).errors
        assert [e.code for e in errors] == ([code] * len(errors)) and bool(errors) is (code is not None)
        if code is None:
            unpack_image(archive, tmp_path / "good", UnpackOptions(limits=limits))
        else:
            with pytest.raises(OciBuilderError) as error:
                unpack_image(archive, tmp_path / "bad", UnpackOptions(limits=limits))
            assert error.value.code == code and not (tmp_path / "bad").exists()


def test_a_tree_too_large_to_be_modelled_is_refused(tmp_path: Path) -> None:
    """Only where names meet links, and then before the memory is taken."""
    plain = t.tar(*(t.file(b"usr/f%d" % n) for n in range(100)))
    met = t.tar(t.file(b"bin/x"), *(t.file(b"usr/g%d" % n) for n in range(100)))
    link = t.tar(t.symlink(b"bin", b"usr/bin"))
    archive = write(tmp_path / "a.tar", Lab(layers=[link, met, plain]).oci())
    good = write(tmp_path / "b.tar", Lab(layers=[link, plain]).oci())
    assert verify_archives([archive]).ok
    small = VerifyOptions(limits=replace(DEFAULT_LIMITS, tree_memory=10_000))
    assert [e.code for e in verify_archives([archive], small).errors] == ["limit.entries"] * 2
    assert verify_archives([good], small).ok


MANY = [t.file(b"%032x" % random.Random(n).getrandbits(128)) for n in range(1500)]
LOWER = t.tar(*MANY, t.file(b"low"), t.symlink(b"s", b"d"))


@pytest.mark.parametrize("bound", ["tree_memory", "logged_names"])
@pytest.mark.parametrize(("upper", "refused"), [
    ([t.hardlink(b"up", b"low")], True),
    ([t.file(b"s/f")], True),
    ([t.hardlink(b"a", b"b"), t.hardlink(b"b", b"c"), t.file(b"c")], True),
    ([t.hardlink(b"a", b"c"), t.file(b"c"), t.hardlink(b"b", b"c")], False),
    ([t.file(b"d/f"), t.file(b".wh.low"), t.file(b".wh.s")], False),
])  # fmt: skip
def test_verify_and_unpack_stop_at_the_same_tree(
    tmp_path: Path, bound: str, upper: list[bytes], refused: bool
) -> None:
    """An unpacking needs no room for a tree in memory; what nobody else could judge is refused there as well."""
    assert verdicts(tmp_path, [LOWER, t.tar(*upper)]) == ("", "")
    (tmp_path / "bound").mkdir()
    limits = replace(DEFAULT_LIMITS, **{bound: 20_000})
    assert verdicts(tmp_path / "bound", [LOWER, t.tar(*upper)], limits) == (("limit.entries",) * 2 if refused else ("", ""))


def test_a_key_set_is_a_set() -> None:
    rng = random.Random(7)
    keys = [rng.choice([rng.getrandbits(64) or 1, rng.randrange(1, 5000)]) for _ in range(20_000)]
    ours, theirs = KeySet(), set()
    for key in keys:
        assert ours.add(key) is (key not in theirs)
        theirs.add(key)
    assert len(ours) == len(theirs) and set(ours) == theirs and sorted(ours) == sorted(theirs)
    assert all((key in ours) is (key in theirs) for key in [*keys[:1000], *range(1, 6000)])


def test_keys_differ_by_name() -> None:
    assert len({name_key(b"%d" % n) for n in range(10_000)}) == 10_000


def test_too_many_links_that_wait(tmp_path: Path) -> None:
    ten = replace(DEFAULT_LIMITS, late_links=10)
    for count, code in ((10, ""), (11, "limit.entries")):
        folder = tmp_path / str(count)
        folder.mkdir()
        layer = t.tar(*(t.hardlink(b"l%d" % n, b"t") for n in range(count)), t.file(b"t"))
        assert verdicts(folder, [layer], ten) == (code, code)
        (folder / "below").mkdir()
        upper = t.tar(*(t.hardlink(b"l%d" % n, b"t") for n in range(count)))
        assert verdicts(folder / "below", [t.tar(t.file(b"t")), upper], ten) == (code, code), "links to a lower layer"
