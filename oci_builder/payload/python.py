"""The interpreter that a runtime ships: a copy of what is needed of a Python, under the prefix.

An environment is a link to an interpreter. When the base brings none at the same path, the runtime brings it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from oci_builder.model.errors import SpecError, disk_error, show
from oci_builder.model.events import Emit, Event
from oci_builder.model.jsontext import dump_json
from oci_builder.payload.partial import beside, making, put
from oci_builder.payload.uv import Interpreter

_FORMAT = 4
_ASK = """
import json, sys, sysconfig
v = "%d.%d" % sys.version_info[:2]
p = sysconfig.get_paths()
print(json.dumps({"version": v, "prefix": sys.base_prefix, "stdlib": p["stdlib"], "platstdlib": p["platstdlib"],
                  "include": p["include"]}))
"""
_SHARED_PREFIXES = ("/", "/usr", "/usr/local")
# Of the standard library: tests, what needs a display, what makes or fills environments, static libraries.
_LEFT_OUT = (
    "__pycache__", "*/__pycache__", "site-packages/*", "dist-packages/*", "test", "*/tests", "*/test", "*/idle_test",
    "idlelib", "tkinter", "turtledemo", "turtle.py", "ensurepip", "*.a", "*.exe", "lib-dynload/_tkinter.*",
    "lib-dynload/_test*", "lib-dynload/xx*", "EXTERNALLY-MANAGED", "sitecustomize.py",
)  # fmt: skip


def stage_python(interpreter: Interpreter, work: Path, emit: Emit) -> Path:
    """A folder with ``bin``, ``lib`` and ``include`` of this interpreter, the libraries it was linked to included.

    Its paths still name where it came from.

    Idempotent: the same interpreter with the same libraries of the machine gives the folder that stands there; when one
    of these was upgraded, another folder.

    Raises:
        SpecError: ``spec.path`` when it has no standard library, ``payload.patchelf`` when its libraries must come with
            it and there is no patchelf.
        TransportError: ``payload.patchelf``, ``io.*``.
    """
    identity = _digest([_FORMAT, str(interpreter.path), interpreter.identity])
    record = work / f"python-{identity}.json"
    place = _standing(record)
    if place is not None:
        return place
    from oci_builder.payload.python_libraries import carry_libraries  # brings elftools, of no use when nothing is made

    about = describe(interpreter.path)
    emit(Event("start", "python", unit="items"))
    try:
        with making(work / f"python-{identity}") as staging:
            _copy_all(interpreter.path, about, staging)
            _bring_in(staging, interpreter.path, Path(about["prefix"]))
            carried = carry_libraries(staging, emit, Path(about["prefix"]))
            settle_copy(staging)
            place = _settle_place(record, staging, {str(path): _content(path) for path in carried.values()})
    except OSError as error:
        raise disk_error(error, f"copying {interpreter.path}") from None
    emit(Event("done", "python", unit="items"))
    return place


def _standing(record: Path) -> Path | None:
    """The copy that a record names, when the libraries in it are still the machine's."""
    try:
        known = json.loads(record.read_bytes())
        place = record.with_name(known["name"])
        same = all(_content(Path(path)) == content for path, content in known["libraries"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return place if same and place.is_dir() else None


def _settle_place(record: Path, staging: Path, libraries: Mapping[str, str]) -> Path:
    """Give a finished copy the name that its libraries make, and note it."""
    place = record.with_name(f"{record.stem}-{_digest(dict(libraries))}")
    put(staging, place)
    fresh = beside(record)
    fresh.write_bytes(dump_json({"name": place.name, "libraries": dict(libraries)}))
    fresh.replace(record)
    return place


def _digest(value: Any) -> str:
    return hashlib.sha256(dump_json(value)).hexdigest()[:20]


def _content(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def describe(python: Path) -> dict[str, Any]:
    """Version (``3.13``), prefix and folders of an interpreter, as it says itself.

    Raises:
        SpecError: ``spec.path``.
    """
    done = subprocess.run([str(python), "-I", "-c", _ASK], capture_output=True, text=True, check=False)
    try:
        about = json.loads(done.stdout)
        if not Path(about["stdlib"]).is_dir():
            raise ValueError(f"no standard library at {about['stdlib']}")
    except (ValueError, KeyError) as error:
        raise SpecError("spec.path", f"{show(str(python))} is no Python to ship: {error}", where=str(python)) from None
    return dict(about)


def original_names(python: Path) -> dict[str, str]:
    """Absolute path that an interpreter's own files name -> what it is below the staged copy, ``""`` for all of it.

    A prefix of its own stands for all that is in it. A distribution's Python shares ``/usr`` with everybody, so that
    only its own folders are meant.

    Raises:
        SpecError: ``spec.path``.
    """
    about = describe(python)
    if about["prefix"] not in _SHARED_PREFIXES:
        return {about["prefix"]: ""}
    name = f"python{about['version']}"
    programs = dict.fromkeys(
        (f"{about['prefix']}/bin/python3", f"{about['prefix']}/bin/{name}", str(python)), f"bin/{name}"
    )
    folders = dict.fromkeys((about["stdlib"], about["platstdlib"]), f"lib/{name}")
    return {**folders, **programs, about["include"]: f"include/{Path(about['include']).name}"}


def _copy_all(python: Path, about: dict[str, Any], target: Path) -> None:
    version, prefix = about["version"], Path(about["prefix"])
    (target / "bin").mkdir(parents=True)
    shutil.copyfile(python, target / f"bin/python{version}")
    (target / f"bin/python{version}").chmod(0o755)
    for name in ("python", "python3"):
        (target / "bin" / name).symlink_to(f"python{version}")
    for stdlib in sorted({about["stdlib"], about["platstdlib"]}):
        _copy_tree(Path(stdlib), target / f"lib/python{version}", _LEFT_OUT)
    (target / f"lib/python{version}/site-packages").mkdir(exist_ok=True)
    include = Path(about["include"])
    if include.is_dir():
        _copy_tree(include, target / "include" / include.name, ("__pycache__",))
    for pattern in (f"lib/libpython{version}*.so*", "lib/libpython3.so", f"lib/pkgconfig/python*{version}*.pc",
                    f"bin/python{version}-config"):  # fmt: skip
        for found in sorted(prefix.glob(pattern)):
            fresh = target / found.relative_to(prefix)
            fresh.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, fresh, follow_symlinks=False)


def _copy_tree(source: Path, target: Path, left_out: tuple[str, ...]) -> None:
    def ignore(folder: str, names: list[str]) -> Iterator[str]:
        below = os.path.relpath(folder, source)
        for name in names:
            path = name if below == "." else f"{below}/{name}"
            if any(fnmatchcase(path, pattern) for pattern in left_out):
                yield name

    shutil.copytree(source, target, symlinks=True, ignore=lambda f, n: set(ignore(f, n)), dirs_exist_ok=True)


def _bring_in(root: Path, python: Path, prefix: Path) -> None:
    """Links that lead out of the copy become the file that they led to; those that led nowhere go."""
    names, top = original_names(python), os.path.realpath(root)
    for place in sorted(p for p in root.rglob("*") if p.is_symlink()):
        target = os.readlink(place)
        former = Path(os.path.normpath(prefix / place.relative_to(root).parent / target))
        if target.startswith("/") and any(former.is_relative_to(name) for name in names):
            continue  # relocation makes it relative
        if os.path.exists(place) and os.path.realpath(place).startswith(top + "/"):
            continue
        place.unlink()
        if former.is_file():
            shutil.copy(former, place)


def settle_copy(root: Path) -> None:
    """Modes without the umask, and no times of today: the same copy whenever and wherever it is made."""
    for parent, folders, files in os.walk(root, topdown=False):
        for name in [*files, *folders]:
            path = os.path.join(parent, name)
            if os.path.isfile(path) and not os.path.islink(path):
                os.chmod(path, 0o755 if os.stat(path).st_mode & 0o100 else 0o644)
            os.utime(path, (0, 0), follow_symlinks=False)
        os.chmod(parent, 0o755)
        os.utime(parent, (0, 0))
