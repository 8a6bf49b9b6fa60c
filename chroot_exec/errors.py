"""The one exception of the runner."""

from __future__ import annotations


class RunnerError(Exception):
    """The runner, not a check, failed.

    Args:
        code: stable dotted code, such as ``sandbox.mount`` or ``gpu.none``.
        message: what, where, and what to do next.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message

    def __str__(self) -> str:
        return f"[{self.code}] {self.message}"


class RequestError(RunnerError):
    """The request is wrong (``request.*``)."""
