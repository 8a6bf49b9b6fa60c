"""A check's own word: one JSON object in the last line of its output, with one reading only.

What is refused here is what no receipt could carry or two readers would see differently: keys that stand twice or
differ in case only, numbers that are no JSON or no 64-bit integers, half surrogate pairs, deep nesting.
"""

from __future__ import annotations

import json
import math
from typing import Any

OUTCOMES = ("pass", "fail", "deferred", "skipped")
_DEEPEST = 32
_LARGEST = 1 << 20
_TOO_DEEP = f"it is nested deeper than {_DEEPEST} levels"


def parse_result(text: str) -> dict[str, Any]:
    """The object, which has an ``outcome`` and, unless that is pass, a ``reason``.

    Raises:
        ValueError: says what is wrong with it.
    """
    value = _load(text.rstrip().rpartition("\n")[2])
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    if value.get("outcome") not in OUTCOMES:
        raise ValueError(f"its outcome is none of {', '.join(OUTCOMES)}")
    reason = value.get("reason", "")
    if not isinstance(reason, str) or (value["outcome"] != "pass" and not reason.strip()):
        raise ValueError("it gives no reason")
    return value


def _load(line: str) -> Any:
    if len(line) > _LARGEST:
        raise ValueError(f"it has more than {_LARGEST} characters")
    try:
        value = json.loads(
            line, object_pairs_hook=_unique, parse_int=_integer, parse_float=_number, parse_constant=_number
        )
        _require_shallow(value)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    except json.JSONDecodeError:
        raise ValueError("it is not JSON") from None
    except UnicodeEncodeError:
        raise ValueError("it has half a surrogate pair") from None
    return value


def _require_shallow(value: Any) -> None:
    level = [value]
    for _ in range(_DEEPEST + 1):
        level = [
            child for item in level if isinstance(item, (dict, list))
            for child in (item.values() if isinstance(item, dict) else item)
        ]  # fmt: skip
    if level:
        raise ValueError(_TOO_DEEP)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Some readers fold case: they would see another object.
    if len({key.casefold() for key, _ in pairs}) != len(pairs):
        raise ValueError("a key stands twice, or two differ in case only")
    return dict(pairs)


def _integer(text: str) -> int:
    if len(text) > 20 or not -(1 << 63) <= int(text) < 1 << 63:
        raise ValueError(f"the integer {text[:20]} does not fit 64 bits")
    return int(text)


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:20]} is no number of JSON")
    return value
