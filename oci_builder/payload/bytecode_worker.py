"""Compiles for the interpreter that runs it: a program of its own, standard library only, Python 3.10 or later.

Standard input: one JSON array a line, ``[source file, its name in the bytecode]``. Argument: the cache folder. Standard
output: ``{"made": N, "kept": N, "left": N}``. Bytecode is checked by the source's hash, so it stays valid whatever
happens to times, and a patched source is compiled again.
"""

from __future__ import annotations

import hashlib
import importlib._bootstrap_external as external
import importlib.util
import json
import os
import sys
import types
from typing import Any

COUNTS = {"made": 0, "kept": 0, "left": 0}


def bytecode(source: bytes, name: str) -> bytes | None:
    """The bytecode file's content; None for what this Python cannot compile (templates, other Pythons' code)."""
    held: list[object] = []
    try:
        code = settled(compile(source, name, "exec", dont_inherit=True, optimize=0), held)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    made = external._code_to_hash_pyc(code, importlib.util.source_hash(source), True)  # type: ignore[attr-defined]
    return bytes(made)


def settled(code: types.CodeType, held: list[object]) -> types.CodeType:
    """The same code with all strings among its constants interned, as Python 3.14 has them; ``held`` gets every string.

    marshal writes down which strings are interned and which somebody else holds, and older compilers let both depend on
    what else the process has compiled. So all are interned, and all are held while they are written.
    """
    # Python 3.10 has no co_qualname.
    own: dict[str, Any] = {
        field: sys.intern(getattr(code, field))
        for field in ("co_name", "co_qualname", "co_filename")
        if hasattr(code, field)
    }
    held += [*code.co_names, *code.co_varnames, *code.co_freevars, *code.co_cellvars, *own.values()]
    return code.replace(co_consts=tuple(_constant(value, held) for value in code.co_consts), **own)


def _constant(value: object, held: list[object]) -> object:
    if type(value) is str:
        held.append(sys.intern(value))
        return held[-1]
    if type(value) is tuple:
        return tuple(_constant(item, held) for item in value)
    if type(value) is frozenset:
        return frozenset(_constant(item, held) for item in value)
    return settled(value, held) if isinstance(value, types.CodeType) else value


def cached(cache: str, source: bytes, name: str) -> str | None:
    """The file with the bytecode of this source under this name: one for all that have both."""
    key = hashlib.sha256(name.encode("utf-8", "surrogateescape") + b"\0" + source).hexdigest()
    place = os.path.join(cache, key[:2], key[2:])
    if os.path.exists(place):
        COUNTS["kept"] += 1
        return place if os.path.getsize(place) else None
    made = bytecode(source, name)
    os.makedirs(os.path.dirname(place), exist_ok=True)
    fresh = f"{place}.{os.getpid()}"
    with open(fresh, "wb") as file:
        file.write(made or b"")
    os.chmod(fresh, 0o644)
    os.utime(fresh, (0, 0))
    try:
        # Never over a file that is there: another worker may be giving it a second name just now.
        os.link(fresh, place)
    except FileExistsError:
        pass
    os.unlink(fresh)
    COUNTS["made"] += 1
    return place if made else None


def one(cache: str, path: str, name: str) -> None:
    """Give one source file its bytecode."""
    with open(path, "rb") as file:
        place = cached(cache, file.read(), name)
    if place is None:
        COUNTS["left"] += 1
        return
    target = importlib.util.cache_from_source(path, optimization="")
    os.makedirs(os.path.dirname(target), exist_ok=True)
    try:
        os.link(place, target)
    except FileExistsError:
        os.unlink(target)
        os.link(place, target)


def main() -> None:
    """Read the list, work, report."""
    import warnings

    warnings.simplefilter("ignore")
    for line in sys.stdin:
        path, name = json.loads(line)
        one(sys.argv[1], path, name)
    print(json.dumps(COUNTS))


main()
