#!/usr/bin/env python3
"""Add NEMO_RL_PREBUILT_ENV_ROOT to a source tree of NeMo RL v0.7.0.

    python3 apply.py SOURCE_TREE [--check] [--json]

Lines are added, none is changed or removed; ``overlay.json`` says where, and the SHA-256 that each file must have. A
tree that has the overlay already stays as it is. One file that is neither pristine nor patched, and nothing is written.
Exit status: 0 applied or there already, 1 ``--check`` and not applied, 2 wrong arguments, 3 another source.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class WrongSource(Exception):
    """The tree is not what the overlay was made for."""


def patched(data: bytes, insertions: list[dict[str, Any]]) -> bytes:
    """The file with lines added, each after the line (from 1) that it names."""
    lines = data.splitlines(keepends=True)
    for one in sorted(insertions, key=lambda i: -i["after"]):
        lines[one["after"] : one["after"]] = [line.encode() + b"\n" for line in one["lines"]]
    return b"".join(lines)


def plan(tree: Path, overlay: dict[str, Any]) -> dict[Path, bytes]:
    """Path -> new content, for what is not as it should be.

    Raises:
        WrongSource: names every file that is neither pristine nor patched.
    """
    out, wrong = {}, []
    for target in overlay["files"]:
        path = tree / target["path"]
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found = hashlib.sha256(data).hexdigest()
        if found == target["sha256"]:
            out[path] = patched(data, target["insert"])
        elif found != target["patched"]:
            wrong.append(f"{target['path']} (sha256 {found})")
    for new in overlay["new"]:
        path, data = tree / new["path"], (HERE / new["from"]).read_bytes()
        if not path.exists():
            out[path] = data
        elif path.read_bytes() != data:
            wrong.append(f"{new['path']} (there already, and different)")
    if wrong:
        raise WrongSource(f"this is not {overlay['name']} {overlay['commit'][:12]}: " + ", ".join(wrong))
    return out


def write(changes: dict[Path, bytes]) -> None:
    """Each file anew and renamed: another name of the old file keeps the old content."""
    for path, data in changes.items():
        fresh = path.with_name(f".{path.name}.overlay")
        fresh.write_bytes(data)
        os.chmod(fresh, path.stat().st_mode & 0o777 if path.exists() else 0o644)
        os.replace(fresh, path)


def relative(tree: Path, changes: dict[Path, bytes]) -> Iterator[str]:
    """Names of changed files, sorted."""
    yield from sorted(str(path.relative_to(tree)) for path in changes)


def main(argv: list[str]) -> int:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(prog="apply.py", description="Add prebuilt interpreters to NeMo RL's source.")
    parser.add_argument("tree", type=Path)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 when there is something to do")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if not options.tree.is_dir():
        parser.error(f"there is no folder {options.tree}")
    try:
        changes = plan(options.tree, json.loads((HERE / "overlay.json").read_text()))
        if not options.check:
            write(changes)
    except (WrongSource, OSError) as error:
        print(f"apply.py: {error}", file=sys.stderr)
        return 3
    names = list(relative(options.tree, changes))
    if options.json:
        print(json.dumps({"changed": names, "applied": not options.check}))
    elif names:
        print("\n".join(names))
    return 1 if options.check and names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
