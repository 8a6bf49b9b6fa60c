"""What every blob store must do, as functions that take a way to open one; after containerd's content test suite."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from oci_builder.model.digest import Digest
from oci_builder.model.errors import IntegrityError
from oci_builder.store.blobs import DirStore

# Opens the same store anew at each call, as another process would.
Opener = Callable[[], DirStore]
DATA = bytes(range(256)) * 1000
DIGEST = Digest.of(DATA)


def committed_bytes_are_read_back(opener: Opener) -> None:
    """What was committed is there, for others too."""
    with opener() as store:
        assert store.put(DATA) == DIGEST
    with opener() as store:
        assert store.has(DIGEST)
        assert store.size(DIGEST) == len(DATA)
        assert b"".join(store.open(DIGEST).chunks(1000)) == DATA
        assert store.digests() == [DIGEST]


def nothing_is_there_before_commit(opener: Opener) -> None:
    """Bytes that are being written are no blob."""
    with opener() as store, store.ingest("a", DIGEST, len(DATA)) as ingest:
        ingest.write(DATA)
        with opener() as other:
            assert not other.has(DIGEST)
            assert other.digests() == []
        ingest.commit()
    with opener() as store:
        assert store.has(DIGEST)


def an_interrupted_ingest_is_resumed(opener: Opener) -> None:
    """The next one goes on where the last broke off."""
    for size in (0, 1, 1000, len(DATA) - 1):
        with pytest.raises(KeyboardInterrupt), opener() as store, store.ingest("a", DIGEST, len(DATA)) as ingest:
            ingest.write(DATA[ingest.offset : size])
            raise KeyboardInterrupt
    with opener() as store, store.ingest("a", DIGEST, len(DATA)) as ingest:
        assert ingest.offset == len(DATA) - 1
        ingest.write(DATA[-1:])
        ingest.commit()
    committed_bytes_are_read_back(opener)


def wrong_bytes_leave_nothing(opener: Opener) -> None:
    """Neither a blob nor something to resume."""
    for data, code in ((bytes(len(DATA)), "blob.digest"), (DATA[:-1], "blob.size"), (DATA + b"x", "blob.size")):
        with pytest.raises(IntegrityError) as error:
            with opener() as store, store.ingest("a", DIGEST, len(DATA)) as ingest:
                ingest.truncate()
                ingest.write(data)
                ingest.commit()
        assert error.value.code == code
        with opener() as store:
            assert store.digests() == []


def a_blob_that_is_there_is_not_written_again(opener: Opener) -> None:
    """An ingest of it says so."""
    with opener() as store:
        store.put(DATA)
    with opener() as store, store.ingest("a", DIGEST, len(DATA)) as ingest:
        assert ingest.present


def records_live_and_die_with_their_blob(opener: Opener) -> None:
    """A note about a blob is for others too, and gone with it."""
    with opener() as store:
        store.put(DATA)
        store.remember(DIGEST, "tar", {"size": 5})
    with opener() as store:
        assert store.recall(DIGEST, "tar") == {"size": 5}
        assert store.recall(DIGEST, "other") is None
        assert store.gc(keep=()) == [DIGEST]
    with opener() as store:
        assert store.recall(DIGEST, "tar") is None
        assert not store.has(DIGEST)


def gc_keeps_what_it_is_told(opener: Opener) -> None:
    """And removes the rest."""
    with opener() as store:
        store.put(DATA)
        other = store.put(b"other")
        assert store.gc(keep=[DIGEST]) == [other]
        assert store.digests() == [DIGEST]


CASES = (
    committed_bytes_are_read_back,
    nothing_is_there_before_commit,
    an_interrupted_ingest_is_resumed,
    wrong_bytes_leave_nothing,
    a_blob_that_is_there_is_not_written_again,
    records_live_and_die_with_their_blob,
    gc_keeps_what_it_is_told,
)
