"""Sets of names that stay small: eight bytes a name, and the room between them."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from os import urandom

_HASH = blake2b(digest_size=8, key=urandom(16))
_FEW = 256


def name_key(name: bytes) -> int:
    """A name's key: 64 bits of a keyed hash, never 0, other ones in each process: nobody can aim at a collision."""
    hashed = _HASH.copy()
    hashed.update(name)
    return int.from_bytes(hashed.digest(), "little") or 1


class KeySet:
    """A set of keys, none of them 0: 13 to 27 bytes each, where Python's own set of numbers takes four times that.

    Open addressing, linear probing: keys are hashes already. Nothing is ever removed.
    """

    __slots__ = ("_mask", "_most", "_size", "_table")

    def __init__(self) -> None:
        self._size = 0
        self._make(_FEW)

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[int]:
        return filter(None, self._table)

    def __contains__(self, key: int) -> bool:
        table, mask = self._table, self._mask
        at = key & mask
        while found := table[at]:
            if found == key:
                return True
            at = (at + 1) & mask
        return False

    def add(self, key: int) -> bool:
        """Add a key; False when it was there."""
        table, mask = self._table, self._mask
        at = key & mask
        while found := table[at]:
            if found == key:
                return False
            at = (at + 1) & mask
        table[at] = key
        self._size += 1
        if self._size > self._most:
            self._grow()
        return True

    def update(self, keys: Iterable[int]) -> None:
        """Add all."""
        for key in keys:
            self.add(key)

    def _make(self, room: int) -> None:
        self._table = array("Q", bytes(8 * room))
        self._mask, self._most = room - 1, room * 3 // 5

    def _grow(self) -> None:
        old = self._table
        self._make(2 * len(old))
        table, mask = self._table, self._mask
        for key in filter(None, old):
            at = key & mask
            while table[at]:
                at = (at + 1) & mask
            table[at] = key
