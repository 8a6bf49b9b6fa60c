"""Reads the YAML that CDI specs are written in, and refuses the rest.

Block mappings and sequences, plain and quoted scalars on one line, ``[]`` and ``{}``, comments. No anchors, tags,
block scalars, flow collections with content, or several documents: a spec that has them can be given as JSON.
"""

from __future__ import annotations

import json
import re
from typing import Any

_KEY = re.compile(r"""("(?:[^"\\]|\\.)*"|'(?:[^']|'')*'|[^\s#&*!|>'"%@`\[\]{},?:-][^#]*?|-[^\s#][^#]*?)\s*:(?:\s+|$)""")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)\Z")
_OCTAL = re.compile(r"0o?([0-7]+)\Z")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


class YamlError(ValueError):
    """The text is not in the subset; the message names the line."""


def parse(text: str) -> Any:
    """The value of one document."""
    rows: list[tuple[int, str, int]] = []
    for number, line in enumerate(text.splitlines(), 1):
        bare = _strip_comment(line)
        if bare.strip() in ("", "---") or (bare.startswith("%") and not rows):
            continue
        if "\t" in bare[: len(bare) - len(bare.lstrip())]:
            raise YamlError(f"line {number}: a tab in the indentation")
        rows.append((len(bare) - len(bare.lstrip(" ")), bare.strip(), number))
    reader = _Reader(rows)
    value = reader.block(0) if rows else None
    if reader.at < len(rows):
        raise YamlError(f"line {rows[reader.at][2]}: unexpected indentation")
    return value


def _strip_comment(line: str) -> str:
    quote = ""
    for i, char in enumerate(line):
        if quote:
            quote = "" if char == quote and (quote == "'" or line[i - 1] != "\\") else quote
        elif char in "\"'" and (i == 0 or line[i - 1] in " :-"):
            quote = char
        elif char == "#" and (i == 0 or line[i - 1] in " \t"):
            return line[:i].rstrip()
    return line.rstrip()


class _Reader:
    def __init__(self, rows: list[tuple[int, str, int]]) -> None:
        self.rows = rows
        self.at = 0

    def block(self, least: int) -> Any:
        indent, text, number = self.rows[self.at]
        if indent < least:
            raise YamlError(f"line {number}: expected deeper indentation")
        if text == "-" or text.startswith("- "):
            return self._sequence(indent)
        if _KEY.match(text):
            return self._mapping(indent)
        self.at += 1
        return _scalar(text, number)

    def _sequence(self, indent: int) -> list[Any]:
        out = []
        while self.at < len(self.rows):
            depth, text, number = self.rows[self.at]
            if depth != indent or not (text == "-" or text.startswith("- ")):
                break
            rest = text[1:].lstrip()
            if not rest:
                self.at += 1
                out.append(self._nested(indent + 1))
                continue
            # What follows the dash is a block of its own, as deep as it stands.
            self.rows[self.at] = (depth + len(text) - len(rest), rest, number)
            out.append(self.block(indent + 1))
        return out

    def _mapping(self, indent: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        while self.at < len(self.rows):
            depth, text, number = self.rows[self.at]
            match = _KEY.match(text) if depth == indent else None
            if not match:
                break
            key = str(_scalar(match.group(1), number, key=True))
            if key in out:
                raise YamlError(f"line {number}: the key {key!r} stands twice")
            rest = text[match.end() :].strip()
            self.at += 1
            out[key] = _scalar(rest, number) if rest else self._value(indent)
        return out

    def _value(self, indent: int) -> Any:
        if self.at < len(self.rows):
            depth, text, _ = self.rows[self.at]
            # A sequence may stand as deep as its key.
            if depth == indent and (text == "-" or text.startswith("- ")):
                return self._sequence(indent)
        return self._nested(indent + 1)

    def _nested(self, least: int) -> Any:
        if self.at < len(self.rows) and self.rows[self.at][0] >= least:
            return self.block(least)
        return None


def _scalar(text: str, number: int, key: bool = False) -> Any:
    if text[:1] == '"':
        try:
            return str(json.loads(text))
        except ValueError:
            raise YamlError(f"line {number}: a quoted string of more lines, or with an escape of YAML's own") from None
    if text[:1] == "'":
        if len(text) < 2 or text[-1] != "'" or "'" in text[1:-1].replace("''", ""):
            raise YamlError(f"line {number}: a quoted string that does not end")
        return text[1:-1].replace("''", "'")
    if text in ("[]", "{}"):
        return [] if text == "[]" else {}
    if text[:1] in "&*!|>%@`[]{},?" and text:
        raise YamlError(f"line {number}: {text[:1]!r} is outside the subset that is read here; give the spec as JSON")
    if key:
        return text
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.match(text):
        return int(text)
    octal = _OCTAL.match(text)
    return int(octal.group(1), 8) if octal else text
