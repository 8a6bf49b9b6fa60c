"""``layers/*.toml``: which shipped files go where, as data.

A definition has a ``name`` (the layer's) and ``[[file]]`` tables with ``from`` (a file or folder beside it),
``to`` (a path below the prefix) and, for a file, ``mode`` (octal text, default that of the file's owner bits).
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oci_builder.model.errors import SpecError, show
from oci_builder.rootfs.layers_assemble import InlineFile

_KEYS = {"name", "description", "file"}
_FILE_KEYS = {"from", "to", "mode"}


def read_definitions(folder: Path) -> dict[str, dict[bytes, InlineFile]]:
    """Layer name -> path below the prefix -> file, for every definition in the folder.

    Raises:
        SpecError: ``spec.path`` when there is no such folder, ``layers.definition`` names the file and the key,
            ``layers.missing`` a file that is not there.
    """
    if not folder.is_dir():
        raise SpecError("spec.path", f"files: there is no folder {show(str(folder))}", where="files")
    out: dict[str, dict[bytes, InlineFile]] = {}
    for path in sorted(folder.glob("*.toml")):
        value = _parse(path)
        name = value.get("name", path.stem)
        files = out.setdefault(name, {})
        for table in value.get("file", []):
            for place, file in _files(folder, path, table):
                if place in files:
                    raise SpecError("layers.overlap", f"{path.name}: {show(place)} is given twice", where=str(path))
                files[place] = file
    return {name: files for name, files in out.items() if files}


def _parse(path: Path) -> dict[str, Any]:
    try:
        value = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SpecError("layers.definition", f"{path}: {error}", where=str(path)) from None
    unknown = set(value) - _KEYS
    if unknown:
        raise SpecError("layers.definition", f"{path}: unknown key {sorted(unknown)[0]!r}", where=str(path))
    return value


def _files(folder: Path, path: Path, table: dict[str, Any]) -> Iterator[tuple[bytes, InlineFile]]:
    if set(table) - _FILE_KEYS or not {"from", "to"} <= set(table):
        keys = ", ".join(sorted(_FILE_KEYS))
        raise SpecError("layers.definition", f"{path}: a [[file]] has the keys {keys}", where=str(path))
    source, target = folder / table["from"], str(table["to"]).strip("/")
    if source.is_dir():
        found = [p for p in sorted(source.rglob("*")) if p.is_file() and "__pycache__" not in p.parts]
        for file in found:
            yield f"{target}/{file.relative_to(source)}".encode(), _inline(file, None)
    elif source.is_file():
        yield target.encode(), _inline(source, table.get("mode"))
    else:
        raise SpecError("layers.missing", f"{path}: there is no {source}", where=str(path))


def _inline(file: Path, mode: str | None) -> InlineFile:
    # git keeps one bit of a file's mode: that bit is all that may reach the image, whatever the umask was.
    executable = file.stat().st_mode & 0o100
    return InlineFile(file.read_bytes(), int(mode, 8) if mode else 0o755 if executable else 0o644)
