"""What lies in the runtime's folder."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

from runtime_check.rows import Row, installed, row

OVERLAID = b"NEMO_RL_PREBUILT_ENV_ROOT"
TOOLS = ("nvcc", "ptxas", "fatbinary", "cudafe++", "nvlink", "cuobjdump", "nvdisasm")


def installation_rows(prefix: Path, tiers: Sequence[str]) -> Iterator[Row]:
    """What lies in the folder."""
    good = re.fullmatch(r"/[A-Za-z0-9._/+@=-]+", str(prefix)) is not None
    yield row("prefix", good, str(prefix) if good else f"{prefix}: characters that Ray's workers do not survive")
    record = installed(prefix)
    if record:
        same = os.path.realpath(str(record.get("prefix"))) == os.path.realpath(prefix)
        advice = "run ensure_runtime.sh with this prefix"
        moved = "" if same else f"it was installed at {record.get('prefix')} and moved: {advice}"
        yield row("installed", same, moved or f"archive {record.get('sha256')}", sha256=record.get("sha256"))
    if not tiers:
        yield row("tiers", False, f"no tier in {prefix}/envs")
    for tier in tiers:
        yield interpreter(prefix, tier)
    yield from toolkit(prefix)
    yield from source_tree(prefix)


def source_tree(prefix: Path) -> Iterator[Row]:
    """The source that would be imported has the overlay: without it workers build environments of their own."""
    given = os.environ.get("NEMO_RL_SOURCE_ROOT")
    tree = Path(given or prefix / "source")
    if not given and not (tree / "nemo_rl").is_dir():
        return  # a runtime of packages alone
    reason = str(tree)
    if not tree.is_absolute():
        reason = f"NEMO_RL_SOURCE_ROOT={tree} is not absolute: another folder's processes do not find it"
    elif not (tree / "nemo_rl").is_dir():
        reason = f"NEMO_RL_SOURCE_ROOT={tree} holds no nemo_rl/"
    elif not any(OVERLAID in path.read_bytes() for path in sorted((tree / "nemo_rl").rglob("*.py")) if path.is_file()):
        reason = f"{tree} lacks the overlay (no {OVERLAID.decode()} in it): run {prefix}/overlay/apply.py {tree}"
    yield row("source", reason == str(tree), reason)


def interpreter(prefix: Path, tier: str) -> Row:
    """A tier's Python starts, from this prefix and, where an interpreter is shipped, off that one."""
    python = prefix / "envs" / tier / "bin/python"
    code = "import json, sys; print(json.dumps([sys.version.split()[0], sys.prefix, sys.base_prefix]))"
    try:
        done = subprocess.run([python, "-I", "-B", "-c", code], capture_output=True, text=True, timeout=120)
        version, found, base = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return row(f"interpreter:{tier}", False, f"{python} does not start: {error}")
    home = os.path.realpath(prefix / "envs" / tier)
    wrong = "" if os.path.realpath(found) == home else f"its prefix is {found}"
    shipped = prefix / "python"
    if not wrong and shipped.is_dir() and os.path.realpath(base) != os.path.realpath(shipped):
        wrong = f"it runs off {base} and not off {shipped}"
    return row(f"interpreter:{tier}", not wrong, wrong or f"Python {version}", base=base)


def toolkit(prefix: Path) -> Iterator[Row]:
    """The shipped CUDA tools, if this runtime ships them; else the image's."""
    cuda = prefix / "cuda"
    if not cuda.is_dir():
        cuda = Path(os.environ.get("CUDA_HOME") or "/usr/local/cuda")
    if not cuda.is_dir():
        yield row("cuda-tools", None, f"no CUDA toolkit in {prefix}/cuda or {cuda}; kernels cannot be compiled here")
        return
    absent = [t for t in TOOLS if not os.access(cuda / "bin" / t, os.X_OK)]
    absent += [f for f in ("include/cuda.h", "nvvm/libdevice") if not (cuda / f).exists()]
    # Of a toolkit that is the host's own, only the kernels that --gpu compiles can say whether it is enough.
    verdict = not absent if cuda == prefix / "cuda" else True if not absent else None
    yield row("cuda-tools", verdict, f"absent in {cuda}: {', '.join(absent)}" if absent else str(cuda))
