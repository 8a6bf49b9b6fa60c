"""Checks of a runtime on real GPUs. Standard library at the top; torch, vLLM, Ray are imported inside functions only.

    python3 <prefix>/checks NAME [options]      one check; the last line of standard output is its result as JSON
    python3 <prefix>/checks run [options]       several, each in a process of its own: a table and a JSON receipt
    python3 <prefix>/checks list [options]      the same checks for the chroot runner, as data

A result is ``{"outcome": "pass" | "fail" | "deferred" | "skipped", "reason", "details"}``. Only ``pass`` is a pass. An
absent package, an absent GPU and an open network are failures with a reason. Exit status: 0 pass or deferred, 1 else.
Python 3.10 or later.
"""

from __future__ import annotations
