"""The blob store: ingest, commit, resume, trust."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from oci_builder.model.digest import Digest
from oci_builder.model.errors import IntegrityError, TransportError
from oci_builder.model.events import Event
from oci_builder.store.blobs import DirStore

DATA = bytes(range(256)) * 4096
DIGEST = Digest.of(DATA)


@pytest.fixture
def store(tmp_path: Path) -> DirStore:
    return DirStore(tmp_path / "store")


def parts(store: DirStore) -> list[str]:
    return sorted(p.name for p in (store.root / "ingest").iterdir())


def test_nothing_is_visible_before_commit(store: DirStore) -> None:
    with store.ingest("x", DIGEST, len(DATA)) as ingest:
        ingest.write(DATA)
        assert not store.has(DIGEST)
        ingest.commit()
    assert store.open(DIGEST).pread(len(DATA), 0) == DATA
    assert parts(store) == []


def test_an_interrupted_ingest_is_resumed_with_its_prefix_hashed(store: DirStore) -> None:
    with pytest.raises(RuntimeError), store.ingest("x", DIGEST, len(DATA)) as ingest:
        ingest.write(DATA[:1000])
        raise RuntimeError
    with store.ingest("x", DIGEST, len(DATA)) as ingest:
        assert ingest.offset == 1000
        ingest.write(DATA[1000:])
        ingest.commit()
    assert store.has(DIGEST)


def test_c2_13_a_wrong_digest_leaves_nothing(store: DirStore) -> None:
    with pytest.raises(IntegrityError) as error, store.ingest("x", DIGEST, len(DATA)) as ingest:
        ingest.write(bytes(len(DATA)))
        ingest.commit()
    assert error.value.code == "blob.digest"
    assert parts(store) == []
    assert store.digests() == []


def test_c2_02_never_past_the_size(store: DirStore) -> None:
    with pytest.raises(IntegrityError) as error, store.ingest("x", DIGEST, 10) as ingest:
        ingest.write(DATA[:11])
    assert error.value.code == "blob.size"


def test_c11_05_a_partial_file_that_is_too_long_is_dropped(store: DirStore) -> None:
    (store.root / "ingest" / f"sha256-{DIGEST.hex}.part").write_bytes(bytes(len(DATA) + 1))
    with store.ingest("x", DIGEST, len(DATA)) as ingest:
        assert ingest.offset == 0


def test_b079_a_partial_of_other_content_ends_as_an_error_and_then_restarts(store: DirStore) -> None:
    (store.root / "ingest" / f"sha256-{DIGEST.hex}.part").write_bytes(b"other")
    with pytest.raises(IntegrityError), store.ingest("x", DIGEST, len(DATA)) as ingest:
        ingest.write(DATA[ingest.offset :])
        ingest.commit()
    with store.ingest("x", DIGEST, len(DATA)) as ingest:
        assert ingest.offset == 0


def test_c2_14_a_corrupt_blob_is_not_served(store: DirStore) -> None:
    store.put(DATA)
    with open(store.path(DIGEST), "r+b") as file:
        file.seek(5)
        file.write(b"!")
    with pytest.raises(IntegrityError) as error:
        store.open(DIGEST)
    assert error.value.code == "blob.digest"
    assert not store.has(DIGEST)
    assert len(list((store.root / "quarantine").iterdir())) == 1
    assert store.put(DATA) == DIGEST
    assert store.open(DIGEST).pread(10, 0) == DATA[:10]


def test_c2_10_a_symlink_is_no_blob(store: DirStore, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_bytes(DATA)
    store.path(DIGEST).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IntegrityError) as error:
        store.open(DIGEST)
    assert error.value.code == "blob.digest"
    assert not store.path(DIGEST).is_symlink()


def test_check_all_finds_a_flip_that_keeps_the_times(store: DirStore) -> None:
    store.put(DATA)
    assert store.check_all() == []
    raw = bytearray(DATA)
    raw[7] ^= 1
    store.path(DIGEST).write_bytes(raw)
    store._records.vouch(DIGEST, os.stat(store.path(DIGEST)))
    assert store.has(DIGEST)
    assert store.check_all() == [DIGEST]


def test_a_proof_hashes_what_was_not_hashed_since_the_store_was_opened(store: DirStore) -> None:
    """A disk that rots changes no time of a file."""
    store.put(DATA)
    raw = bytearray(DATA)
    raw[7] ^= 1
    store.path(DIGEST).write_bytes(raw)
    store._records.vouch(DIGEST, os.stat(store.path(DIGEST)))
    seen: list[Event] = []
    with DirStore(store.root) as again:
        assert again.has(DIGEST)
        with pytest.raises(IntegrityError) as error:
            again.prove([DIGEST], seen.append)
        assert not again.has(DIGEST)
    assert error.value.code == "blob.digest"
    assert sum(event.amount for event in seen) == len(DATA)


def test_a_proof_hashes_nothing_twice(store: DirStore) -> None:
    seen: list[Event] = []
    store.put(DATA)
    store.prove([DIGEST], seen.append)
    assert not seen
    with DirStore(store.root) as again:
        again.prove([DIGEST], seen.append)
        assert seen
        seen.clear()
        again.prove([DIGEST], seen.append)
    assert not seen


def test_c11_12_two_threads_ingest_the_same_blob(store: DirStore) -> None:
    seen: list[bool] = []

    def pull() -> None:
        with store.ingest("x", DIGEST, len(DATA)) as ingest:
            seen.append(ingest.present)
            if not ingest.present:
                ingest.write(DATA[ingest.offset :])
                ingest.commit()

    threads = [threading.Thread(target=pull) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [False, True, True, True]


def test_c2_16_gc_leaves_a_living_ingest_alone(store: DirStore) -> None:
    with store.ingest("mine") as ingest:
        ingest.write(DATA)
        store.gc(keep=())
        ingest.commit(DIGEST)
    assert store.has(DIGEST)


def test_a_killed_process_leaves_no_blob_and_no_lock(store: DirStore) -> None:
    code = (
        "import sys, time; from pathlib import Path; from oci_builder.store.blobs import DirStore\n"
        "from oci_builder.model.digest import Digest\n"
        f"store = DirStore(Path({str(store.root)!r}))\n"
        f"with store.ingest('a', Digest({str(DIGEST)!r})) as i, store.ingest('b') as j:\n"
        "    i.write(b'12345'); j.write(b'678'); print('ready', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert store.digests() == []
    store.sweep()
    assert parts(store) == [f"sha256-{DIGEST.hex}.part"]
    with store.ingest("a", DIGEST) as ingest:
        assert ingest.offset == 5


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small tmpfs needs root")
def test_a_full_disk_is_io_space(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", str(small)], check=True)
    try:
        store = DirStore(small / "store")
        with pytest.raises(TransportError) as error:
            store.put(DATA)
        assert error.value.code == "io.space"
        assert store.digests() == []
    finally:
        subprocess.run(["umount", str(small)], check=True)
