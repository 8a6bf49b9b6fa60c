"""The names of a layer seen so far."""

from __future__ import annotations

from oci_builder.model.errors import PolicyError
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.wire.tar.entry import Kind, TarEntry
from oci_builder.wire.tar.keys import KeySet, name_key

_WHITEOUT = b".wh."


class NameLedger:
    """Finds names that stand twice in a layer and hard links without a target in it.

    A million names take about 30 MB.
    """

    __slots__ = ("_no_target", "_seen")

    def __init__(self) -> None:
        self._seen = KeySet()
        self._no_target = KeySet()

    @property
    def size(self) -> int:
        """How many names were seen."""
        return len(self._seen)

    def has_other_than_folders(self, keys: KeySet) -> bool:
        """Whether something that is no folder was seen under a name with one of these keys."""
        few, many = (keys, self._seen) if len(keys) < len(self._seen) else (self._seen, keys)
        return any(key in many and key not in self._no_target for key in few)

    def note(self, entry: TarEntry) -> str | None:
        """Record an entry; returns ``entry.duplicate`` or ``entry.link_target`` when it is one of those."""
        key = name_key(entry.name)
        to_itself = entry.kind is Kind.HARDLINK and entry.link == entry.name
        if to_itself and self.knows_key(key):
            return "entry.duplicate"
        new = self._seen.add(key)
        if entry.kind is Kind.DIR or to_itself or _is_whiteout(entry.name):
            self._no_target.add(key)
        if entry.kind is Kind.HARDLINK and not self.knows(entry.link):
            return "entry.link_target"
        return None if new else "entry.duplicate"

    def saw(self, name: bytes) -> bool:
        """Whether anything was seen under this name."""
        return name_key(name) in self._seen

    def knows(self, name: bytes) -> bool:
        """Whether something that a hard link can point at was seen under this name."""
        return self.knows_key(name_key(name))

    def knows_key(self, key: int) -> bool:
        """As ``knows``, for a name's key (``name_key``)."""
        return key in self._seen and key not in self._no_target


def _is_whiteout(name: bytes) -> bool:
    return _WHITEOUT in name and name.rpartition(b"/")[2].startswith(_WHITEOUT)


class FolderLedger:
    """Counts the folders of a layer: those that it lists, or those that its names lead through if these are more.

    Args:
        before: folders of other layers of the image.

    Attributes:
        keys: keys of the folders that names and targets of hard links lead through.
    """

    __slots__ = ("_before", "_last", "_listed", "_most", "keys")

    def __init__(self, limits: Limits = DEFAULT_LIMITS, before: int = 0) -> None:
        self.keys = KeySet()
        self._most, self._before = limits.folders, before
        self._listed = 0
        self._last = b""

    @property
    def count(self) -> int:
        """Folders so far, those of the layers before included."""
        return self._before + self.own

    @property
    def own(self) -> int:
        """Folders of this layer so far."""
        return max(self._listed, len(self.keys))

    def note(self, entry: TarEntry) -> None:
        """Record an entry.

        Raises:
            PolicyError: ``limit.folders``.
        """
        self._listed += entry.kind is Kind.DIR
        self._through(entry.name)
        if entry.kind is Kind.HARDLINK:
            self._through(entry.link)
        if self.count > self._most:
            raise too_many_folders("the image", self._most)

    def _through(self, name: bytes) -> None:
        above = name.rpartition(b"/")[0]
        if above == self._last:
            return
        self._last = above
        while above and self.keys.add(name_key(above)):
            above = above.rpartition(b"/")[0]


def too_many_folders(where: str, most: int) -> PolicyError:
    """``limit.folders``."""
    message = f"{where}: its names make more than {most} folders; raise limits.folders if it is really meant to"
    return PolicyError("limit.folders", message, where=where, expected=f"<= {most}")
