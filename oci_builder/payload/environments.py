"""A tier's environment from pinned inputs, made by uv: a relocatable venv, hard-linked from one cache.

uv links every tier's files from the same cache, so equal files of tiers are the same inode and the plan need not read
them. Upstream declares its backend extras incompatible, so tiers are made in turn and never combined.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from email.parser import BytesHeaderParser
from pathlib import Path

from oci_builder.model.errors import SpecError, TransportError, disk_error, show
from oci_builder.model.events import Emit, Event
from oci_builder.model.jsontext import dump_json
from oci_builder.model.spec import LockTier, RequirementsTier

UV_VERSION = "0.11.18"
INVENTORY = "inventory.json"
_FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_DROPPED = ("uv_cache.json",)


def realize(name: str, tier: RequirementsTier | LockTier, folder: Path, work: Path, emit: Emit) -> Path:
    """The environment's folder; idempotent: the same inputs give the folder that stands there.

    Beside it lies ``inventory.json``: every package with its version, and what was left out with the reason.

    Raises:
        SpecError: ``spec.path`` (list, lock or interpreter), ``payload.uv`` (no uv, or another version),
            ``payload.hardlinks`` (the file system has none), ``payload.omit`` (a package that is not there).
        TransportError: ``payload.install`` with uv's own words, ``io.*``.
    """
    if isinstance(tier, LockTier):
        raise SpecError(
            "payload.project",
            f"tiers.{name}: building from a project's lock needs the toolchain of docs/payload.md; export it to a "
            "requirements list (uv export --frozen) and use requirements",
            where=f"tiers.{name}",
        )
    source = folder / tier.requirements
    try:
        listed = source.read_text()
    except OSError as error:
        raise SpecError("spec.path", f"tiers.{name}: cannot read {show(str(source))}: {error.strerror}") from None
    wanted = "".join(keep_packages(listed, tier.omit, f"tiers.{name}"))
    uv = find_uv()
    python = find_python(tier.python, uv, name)
    key = hashlib.sha256(dump_json([_FORMAT, UV_VERSION, str(python), wanted, dict(tier.omit)])).hexdigest()[:20]
    place = work / f"{name}-{key}"
    if (place / INVENTORY).is_file():
        return place / name
    try:
        work.mkdir(parents=True, exist_ok=True)
        _probe_links(work)
        _make(name, wanted, python, uv, place, tier.omit, emit)
    except OSError as error:
        raise disk_error(error, f"making the environment of tier {name}") from None
    return place / name


def keep_packages(text: str, omit: Mapping[str, str], where: str) -> Iterator[str]:
    """The lines of a requirements list without the packages that are left out.

    Raises:
        SpecError: ``payload.omit`` when one of those is not in the list: the reason would be about nothing.
    """
    left = {normalize(package) for package in omit}
    keep = True
    for line in text.splitlines(keepends=True):
        match = _NAME.match(line)
        if match:
            package = normalize(match.group())
            keep = package not in {normalize(p) for p in omit}
            left.discard(package)
        elif line.strip().startswith("#") and not line.startswith(" "):
            keep = True
        if keep:
            yield line
    if left:
        raise SpecError(
            "payload.omit", f"{where}.omit: the list has no package {sorted(left)[0]!r}", where=f"{where}.omit"
        )


def normalize(package: str) -> str:
    """PEP 503 form of a package name.

    >>> normalize("Flash_Attn")
    'flash-attn'
    """
    return re.sub(r"[-_.]+", "-", package).lower()


def find_uv() -> Path:
    """The uv program, of the version that the locks were made for.

    Raises:
        SpecError: ``payload.uv``.
    """
    beside = Path(sys.executable).with_name("uv")
    found = str(beside) if beside.is_file() else shutil.which("uv")
    if found is None:
        raise SpecError("payload.uv", f"there is no uv: pip install uv=={UV_VERSION}, or oci-builder[payload]")
    version = _run([found, "--version"], {}).split()
    if version[1:2] != [UV_VERSION]:
        raise SpecError(
            "payload.uv", f"{found} is version {' '.join(version[1:2])}, wanted {UV_VERSION}", expected=UV_VERSION
        )
    return Path(found)


def find_python(wanted: str, uv: Path, name: str) -> Path:
    """The interpreter: ``host`` (the one that runs us), a path, or a version that uv finds on this machine.

    Raises:
        SpecError: ``spec.path``.
    """
    if wanted == "host":
        return Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    if "/" in wanted:
        place = Path(wanted).expanduser()
        if not place.is_file():
            raise SpecError(
                "spec.path", f"tiers.{name}.python: there is no {show(wanted)}", where=f"tiers.{name}.python"
            )
        return place.resolve()
    try:
        found = _run([str(uv), "python", "find", "--no-project", wanted], {})
    except TransportError as error:
        raise SpecError(
            "spec.path", f"tiers.{name}.python: no Python {wanted} on this machine; name its path ({error.message})",
            where=f"tiers.{name}.python",
        ) from None  # fmt: skip
    return Path(found.strip()).resolve()


def _make(name: str, wanted: str, python: Path, uv: Path, place: Path, omit: Mapping[str, str], emit: Emit) -> None:
    emit(Event("start", f"tier {name}", unit="items"))
    staging = place.with_name(f".{place.name}.partial-{os.getpid()}")
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        (staging / "requirements.txt").write_text(wanted)
        env = {"UV_CACHE_DIR": os.environ.get("UV_CACHE_DIR") or str(place.parent / "uv-cache"), "UV_NO_PROGRESS": "1"}
        target = staging / name
        _run([str(uv), "venv", "--quiet", "--relocatable", "--prompt", name, "--python", str(python), str(target)], env)
        _run(
            [
                str(uv), "pip", "install", "--quiet", "--no-deps", "--require-hashes", "--link-mode", "hardlink",
                "--no-compile-bytecode", "--python", str(target / "bin" / "python"),
                "-r", str(staging / "requirements.txt"),
            ],
            env,
        )  # fmt: skip
        _settle(target, staging)
        inventory = {"tier": name, "packages": list(packages(target)), "omitted": dict(sorted(omit.items()))}
        (staging / INVENTORY).write_text(json.dumps(inventory, indent=1, sort_keys=True) + "\n")
        shutil.rmtree(place, ignore_errors=True)
        staging.rename(place)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    emit(Event("done", f"tier {name}", unit="items"))


def _settle(target: Path, staging: Path) -> None:
    """Remove what differs from one run to the next, and make sure that nothing names the folder it was made in."""
    for path in target.rglob("*.dist-info/*"):
        if path.name in _DROPPED:
            path.unlink()
    for lock in (target / ".lock", target / "CACHEDIR.TAG", target / ".gitignore"):
        lock.unlink(missing_ok=True)
    # The venv's own files were written now; their times would make each build another.
    for path in [target, *target.rglob("*")]:
        if path.is_dir() and not path.is_symlink():
            os.utime(path, (0, 0))
    for path in (target / "pyvenv.cfg", *(p for p in (target / "bin").iterdir() if not p.is_symlink())):
        text = path.read_bytes()
        if os.fsencode(staging) in text:
            raise TransportError("payload.prefix", f"{path.name} names the folder that it was made in", where=str(path))
        fresh = path.with_name(path.name + ".new")
        fresh.write_bytes(text)
        fresh.chmod(path.stat().st_mode & 0o777 | 0o644)
        os.utime(fresh, (0, 0))
        fresh.replace(path)
    for record in target.rglob("*.dist-info/*"):
        os.utime(record, (0, 0))


def packages(env: Path) -> Iterator[dict[str, str]]:
    """Name, version and licence of every distribution in an environment, sorted by name."""
    found = []
    for path in env.glob("lib/python*/site-packages/*.dist-info/METADATA"):
        with open(path, "rb") as file:
            headers = BytesHeaderParser().parse(file)
        licence = headers.get("License-Expression") or headers.get("License") or ""
        found.append(
            {
                "name": normalize(str(headers["Name"])),
                "version": str(headers["Version"]),
                "licence": str(licence).splitlines()[0][:120] if licence else "",
            }
        )
    yield from sorted(found, key=lambda item: item["name"])


def _probe_links(work: Path) -> None:
    one, two = work / f".probe-{os.getpid()}", work / f".probe-{os.getpid()}-link"
    try:
        one.write_bytes(b"")
        os.link(one, two)
    except OSError as error:
        raise SpecError(
            "payload.hardlinks", f"{work} has no hard links ({error.strerror}), and tiers share files by them; choose "
            "another --cache", where=str(work),
        ) from None  # fmt: skip
    finally:
        one.unlink(missing_ok=True)
        two.unlink(missing_ok=True)


def _run(argv: list[str], env: Mapping[str, str]) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in ("VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(argv, capture_output=True, text=True, env={**kept, **env}, check=False)
    if done.returncode:
        words = (done.stderr or done.stdout).strip()[-1500:]
        raise TransportError("payload.install", f"{Path(argv[0]).name} {' '.join(argv[1:3])}: {words}")
    return done.stdout
