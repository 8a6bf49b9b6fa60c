"""The runtime works from every prefix given, and from each it takes its own libraries, never another prefix's."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from .common import Result, last_json
from .conditions import all_conditions
from .process import run

# Seconds for one prefix's probe; the list gives the check somewhat more than two of them.
PROBE_LIMIT = 300.0
# Libraries whose place decides which one computes.
WATCHED = ("libcudnn", "libnccl", "libcublas", "libnvrtc")


def check(prefixes: Sequence[str], tier: str) -> Result:
    """Run the probe with the interpreter of each prefix."""
    result = Result()
    all_conditions(result)
    if result.reasons:
        return result
    real = [os.path.realpath(p) for p in prefixes]
    identities = {(s.st_dev, s.st_ino, p) for p in real if os.path.isdir(p) for s in (os.stat(p),)}
    result.expect(len(set(real)) == len(real) >= 2, f"two different prefixes are needed, got {', '.join(prefixes)}")
    result.expect(len(identities) == len(real), "a prefix is not there")
    if result.reasons:
        return result
    for prefix in real:
        others = [other for other in real if other != prefix]
        named = [given for given in prefixes if os.path.realpath(given) != prefix]
        result.details[prefix] = probe_in(result, prefix, others, tier, [*named, *others])
    return result


def probe_in(result: Result, prefix: str, others: Sequence[str], tier: str, named: Sequence[str]) -> dict[str, object]:
    """One prefix's answer, judged. ``named`` are all names of the others, as given and as they really are."""
    python = f"{prefix}/envs/{tier}/bin/python3"
    folder = str(Path(__file__).resolve().parent)
    done = run([python, folder, "relocation-probe"], timeout=PROBE_LIMIT, env=own_environment(prefix, named))
    value = last_json(done.stdout)
    if done.status != 0 or value is None or value.get("outcome") != "pass":
        reason = (value or {}).get("reason") or done.stderr[-600:]
        result.add([f"{prefix}: the probe ended with {done.status}: {reason}"])
        return {}
    details = dict(value["details"])
    result.add(judge(prefix, others, details))
    return {"libraries": details["libraries"], "executable": details["executable"]}


def own_environment(prefix: str, others: Sequence[str]) -> dict[str, str]:
    """This process's environment, with every mention of another prefix turned into this one."""
    names = "|".join(re.escape(other) for other in sorted(others, key=len, reverse=True))
    # A name that goes on is another place: /rt-second is not below /rt.
    mention = re.compile(rf"(?:{names})(?=[/:;,\s'\"]|$)")
    return {name: mention.sub(lambda _: prefix, value) for name, value in os.environ.items()}


def judge(prefix: str, others: Sequence[str], found: dict[str, object]) -> list[str]:
    """Reasons against what a probe found."""
    reasons = []
    libraries: dict[str, list[str]] = found["libraries"]  # type: ignore[assignment]
    for name in WATCHED:
        places = libraries.get(name, [])
        if not places:
            reasons.append(f"{prefix}: {name} was not loaded")
        reasons += [f"{prefix}: {name} comes from {p}" for p in places if not p.startswith(prefix + "/")]
    everything = [str(found["executable"]), str(found["prefix"]), *found["path"], *found["mapped"]]  # type: ignore[misc]
    strays = sorted({p for p in everything for other in others if p.startswith(other + "/")})
    if strays:
        reasons.append(f"{prefix}: uses another prefix: {', '.join(strays[:5])}")
    return reasons


def probe() -> Result:
    """Use cuDNN, NCCL, cuBLAS and NVRTC, then say where everything that is mapped comes from."""
    import torch

    result = Result()
    x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    (x @ x).sum().item()
    torch.nn.functional.conv2d(torch.randn(1, 3, 32, 32, device="cuda"), torch.randn(4, 3, 3, 3, device="cuda"))
    torch.cuda.nccl.version()
    # cuBLAS and NCCL come with torch; NVRTC is loaded when a kernel is made from text.
    twice = torch.cuda.jiterator._create_jit_fn("template <typename T> T twice(T x) { return x + x; }")
    result.expect(torch.equal(twice(x.float()), 2 * x.float()), "the kernel of NVRTC gave wrong values")
    files = mapped(Path("/proc/self/maps").read_text())
    result.details = {
        "executable": sys.executable, "prefix": sys.prefix, "path": [p for p in sys.path if p],
        "libraries": {name: [f for f in files if re.match(rf"{name}[.\-_]", os.path.basename(f))] for name in WATCHED},
        "mapped": files,
    }  # fmt: skip
    return result


def mapped(maps: str) -> list[str]:
    """Files of /proc/self/maps that hold code.

    >>> mapped("7f0-7f1 r-xp 0 fe:00 12 /lib/x.so\\n7f1-7f2 r--p 0 fe:00 12 /lib/x.so\\n7f2-7f3 rw-p 0 0:0 0\\n")
    ['/lib/x.so']
    """
    rows = (line.split(maxsplit=5) for line in maps.splitlines())
    return sorted({row[5] for row in rows if len(row) == 6 and "x" in row[1] and row[5].startswith("/")})
