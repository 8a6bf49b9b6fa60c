"""A Triton kernel. Triton compiles source that it finds in a file; only the jit check imports this, and only inside."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def scaled_sum(x, y, out, n, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """out = 2x + y."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = at < n
    tl.store(out + at, 2 * tl.load(x + at, mask=inside) + tl.load(y + at, mask=inside), mask=inside)
