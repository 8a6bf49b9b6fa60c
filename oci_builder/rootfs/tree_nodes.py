"""The nodes of a tree in memory, and the walk over them that ``resolve`` does on a disk."""

from __future__ import annotations

from collections.abc import Callable

from oci_builder.model.errors import PolicyError, show
from oci_builder.model.limits import Limits
from oci_builder.rootfs.resolve import MAX_LINKS

_NAME_MAX = 255  # linux/limits.h


class Link:
    """A symbolic link that ``layer`` made."""

    __slots__ = ("layer", "target")

    def __init__(self, layer: int, target: bytes) -> None:
        self.layer = layer
        self.target = target


class Folder:
    """A folder that ``layer`` made or named last, and what is in it; ``clean``: the layer that has nothing below it."""

    __slots__ = ("children", "clean", "layer")

    def __init__(self, layer: int) -> None:
        self.layer = self.clean = layer
        self.children: dict[bytes, Node] = {}


class File:
    """Something else that ``layer`` made, for a tree that tells more of it than that."""

    __slots__ = ("layer",)

    def __init__(self, layer: int) -> None:
        self.layer = layer


# What is neither a folder nor a link is the number of the layer that made it: there may be millions of them.
Leaf = int | File | Link
Node = Leaf | Folder


def made_by(node: Node) -> int:
    """The layer that made it."""
    return node if isinstance(node, int) else node.layer


def above_and_name(path: bytes) -> tuple[bytes, bytes]:
    """The folder's path and the last component."""
    above, _, name = path.rpartition(b"/")
    return above, name


class Walk:
    """One walk below a root, links followed as a process inside the root would follow them (openat2(2)).

    Args:
        make: the layer that makes what is missing; ``None`` makes nothing.
        replaced: told the path below something that is no folder and makes way for one.

    Raises (``to``):
        PolicyError: ``path.loop``, ``path.parent``, ``limit.depth``, ``limit.name``.
        FileNotFoundError: absent, without ``make``.
    """

    __slots__ = ("_limits", "_make", "_names", "_replaced", "_stack")

    def __init__(self, root: Folder, limits: Limits, make: int | None, replaced: Callable[[bytes], None]) -> None:
        self._limits, self._make, self._replaced = limits, make, replaced
        self._stack: list[Folder] = [root]
        self._names: list[bytes] = []

    def to(self, path: bytes) -> Folder:
        """The folder that ``path`` names."""
        rest, links = _components(path), 0
        while rest:
            name = rest.pop()
            if name == b"..":
                self._up(1)
                continue
            node = self._stack[-1].children.get(name)
            if isinstance(node, Link):
                links += 1
                if links > min(MAX_LINKS, self._limits.symlink_follows):
                    raise _refuse("path.loop", path, "too many symbolic links, or links in a circle")
                if node.target.startswith(b"/"):
                    self._up(len(self._names))
                rest += _components(node.target)
                continue
            if not isinstance(node, Folder):
                node = self._made(path, name, node, through_link=links > 0)
            self._stack.append(node)
            self._names.append(name)
        return self._stack[-1]

    def _made(self, path: bytes, name: bytes, node: Node | None, *, through_link: bool) -> Folder:
        # Something else than a folder makes way where the path itself names it, not where a link leads to it.
        if node is not None and (self._make is None or through_link):
            raise _refuse("path.parent", path, "a part of it is no folder")
        if len(name) > _NAME_MAX:
            raise _refuse("limit.name", path, "a name that a file system cannot hold")
        if self._make is None:
            raise FileNotFoundError
        if len(self._names) >= self._limits.depth:
            raise _refuse("limit.depth", path, f"links lead deeper than {self._limits.depth} folders")
        if node is not None:
            self._replaced(path)
        folder = self._stack[-1].children[name] = Folder(self._make)
        return folder

    def _up(self, count: int) -> None:
        for _ in range(min(count, len(self._names))):
            self._names.pop()
            self._stack.pop()


def _components(path: bytes) -> list[bytes]:
    return [part for part in path.split(b"/") if part and part != b"."][::-1]


def _refuse(code: str, path: bytes, what: str) -> PolicyError:
    place = show(path[:300])
    return PolicyError(code, f"{place}: {what}", where=place, actual=what)
