"""Every limit in one place, each with its reason.

A limit can be set from the spec (``"limits": {...}``) and from the command line, never from an archive.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


def _limit(default: int, reason: str) -> int:
    return field(default=default, metadata={"reason": reason})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on untrusted input. Sizes are bytes, the rest are counts."""

    document: int = _limit(4 * MIB, "JSON manifest, index or config; the bound that containers/image uses")
    docker_manifest: int = _limit(1 * MIB, "manifest.json of a Docker archive; ours are below 64 KiB at 127 layers")
    json_depth: int = _limit(64, "nesting of JSON documents; OCI documents nest about six deep")
    record: int = _limit(1 * MIB, "one PAX header or GNU long name; Linux xattr values end at 64 KiB, names at 4 KiB")
    pax_headers: int = _limit(16, "extended headers in a row before one entry; real writers emit at most three")
    pax_records: int = _limit(
        1024, "records in one PAX header, each costs far more time than its bytes; writers emit ten and one an xattr"
    )
    pax_bytes: int = _limit(128 * MIB, "extended headers of one layer together: 512 bytes for each of 250,000 entries")
    name: int = _limit(4096, "bytes of an entry name or link target: PATH_MAX")
    component: int = _limit(255, "bytes of one path component: NAME_MAX")
    depth: int = _limit(128, "parts of one path or link; the deepest real tree seen (node_modules) has about 40")
    entries: int = _limit(2_000_000, "entries in one layer; the biggest real layer seen has 190,000")
    archive_entries: int = _limit(4_000_000, "entries of all layers of an archive: verify keeps up to 27 bytes of each")
    folders: int = _limit(500_000, "folders that the layers of an image list or lead through: one name makes up to 127")
    logged_names: int = _limit(64 * MIB, "compressed names kept to judge links; the biggest real layer's take 2 MB")
    tree_memory: int = _limit(160 * MIB, "memory for a tree whose names meet links: about 1,200,000 names")
    late_links: int = _limit(500_000, "hard links of one layer before their target; each takes 250 bytes")
    entry_size: int = _limit(64 * GIB, "bytes of one file; no file of a runtime image comes near")
    layer_size: int = _limit(64 * GIB, "uncompressed bytes of one layer; the real image's largest layer has 6.5 GB")
    image_size: int = _limit(256 * GIB, "uncompressed bytes of all layers together")
    ratio: int = _limit(200, "uncompressed over compressed, once a layer is past ratio_floor; real layers reach 10")
    ratio_floor: int = _limit(1 * GIB, "uncompressed bytes before the ratio applies: honest layers of zeros pass")
    zstd_window: int = _limit(128 * MIB, "decoder memory for one zstd frame; --ultra --long=27")
    index_depth: int = _limit(3, "indexes that point to indexes")
    manifests: int = _limit(64, "descriptors in one index; multi-arch images have about 20")
    layers: int = _limit(127, "layers of one image; overlayfs mounts fail above about 125 lower directories")
    symlink_follows: int = _limit(40, "symbolic links followed for one path: the kernel's MAXSYMLINKS")
    archive_members: int = _limit(4096, "members of an image archive; ours have layers + 6")
    xattr_size: int = _limit(64 * KIB, "bytes of one xattr value: XATTR_SIZE_MAX")
    blob_idle_seconds: int = _limit(60, "seconds without a byte before a download is given up and resumed")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The keys that ``limits`` in a spec may have."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def reasons(cls) -> dict[str, str]:
        """Field name -> why the default is what it is."""
        return {f.name: str(f.metadata["reason"]) for f in fields(cls)}


DEFAULT_LIMITS = Limits()
