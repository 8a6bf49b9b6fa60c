"""What travels between the sender and a container of Modal: one tar of inputs there, the release folder back.

Modal ships files one by one and follows links; a tar keeps links, modes and a checkout as they are. Archives and caches
never travel: they stay on the volume. Both ends are this file, so the standard library's tar reader is good enough.
"""

from __future__ import annotations

import base64
import io
import lzma
import os
import re
import stat
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from oci_builder.engines.modal_history import Carried, carry_projects
from oci_builder.engines.modal_inputs import As, Item, write_inputs
from oci_builder.engines.stages import Request
from oci_builder.engines.stages_options import FILES
from oci_builder.model.errors import ConflictError, SpecError, TransportError, disk_error, show
from oci_builder.model.spec import (
    TAG_PATTERN,
    DockerBase,
    GitTier,
    LockTier,
    OciBase,
    PathTier,
    RequirementsTier,
    RootfsBase,
    Spec,
    load_spec,
)
from oci_builder.payload.checkout import check_commit
from oci_builder.release.files import replace_file
from oci_builder.store.locks import alone_in
from oci_builder.store.scratch import scratch_folder
from oci_builder.transports.layerfiles import read_definitions

# Options that name a file of the sender; those that name a whole root are of this machine only.
FILE_OPTIONS = tuple(option for option in FILES if not option.startswith("root"))
# Records, SBOMs and receipts; a folder with archives in it is no release folder.
LARGEST_RELEASE = 256 << 20
# Logs and answers of a stage without a volume; a log of more is not read by anybody in one piece.
_LEFT_FILES, _LEFT_FILE = 32, 16 << 20


def pack(request: Request, target: Path, mounts: Iterable[str] = (), *, whole: bool = True) -> dict[str, Any]:
    """Write the tar of everything that a request needs of this machine.

    Args:
        request: with paths of this machine.
        target: the tar; the same inputs give the same bytes, so that Modal uploads them once.
        mounts: mount points of volumes: absolute paths below them exist where the spec's inputs are read.
        whole: the stage reads what the spec names; else only its packaging files go along.

    Returns: the request as JSON, its paths relative to the unpacked tar.

    Raises:
        SpecError: ``spec.*`` (``spec.path``: an input is missing); ``modal.project``: the spec names something outside
            its folder, or too much; ``layers.*``: as ``read_definitions``; ``payload.commit``: a project is not the
            checkout that it should be; ``payload.history``: as ``carry_projects``.
        TransportError: ``io.*``.
    """
    path = Path(request.spec)
    spec, folder = load_spec(path), path.absolute().parent
    release = release_folder(request.release) if request.release else None
    names = _named(spec, folder, tuple(mounts), whole)
    with scratch_folder(target.parent, "histories-") as scratch:
        carried = _require_inputs(spec, folder, scratch) if whole else Carried()
        home = PurePosixPath("spec", carried.above)
        named = {str(home / name): Item(folder / name, how) for name, how in names}
        sent = {**request.to_json(), "spec": str(home / path.name), "key": "", "work": "", "scratch": ""}
        named[sent["spec"]] = Item(path.absolute())
        sent |= _sent_files(request, release, named)
        write_inputs(target, {**named, **carried.items})
    return sent


def _sent_files(request: Request, release: Path | None, named: dict[str, Item]) -> dict[str, Any]:
    """Add the files of options and the release folder to what travels; those parts of the request."""
    options = dict(request.options)
    for option in FILE_OPTIONS:
        if isinstance(options.get(option), str) and options[option]:
            file = Path(options[option])
            options[option] = f"inputs/{option}/{file.name}"
            named[options[option]] = Item(file.absolute())
    if release is None:
        return {"options": options}
    there = f"releases/{release.name}"
    if release.is_dir():
        named[there] = Item(release)
    return {"options": options, "release": there}


def release_folder(text: str) -> Path:
    """The release folder itself, not a link to it; its name is also that of a folder on the volume.

    Raises:
        SpecError: ``modal.project``.
    """
    release = Path(os.path.realpath(text))
    if not re.fullmatch(TAG_PATTERN, release.name):
        raise SpecError(
            "modal.project", f"a release folder on Modal is called by letters, digits, dots, dashes, underscores, not "
            f"{show(release.name)}", where="--release", actual=release.name,
        )  # fmt: skip
    return release


def arrived(sent: Mapping[str, Any], project: Path) -> dict[str, Any]:
    """The request with the paths of the unpacked tar."""
    options = {k: str(project / v) if k in FILE_OPTIONS and v else v for k, v in sent["options"].items()}
    release = str(project / sent["release"]) if sent["release"] else ""
    return {**sent, "spec": str(project / sent["spec"]), "release": release, "options": options}


def folder_state(folder: Path) -> dict[str, bytes]:
    """Relative name -> content of all files of a small folder; empty where there is none.

    Raises:
        SpecError: ``modal.project``: it holds a link, a pipe or a device, which cannot come back as what it is, or more
            than ``LARGEST_RELEASE``.
        TransportError: ``io.*``.
    """
    found: dict[str, bytes] = {}
    total = 0
    try:
        for place, folders, names in os.walk(folder, onerror=_raise):
            for name in (*names, *(name for name in folders if Path(place, name).is_symlink())):
                path = Path(place, name)
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    raise SpecError(
                        "modal.project", f"{show(str(path))} is no regular file: a release folder on Modal has folders "
                        "and files only", where=str(path),
                    )  # fmt: skip
                if (total := total + status.st_size) > LARGEST_RELEASE:
                    raise SpecError(
                        "modal.project", f"{show(str(folder))} holds more than {LARGEST_RELEASE >> 20} MiB (at "
                        f"{show(name)}): a release folder has records only, and archives stay on the volume",
                        where=str(path),
                    )  # fmt: skip
                found[str(path.relative_to(folder))] = path.read_bytes()
    except FileNotFoundError as error:
        if folder.exists():
            raise disk_error(error, "reading the release folder") from None
    except OSError as error:
        raise disk_error(error, "reading the release folder") from None
    return found


def _raise(error: OSError) -> None:
    raise error


def folder_text(state: Mapping[str, bytes]) -> str:
    """A folder's files as text that fits into JSON."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as tar:
        for name, data in sorted(state.items()):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def left_text(folder: Path, most: int) -> str:
    """What a failed stage left on a disk that goes with its container: the small files first, as far as ``most``
    characters hold them; empty for nothing."""
    files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
    state: dict[str, bytes] = {}
    text = ""
    for path in sorted(files, key=lambda path: path.stat().st_size)[:_LEFT_FILES]:
        if path.stat().st_size > _LEFT_FILE:
            break
        state[str(path.relative_to(folder))] = path.read_bytes()
        if len(fresh := folder_text(state)) > most:
            break
        text = fresh
    return text


def take_left(text: str, folder: Path) -> None:
    """Put ``left_text`` into a folder here.

    Raises:
        TransportError: ``io.*``, ``modal.result``.
    """
    try:
        for name, data in _files(text):
            _put(folder / name, data)
    except OSError as error:
        raise disk_error(error, "keeping what the stage left") from None


def take_folder(text: str, folder: Path, sent: Mapping[str, bytes]) -> list[str]:
    """Do to ``folder`` what the stage did to its copy; what others did here meanwhile stays.

    Args:
        text: the copy as the stage left it, by ``folder_text``.
        sent: the folder's state when the copy was made.

    Returns: the names that are new, have changed, or are gone.

    Raises:
        ConflictError: ``modal.conflict``: a file was changed here and there. Nothing is done then; what came back lies
            beside the folder.
        TransportError: ``io.*``, ``modal.result`` (damaged, or names outside the folder).
    """
    state, folder = dict(_files(text)), Path(os.path.realpath(folder))
    try:
        (folder / "receipts").mkdir(parents=True, exist_ok=True)
        with alone_in(folder.parent):
            return _merge(state, folder, sent)
    except OSError as error:
        raise disk_error(error, "taking the release folder over") from None


def _merge(state: Mapping[str, bytes], folder: Path, sent: Mapping[str, bytes]) -> list[str]:
    here = {name: _content(folder / name) for name in {*state, *sent}}
    changed = sorted(n for n in {*state, *sent} if state.get(n) != sent.get(n) and state.get(n) != here.get(n))
    if torn := [name for name in changed if here.get(name) != sent.get(name)]:
        kept = Path(tempfile.mkdtemp(prefix=f".{folder.name}.returned-", dir=folder.parent))
        for name, data in state.items():
            _put(kept / name, data)
        raise ConflictError(
            "modal.conflict", f"{show(str(folder / torn[0]))} was changed here while the stage changed its copy; what "
            f"came back lies in {show(str(kept))}", where=torn[0],
        )  # fmt: skip
    # The verdict speaks of receipts: it comes last.
    for name in sorted(changed, key=lambda n: (not n.startswith("receipts/"), n.startswith("qualification"), n)):
        if name in state:
            _put(folder / name, state[name])
        else:
            (folder / name).unlink()
    return changed


def _content(path: Path) -> bytes | object | None:
    """A file's bytes, None where nothing is, and what equals nothing for anything else."""
    try:
        return path.read_bytes() if stat.S_ISREG(path.lstat().st_mode) else object()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, data)


def _files(text: str) -> Iterator[tuple[str, bytes]]:
    try:
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(text, validate=True)), mode="r:xz") as tar:
            for member in tar:
                parts = PurePosixPath(member.name).parts
                file = tar.extractfile(member) if member.isreg() else None
                if file is None or not parts or parts[0] == "/" or ".." in parts:
                    raise TransportError("modal.result", f"the result holds {show(member.name)}, no file of a release")
                yield member.name, file.read()
    except (tarfile.TarError, ValueError, EOFError, lzma.LZMAError) as error:
        raise TransportError("modal.result", f"the release folder did not come back whole: {error}") from None


def _named(spec: Spec, folder: Path, mounts: tuple[str, ...], whole: bool) -> list[tuple[str, As]]:
    """Relative names of everything that a stage reads below the spec's folder; what is missing costs no machine."""
    found = []
    for place, name, how in _places(spec):
        inside = ".." not in PurePosixPath(name).parts
        if inside and any(name.startswith(f"{mount.rstrip('/')}/") for mount in mounts):
            continue
        if name.startswith("/") or not inside:
            held = " or ".join(f"{mount.rstrip('/')}/…" for mount in mounts) or "no volume"
            raise SpecError(
                "modal.project", f"{place} names {show(name)}: what lies outside the spec's folder does not get to "
                f"Modal; move it there, or put it on the volume and name it {held}", where=place,
            )  # fmt: skip
        if whole and not (folder / name).exists():
            raise SpecError(
                "spec.path", f"{place} names {show(name)}, which is not there{_hint(folder / name)}", where=place
            )
        if (whole or place == "files") and (folder / name).exists():
            found.append((name, how))
    return found


def _require_inputs(spec: Spec, folder: Path, scratch: Path) -> Carried:
    """What the build would refuse of packaging files and projects, an hour and a machine earlier."""
    if spec.files is not None and not spec.files.startswith("/"):
        read_definitions(folder / spec.files, spec.effective_limits, moved=True)
    fields: dict[str, str] = {}
    checked = set()
    for name, tier in spec.tiers.items():
        if not isinstance(tier, LockTier) or tier.project.startswith("/"):
            continue
        where = fields.setdefault(tier.project, f"tiers.{name}")
        if (tier.project, tier.commit) not in checked:
            check_commit(folder / tier.project, tier.commit, where)
            checked.add((tier.project, tier.commit))
    return carry_projects(fields, folder, scratch)


def _hint(path: Path) -> str:
    """A submodule that was not checked out is an empty folder."""
    empty = path.parent.is_dir() and not any(path.parent.iterdir())
    return f"; {show(str(path.parent))} is empty: git submodule update --init --recursive" if empty else ""


def _places(spec: Spec) -> Iterator[tuple[str, str, As]]:
    base = spec.base
    if isinstance(base, OciBase):
        yield "base.oci", base.oci, As.TREE
    elif isinstance(base, DockerBase):
        yield "base.docker", base.docker, As.TREE
    elif isinstance(base, RootfsBase):
        yield "base.rootfs", base.rootfs, As.TREE
    if spec.files is not None:
        yield "files", spec.files, As.FILES
    for name, tier in spec.tiers.items():
        if isinstance(tier, PathTier):
            yield f"tiers.{name}.path", tier.path, As.TREE
        elif isinstance(tier, RequirementsTier):
            yield f"tiers.{name}.requirements", tier.requirements, As.FILES
        elif isinstance(tier, GitTier):
            if tier.lock is not None:
                yield f"tiers.{name}.lock", tier.lock, As.FILES
        elif isinstance(tier, LockTier):
            yield f"tiers.{name}.project", tier.project, As.PROJECT
            lock = f"{tier.project}/uv.lock" if tier.lock is None else tier.lock
            yield f"tiers.{name}.lock", lock, As.FILES


__all__ = ["arrived", "folder_state", "folder_text", "left_text", "pack", "release_folder", "take_folder", "take_left"]
