"""The build cache: what it saves, that the bytes are those of the long way, and that it is never needed."""

from __future__ import annotations

import os
import random
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from rootfs_trees import fill, plan_of, settle

from oci_builder.model.digest import Digest
from oci_builder.model.image import Layer
from oci_builder.rootfs import layers_blocks
from oci_builder.rootfs.layers import WriteOptions, write_layer
from oci_builder.rootfs.layers_plan import LayerPlan, Normal, Origin, PlannedEntry
from oci_builder.rootfs.scan import SourceEntry
from oci_builder.store.blobs import DirStore
from oci_builder.store.cache import BuildCache
from oci_builder.wire.compress import BLOCK, Codec
from oci_builder.wire.tar import Kind, encode_header


@dataclass
class Work:
    """A store and a cache, and how much work was done with them."""

    store: DirStore
    cache: BuildCache
    read: int = 0
    compressed: int = 0

    def build(self, plan: LayerPlan, *, check: bool = False) -> Layer:
        self.read = self.compressed = 0
        return write_layer(plan, self.store, WriteOptions(cache=self.cache, check=check))


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Work]:
    with DirStore(tmp_path / "store") as store, BuildCache(tmp_path / "cache.db") as cache:
        made = Work(store, cache)
        lock = threading.Lock()
        compress, read = Codec.compress, layers_blocks._read

        def counting_compress(self: Codec, block: bytes) -> bytes:
            with lock:
                made.compressed += len(block)
            return compress(self, block)

        def counting_read(descriptor: int, start: int, size: int) -> bytes:
            made.read += size
            return read(descriptor, start, size)

        monkeypatch.setattr(Codec, "compress", counting_compress)
        monkeypatch.setattr(layers_blocks, "_read", counting_read)
        yield made


def long_way(plan: LayerPlan, tmp_path: Path) -> str:
    """The blob's digest with no cache and an empty store."""
    with DirStore(tmp_path / f"fresh-{random.getrandbits(32)}") as store:
        return write_layer(plan, store).descriptor.digest


def test_nothing_changed_means_nothing_read(work: Work, tmp_path: Path) -> None:
    root = fill(tmp_path / "tree", {"a": b"a" * 5000, "b": os.urandom(2 * BLOCK)})
    settle()
    first = work.build(plan_of({"base": root})[0])
    assert (work.read, work.compressed > 0) == (2 * BLOCK + 5000, True)
    assert work.build(plan_of({"base": root})[0]) == first
    assert (work.read, work.compressed) == (0, 0)


def test_check_reads_everything_again_and_believes_no_times(work: Work, tmp_path: Path) -> None:
    root = fill(tmp_path / "tree", {"a": b"a" * 5000})
    settle()
    first = work.build(plan_of({"base": root})[0])
    assert work.build(plan_of({"base": root})[0], check=True) == first
    assert (work.read, work.compressed) == (5000, 0)


def test_a_tree_linked_anew_is_read_and_not_compressed(work: Work, tmp_path: Path) -> None:
    """uv makes an environment again with links to the same cache: every ctime moves, no content does."""
    root = fill(tmp_path / "tree", {f"f{n}": b"%d" % n * 999 for n in range(50)})
    settle()
    first = work.build(plan_of({"base": root})[0])
    shutil.copytree(root, tmp_path / "again")
    settle()
    (other,) = plan_of({"base": tmp_path / "again"})
    assert work.build(other) == first
    assert work.read > 0
    assert work.compressed == 0


@pytest.mark.parametrize("size", [4, 4 * BLOCK])
def test_a_write_that_restores_size_and_mtime_is_noticed(work: Work, tmp_path: Path, size: int) -> None:
    root = fill(tmp_path / "tree", {"f": bytes(size)})
    before = (root / "f").stat()
    settle()
    first = work.build(plan_of({"base": root})[0])
    (root / "f").write_bytes(b"\1" * size)
    os.utime(root / "f", ns=(before.st_atime_ns, before.st_mtime_ns))
    settle()
    (plan,) = plan_of({"base": root})
    second = work.build(plan)
    assert second.diff_id != first.diff_id
    assert second.descriptor.digest == long_way(plan, tmp_path)


def test_only_touched_blocks_are_compressed_again(work: Work, tmp_path: Path) -> None:
    """A file that leaves a shared layer costs its neighbourhood, and the bytes are those of the long way."""
    chance = random.Random(7)
    files = {f"d/{n:04}": chance.randbytes(9000) for n in range(600)} | {"big": chance.randbytes(3 * BLOCK)}
    one, two = fill(tmp_path / "one", files), tmp_path / "two"
    shutil.copytree(one, two)
    settle()
    for plan in plan_of({"one": one, "two": two}):
        work.build(plan)
    (two / "d/0300").write_bytes(b"changed")
    settle()
    plans = plan_of({"one": one, "two": two})
    assert [plan.name for plan in plans] == ["one+two", "one", "two"]
    shared = work.build(plans[0])
    assert 0 < work.compressed <= 3 * BLOCK
    assert work.read > 8 * BLOCK
    assert shared.descriptor.digest == long_way(plans[0], tmp_path)


def test_blocks_of_a_rebuilt_tier_are_inflated_and_compared(work: Work, tmp_path: Path) -> None:
    """Other inodes, equal times: what is the same is copied; what only looks the same is noticed."""
    chance = random.Random(7)
    files = {f"d/{n:04}": chance.randbytes(9000) for n in range(600)}
    root, again = fill(tmp_path / "tree", files), tmp_path / "again"
    settle()
    work.build(plan_of({"base": root})[0])
    shutil.copytree(root, again)
    before = (again / "d/0300").stat()
    (again / "d/0300").write_bytes(bytes(9000))
    os.utime(again / "d/0300", ns=(before.st_atime_ns, before.st_mtime_ns))
    (again / "d/0500").write_bytes(b"changed")
    settle()
    (plan,) = plan_of({"base": again})
    layer = work.build(plan)
    assert 0 < work.compressed <= 4 * BLOCK
    assert layer.descriptor.digest == long_way(plan, tmp_path)


def test_one_changed_tier_leaves_the_other_layers_alone(work: Work, tmp_path: Path) -> None:
    one = fill(tmp_path / "one", {"own": b"1" * 70_000, "same": b"s" * 70_000})
    two = fill(tmp_path / "two", {"own": b"2" * 70_000, "same": b"s" * 70_000})
    os.utime(one / "same", (5, 5))
    os.utime(two / "same", (5, 5))
    settle()
    for plan in plan_of({"one": one, "two": two}):
        work.build(plan)
    fill(two, {"own": b"3" * 70_000})
    settle()
    counts = {}
    for plan in plan_of({"one": one, "two": two}):
        work.build(plan)
        counts[plan.name] = (work.read, work.compressed > 0)
    assert counts == {"one+two": (0, False), "one": (0, False), "two": (70_000, True)}


def test_a_blob_that_is_gone_is_made_again(work: Work, tmp_path: Path) -> None:
    root = fill(tmp_path / "tree", {"f": b"x" * 100})
    settle()
    first = work.build(plan_of({"base": root})[0])
    work.store.gc([])
    assert work.build(plan_of({"base": root})[0]) == first
    assert work.store.has(first.descriptor.digest)
    assert work.compressed > 0


def test_a_corrupt_blob_is_made_again(work: Work, tmp_path: Path) -> None:
    """C2-14: it is not served, and blocks are not copied from it."""
    root = fill(tmp_path / "tree", {"f": random.Random(1).randbytes(100_000)})
    settle()
    first = work.build(plan_of({"base": root})[0])
    blob = work.store.path(first.descriptor.digest)
    data = bytearray(blob.read_bytes())
    data[1000] ^= 1
    blob.write_bytes(data)
    settle()
    assert work.build(plan_of({"base": root})[0]) == first
    assert work.store.check_all() == []


def rot(store: DirStore, digest: Digest, at: int) -> None:
    """Change a byte of a blob as a disk does it: no time of the file tells."""
    path = store.path(digest)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    store._records.vouch(digest, path.stat())


def test_blocks_are_not_copied_from_a_blob_that_rotted(tmp_path: Path) -> None:
    """The member's trailer and the blob's times are as they were: the copy would be broken under a digest of its own."""
    root = fill(tmp_path / "tree", {"a": random.Random(1).randbytes(3 << 20), "b": b"x" * 1000})
    settle()
    with BuildCache(tmp_path / "cache.db") as cache:
        options = WriteOptions(cache=cache)
        with DirStore(tmp_path / "store") as store:
            first = write_layer(plan_of({"base": root})[0], store, options)
            rot(store, first.descriptor.id, 1 << 20)
        fill(root, {"c": b"y" * 1000})
        settle()
        with DirStore(tmp_path / "store") as store:
            second = write_layer(plan_of({"base": root})[0], store, options)
        with DirStore(tmp_path / "fresh") as store:
            assert write_layer(plan_of({"base": root})[0], store) == second


def test_a_file_that_is_too_fresh_is_read_again(work: Work, tmp_path: Path) -> None:
    """It can change once more within the tick of the clock in which it was scanned."""
    root = fill(tmp_path / "tree", {"f": b"x" * 100})
    (plan,) = plan_of({"base": root})
    fresh = plan.items[-1]
    origin = fresh.origin
    object.__setattr__(origin, "settled_ns", fresh.source.ctime_ns)
    first = work.build(plan)
    assert work.build(plan) == first
    assert work.read == 100


def test_another_codec_is_another_layer(work: Work, tmp_path: Path) -> None:
    root = fill(tmp_path / "tree", {"f": b"x" * 100_000})
    settle()
    (plan,) = plan_of({"base": root})
    digests = {
        write_layer(plan, work.store, WriteOptions(codec=codec, cache=work.cache)).descriptor.digest
        for codec in (Codec("gzip", 1), Codec("gzip", 9), Codec("zstd"), Codec("identity"))
    }
    assert len(digests) == 4


@pytest.mark.parametrize("damage", ["garbage", "truncate", "readonly", "folder"])
def test_a_broken_cache_file_costs_only_time(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "cache.db"
    match damage:
        case "garbage":
            path.write_bytes(b"this is no database" * 500)
        case "truncate":
            with BuildCache(path) as cache:
                cache.remember(b"k", 1)
            os.truncate(path, path.stat().st_size // 2)
        case "readonly":
            path = Path("/proc/cache.db")
        case _:
            path.mkdir()
    root = fill(tmp_path / "tree", {"f": b"x" * 100})
    with DirStore(tmp_path / "store") as store, BuildCache(path) as cache:
        (plan,) = plan_of({"base": root})
        first = write_layer(plan, store, WriteOptions(cache=cache))
        assert write_layer(plan, store, WriteOptions(cache=cache)) == first


def test_records_that_make_no_sense_are_not_believed(
    work: Work, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = fill(tmp_path / "tree", {"f": b"x" * 100})
    settle()
    (plan,) = plan_of({"base": root})
    first = work.build(plan)
    digest, diff_id = first.descriptor.digest, first.diff_id
    for nonsense in (
        1,
        [],
        {},
        {"digest": "sha256:../../x"},
        {"digest": digest, "diff_id": 3},
        {"digest": digest, "diff_id": diff_id, "size": "x", "tar_size": 1},
    ):
        monkeypatch.setattr(work.cache, "record", lambda _key, value=nonsense: value)
        assert work.build(plan) == first


@pytest.mark.parametrize("codec", [Codec("gzip"), Codec("zstd"), Codec("identity")])
def test_a_wrong_place_of_a_block_is_not_believed(work: Work, tmp_path: Path, codec: Codec) -> None:
    """A cache row that points at another block's member gives no corrupt layer."""
    files = {name: random.Random(name).randbytes(2 * BLOCK) for name in ("a", "b")}
    root = fill(tmp_path / "tree", files)
    settle()
    options = WriteOptions(codec=codec, cache=work.cache)
    (plan,) = plan_of({"base": root})
    first = write_layer(plan, work.store, options)
    database = sqlite3.connect(work.cache.path)
    with database:
        (place,) = database.execute("SELECT offset || ',' || size FROM blocks ORDER BY size DESC LIMIT 1").fetchone()
        offset, size = place.split(",")
        database.execute("UPDATE blocks SET offset = ?, size = ?", (offset, size))
        database.execute("DELETE FROM records")
    database.close()
    assert write_layer(plan, work.store, options) == first


def test_the_cache_keeps_large_numbers_and_forgets_gone_blobs(tmp_path: Path) -> None:
    identity = (2**64 - 1, 2**63, 5, 6, 7)
    with BuildCache(tmp_path / "cache.db") as cache:
        cache.remember_hashes({identity: b"digest"})
        cache.remember_blocks([(b"a", ("sha256:1", 0, 5)), (b"b", ("sha256:2", 5, 5))])
        cache.forget_blobs(["sha256:2"])
    with BuildCache(tmp_path / "cache.db") as cache:
        assert cache.known_hashes([identity, (1, 1, 1, 1, 1)]) == {identity: b"digest"}
        assert cache.known_hashes([(*identity[:4], 8)]) == {}
        assert cache.block(b"a") is None
        assert cache.block(b"b") == ("sha256:2", 5, 5)


def test_two_builds_share_one_store_and_cache(tmp_path: Path) -> None:
    root = fill(tmp_path / "tree", {f"f{n}": os.urandom(20_000) for n in range(40)})
    settle()
    (plan,) = plan_of({"base": root})
    results: list[Layer] = []

    def build() -> None:
        with DirStore(tmp_path / "store") as store, BuildCache(tmp_path / "cache.db") as cache:
            results.append(write_layer(plan, store, WriteOptions(cache=cache)))

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert len({layer.descriptor.digest for layer in results}) == 1
    assert not list((tmp_path / "store/ingest").iterdir())


LARGE = 1 << 41
VARIANTS = [
    {}, {"path": b"b"}, {"kind": Kind.DIR}, {"mode": 0o755}, {"uid": 7}, {"gid": 7}, {"size": 3}, {"size": LARGE},
    {"mtime_ns": 4_000_000_000}, {"kind": Kind.SYMLINK, "link": b"b"}, {"kind": Kind.SYMLINK, "link": b"c"},
    {"xattrs": ((b"user.a", b"1"),)}, {"xattrs": ((b"user.a", b"2"),)}, {"path": b"\xff" * 300}, {"uid": 1 << 31},
]  # fmt: skip


def test_the_facts_of_entries_differ_exactly_where_their_headers_do() -> None:
    """They stand for the headers in a layer's cache key."""
    whole = Normal(1 << 33, None, None)
    first = SourceEntry(b"a", Kind.FILE, 0o644, 0, 0, 1, 1, 1, 1, 1, 1)
    entries = [PlannedEntry(Origin(b"/r", b"p", whole), replace(first, **variant)) for variant in VARIANTS]  # type: ignore[arg-type]
    entries.append(PlannedEntry(Origin(b"/r", b"q", whole), first))
    entries += [PlannedEntry(Origin(b"/r", b"p", whole), replace(first, path=b"z"), target=t) for t in entries[:2]]
    for one in entries:
        # What no header says is in no facts either: the folder on disk, when it was read, inode and times.
        twin = replace(one.source, ctime_ns=9, mtime_ns=one.source.mtime_ns + 1, dev=9, ino=9, nlink=9)
        moved = PlannedEntry(replace(one.origin, root=b"/elsewhere"), twin, target=one.target)
        assert (moved.facts, encode_header(moved.entry)) == (one.facts, encode_header(one.entry))
    assert len({entry.facts for entry in entries}) == len({encode_header(e.entry) for e in entries}) == len(entries)
