#!/usr/bin/env python3
"""Add NEMO_RL_PREBUILT_ENV_ROOT to a source tree of NeMo RL v0.7.0.

    python3 apply.py SOURCE_TREE [--check] [--json]
    python3 apply.py ENVIRONMENT --packages [--check] [--json]

Lines are added to a source tree, none is changed or removed; ``overlay.json`` says where, and the SHA-256 that each
file must have. With ``--packages`` the fixes that upstream writes into installed packages at a worker's start are there
before: upstream then finds nothing to do, which a prefix that cannot be written needs. They name no path, so the prefix
may move. A package of another version stays as it is, and is named.
What is done already stays as it is. One file that is neither pristine nor patched, and nothing is written.
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
    """The file with lines added, each after the line (from 1) that it names, in place of the next ``drop`` ones."""
    lines = data.splitlines(keepends=True)
    for one in sorted(insertions, key=lambda i: -i["after"]):
        end = one["after"] + one.get("drop", 0)
        lines[one["after"] : end] = [line.encode() + b"\n" for line in one["lines"]]
    return b"".join(lines)


def plan_files(tree: Path, targets: list[dict[str, Any]], wrong: list[str]) -> dict[Path, bytes]:
    """Path -> new content, for what is not as it should be; what is neither pristine nor patched goes to ``wrong``."""
    out = {}
    for target in targets:
        path = tree / target["path"]
        data = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        found = hashlib.sha256(data).hexdigest()
        if found == target["sha256"]:
            out[path] = patched(data, target["insert"])
        elif found != target["patched"]:
            wrong.append(f"{target['path']} (sha256 {found})")
    return out


def plan(tree: Path, overlay: dict[str, Any]) -> dict[Path, bytes]:
    """The same of a source tree, new files included.

    Raises:
        WrongSource: names every file that is neither pristine nor patched.
    """
    wrong: list[str] = []
    out = plan_files(tree, overlay["files"], wrong)
    for new in overlay["new"]:
        path, data = tree / new["path"], (HERE / new["from"]).read_bytes()
        if not path.exists():
            out[path] = data
        elif path.read_bytes() != data:
            wrong.append(f"{new['path']} (there already, and different)")
    if wrong:
        raise WrongSource(f"this is not {overlay['name']} {overlay['commit'][:12]}: " + ", ".join(wrong))
    return out


def version_in(site: Path, package: str) -> str:
    """Of an installed package; empty without it."""
    for metadata in site.glob(f"{package.replace('-', '_')}-*.dist-info/METADATA"):
        for line in metadata.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("Version:"):
                return line.partition(":")[2].strip()
    return ""


def plan_packages(env: Path, overlay: dict[str, Any]) -> tuple[dict[Path, bytes], list[dict[str, Any]], list[str]]:
    """Path -> new content of an environment's packages; the fixes that they then have; packages of other versions.

    Raises:
        WrongSource: names every file that is neither pristine nor patched.
    """
    out: dict[Path, bytes] = {}
    fixed: list[dict[str, Any]] = []
    other: list[str] = []
    wrong: list[str] = []
    for site in sorted(env.glob("lib/python3*/site-packages")):
        for fix in overlay.get("packages", []):
            version = version_in(site, fix["package"])
            if version != fix["version"]:
                other += [f"{fix['package']} {version}"] * bool(version)
                continue
            out.update(plan_files(site, [fix], wrong))
            place = (site / fix["path"]).relative_to(env)
            fixed.append({k: v for k, v in fix.items() if k != "insert"} | {"path": str(place)})
    if wrong:
        raise WrongSource("these files are not those of the versions that they say: " + ", ".join(wrong))
    return out, fixed, sorted(set(other))


def write(changes: dict[Path, bytes], times: bool = False) -> None:
    """Each file anew and renamed: another name of the old file keeps the old content. ``times``: and keeps its time."""
    for path, data in changes.items():
        fresh = path.with_name(f".{path.name}.overlay")
        fresh.write_bytes(data)
        found = path.stat() if path.exists() else None
        os.chmod(fresh, found.st_mode & 0o777 if found else 0o644)
        if times and found:
            os.utime(fresh, ns=(found.st_mtime_ns, found.st_mtime_ns))
        os.replace(fresh, path)


def relative(tree: Path, changes: dict[Path, bytes]) -> Iterator[str]:
    """Names of changed files, sorted."""
    yield from sorted(str(path.relative_to(tree)) for path in changes)


def main(argv: list[str]) -> int:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(prog="apply.py", description="Add prebuilt interpreters to NeMo RL's source.")
    parser.add_argument("tree", type=Path)
    parser.add_argument("--packages", action="store_true", help="TREE is an environment: fix its packages")
    parser.add_argument("--check", action="store_true", help="change nothing; 1 when there is something to do")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if not options.tree.is_dir():
        parser.error(f"there is no folder {options.tree}")
    about: dict[str, Any] = {}
    try:
        overlay = json.loads((HERE / "overlay.json").read_text())
        if options.packages:
            changes, about["fixed"], about["other"] = plan_packages(options.tree, overlay)
        else:
            changes = plan(options.tree, overlay)
        if not options.check:
            write(changes, times=options.packages)
    except (WrongSource, OSError) as error:
        print(f"apply.py: {error}", file=sys.stderr)
        return 3
    names = list(relative(options.tree, changes))
    if options.json:
        print(json.dumps({"changed": names, "applied": not options.check, **about}))
    else:
        print("".join(f"{name}\n" for name in names), end="")
        for name in about.get("other", ()):
            print(f"apply.py: {name} is another version than the fixes are for; it stays as it is", file=sys.stderr)
    return 1 if options.check and names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
