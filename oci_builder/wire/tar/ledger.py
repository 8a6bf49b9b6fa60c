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
        self._no_target: set[bytes] = set()
        self._below = tuple(below)

    @staticmethod
    def key(name: bytes) -> bytes:
        """A name's eight bytes, which differ from process to process."""
        return blake2b(name, digest_size=8, key=_SALT).digest()

    @property
    def size(self) -> int:
        """How many names were seen here."""
        return len(self._seen)

    def has_other_than_folders(self, keys: set[bytes]) -> bool:
        """Whether something that is no folder was seen here under a name with one of these keys."""
        return any(key not in self._no_target for key in self._seen & keys)

    def note(self, entry: TarEntry) -> str | None:
        """Record an entry; returns ``entry.duplicate`` or ``entry.link_target`` when it is one of those."""
        key = self.key(entry.name)
        twice = key in self._seen
        to_itself = entry.kind is Kind.HARDLINK and entry.link == entry.name
        if to_itself and self.knows(entry.name):
            return "entry.duplicate"
        self._seen.add(key)
        if entry.kind is Kind.DIR or to_itself:
            self._no_target.add(key)
        else:
            self._no_target.discard(key)
        if entry.kind is Kind.HARDLINK and not self.knows(entry.link):
            return "entry.link_target"
        return "entry.duplicate" if twice else None

    def saw(self, name: bytes) -> bool:
        """Whether anything was seen here under this name."""
        return self.key(name) in self._seen

    def knows(self, name: bytes) -> bool:
        """Whether something that a hard link can point at was seen under this name, here or below."""
        return self.knows_key(self.key(name))

    def knows_key(self, key: bytes) -> bool:
        """As ``knows``, for a name's key."""
        return (key in self._seen and key not in self._no_target) or any(b.knows_key(key) for b in self._below)
