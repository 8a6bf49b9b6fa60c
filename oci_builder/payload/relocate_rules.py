"""Relocation rules, pure: bytes of one file or link in, the bytes that work from any prefix out; None leaves it alone.

Each rule is idempotent: what it gives, it leaves alone.
"""

from __future__ import annotations

import json
import os
import posixpath
import re
from collections.abc import Callable
from dataclasses import dataclass

# What may follow a prefix when it is really that folder, and not the first letters of another one.
WORD = frozenset(bytes([byte]) for byte in range(128) if chr(byte).isalnum() or byte in b"._+@=-")
_END = rb"(?![A-Za-z0-9._+@=-])"
_INTERPRETER = re.compile(rb"#![ \t]*(\S*/)?(python[0-9.]*)([ \t][^\n]*)?\n")
# uv's and distlib's launchers where the interpreter's path is too long or has a space.
_LAUNCHER = re.compile(rb"#!/bin/sh\n'''exec' [\"']?(/[^\"'\n]*/python[0-9.]*)[\"']? \"\$0\" \"\$@\"\n' '''\n")
_HOME = re.compile(rb"^home *=.*\n?", re.MULTILINE)
_COMMAND = re.compile(rb"^(executable|command|base-[a-z-]+) *=.*\n?", re.MULTILINE)
_SITE = re.compile(rb"(?P<env>(?:.*/)?)(?P<site>lib/python[0-9.]+/site-packages)/(?P<rest>.+)\Z", re.DOTALL)
_CONFIGURATION = re.compile(
    rb"(?:_sysconfigdata[^/]*\.(?:py|json)|[^/]*\.pc|[^/]*\.la|[^/]*\.cmake|python[0-9.]*-config|"
    rb"_sysconfig_vars[^/]*\.json)\Z|.*/config-[^/]*/Makefile\Z"
)


@dataclass(frozen=True, slots=True)
class Prefixes:
    """The names that the tree and its parts have.

    Attributes:
        built: (absolute path, place below the root): where the tree stands or stood while it was made (place ``b""``),
            and where parts of it came from, as an interpreter that was copied to ``python``. Longest path first.
        final: where it will live; configuration files name it. Nothing needs it to run.
    """

    built: tuple[tuple[bytes, bytes], ...]
    final: bytes

    def inside(self, path: bytes) -> bytes | None:
        """An absolute path as one below the root, or None when it is not."""
        path = posixpath.normpath(path)
        for name, place in self.built:
            if path == name or path.startswith(name + b"/"):
                return posixpath.join(place, path[len(name) + 1 :]).rstrip(b"/")
        return None

    def named(self, data: bytes) -> bool:
        """Does a file's content hold one of the paths?"""
        return bool(self._pattern().search(data))

    def as_final(self, data: bytes) -> bytes:
        """The content with each of the paths as it will be."""
        places = dict(self.built)
        return self._pattern().sub(lambda m: posixpath.join(self.final, places[m[0]]).rstrip(b"/"), data)

    def _pattern(self) -> re.Pattern[bytes]:
        return re.compile(b"(?:" + b"|".join(re.escape(name) for name, _ in self.built) + b")" + _END)


def relative(path: bytes, target: bytes) -> bytes:
    """``target`` as seen from the folder of ``path``; both below the root.

    >>> relative(b"envs/base/bin/python", b"python/bin/python3.13")
    b'../../../python/bin/python3.13'
    """
    return posixpath.relpath(b"/" + target, b"/" + posixpath.dirname(path))


def launcher(path: bytes, data: bytes, prefixes: Prefixes) -> bytes | None:
    """A script whose interpreter is in the tree, started through the interpreter's place beside the script.

    A ``#!`` line takes no relative path, no space and at most 127 bytes, so sh finds the interpreter: sh reads the
    script up to its ``exec``, Python reads that part as a string literal with the program after it.
    """
    match = _LAUNCHER.match(data) or _INTERPRETER.match(data)
    if match is None:
        return None
    named = match[1] if match.re is _LAUNCHER else (match[1] or b"") + match[2]
    inside = prefixes.inside(named) if named.startswith(b"/") else None
    if inside is None:
        return None
    return (
        b"#!/bin/sh\n'''exec' \"$(dirname -- \"$(realpath -- \"$0\")\")\"/'" + relative(path, inside)
        + b"' \"$0\" \"$@\"\n' '''\n" + data[match.end() :]
    )  # fmt: skip


def venv_settings(data: bytes, prefixes: Prefixes, home: bytes | None) -> bytes | None:
    """``pyvenv.cfg`` without paths of the build.

    An interpreter without ``home`` follows its own link (cpython#135831; the same with 3.9 to 3.13 when it was tried),
    so the key goes.

    Args:
        home: folder of the real interpreter below the root; None when it is outside, and then ``home`` stays.
    """
    out = _COMMAND.sub(lambda m: b"" if prefixes.named(m[0]) else m[0], data)
    if home is not None:
        out = _HOME.sub(b"", out)
    return None if out == data else out


def is_configuration(path: bytes) -> bool:
    """A file that tells compilers and build tools where things are."""
    return bool(_CONFIGURATION.match(posixpath.basename(path)) or _CONFIGURATION.match(path))


def configuration(data: bytes, prefixes: Prefixes) -> bytes | None:
    """Such a file with the final prefix instead of the build's."""
    out = prefixes.as_final(data)
    return None if out == data else out


def path_file(path: bytes, data: bytes, prefixes: Prefixes) -> bytes | None:
    """A ``.pth`` file whose absolute lines into the tree are relative to its folder (site.py joins them so)."""
    lines = []
    for line in data.splitlines(keepends=True):
        inside = prefixes.inside(line.rstrip()) if line.startswith(b"/") else None
        lines.append(line if inside is None else relative(path, inside) + b"\n")
    out = b"".join(lines)
    return None if out == data else out


def is_local_origin(data: bytes, prefixes: Prefixes) -> bool:
    """Does a ``direct_url.json`` (PEP 610) name a folder of the build machine?"""
    try:
        url = str(json.loads(data).get("url", ""))
    except (ValueError, AttributeError):
        return prefixes.named(data)
    return url.startswith("file:")


def runpath(
    path: bytes,
    entries: tuple[str, ...],
    prefixes: Prefixes,
    system: tuple[str, ...],
    has: Callable[[bytes], bool] = lambda _: False,
) -> str | None:
    """A library's search path, with places in the tree relative to the library and strays of build machines gone.

    Args:
        entries: DT_RUNPATH or DT_RPATH, in order.
        system: absolute folders that every machine has; they stay.
        has: is there a folder of this path below the root?
    """
    out: list[str] = []
    for entry in entries:
        if entry.startswith("/"):
            inside = _same_environment(path, os.fsencode(entry), has) or prefixes.inside(os.fsencode(entry))
            if inside is not None:
                entry = f"$ORIGIN/{os.fsdecode(relative(path, inside))}".removesuffix("/.")
            elif entry.rstrip("/") not in system:
                continue
        elif not entry.startswith(("$ORIGIN", "${ORIGIN}")):
            # Relative to whoever's working folder, an empty one included: nobody means that.
            continue
        if entry not in out:
            out.append(entry)
    return None if out == list(entries) else ":".join(out)


def _same_environment(path: bytes, entry: bytes, has: Callable[[bytes], bool]) -> bytes | None:
    """A folder of some environment's packages as the folder of the library's own environment, if that has it.

    uv's cache carries what was built in one environment into others, and into builds to come: the environment that the
    search path names may be another tier, or gone.
    """
    own, named = _SITE.match(path), _SITE.match(posixpath.normpath(entry))
    if own is None or named is None or own["site"] != named["site"]:
        return None
    inside = posixpath.join(own["env"], own["site"], named["rest"])
    return inside if has(inside) else None
