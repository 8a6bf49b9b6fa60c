"""Triton finds the driver's library through ldconfig, compiles a kernel into an empty cache, and it is right."""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
import triton
import triton.language as tl


@triton.jit
def scaled_sum(x, y, out, n, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = 2x + y."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    tl.store(out + at, 2 * tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)


def main() -> None:
    """Print one result."""
    cache = Path(os.environ["TRITON_CACHE_DIR"])
    empty = not cache.exists() or not any(cache.iterdir())
    n = 100_003
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    out = torch.empty_like(x)
    scaled_sum[(triton.cdiv(n, 1024),)](x, y, out, n, SIZE=1024)
    right = torch.allclose(out, 2 * x + y)
    compiled = any(p.suffix == ".cubin" for p in cache.rglob("*"))
    facts = {"wrong sums": right, "the cache was not empty": empty, "no cubin was made": compiled}
    reasons = [text for text, good in facts.items() if not good]
    details = {"triton": triton.__version__}
    print(json.dumps({"outcome": "fail" if reasons else "pass", "reason": "; ".join(reasons), "details": details}))


if __name__ == "__main__":
    main()
