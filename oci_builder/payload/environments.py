"""A tier's environment from pinned inputs, made by uv: a relocatable venv, hard-linked from one cache.

uv links every tier's files from the same cache, so equal files of tiers are the same inode and the plan need not read
them. Upstream declares its backend extras incompatible, so tiers are made in turn and never combined.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from oci_builder.model.errors import SpecError, TransportError, disk_error, show
from oci_builder.model.events import Emit, Event
from oci_builder.model.jsontext import dump_json
from oci_builder.model.spec import LockTier, RequirementsTier
from oci_builder.model.specvalues import read_input
from oci_builder.payload import compilers
from oci_builder.payload.checkout import check_commit, clone, file_at, top_of, untracked
from oci_builder.payload.inventory import from_lock, from_requirements, inventory, local_sources, unpinned
from oci_builder.payload.lists import all_there, check_list, keep_packages, weakly_pinned
from oci_builder.payload.names import normalize
from oci_builder.payload.overlaps import settle_overlaps
from oci_builder.payload.partial import making, put
from oci_builder.payload.traces import traces
from oci_builder.payload.uv import UV_VERSION, Interpreter, Programs, Uv, probe_links
from oci_builder.payload.uv_cache import drop_other_builds, note_builds, origins, unpacked
from oci_builder.store.removal import clear_folder, remove_folder

INVENTORY = "inventory.json"
_Tier: TypeAlias = RequirementsTier | LockTier
_COMPILERS = "compilers"
_FORMAT = 6  # of the result: a number more when the same inputs give another environment
# uv's own notes, not part of a package: they hold times.
_NOTES = ("uv_cache.json", "uv_build.json")
_MODES = {False: 0o644, True: 0o755}


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How a tier is filled.

    Attributes:
        inputs: JSON-able value that stands for everything the result depends on, besides uv and the interpreter.
        listed: what the list or the lock says of each package.
        install: fills the environment at the path; the second path is a scratch folder.
    """

    inputs: Any
    listed: Mapping[str, Mapping[str, Any]]
    install: Callable[[Uv, Path, Path], None]


def realize(name: str, tier: _Tier, folder: Path, work: Path, emit: Emit, programs: Programs | None = None) -> Path:
    """The environment's folder; idempotent: the same inputs give the folder that stands there.

    Beside it lies ``inventory.json``: every package, and what was left out with the reason.

    Raises:
        SpecError: ``spec.path`` (list, lock or interpreter), ``payload.uv`` (no uv, or another version),
            ``payload.hardlinks`` (the file system has none), ``payload.omit`` (a package that is not there),
            ``payload.list`` (a list that takes in other files, or that uv cannot install),
            ``payload.lock`` (also: an extra that it does not have),
            ``payload.commit`` (a checkout that is not the pinned one, or has changes),
            ``payload.project`` (a package from a folder that the commit does not have).
        IntegrityError: ``payload.hash`` when a package is not what the list says.
        TransportError: ``payload.install`` with uv's own words, ``io.*``.
    """
    where = f"tiers.{name}"
    if isinstance(tier, RequirementsTier):
        recipe = _requirements(tier, folder, where, emit)
    else:
        recipe = _lock(tier, folder, where, emit)
    programs = programs or Programs(work)
    uv, python = programs.uv, programs.interpreter(tier.python, f"{where}.python")
    parts = [_FORMAT, compilers.FORMAT, UV_VERSION, str(python.path), python.identity, recipe.inputs, dict(tier.omit)]
    place = work / f"{name}-{_key(parts)}"
    if not (place / INVENTORY).is_file():
        try:
            work.mkdir(parents=True, exist_ok=True)
            probe_links(uv, work)
            _make(name, tier, recipe, python, uv, place, emit)
        except OSError as error:
            raise disk_error(error, f"making the environment of tier {name}") from None
    return place / name


def _key(value: Any) -> str:
    return hashlib.sha256(dump_json(value)).hexdigest()[:20]


def _read(path: Path, where: str) -> str:
    try:
        text = read_input(path, "list").decode()
    except SpecError as error:
        raise SpecError("spec.path", f"{where}: {error.message}", where=where) from None
    except UnicodeDecodeError as error:
        raise SpecError("spec.path", f"{where}: cannot read {show(str(path))}: {error}", where=where) from None
    # A checkout may have other line ends on another machine.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _requirements(tier: RequirementsTier, folder: Path, where: str, emit: Emit) -> _Recipe:
    listed = _read(folder / tier.requirements, f"{where}.requirements")
    wanted = "".join(keep_packages(listed, tier.omit, where))
    check_list(wanted, f"{where}.requirements")
    _warn_of(weakly_pinned(wanted), "the list has no hash but MD5 for", f"{where}.requirements", emit)

    def install(uv: Uv, target: Path, scratch: Path) -> None:
        file = scratch / "requirements.txt"
        file.write_text(wanted)
        with _variables(tier.build_env, uv, target, where, emit) as env:
            uv.run(
                "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--link-mode", "hardlink",
                "--no-compile-bytecode", "--python", target / "bin" / "python", "-r", file, env=env,
            )  # fmt: skip

    inputs = [wanted, tier.build_env] if tier.build_env else wanted
    return _Recipe(inputs, from_requirements(wanted), install)


def _lock(tier: LockTier, folder: Path, where: str, emit: Emit) -> _Recipe:
    project = (folder / tier.project).absolute()
    _read(project / "uv.lock", f"{where}.project")
    commit = check_commit(project, tier.commit, where)
    text, settings = (file_at(project, commit, name, f"{where}.project") for name in ("uv.lock", "pyproject.toml"))
    if tier.lock is not None and _read(folder / tier.lock, f"{where}.lock") != text:
        raise SpecError(
            "payload.lock", f"{where}: the project's uv.lock is not {show(tier.lock)}", where=f"{where}.lock"
        )
    try:
        lock = tomllib.loads(text)
        listed, local, loose = from_lock(lock), local_sources(lock), set(unpinned(lock))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SpecError("payload.lock", f"{where}: {project}/uv.lock: {error}", where=where) from None
    omitted = {normalize(package) for package in tier.omit}
    all_there(omitted - set(listed), "lock", where)
    local = {package: path for package, path in local.items() if package not in omitted}
    _check_inside(project, local, where)
    left = untracked(project, where) if tier.commit is None else ()
    if left:
        told = f"no commit has {', '.join(left[:3])}{' and more' if left[3:] else ''}, so they are left out"
        emit(Event("warning", where, message=f"{show(str(project))}: {told}"))
    _warn_of(sorted(loose - omitted), "the lock has no SHA-2 hash for", f"{where}.project", emit)
    inputs = [text, settings, list(tier.extras), commit, *([tier.build_env] if tier.build_env else [])]
    return _Recipe(inputs, listed, partial(_sync, tier, project, commit, tuple(local), where, emit))


def _warn_of(packages: Sequence[str], what: str, where: str, emit: Emit) -> None:
    if packages:
        more = f" and {len(packages) - 3} more" if packages[3:] else ""
        told = f"{what} {', '.join(packages[:3])}{more}: nothing says that what comes is what was meant"
        emit(Event("warning", where, message=told))


def _check_inside(project: Path, local: Mapping[str, str], where: str) -> None:
    """Packages of other folders have a content that the commit does not pin."""
    top = top_of(project, where).resolve()
    for package, path in local.items():
        if not (project.resolve() / path).resolve().is_relative_to(top):
            raise SpecError(
                "payload.project",
                f"{where}: the lock takes {package} from {show(path)}, outside of the checkout, where no commit says "
                "what it is: move it in, take it from a git source, or omit it",
                where=f"{where}.project",
            )


def _sync(
    tier: LockTier, project: Path, commit: str, local: tuple[str, ...], where: str, emit: Emit, uv: Uv, target: Path,
    scratch: Path,
) -> None:  # fmt: skip
    checkout = scratch / "checkout"
    # uv takes a wheel that it built from a folder for as good as new while the folder's pyproject.toml keeps its time.
    words = [
        *(word for package in local for word in ("--refresh-package", package)),
        *(word for package in sorted(tier.omit) for word in ("--no-install-package", package)),
    ]
    argv: list[str | Path] = [
        "sync", "--quiet", "--frozen", "--no-editable", "--no-install-project", "--link-mode", "hardlink",
        "--no-compile-bytecode", "--project", clone(project, commit, checkout, where), *words,
    ]  # fmt: skip
    with _variables(tier.build_env, uv, target, where, emit) as variables:
        env = {**variables, "UV_PROJECT_ENVIRONMENT": str(target)}
        # What an extra builds without isolation finds its build requirements in the environment: the plain tier first.
        uv.run(*argv, env=env)
        if tier.extras:
            uv.run(*argv, *(word for extra in tier.extras for word in ("--extra", extra)), env=env)
    remove_folder(checkout)


def build_variables(said: Mapping[str, str], target: Path) -> dict[str, str]:
    """A tier's ``build_env`` with ``{env}`` and ``{site}`` replaced: the environment, and its site-packages.

    What is built without isolation takes headers from packages that were installed before it (cuDNN's, say).
    """
    site = next(iter(sorted(target.glob("lib/python*/site-packages"))), target)
    return {name: value.replace("{env}", str(target)).replace("{site}", str(site)) for name, value in said.items()}


@contextmanager
def _variables(said: Mapping[str, str], uv: Uv, target: Path, where: str, emit: Emit) -> Iterator[dict[str, str]]:
    """What builds are given; afterwards what they did that the result does not show is told."""
    folder = target.parent / _COMPILERS
    with compilers.plain_name(folder) as name:
        yield compilers.with_compilers(name, uv.cache, target, build_variables(said, target))
        for note in compilers.notes(folder):
            emit(Event("warning", where, message=note))


def _make(name: str, tier: _Tier, recipe: _Recipe, python: Interpreter, uv: Uv, place: Path, emit: Emit) -> None:
    emit(Event("start", f"tier {name}", unit="items"))
    with making(place) as staging:
        staging.mkdir()
        target = staging / name
        uv.run("venv", "--quiet", "--relocatable", "--no-project", "--prompt", name, "--python", python.path, target)
        variables = _key([compilers.FORMAT, tier.build_env])
        drop_other_builds(uv.cache, variables)
        recipe.install(uv, target, staging)
        clear_folder(staging / _COMPILERS)
        files = origins(target, uv.cache)
        built = [package for package, origin in files.items() if origin.built]
        note_builds(uv.cache, built, variables)
        told = settle_overlaps(target, unpacked(target, uv.cache))
        settle(target, staging)
        for line in (*told, *traces(target, built, (uv.cache, staging))):
            emit(Event("warning", f"tiers.{name}", message=line))
        found = inventory(name, target, tier.omit, recipe.listed, files)
        if tier.build_env:
            # What a compiled package can do hangs on it: the architectures that its kernels are for.
            found["build_env"] = dict(sorted(tier.build_env.items()))
        (staging / INVENTORY).write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        put(staging, place, INVENTORY)
    emit(Event("done", f"tier {name}", unit="items"))


def settle(target: Path, made_in: Path) -> None:
    """Make an environment the same whenever and wherever it was made. Idempotent.

    uv's notes and the names of local origins go; modes lose the umask; what was written just now (files with one name,
    folders, links) loses its time. Files of uv's cache keep theirs: they have other names in other environments.

    Raises:
        TransportError: ``payload.prefix`` when a launcher or ``pyvenv.cfg`` names the folder it was made in.
    """
    for name in (".lock", "CACHEDIR.TAG", ".gitignore"):
        (target / name).unlink(missing_ok=True)
    for folder in target.glob("lib/python*/site-packages/*.dist-info"):
        _drop_notes(folder)
    for parent, _folders, files in os.walk(target, topdown=False):
        for entry in files:
            _settle_file(Path(parent, entry))
        for link in (e for e in os.scandir(parent) if e.is_symlink()):
            os.utime(link.path, (0, 0), follow_symlinks=False)
        os.chmod(parent, 0o755)
        os.utime(parent, (0, 0))
    for path in (target / "pyvenv.cfg", *(p for p in (target / "bin").iterdir() if p.is_file() and not p.is_symlink())):
        if os.fsencode(made_in) in path.read_bytes():
            raise TransportError("payload.prefix", f"{path.name} names the folder that it was made in", where=str(path))


def _settle_file(path: Path) -> None:
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode):
        return
    mode = _MODES[bool(found.st_mode & 0o111)]
    if stat.S_IMODE(found.st_mode) != mode:
        path.chmod(mode)
    if found.st_nlink == 1:
        os.utime(path, (0, 0))


def _drop_notes(folder: Path) -> None:
    dropped = [folder / name for name in _NOTES if (folder / name).exists()]
    origin = folder / "direct_url.json"
    # A folder of the build machine (PEP 610), of no use elsewhere and another one in each build.
    if origin.exists() and b'"file:' in origin.read_bytes():
        dropped.append(origin)
    record = folder / "RECORD"
    if dropped and record.is_file():
        gone = tuple(f"{folder.name}/{path.name}," for path in dropped)
        lines = [line for line in record.read_text().splitlines(keepends=True) if not line.startswith(gone)]
        # A new file: the old one may be a link to uv's cache.
        record.unlink()
        record.write_text("".join(lines))
    for path in dropped:
        path.unlink()
