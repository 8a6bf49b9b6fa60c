"""What a repack may change: packaging files, and nothing else. Compares two portable archives, entry by entry."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oci_builder.model.errors import ConflictError, FormatError, IntegrityError, PolicyError, SpecError, show
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.release.files import io_error
from oci_builder.wire.compress import decode
from oci_builder.wire.source import open_range
from oci_builder.wire.tar import Kind, TarEntry, TarReader

_MARKER_KEYS = ("name", "release", "prefix", "tag")


@dataclass(frozen=True, slots=True)
class Item:
    """One entry as far as a repack must keep it: metadata, and the hash of its content (empty for no file)."""

    kind: str
    mode: int
    owner: tuple[int, int]
    mtime_ns: int
    link: bytes
    size: int
    sha256: str
    xattrs: tuple[tuple[bytes, bytes], ...]


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries of a portable archive by path, and the marker file's content."""

    items: Mapping[bytes, Item]
    marker: bytes | None


@dataclass(frozen=True, slots=True)
class Changes:
    """Paths that differ between two listings, sorted."""

    added: tuple[bytes, ...]
    removed: tuple[bytes, ...]
    changed: tuple[bytes, ...]

    @property
    def paths(self) -> tuple[bytes, ...]:
        """All of them."""
        return tuple(sorted({*self.added, *self.removed, *self.changed}))

    def to_json(self) -> dict[str, list[str]]:
        """For a receipt."""
        shown = {"added": self.added, "removed": self.removed, "changed": self.changed}
        return {kind: [show(p) for p in paths] for kind, paths in shown.items()}


def read_listing(archive: Path, marker: bytes, limits: Limits = DEFAULT_LIMITS, threads: int = 1) -> Listing:
    """Read a portable archive once, every byte of it.

    Args:
        marker: path of the marker file in the archive.

    Raises:
        FormatError, PolicyError: the archive is broken, or breaks a limit.
        FormatError: ``tar.ambiguous``: a path stands twice.
        TransportError: ``io.*``.
    """
    try:
        chunks = decode(open_range(archive), "gzip", limits=limits, where=archive.name, threads=threads)
        return _list(TarReader(chunks, limits=limits, where=archive.name), marker, archive.name)
    except OSError as error:
        raise io_error(error, archive) from None


def _list(reader: TarReader, marker: bytes, where: str) -> Listing:
    items: dict[bytes, Item] = {}
    found: bytes | None = None
    for entry in reader:
        digest, kept = hashlib.sha256(), bytearray()
        for piece in reader.data():
            digest.update(piece)
            if entry.name == marker and len(kept) <= DEFAULT_LIMITS.document:
                kept += piece
        # Each layer brings the folders that lead to its files; only folders may stand twice.
        if entry.name in items and not (entry.kind is Kind.DIR and items[entry.name].kind == Kind.DIR):
            raise FormatError("tar.ambiguous", f"{where}: {show(entry.name)} stands twice", where=where)
        items[entry.name] = _item(entry, digest.hexdigest() if entry.size else "")
        if entry.name == marker:
            found = bytes(kept)
    return Listing(items, found)


def _item(entry: TarEntry, sha256: str) -> Item:
    xattrs = tuple(sorted(entry.xattrs.items()))
    return Item(
        str(entry.kind), entry.mode, (entry.uid, entry.gid), entry.mtime_ns, entry.link, entry.size, sha256, xattrs
    )


def compare(old: Mapping[bytes, Item], new: Mapping[bytes, Item]) -> Changes:
    """What differs."""
    both = old.keys() & new.keys()
    return Changes(
        added=tuple(sorted(new.keys() - old.keys())),
        removed=tuple(sorted(old.keys() - new.keys())),
        changed=tuple(sorted(p for p in both if old[p] != new[p])),
    )


def check_scope(changes: Changes, packaging: Collection[bytes], records: Collection[bytes] = ()) -> None:
    """Let only packaging files differ.

    Args:
        packaging: paths that come from ``layers/files``, of the old archive and the new one.
        records: paths of files that describe the archive itself (the marker): they follow, and alone are no reason.

    Raises:
        PolicyError: ``repack.scope``, naming what else differs.
        SpecError: ``repack.nothing``: no packaging file differs.
    """
    allowed = {*packaging, *records}
    outside = [p for p in changes.paths if p not in allowed]
    if outside:
        names = ", ".join(show(p) for p in outside[:5]) + (f" and {len(outside) - 5} more" if len(outside) > 5 else "")
        raise PolicyError(
            "repack.scope", f"a repack changes packaging files only, this would change {names}; make a new release",
            actual=len(outside),
        )  # fmt: skip
    if not any(p in packaging for p in changes.paths):
        raise SpecError("repack.nothing", "no packaging file differs from the archive; there is nothing to repack")


def check_marker(marker: bytes | None, portable: Mapping[str, Any], where: str) -> None:
    """The archive says of itself what its record says of it.

    Raises:
        IntegrityError: ``repack.marker``: there is none, or it is another archive's.
    """
    if marker is None:
        raise IntegrityError("repack.marker", f"{where}: no marker file; this is none of our archives", where=where)
    value = load_json(marker, f"{where}: marker")
    said = value if isinstance(value, dict) else {}
    common = [k for k in _MARKER_KEYS if k in said and k in portable]
    # A prefix stands without its first slash where it is a path inside the archive.
    wrong = [k for k in common if str(said[k]).lstrip("/") != str(portable[k]).lstrip("/")]
    if wrong or not common:
        key = wrong[0] if wrong else "name"
        raise IntegrityError(
            "repack.marker", f"{where}: the marker's {key} is not that of portable.json", where=where,
            expected=str(portable.get(key)), actual=str(said.get(key)),
        )  # fmt: skip


def check_layers(old: Any, new: Any, packaging: Collection[str]) -> None:
    """All layers but those of packaging files are the same blobs, in the same order.

    Args:
        old, new: ``container.json`` documents.
        packaging: names of the layers of packaging files.

    Raises:
        PolicyError: ``repack.scope``: another layer differs.
        FormatError: ``json.field``: no layers in a record.
    """
    before, after = (_layer_digests(document, packaging) for document in (old, new))
    if before != after:
        differing = sorted({name for name, _ in {*before} ^ {*after}}) or ["their order"]
        raise PolicyError(
            "repack.scope",
            f"a repack keeps every layer but {', '.join(sorted(packaging))}; this changes {', '.join(differing)}",
            actual=", ".join(differing),
        )  # fmt: skip


def _layer_digests(document: Any, leave_out: Collection[str]) -> list[tuple[str, str]]:
    layers = document.get("layers") if isinstance(document, dict) else None
    if not isinstance(layers, list) or not all(isinstance(v, dict) and "digest" in v for v in layers):
        raise FormatError("json.field", "container.json: no list of layers with digests", where="container.json")
    kept = [v for v in layers if v.get("from") == "base" or v.get("name") not in leave_out]
    return [(str(v.get("name") or "base image"), str(v["digest"])) for v in kept]


def refuse_states(state: str, release: str) -> None:
    """Only a candidate (or one that failed) is repacked.

    Raises:
        ConflictError: ``release.qualified``, ``release.superseded``.
    """
    if state == "pass":
        raise ConflictError(
            "release.qualified", f"{release} is qualified and never changes; make a new release", where=release
        )
    if state == "superseded":
        raise ConflictError("release.superseded", f"{release} was replaced already; repack what replaced it")
