"""A check's own word has one reading, and a bad one is that check's failure alone."""

from __future__ import annotations

import json

import pytest

from chroot_exec.result import parse_result
from oci_builder.model.errors import OciBuilderError
from oci_builder.model.receipts import Receipt, parse_closed, refuse_folded
from tests.lab.oracle import within

BAD = {
    "a key twice": '{"outcome": "fail", "outcome": "pass", "reason": "r"}',
    "a key twice, deep": '{"outcome": "pass", "more": [{"a": 1, "a": 2}]}',
    "keys that differ in case": '{"outcome": "pass", "a": 1, "A": 2}',
    "the outcome in another case": '{"Outcome": "pass", "outcome": "fail", "reason": "r"}',
    "not a number": '{"outcome": "pass", "x": NaN}',
    "infinity": '{"outcome": "pass", "x": -Infinity}',
    "a number out of range": '{"outcome": "pass", "x": 1e999}',
    "an integer beyond 64 bits": '{"outcome": "pass", "x": 9223372036854775808}',
    "an integer of 5000 digits": '{"outcome": "pass", "x": ' + "9" * 5000 + "}",
    "half a surrogate pair": '{"outcome": "pass", "x": "\\ud800"}',
    "half a surrogate pair in a key": '{"outcome": "pass", "\\udc80": 1}',
    "33 lists, one too many": '{"outcome": "pass", "x": ' + "[" * 33 + "]" * 33 + "}",
    "70 lists": '{"outcome": "pass", "x": ' + "[" * 70 + "]" * 70 + "}",
    "100000 lists": '{"outcome": "pass", "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "not JSON": "outcome: pass",
    "a list": '["pass"]',
    "nothing": "",
    "more than one": '{"outcome": "pass"} {"outcome": "pass"}',
    "no outcome": '{"reason": "r"}',
    "an outcome of its own": '{"outcome": "error", "reason": "r"}',
    "an outcome that is no text": '{"outcome": ["pass"]}',
    "no reason": '{"outcome": "deferred", "reason": " "}',
    "a reason that is no text": '{"outcome": "fail", "reason": {"a": 1}}',
    "too long": '{"outcome": "pass", "x": "' + "x" * (1 << 20) + '"}',
}  # fmt: skip


@pytest.mark.parametrize("text", BAD.values(), ids=BAD.keys())
def test_a_result_with_two_readings_or_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^(it |its |a key |the integer |\S+ is no number)"):
        parse_result("before\n" + text + "\n\n")


@pytest.mark.parametrize(
    "text",
    [
        '{"outcome": "pass"}',
        '{"outcome": "deferred", "reason": "no driver", "x": [1, -1.5e3, null, true, "\\ud83d\\ude00"]}',
        '{"outcome": "fail", "reason": "separated \u2028 by \x85 what some call lines"}',
        '{"outcome": "pass", "x": ' + "[" * 32 + "]" * 32 + "}",
    ],
)
def test_a_good_result_is_one_that_receipts_can_carry(text: str) -> None:
    value = parse_result("noise {\n" + text + "\n")
    assert value == json.loads(text)
    refuse_folded(value, "result")


def test_hostile_quotes_take_no_time() -> None:
    with within(5), pytest.raises(ValueError, match="not JSON"):
        parse_result('"\\' * 200_000)


def test_what_is_refused_here_would_be_refused_in_a_receipt() -> None:
    """The two readers agree: what passes here never fails the whole receipt there."""
    for name in ("a key twice", "keys that differ in case", "not a number", "half a surrogate pair", "70 lists"):
        with pytest.raises(OciBuilderError) as caught:
            parse_closed(Receipt, BAD[name].encode(), name)
        assert caught.value.code != "json.field", "for what it is, not for a field that receipts do not have"
