"""One run of the benchmark: its folders, its builds, and what it has measured so far."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.measure import Run, ours, run

OCI, DOCKER, PORTABLE = "runtime.oci.tar", "runtime.docker.tar.gz", "runtime.tar.gz"


class Bench:
    """One run: measures, prints as it goes, keeps everything for the JSON."""

    def __init__(self, tiers: dict[str, Path], work: Path) -> None:
        self.tiers, self.work = tiers, work
        self.rows: dict[str, dict[str, Any]] = {}
        self.out, self.cache, self.spec = work / "out", work / "cache", work / "spec.json"
        self.spec.write_text(
            json.dumps(
                {
                    "name": "bench", "tag": "t1", "epoch": 0, "base": {"scratch": True}, "prefix": "/opt/rt",
                    "tiers": {name: {"path": str(path)} for name, path in tiers.items()},
                }
            )
        )  # fmt: skip

    def row(self, name: str, taken: Run, **more: Any) -> Run:
        """Keep and print one measurement."""
        self.rows[name] = {**asdict(taken), **more}
        extra = "  ".join(f"{k} {v:,}" if isinstance(v, int) else f"{k} {v}" for k, v in more.items())
        print(f"{name:<46} {taken.wall:8.1f} s wall {taken.cpu:8.1f} s CPU {taken.peak:7.0f} MiB  {extra}", flush=True)
        return taken

    def ratio(self, name: str, value: float, goal: str) -> None:
        """Keep and print a ratio beside its goal."""
        self.rows[f"ratio: {name}"] = {"value": round(value, 2), "goal": goal}
        print(f"  -> {name}: {value:.2f} (goal {goal})", flush=True)

    def save(self, path: Path | None) -> None:
        """Write the JSON, when one is wanted."""
        if path is not None:
            path.write_text(json.dumps(self.rows, indent=1) + "\n")

    def build(self) -> Run:
        """All three archives from nothing but the trees."""
        shutil.rmtree(self.cache, ignore_errors=True)
        shutil.rmtree(self.out, ignore_errors=True)
        return ours("build", self.spec, "--out", self.out, "--cache", self.cache)

    def limits(self) -> Run:
        """What hashing and compressing the distinct bytes once takes, with the same compressor and nothing else."""
        return run([sys.executable, "-m", "bench.floor", *self.tiers.values()])
