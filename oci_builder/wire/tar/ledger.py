"""The names seen so far, remembered in eight bytes each."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from os import urandom

from oci_builder.wire.tar.entry import Kind, TarEntry

_SALT = urandom(16)


class NameLedger:
    """Finds names that stand twice in a layer and hard links without a target.

    Names are kept as keyed 64-bit hashes: an archive cannot aim at a collision, and 190,000 names take a few MB.
    Link targets may lie in a lower layer (B096): give those names as ``below``.
    """

    def __init__(self, below: Iterable[NameLedger] = ()) -> None:
        self._seen: set[bytes] = set()
        self._below = tuple(below)

    def note(self, entry: TarEntry) -> str | None:
        """Record an entry; returns ``entry.duplicate`` or ``entry.link_target`` when it is one of those."""
        key = _key(entry.name)
        twice = key in self._seen
        self._seen.add(key)
        if entry.kind is Kind.HARDLINK and not self.knows(entry.link):
            return "entry.link_target"
        return "entry.duplicate" if twice else None

    def knows(self, name: bytes) -> bool:
        """Whether an entry of this name was seen here or below."""
        return _key(name) in self._seen or any(ledger.knows(name) for ledger in self._below)


def _key(name: bytes) -> bytes:
    return blake2b(name, digest_size=8, key=_SALT).digest()
