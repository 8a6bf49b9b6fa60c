"""Does our fat binary reader agree with NVIDIA's ``cuobjdump``, file by file?

    python bench/compare_cuobjdump.py ENVIRONMENT [--cuobjdump PATH]

Every shared object and static library below ENVIRONMENT is listed by ``cuobjdump --list-elf --list-ptx`` and by us,
and the number of entries of each kind and architecture compared. ``cuobjdump`` comes with CUDA and inside Triton's
wheel. It names an architecture without its suffix where the machine code itself has none, and older ones do not know
``f``, so suffixes are compared only where it gives one. Exit status 1 when a file differs.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from oci_builder.payload.fatbin import Arch
from oci_builder.payload.readiness.collect import folder_delta
from oci_builder.payload.readiness.facts import GpuCode

_LINE = re.compile(r"^(ELF|PTX) file\s+\d+: .*\.(sm_[0-9]+[af]?)\.(?:cubin|ptx)$", re.M)
_LIBRARY = re.compile(rb"\.so(?:\.[0-9.]+)?\Z|\.a\Z")

Entries = Counter[tuple[str, int]]


def theirs(tool: Path, file: Path) -> Counter[tuple[str, Arch]]:
    """What cuobjdump lists."""
    run = subprocess.run([tool, "--list-elf", "--list-ptx", file], capture_output=True, text=True, check=False)
    found = ((kind, Arch.parse(arch)) for kind, arch in _LINE.findall(run.stdout))
    return Counter(("sass" if kind == "ELF" else "ptx", arch) for kind, arch in found if arch)


def ours(code: GpuCode | None) -> Counter[tuple[str, Arch]]:
    """What we list of the same sections."""
    return code.entries() if code else Counter()


def plain(entries: Counter[tuple[str, Arch]]) -> Entries:
    """Without suffixes and without what cuobjdump does not list."""
    out: Entries = Counter()
    for (kind, arch), times in entries.items():
        if kind in ("sass", "ptx"):
            out[kind, arch.number] += times
    return out


def suffixed(entries: Counter[tuple[str, Arch]]) -> Counter[tuple[str, Arch]]:
    """Only the entries whose architecture has a suffix."""
    return Counter({key: times for key, times in entries.items() if key[1].suffix})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", type=Path)
    parser.add_argument("--cuobjdump", type=Path, help="default: the one inside Triton's wheel")
    args = parser.parse_args()
    found = sorted(args.environment.rglob("triton/backends/nvidia/bin/cuobjdump"))
    tool = args.cuobjdump or (found[0] if found else None)
    if tool is None:
        parser.error("no cuobjdump below the environment: name one with --cuobjdump")
    start = time.monotonic()
    nodes = folder_delta(args.environment).nodes
    seconds = {"ours": round(time.monotonic() - start, 1)}
    files = [p for p, n in sorted(nodes.items()) if n.kind == "file" and _LIBRARY.search(p)]
    start = time.monotonic()
    with_code, differing, entries = 0, [], 0
    for path in files:
        facts = nodes[path].facts
        mine, other = ours(facts.gpu if facts else None), theirs(tool, args.environment / path.decode())
        with_code += bool(other)
        entries += plain(other).total()
        more = suffixed(other) - suffixed(mine)
        if plain(mine) != plain(other) or more:
            differing.append(
                {"file": path.decode(), "ours": str(plain(mine)), "cuobjdump": str(plain(other)), "suffixes": str(more)}
            )
    seconds["cuobjdump"] = round(time.monotonic() - start, 1)
    summary = {"files": len(files), "with_gpu_code": with_code, "entries": entries, "seconds": seconds}
    print(json.dumps({**summary, "differing": differing}, indent=1))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
