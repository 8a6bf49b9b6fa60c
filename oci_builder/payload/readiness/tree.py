"""The final tree of an image: layers over each other with whiteouts, and paths resolved as a loader would."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from oci_builder.payload.readiness.facts import FileFacts

_FOLLOWS = 40
_OPAQUE = b".wh..wh..opq"
_WHITEOUT = b".wh."


@dataclass(frozen=True, slots=True)
class Node:
    """One path of a tree.

    Attributes:
        kind: ``file``, ``dir``, ``link`` (symbolic) or ``other``.
        mode: permission bits.
        size: bytes of a file.
        link: target of a symbolic link, verbatim.
        facts: of a file of interest.
    """

    kind: str
    mode: int = 0o644
    size: int = 0
    link: bytes = b""
    facts: FileFacts | None = None


@dataclass(slots=True)
class Delta:
    """What one layer says: paths it adds or replaces, paths it removes, folders whose lower content it hides, and
    hard links to files that it does not hold itself."""

    nodes: dict[bytes, Node] = field(default_factory=dict)
    removed: set[bytes] = field(default_factory=set)
    opaque: set[bytes] = field(default_factory=set)
    links: dict[bytes, bytes] = field(default_factory=dict)

    def add(self, path: bytes, node: Node) -> None:
        """Add an entry; a whiteout name becomes a removal (image-spec layer.md, "Whiteouts")."""
        folder, _, name = path.rpartition(b"/")
        if name == _OPAQUE:
            self.opaque.add(folder)
        elif name.startswith(_WHITEOUT):
            self.removed.add(posixpath.join(folder, name[len(_WHITEOUT) :]))
        else:
            self.nodes[path] = node

    def add_link(self, path: bytes, target: bytes) -> None:
        """Add a second name of a file: of this layer, or of one below when the layers meet."""
        if target in self.nodes:
            self.nodes[path] = self.nodes[target]
        else:
            self.links[path] = target


class Tree:
    """Paths of the final tree, without a leading slash.

    Attributes:
        nodes: every path.
        env: environment of the image config, empty for a folder.
    """

    def __init__(self, nodes: Mapping[bytes, Node], env: Mapping[str, str] | None = None) -> None:
        self.nodes = nodes
        self.env = dict(env or {})
        self._folders: dict[bytes, bytes | None] = {b"": b""}
        self._facts = [(p, n, n.facts) for p, n in sorted(nodes.items()) if n.facts is not None]

    def files(self) -> Iterator[tuple[bytes, Node, FileFacts]]:
        """Every file that has facts, by path."""
        return iter(self._facts)

    def find(self, folder: bytes, name: bytes) -> bytes | None:
        """The real path of ``name`` in ``folder``, symbolic links followed; None when there is none."""
        return self.resolve(posixpath.join(folder, name))

    def resolve(self, path: bytes) -> bytes | None:
        """The real path of ``path`` inside the tree, as ``openat2(RESOLVE_IN_ROOT)`` would find it; None: none."""
        folder, _, name = path.strip(b"/").rpartition(b"/")
        if folder not in self._folders:
            self._folders[folder] = self._walk(b"", folder)
        parent = self._folders[folder]
        return None if parent is None else self._walk(parent, name)

    def _walk(self, at: bytes, path: bytes) -> bytes | None:
        # One budget of links for the whole path, as the kernel counts: links that use links twice would never end.
        pending, follows = path.split(b"/")[::-1], 0
        while pending:
            name = pending.pop()
            if name in (b"", b"."):
                continue
            if name == b"..":
                at = at.rpartition(b"/")[0]
                continue
            real = posixpath.join(at, name)
            node = self.nodes.get(real)
            if node is None or follows > _FOLLOWS:
                return None
            if node.kind != "link":
                at = real
                continue
            follows += 1
            at = b"" if node.link.startswith(b"/") else at
            pending += node.link.split(b"/")[::-1]
        return at


def overlay(deltas: Iterable[Delta]) -> dict[bytes, Node]:
    """The tree that layers give, lowest first; folders that no layer names are added."""
    nodes: dict[bytes, Node] = {}
    for delta in deltas:
        upper = _through_links(nodes, delta)
        for path, target in delta.links.items():
            upper[path] = upper.get(target) or nodes.get(target) or Node("file")
        hidden = delta.removed | {p for p, n in upper.items() if n.kind != "dir"}
        _drop_below(nodes, {p for p in hidden if p in nodes and nodes[p].kind == "dir"} | delta.opaque)
        for path in delta.removed:
            nodes.pop(path, None)
        nodes.update(upper)
        _add_folders(nodes, upper)
    return nodes


def _through_links(nodes: dict[bytes, Node], delta: Delta) -> dict[bytes, Node]:
    """The layer's nodes where they really land: a parent that is a link in a layer below leads elsewhere."""
    if not any(n.kind == "link" for n in nodes.values()):
        return dict(delta.nodes)
    below, moved, out = Tree(nodes), {}, {}
    for path, node in delta.nodes.items():
        folder, _, name = path.rpartition(b"/")
        if folder not in moved:
            moved[folder] = _landing(nodes, below, delta, folder)
        out[posixpath.join(moved[folder], name)] = node
    return out


def _landing(nodes: dict[bytes, Node], below: Tree, delta: Delta, folder: bytes) -> bytes:
    at = folder
    while at:
        if at in delta.nodes or at in delta.removed:
            return folder
        if at in nodes and nodes[at].kind == "link":
            real = below.resolve(at)
            return folder if real is None else posixpath.join(real, folder[len(at) :].lstrip(b"/")).rstrip(b"/")
        at = at.rpartition(b"/")[0]
    return folder


def _add_folders(nodes: dict[bytes, Node], paths: Iterable[bytes]) -> None:
    for path in list(paths):
        folder = path.rpartition(b"/")[0]
        while folder and (folder not in nodes or nodes[folder].kind not in ("dir", "link")):
            nodes[folder] = Node("dir", 0o755)
            folder = folder.rpartition(b"/")[0]


def _drop_below(nodes: dict[bytes, Node], roots: set[bytes]) -> None:
    if not roots:
        return
    for path in list(nodes):
        folder = path
        while folder:
            folder = folder.rpartition(b"/")[0]
            if folder in roots:
                del nodes[path]
                break
