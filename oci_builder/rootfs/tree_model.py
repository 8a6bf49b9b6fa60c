"""What layers make of an empty folder, without a disk: refuses exactly what ``apply`` refuses because of the tree.

``apply`` asks the kernel as it goes; this keeps the tree in memory, so that somebody who writes nothing (``verify``,
``inspect``, a base being read) comes to the same answer. Costs a few hundred bytes a path: use it where names meet
links or files on their way, which ``TreeLog`` finds out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from oci_builder.model.errors import PolicyError, show
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.rootfs.apply_common import HardLink, if_there, link_late, require_few
from oci_builder.rootfs.tree_nodes import Folder, Leaf, Link, Node, Walk, above_and_name, made_by
from oci_builder.rootfs.whiteout import OPAQUE, hidden_by
from oci_builder.wire.tar import Kind, TarEntry

_FOUND_AT_MOST = 1024


class TreeModel:
    """A tree that layers are applied to, lowest first.

    Raises (``apply``):
        PolicyError: ``entry.whiteout``, ``entry.link_target``, ``entry.duplicate``, ``path.loop``, ``path.parent``,
            ``limit.depth``, ``limit.name``.
    """

    def __init__(
        self, where: str = "image", limits: Limits = DEFAULT_LIMITS,
        replaced: Callable[[bytes], None] = lambda _path: None,
    ) -> None:  # fmt: skip
        self.where = where
        self._replaced = replaced
        self.root = Folder(0)
        self._limits = limits
        self._layer = 0
        self._late: list[HardLink] = []
        # Where paths lead, for as long as nothing goes that they may lead through.
        self._found: dict[bytes, Folder] = {}

    def apply(self, entries: Iterable[TarEntry]) -> None:
        """Apply one layer."""
        self._layer += 1
        self._late = []
        for entry in entries:
            self._apply(entry)
        self._late_links()

    def _apply(self, entry: TarEntry) -> None:
        hidden = hidden_by(entry, self.where)
        if hidden is not None:
            self._hide(*hidden)
        elif entry.kind is Kind.DIR:
            self._folder(entry)
        elif entry.kind is Kind.HARDLINK:
            link = HardLink(entry.name, entry.link)
            if not self._link(link):
                self._late.append(link)
                require_few(len(self._late), self._limits)
        else:
            self._place(entry, self._node(entry))

    def _node(self, entry: TarEntry) -> Leaf:
        """What the tree keeps of an entry that is no folder."""
        return Link(self._layer, entry.link) if entry.kind is Kind.SYMLINK else self._layer

    def _walk(self, path: bytes, *, create: bool) -> Folder:
        folder = self._found.get(path)
        if folder is None:
            folder = Walk(self.root, self._limits, self._layer if create else None, self._replaced).to(path)
            if len(self._found) >= _FOUND_AT_MOST:
                self._found.clear()
            self._found[path] = folder
        return folder

    def _drop(self, folder: Folder, name: bytes) -> None:
        if not isinstance(folder.children.pop(name), int):
            self._found.clear()

    def _existing(self, path: bytes) -> Folder | None:
        return if_there(lambda: self._walk(path, create=False))

    def _place(self, entry: TarEntry | HardLink, node: Leaf) -> None:
        above, name = above_and_name(entry.name)
        folder = self._walk(above, create=True)
        there = folder.children.get(name)
        if there is not None:
            self._require_lower(there, entry)
            self._drop(folder, name)
            # What made way may have been a link on the path itself.
            folder = self._walk(above, create=True)
        folder.children[name] = node

    def _folder(self, entry: TarEntry) -> None:
        if not entry.name:
            return
        above, name = above_and_name(entry.name)
        parent = self._walk(above, create=True)
        there = parent.children.get(name)
        if isinstance(there, Folder):
            there.layer = self._layer
            return
        if there is not None:
            self._require_lower(there, entry)
            self._drop(parent, name)
        self._walk(entry.name, create=True)

    # -- hard links ------------------------------------------------------------------------------------------------

    def _link(self, entry: HardLink) -> bool:
        """False when the target is not there (yet)."""
        if entry.link.startswith(entry.name + b"/"):
            raise self._refuse("entry.link_target", entry, f"a hard link in place of a folder of {show(entry.link)}")
        above, name = above_and_name(entry.link)
        source = self._existing(above)
        node = source.children.get(name) if source else None
        if source is None or node is None:
            if entry.link == entry.name:
                raise self._refuse("entry.link_target", entry, "a hard link to itself")
            return False
        if isinstance(node, Folder):
            raise self._refuse("entry.link_target", entry, f"a hard link to the folder {show(entry.link)}")
        folder, new = above_and_name(entry.name)
        if self._walk(folder, create=True) is source and new == name:
            self._require_lower(node, entry)
            source.children[name] = self._again(node)
            return True
        self._place(entry, self._again(node))
        left = self._existing(above)
        if left is None or left.children.get(name) != node:
            raise self._refuse("entry.link_target", entry, f"a hard link that replaces {show(entry.link)}")
        return True

    def _again(self, node: Leaf) -> Leaf:
        """Another name of the same file."""
        return Link(self._layer, node.target) if isinstance(node, Link) else self._layer

    def _late_links(self) -> None:
        left = link_late(self._late, self._link)
        if left is not None:
            raise self._refuse("entry.link_target", left, f"a hard link to {show(left.link)}, which is nowhere")

    # -- whiteouts -------------------------------------------------------------------------------------------------

    def _hide(self, above: bytes, name: bytes) -> None:
        folder = self._existing(above)
        # What is hidden once is hidden for the layer: a folder may have as many names as there are links.
        if folder is None or folder.clean == self._layer:
            return
        if name == OPAQUE:
            folder.clean = self._layer
        for child in list(folder.children) if name == OPAQUE else [name]:
            self._remove(folder, child)

    def _remove(self, folder: Folder, name: bytes) -> None:
        """Remove what lower layers have; what this layer has stays, and the folders above it."""
        stack = [(folder, name, False)]
        while stack:
            parent, child, visited = stack.pop()
            node = parent.children.get(child)
            if node is None:
                continue
            if isinstance(node, Folder) and node.children and not visited:
                if node.clean == self._layer:
                    continue
                node.clean = self._layer
                stack.append((parent, child, True))
                stack += [(node, inner, False) for inner in node.children]
            elif made_by(node) != self._layer and not (isinstance(node, Folder) and node.children):
                self._drop(parent, child)

    def _require_lower(self, node: Node, entry: TarEntry | HardLink) -> None:
        if made_by(node) == self._layer:
            raise self._refuse("entry.duplicate", entry, "a name that stands twice in its layer")

    def _refuse(self, code: str, entry: TarEntry | HardLink, what: str) -> PolicyError:
        place = f"{self.where}: {show(entry.name)}"
        return PolicyError(code, f"{place}: {what}", where=place, actual=what)
