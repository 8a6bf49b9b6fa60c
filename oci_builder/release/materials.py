"""What a build was made of, with digests: base, locks, source commits, shipped files, the spec itself."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from oci_builder.model.errors import SpecError, show
from oci_builder.model.spec import DockerBase, GitTier, HostBase, LockTier, OciBase, RequirementsTier, RootfsBase, Spec
from oci_builder.payload.overlay import resolve_commit
from oci_builder.release.files import io_error, open_file
from oci_builder.release.provenance import Material, base_material

_BLOCK = 1 << 20


def materials(
    spec: Spec, spec_path: Path, container: Mapping[str, Any]
) -> tuple[tuple[Material, ...], tuple[str, ...]]:
    """(inputs with digests, inputs that have none), for a provenance.

    Args:
        spec_path: relative paths of the spec are relative to its folder.
        container: ``container.json`` of the build, for the base's digest.

    Raises:
        SpecError: ``spec.path``: an input is not there any more. TransportError: ``io.*``.
    """
    folder = spec_path.absolute().parent
    unpinned: list[str] = []
    found = [_file(spec_path, spec_path.name, "spec"), *_base(spec, container, unpinned)]
    for name, tier in spec.tiers.items():
        if isinstance(tier, RequirementsTier):
            found.append(_file(folder / tier.requirements, tier.requirements, f"tier {name}"))
        elif isinstance(tier, LockTier):
            found += _lock(folder, name, tier)
        elif isinstance(tier, GitTier):  # the commit covers the lock that lies in it
            found.append(Material(f"git+{tier.git}", {"gitCommit": tier.commit}, "source"))
        else:
            unpinned.append(f"tiers.{name}.path: a staged tree, known by the layers that it became")
    if spec.files is not None:
        found += _shipped(folder, spec.files)
    unique = {(m.uri, m.name): m for m in found}
    return tuple(unique[key] for key in sorted(unique)), tuple(unpinned)


def _base(spec: Spec, container: Mapping[str, Any], unpinned: list[str]) -> Iterator[Material]:
    base = spec.base
    known = base_material(spec)
    about = container.get("base") if isinstance(container.get("base"), dict) else {}
    digest = str((about or {}).get("digest") or "")
    if known is not None:
        yield known
    elif isinstance(base, OciBase | DockerBase) and digest:
        place = base.oci if isinstance(base, OciBase) else base.docker
        yield Material(f"file:{Path(place).name}", {"sha256": digest.removeprefix("sha256:")}, "base image")
    elif isinstance(base, HostBase | RootfsBase | OciBase | DockerBase):
        unpinned.append("base: files of the machine or of a folder, known by the layer that they became")


def _lock(folder: Path, name: str, tier: LockTier) -> Iterator[Material]:
    project = folder / tier.project
    lock = tier.lock or f"{tier.project}/uv.lock"
    yield _file(folder / lock, lock, "lock")
    commit = tier.commit or resolve_commit(project, "HEAD")
    yield Material(f"git+{_remote(project) or f'file:{tier.project}'}", {"gitCommit": commit}, "source")


def _remote(project: Path) -> str:
    """Where a checkout was cloned from, as it says; the commit is what identifies the source."""
    argv = ["git", "-C", str(project), "config", "--get", "remote.origin.url"]
    try:
        return subprocess.run(argv, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def _shipped(folder: Path, files: str) -> Iterator[Material]:
    root = folder / files
    if not root.is_dir():
        raise SpecError("spec.path", f"no such folder: {show(str(root))}", where="files")
    for path in sorted(root.rglob("*")):
        inside = path.relative_to(root)
        if path.is_file() and not path.is_symlink() and "__pycache__" not in inside.parts:
            yield _file(path, f"{files}/{inside.as_posix()}", "shipped file")


def _file(path: Path, shown: str, name: str) -> Material:
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            while data := file.read(_BLOCK):
                digest.update(data)
    except FileNotFoundError:
        raise SpecError("spec.path", f"no such file: {show(str(path))}", where=shown) from None
    except OSError as error:
        raise io_error(error, path) from None
    # A path of this machine tells nothing to others; one below the spec's folder does.
    place = Path(shown).name if Path(shown).is_absolute() else shown
    return Material(f"file:{place}", {"sha256": digest.hexdigest()}, name)
