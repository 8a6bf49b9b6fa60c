"""``layers/*.toml``: which shipped files go where, as data.

A definition has a ``name`` (the layer's) and ``[[file]]`` tables with ``from`` (a file or folder beside it), ``to`` (a
path below the prefix) and, for a file, ``mode`` (octal text, default that of the file's owner bits).

Everything that gets into the image lies in the definitions' folder: that folder's fingerprint tells whether a build has
anything to do.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

from oci_builder.model.errors import OciBuilderError, SpecError, show
from oci_builder.model.events import Emit, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.specvalues import check_inside, read_input
from oci_builder.rootfs.layers_assemble import InlineFile
from oci_builder.rootfs.scan import ScanPolicy, input_failure, scan_tree
from oci_builder.wire.tar import Kind, clean_name

_KEYS = {"name", "description", "file"}
_FILE_KEYS = {"from", "to", "mode"}
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}\Z")
# Set-user-ID files are no more welcome here than in a tier.
_MODE = re.compile(r"0?[0-7]{3}\Z")
_POLICY = ScanPolicy(exclude=("__pycache__", "*/__pycache__"))
# They are held in memory, which has its bound whatever is shipped.
_MOST = 64 << 20

Files = dict[bytes, InlineFile]


def read_definitions(
    folder: Path, limits: Limits = DEFAULT_LIMITS, emit: Emit = silent, *, moved: bool = False
) -> dict[str, Files]:
    """Layer name -> path below the prefix -> file, for every definition in the folder.

    Symbolic links in a folder stay links; what is ``from`` itself is followed, within the definitions' folder.

    Args:
        moved: a copy of the folder elsewhere must say the same: a link that is followed may not be absolute.

    Raises:
        SpecError: ``spec.path`` when there is no such folder, ``layers.definition`` names the file and the key,
            ``layers.missing`` a file that is not there, ``layers.overlap`` a path that is given twice; as
            ``scan_tree``.
        PolicyError: as ``scan_tree`` and ``clean_name``.
        TransportError: ``io.*``.
    """
    if not folder.is_dir():
        raise SpecError("spec.path", f"files: there is no folder {show(str(folder))}", where="files")
    out: dict[str, Files] = {}
    total = 0
    for path in sorted(folder.glob("*.toml")):
        definition = _Definition(folder, path, limits, emit, moved)
        name, files = definition.read()
        known = out.setdefault(name, {})
        for place, file in files:
            if place in known:
                raise SpecError("layers.overlap", f"{path.name}: {show(place)} is given twice", where=str(path))
            known[place] = file
            total += len(file.data)
            if total > _MOST:
                definition.refuse(f"over {_MOST} bytes in all are too many for definitions: a tier can hold them")
    return {name: files for name, files in out.items() if files}


class _Definition:
    """One definition's file."""

    def __init__(self, folder: Path, path: Path, limits: Limits, emit: Emit, moved: bool) -> None:
        self.folder, self.path, self.limits, self.emit, self.moved = folder, path, limits, emit, moved

    def refuse(self, reason: str) -> NoReturn:
        """Raise ``layers.definition``."""
        raise SpecError("layers.definition", f"{self.path}: {reason}", where=str(self.path))

    def read(self) -> tuple[str, Iterator[tuple[bytes, InlineFile]]]:
        """The layer's name, and its files."""
        if not self.path.resolve().is_relative_to(self.folder.resolve()):
            self.refuse(f"leads out of the folder to {show(str(self.path.resolve()))}; put a copy into it")
        self._require_movable(self.path.name)
        value = self._parse()
        if unknown := set(value) - _KEYS:
            self.refuse(f"unknown key {show(sorted(unknown)[0])}")
        name = value.get("name", self.path.stem)
        if not isinstance(name, str) or not _NAME.match(name):
            self.refuse(f"name: must be 1 to 63 of a-z 0-9 . _ -, and begin with a letter or digit (got {name!r})")
        tables = value.get("file", [])
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            self.refuse("file: must be tables, [[file]]")
        return name, (pair for table in tables for pair in self._files(table))

    def _parse(self) -> dict[str, Any]:
        try:
            return tomllib.loads(read_input(self.path, "layer definition").decode())
        except OciBuilderError as error:
            self.refuse(error.message)
        except (ValueError, RecursionError) as error:
            self.refuse(str(error))

    def _files(self, table: dict[str, Any]) -> Iterator[tuple[bytes, InlineFile]]:
        if set(table) - _FILE_KEYS or not {"from", "to"} <= set(table):
            self.refuse(f"a [[file]] has the keys {', '.join(sorted(_FILE_KEYS))}")
        source, target = self._source(table["from"]), self._target(table["to"])
        mode = self._mode(table)
        if source.is_dir():
            if mode is not None:
                self.refuse(f"from {show(table['from'])} is a folder: mode is for a file")
            yield from self._tree(source, target)
        elif source.is_file():
            yield target, _read(source, mode)
        else:
            raise SpecError("layers.missing", f"{self.path}: there is no {show(str(source))}", where=str(self.path))

    def _tree(self, source: Path, target: bytes) -> Iterator[tuple[bytes, InlineFile]]:
        tree = scan_tree(source, emit=self.emit, limits=self.limits, policy=_POLICY)
        for entry in tree.entries:
            place = target + b"/" + entry.path
            if entry.kind is Kind.SYMLINK:
                yield place, InlineFile(link=entry.link)
            elif entry.kind is Kind.FILE:
                yield place, _read(source / os.fsdecode(entry.path), None)

    def _source(self, value: Any) -> Path:
        try:
            source = (self.folder / check_inside(value)).resolve()
        except (AttributeError, TypeError, ValueError, OSError, RuntimeError) as error:
            self.refuse(f"from: must be a path beside the definition, without .. (got {value!r}: {error})")
        if not source.is_relative_to(self.folder.resolve()):
            self.refuse(f"from: {show(value)} leads out of the folder to {show(str(source))}; put a copy into it")
        self._require_movable(value)
        return source

    def _require_movable(self, name: str) -> None:
        link = _absolute_link(self.folder, name) if self.moved else None
        if link is not None:
            self.refuse(f"{show(str(link))} is a link to {show(os.readlink(link))}, which is another place where this "
                        "folder is copied to: make it relative (ln -sr)")  # fmt: skip

    def _target(self, value: Any) -> bytes:
        try:
            text = check_inside(value).rstrip("/")
            name = clean_name(text.encode(), self.limits, f"{self.path}: to")
        except (AttributeError, TypeError, ValueError) as error:
            self.refuse(f"to: must be a path below the prefix, without .. (got {value!r}: {error})")
        if not name:
            self.refuse(f"to: must be a path below the prefix (got {value!r})")
        if any(part.startswith(b".wh.") for part in name.split(b"/")):
            self.refuse(f"to: {show(name)}: a part that begins with .wh. would delete files when the image is unpacked")
        return name

    def _mode(self, table: dict[str, Any]) -> int | None:
        if "mode" not in table:
            return None
        mode = table["mode"]
        if not isinstance(mode, str) or not _MODE.match(mode):
            self.refuse(f'mode: must be three octal digits as text, such as "755" (got {mode!r})')
        return int(mode, 8)


def _absolute_link(folder: Path, name: str) -> Path | None:
    """The first absolute link on the way to ``name``, which leads to something below the folder."""
    place, parts = folder, list(Path(name).parts)
    while parts:
        place = place.parent if parts[0] == ".." else place / parts[0]
        del parts[0]
        if place.is_symlink():
            target = Path(os.readlink(place))
            if target.is_absolute():
                return place
            place, parts = place.parent, [*target.parts, *parts]
    return None


def _read(place: Path, mode: int | None) -> InlineFile:
    try:
        with place.open("rb") as file:
            # git keeps one bit of a file's mode: that bit is all that may reach the image, whatever the umask was.
            executable = os.fstat(file.fileno()).st_mode & stat.S_IXUSR
            data = file.read(_MOST + 1)
    except OSError as error:
        raise input_failure(error, os.fsencode(place)) from None
    return InlineFile(data, mode if mode is not None else 0o755 if executable else 0o644)
