#!/usr/bin/env python3
"""Is this host fit for the runtime in this folder, and does the runtime work here?

    python3 check_runtime.py [--imports] [--gpu] [--cluster] [--tier NAME]... [--json FILE] [--prefix DIR]

Without options: the host (Linux x86_64, glibc, driver, compiler, memory for collectives) and the installation.
``--imports`` imports every tier, ``--gpu`` runs the checks on all visible GPUs (zero is a failure), ``--cluster`` asks
every node of the running Ray cluster whether it has the same runtime under the same absolute path.
What a build left out is named as skipped, with its reason. Python 3.10 or later, standard library only.
Exit status: 0 nothing failed, 1 a check said no, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

if sys.version_info < (3, 10):
    print("check_runtime.py: needs Python 3.10 or later: take envs/base/bin/python beside it", file=sys.stderr)
    sys.exit(2)
# Bytecode written here would be a stranger in the installation, and ``-I`` leaves this folder out of the path.
sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent))

from runtime_check.cluster import cluster_rows  # noqa: E402
from runtime_check.gpus import gpu_rows  # noqa: E402
from runtime_check.host import host_rows  # noqa: E402
from runtime_check.installation import installation_rows  # noqa: E402
from runtime_check.rows import Row, at_home, installed, row  # noqa: E402
from runtime_check.shipped import shipped_rows  # noqa: E402

SCHEMA = "nrl-check-runtime/1"


def collect(options: argparse.Namespace) -> list[Row]:
    """All rows that were asked for."""
    prefix = at_home(Path(os.path.abspath(options.prefix)))
    envs = prefix / "envs"
    there = sorted(p.name for p in envs.iterdir() if (p / "bin").is_dir()) if envs.is_dir() else []
    tiers = options.tier or sorted(there, key=lambda t: (t != "base", t))
    rows = [*host_rows(options.gpu), *installation_rows(prefix, tiers)]
    startable = {r["name"] for r in rows if r["outcome"] == "pass"}
    usable = [t for t in tiers if f"interpreter:{t}" in startable]
    if usable and options.imports and not options.gpu:
        rows += shipped(prefix, usable, ["container-check"], r"imports?:")
    if options.gpu:
        found, count = gpu_rows(prefix)
        rows += found
        stages = ["single", "nccl"] if count > 1 else ["single"]
        rows += shipped(prefix, usable, stages, "", count) if usable and count else []
    if options.cluster:
        rows += cluster_rows(prefix)
    return rows


def shipped(prefix: Path, tiers: Sequence[str], stages: Sequence[str], only: str, gpus: int = 0) -> list[Row]:
    """Their rows, or one that says why they could not be run: no folder for temporary files, a full disk."""
    try:
        return shipped_rows(prefix, tiers, stages, only, gpus)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return [row("checks", False, f"they cannot be run here: {error}")]


def table(rows: Sequence[Row]) -> str:
    """One line a row, and the count."""
    width = max(len(r["name"]) for r in rows)
    lines = [f"{r['outcome']:<8} {r['name']:<{width}}  {r['reason'][:300]}".rstrip() for r in rows]
    counts = {o: sum(r["outcome"] == o for r in rows) for o in ("pass", "fail", "deferred", "skipped")}
    return "\n".join([*lines, ", ".join(f"{n} {o}" for o, n in counts.items() if n)])


def main(argv: Sequence[str]) -> int:
    """See the module's documentation."""
    parser = argparse.ArgumentParser(prog="check_runtime.py", description=str(__doc__).splitlines()[0])
    parser.add_argument("--imports", action="store_true", help="import every tier; what needs the driver is deferred")
    parser.add_argument("--gpu", action="store_true", help="run the checks on this node's GPUs, imports included")
    parser.add_argument("--cluster", action="store_true", help="compare all nodes of the running Ray cluster")
    parser.add_argument("--tier", action="append", default=[], help="only this tier (may be repeated)")
    parser.add_argument("--prefix", default=str(Path(__file__).resolve().parent), help="the runtime's folder")
    parser.add_argument("--json", metavar="FILE", help="results as JSON; - for standard output")
    options = parser.parse_args(argv)
    if options.json and options.json != "-" and (why := unwritable(options.json)):
        print(f"check_runtime.py: {options.json}: {why}", file=sys.stderr)
        return 2
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a reason may have letters that this terminal lacks
            stream.reconfigure(errors="backslashreplace")
    started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    rows = collect(options)
    outcomes = {r["outcome"] for r in rows}
    ok = not outcomes - {"pass", "deferred", "skipped"}
    prefix = str(at_home(Path(os.path.abspath(options.prefix))))
    result = {
        "schema": SCHEMA, "ok": ok, "started": started, "prefix": prefix, "host": platform.node(),
        "archive": installed(Path(prefix)).get("sha256", ""), "kernel": platform.release(), "checks": rows,
    }  # fmt: skip
    try:
        report(rows, json.dumps(result, indent=1, sort_keys=True) + "\n", options.json)
    except BrokenPipeError:  # the reader has seen enough; what the checks say stands
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        print(f"check_runtime.py: {options.json}: {error.strerror}", file=sys.stderr)
        return 2
    return 0 if ok else 1


def unwritable(place: str) -> str:
    """Why no file can be written there, known before checks run for long; empty when one can."""
    folder = os.path.dirname(place) or "."
    if not os.path.isdir(folder):
        return os.strerror(errno.ENOENT)
    if os.path.isdir(place):
        return os.strerror(errno.EISDIR)
    there = os.path.exists(place)
    return "" if os.access(place if there else folder, os.W_OK) else os.strerror(errno.EACCES)


def report(rows: Sequence[Row], result: str, place: str | None) -> None:
    """The table, and the JSON where it is wanted."""
    if place and place != "-":  # first of all: the table is for a terminal that may be gone
        Path(place).write_text(result)
    print(table(rows), file=sys.stderr if place == "-" else sys.stdout)
    print(result if place == "-" else "", end="", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
