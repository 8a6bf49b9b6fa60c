"""Every way in which bytes of strangers come in, as functions from an archive to an outcome."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oci_builder.build import BuildOptions, build
from oci_builder.inspection import inspect_archive
from oci_builder.model import media
from oci_builder.model.errors import OciBuilderError
from oci_builder.pull import PullOptions, pull
from oci_builder.unpack import UnpackOptions, unpack_image
from oci_builder.verify import verify_archives
from tests.lab.registry import Registry

Codes = frozenset[str]
ACCEPTED: Codes = frozenset()
Verb = Callable[[Path, Path], Codes]


def verify(archive: Path, _dest: Path) -> Codes:
    """Verify; all codes that it finds."""
    report = verify_archives([archive])
    assert report.ok or report.exit_status in (3, 4), report.errors
    json.dumps(report.to_json()).encode("ascii")
    return frozenset(finding.code for finding in report.errors)


def unpack(archive: Path, dest: Path) -> Codes:
    """Unpack; the code of the refusal, after which nothing stands in the folder."""
    return _refused(lambda: unpack_image(archive, dest, UnpackOptions(threads=1)), dest)


def inspect(archive: Path, _dest: Path) -> Codes:
    """Inspect."""
    return _refused(lambda: inspect_archive(archive).lines())


def base(archive: Path, dest: Path) -> Codes:
    """Build on it as a base. What a build accepts, verify accepts of its output."""
    folder = archive.parent / "work"
    (folder / "tier").mkdir(parents=True)
    (folder / "tier" / "file").write_bytes(b"of the tier")
    spec = folder / "spec.json"
    try:
        kind = "docker" if archive.is_file() and not _has_index(archive) else "oci"
        spec.write_text(json.dumps({
            "name": "lab/based", "tag": "t", "base": {kind: str(archive)}, "prefix": "/opt/based-on-it",
            "tiers": {"one": {"path": str(folder / "tier")}},
        }))  # fmt: skip
        found = _refused(lambda: build(spec, folder / "out", BuildOptions(folder / "cache", 1)))
        if found:
            made = sorted(path.name for path in (folder / "out").glob("*")) if (folder / "out").exists() else []
            assert not made, f"a refused build left {made}"
        else:
            report = verify_archives([folder / "out" / "runtime.oci.tar", folder / "out" / "runtime.docker.tar.gz"])
            assert report.ok, f"build accepts what verify refuses: {report.errors}"
        return found
    finally:
        shutil.rmtree(folder)


def _has_index(archive: Path) -> bool:
    import gzip

    data = archive.read_bytes()
    if data[:2] == b"\x1f\x8b":
        try:
            data = gzip.decompress(data)
        except (OSError, EOFError):
            return False
    return b"\0index.json\0" in b"\0" + data or b"./index.json\0" in data


def pulled(members: dict[str, bytes], dest: Path) -> Codes:
    """Pull what an OCI layout holds from a registry, each layer proved; then verify what came.

    Pull carries bytes: a layer whose tar is evil is what the digest says. It is the layout that verify must refuse.
    """
    with Registry() as registry:
        for name, data in members.items():
            if name.startswith("blobs/sha256/"):
                digest = "sha256:" + name.rpartition("/")[2]
                registry.blobs[digest] = data
                registry.manifests["lab/image", digest] = (_served_as(data), data)
        top = registry.put_manifest("lab/image", members["index.json"], media.OCI_INDEX)
        try:
            pull(f"{registry.host}/lab/image@{top}", dest, PullOptions(prove=True))
        except OciBuilderError as error:
            assert not (dest / "index.json").exists(), "a refused pull left an index.json"
            shutil.rmtree(dest, ignore_errors=True)
            return frozenset({error.code})
        found = verify(dest, dest)
        shutil.rmtree(dest)
        return found


def _served_as(data: bytes) -> str:
    """As an honest registry of a hostile image serves it: by what the document says of itself."""
    try:
        value: Any = json.loads(data)
        return str(value["mediaType"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return media.OCI_MANIFEST


def _refused(action: Callable[[], object], dest: Path | None = None) -> Codes:
    try:
        action()
    except OciBuilderError as error:
        assert error.exit_status in (3, 4), f"exit status {error.exit_status} of {error}"
        assert dest is None or not dest.exists(), "something is left after a refusal"
        return frozenset({error.code})
    return ACCEPTED


VERBS: dict[str, Verb] = {"verify": verify, "unpack": unpack, "inspect": inspect, "base": base}
