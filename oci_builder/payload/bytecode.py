"""Bytecode for a whole runtime: made once for each source, hard-linked wherever the source stands again.

Checked by hash: normalised times would make bytecode that is checked by time stale (field report B155), and unchecked
bytecode would hide sources that are patched at run time.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from oci_builder.model.errors import TransportError

WORKER = Path(__file__).with_name("bytecode_worker.py")
_SITE = ("site-packages", "dist-packages")


@dataclass(frozen=True, slots=True)
class Compiled:
    """How many sources were compiled now, had been before, and cannot be compiled (templates, for one)."""

    made: int
    kept: int
    left: int


def compile_tree(root: Path, python: Path, cache: Path, jobs: int) -> Compiled:
    """Compile every module below ``lib/python*`` folders of a runtime. Idempotent; equal sources share one file.

    Args:
        python: the interpreter that the bytecode is for.
        cache: folder on the same file system, used again by later builds.

    Raises:
        TransportError: ``payload.bytecode`` when the interpreter fails, ``io.*``.
    """
    wanted = [json.dumps([path, name]) for path, name in sources(root)]
    # Another worker may write other bytes.
    cache /= hashlib.sha256(WORKER.read_bytes()).hexdigest()[:12]
    cache.mkdir(parents=True, exist_ok=True)
    shares = [wanted[start::jobs] for start in range(max(1, jobs))]
    with ThreadPoolExecutor(max(1, jobs)) as pool:
        done = list(pool.map(lambda share: _run(python, cache, share), shares))
    return Compiled(*(sum(part[key] for part in done) for key in ("made", "kept", "left")))


def sources(root: Path) -> Iterator[tuple[str, str]]:
    """Path and name-in-the-bytecode of every module; the name does not depend on the tier or the prefix."""
    for library in sorted({*root.glob("envs/*/lib/python*"), *root.glob("python/lib/python*")}):
        for folder, below, names in os.walk(library):
            below[:] = sorted(b for b in below if b != "__pycache__")
            parts = Path(folder).relative_to(library).parts
            inner = parts[1:] if parts[:1] and parts[0] in _SITE else parts
            for name in sorted(names):
                path = os.path.join(folder, name)
                if name.endswith(".py") and not os.path.islink(path):
                    yield path, "/".join((*inner, name))


def _run(python: Path, cache: Path, share: list[str]) -> dict[str, int]:
    # The seed decides the order of sets among the constants; isolated mode would ignore it.
    env = {"PATH": os.defpath, "PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8"}
    argv = [str(python), "-s", "-S", "-B", str(WORKER), str(cache)]
    done = subprocess.run(argv, input="\n".join(share), capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise TransportError("payload.bytecode", f"{python} compiles nothing: {done.stderr.strip()[-500:]}")
    found: dict[str, int] = json.loads(done.stdout)
    return found
