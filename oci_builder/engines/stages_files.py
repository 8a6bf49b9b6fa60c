"""What several stages do with files: the records of a build, one streaming copy to local disk, the release folder."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from oci_builder.build import FILES
from oci_builder.engines.stages_request import Request
from oci_builder.model.errors import ConflictError, IntegrityError, SpecError, disk_error, show
from oci_builder.model.events import Emit, Event
from oci_builder.release.folder import ReleaseFolder
from oci_builder.store.locks import alone_now
from oci_builder.store.removal import clear_folder

RECORDS = ("portable.json", "container.json")
_BLOCK = 4 << 20


def recorded(request: Request) -> dict[str, str]:
    """Archive name -> sha256, hex, as the records of ``request.out`` say.

    Raises:
        SpecError: ``stage.order``: there is no finished build.
        FormatError: ``release.subject``, ``json.*``.
    """
    out = Path(request.out)
    missing = [name for name in RECORDS if not (out / name).is_file()]
    if missing:
        raise SpecError(
            "stage.order", f"{show(str(out))} has no {missing[0]}: run the stage package first", where=str(out)
        )
    return ReleaseFolder(out).subjects()


def checked_copy(path: Path, sha256: str, scratch: Path | None, emit: Emit) -> Path:
    """Read a file once; it must be ``sha256``. With ``scratch`` the same read makes a copy there, which is returned.

    A volume is far away and read at most once; what needs more than one pass reads the copy.

    Raises:
        IntegrityError: ``blob.digest``; no copy is left.
        TransportError: ``io.*``.
    """
    copy = None if scratch is None else scratch / path.name
    task = f"{'hash' if copy is None else 'copy'} {path.name}"
    digest = hashlib.sha256()
    try:
        emit(Event("start", task, total=path.stat().st_size))
        with path.open("rb", buffering=0) as source, open(os.devnull if copy is None else copy, "wb") as target:
            while block := source.read(_BLOCK):
                digest.update(block)
                target.write(block)
                emit(Event("advance", task, len(block)))
    except OSError as error:
        raise disk_error(error, task) from None
    emit(Event("done", task))
    if digest.hexdigest() != sha256:
        if copy is not None:
            copy.unlink(missing_ok=True)
        raise IntegrityError(
            "blob.digest", f"{show(str(path))} is not what its record says", where=str(path), expected=sha256,
            actual=digest.hexdigest(),
        )  # fmt: skip
    return copy or path


def refuse_other_release(request: Request) -> None:
    """The release folder, where it is one already, is about the build that lies in ``out``.

    Raises:
        ConflictError: ``release.exists``; TransportError: ``io.*``.
    """
    for name in RECORDS if request.release else ():
        there, here = Path(request.release) / name, Path(request.out) / name
        try:
            same = not there.exists() or there.read_bytes() == here.read_bytes()
        except OSError as error:
            raise disk_error(error, f"reading {name}") from None
        if not same:
            raise ConflictError(
                "release.exists", f"{show(request.release)} is about another build: a candidate is changed by repack, "
                "anything else is a release of its own (remove the folder when nothing of it was published)",
                where=str(there),
            )  # fmt: skip


@contextmanager
def kept_build(request: Request) -> Iterator[None]:
    """A release's archives stay: where the block ends in an error, the finished build that lay in ``out`` lies there.

    A build replaces its files by rename, so links to the old ones keep them at no cost. Links that a killed run left
    are put back first. One run at a time writes into ``out``.

    Raises:
        ConflictError: ``stage.busy``; TransportError: ``io.*``.
    """
    out = Path(request.out).absolute()
    with _alone(Path(request.cache) / "locks", out):
        if request.release and (Path(request.release) / "portable.json").is_file():
            with _linked(out):
                yield
        else:
            yield


@contextmanager
def _alone(locks: Path, out: Path) -> Iterator[None]:
    name = hashlib.sha256(os.fsencode(out.resolve())).hexdigest()[:32]
    with ExitStack() as stack:
        try:
            locks.mkdir(parents=True, exist_ok=True)
            free = stack.enter_context(alone_now(locks / name))
        except OSError as error:
            raise disk_error(error, f"locking {out}") from None
        if not free:
            text = f"another stage is writing into {show(str(out))}"
            raise ConflictError("stage.busy", text, where=str(out))
        yield


@contextmanager
def _linked(out: Path) -> Iterator[None]:
    links = out.with_name(f".{out.name}.before")
    try:
        _put_back(links, out)
        if all((out / name).is_file() for name in FILES):
            _link_all(out, links)
    except OSError as error:
        raise disk_error(error, f"keeping the build in {out}") from None
    try:
        yield
    except BaseException:
        _put_back(links, out)
        raise
    clear_folder(links)


def _link_all(out: Path, links: Path) -> None:
    partial = links.with_name(f"{links.name}.partial")
    clear_folder(partial)
    partial.mkdir()
    for name in FILES:
        os.link(out / name, partial / name)
    partial.rename(links)


def _put_back(links: Path, out: Path) -> None:
    if not links.is_dir():
        return
    # The records come last, so that none tells of other bytes.
    for name in FILES:
        if (links / name).exists():
            os.replace(links / name, out / name)
    clear_folder(links)


def digest_of(data: bytes) -> str:
    """sha256, hex."""
    return hashlib.sha256(data).hexdigest()


def release_id(request: Request, fallback: str) -> str:
    """The release that receipts name: the folder's, else the spec's."""
    return ReleaseFolder(Path(request.release)).release if request.release else fallback


def merged(*parts: Mapping[str, str]) -> dict[str, str]:
    """All digests of several sources; two that disagree are an error.

    Raises:
        IntegrityError: ``blob.digest``.
    """
    out: dict[str, str] = {}
    for part in parts:
        for name, sha256 in part.items():
            if out.setdefault(name, sha256) != sha256:
                raise IntegrityError(
                    "blob.digest", f"{show(name)} is another archive than its record says", where=name,
                    expected=out[name], actual=sha256,
                )  # fmt: skip
    return out
