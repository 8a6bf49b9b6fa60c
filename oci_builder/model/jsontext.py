"""Strict JSON: one reading only, bounded, and one way to write it.

Python's ``json`` keeps the last of duplicate keys and accepts NaN, where Go keeps the first match without regard to
case: two readers of one document must never see two things (in-toto/specification#74).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

from oci_builder.model.errors import FormatError, PolicyError, show
from oci_builder.model.limits import DEFAULT_LIMITS, Limits

_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_INT64 = 1 << 63


def load_json(data: bytes, where: str, limits: Limits = DEFAULT_LIMITS, max_size: int | None = None) -> Any:
    """Parse one JSON document.

    Raises:
        PolicyError: ``limit.document`` when it is larger than ``max_size`` (default ``limits.document``).
        FormatError: ``json.syntax``, ``json.duplicate`` (a repeated key), ``json.number`` (NaN, infinity, an integer
            outside 64 bits), ``json.depth``. Half a surrogate pair is ``json.syntax``: Go reads U+FFFD there, and no
            document that we write could hold it.
    """
    bound = limits.document if max_size is None else max_size
    if len(data) > bound:
        raise PolicyError(
            "limit.document", f"{where}: {len(data)} bytes of JSON, the limit is {bound}", where=where,
            expected=f"<= {bound}", actual=len(data),
        )  # fmt: skip
    _check_depth(data, where, limits.json_depth)
    try:
        text = data.decode("utf-8")
        if text.startswith("\ufeff"):
            raise ValueError("it begins with a byte order mark; write it as UTF-8 without one")
        value = json.loads(
            text, object_pairs_hook=_unique(where), parse_constant=_no_constant(where), parse_int=_int(where),
            parse_float=_float(where),
        )
        if _SURROGATE.search(data):
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise FormatError("json.syntax", f"{where}: not JSON: {error}", where=where, actual=show(data[:60])) from None


def dump_json(value: object) -> bytes:
    """The project's one JSON form: sorted keys, no white space, UTF-8. Digests are over these bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def _check_depth(data: bytes, where: str, bound: int) -> None:
    depth = 0
    for match in _TOKENS.finditer(data):
        token = match.group()
        if token in b"[{":
            depth += 1
            if depth > bound:
                raise FormatError(
                    "json.depth", f"{where}: nested deeper than {bound} levels", where=where, expected=f"<= {bound}"
                )
        elif token in b"]}":
            depth -= 1


def _float(where: str) -> Callable[[str], float]:
    def check(text: str) -> float:
        value = float(text)
        if math.isinf(value):
            raise FormatError("json.number", f"{where}: the number {text[:40]} is out of range", where=where)
        return value

    return check


def _unique(where: str) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for key, value in items:
            if key in out:
                raise FormatError(
                    "json.duplicate", f"{where}: the key {show(key[:100])} stands twice", where=where, actual=key[:100]
                )
            out[key] = value
        return out

    return pairs


def _no_constant(where: str) -> Any:
    def refuse(text: str) -> None:
        raise FormatError("json.number", f"{where}: {text} is not JSON", where=where, actual=text)

    return refuse


def _int(where: str) -> Any:
    def parse(text: str) -> int:
        if len(text) > 20 or not -_INT64 <= int(text) < _INT64:
            raise FormatError(
                "json.number", f"{where}: the integer {text[:40]} does not fit 64 bits", where=where, actual=text[:40]
            )
        return int(text)

    return parse
