"""The GPUs of this node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from runtime_check.rows import Row, row

CAPABILITY = "10.0"


def gpu_rows(prefix: Path) -> tuple[list[Row], int]:
    """Every visible GPU is a B200; how many there are."""
    code = (
        "import sys, json; sys.path.insert(0, sys.argv[1])\nimport gpu\n"
        "try: print(json.dumps(gpu.gpu_facts()))\nexcept gpu.NoGpu as e: print(json.dumps({'why': str(e), 'gpus': []}))"
    )
    done = subprocess.run([sys.executable, "-B", "-c", code, str(prefix / "checks")], capture_output=True, text=True)
    try:
        facts = json.loads(done.stdout)
    except ValueError:
        facts = {"why": done.stderr[-300:], "gpus": []}
    gpus = facts["gpus"]
    if not gpus:
        return [row("gpus", False, f"zero GPUs: {facts.get('why')}")], 0
    names = sorted({f"{g['name']} ({g['capability']})" for g in gpus})
    other = [g["uuid"] for g in gpus if g["capability"] != CAPABILITY]
    few = len({g["uuid"] for g in gpus}) != len(gpus)
    wrong = f"{len(other)} are not of capability {CAPABILITY}: " if other else ""
    wrong = "two devices have one UUID; " if few else wrong
    return [row("gpus", not wrong, f"{wrong}{len(gpus)} x {', '.join(names)}", gpus=gpus)], len(gpus)
