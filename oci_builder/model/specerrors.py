"""What pydantic finds wrong with a spec, in the words of whoever wrote it: field, value, and what would be right."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from oci_builder.model.documents import DIGEST_ERROR
from oci_builder.model.errors import SpecError, show
from oci_builder.model.jsontext import dump_json


@dataclass(frozen=True, slots=True)
class Words:
    """What messages are made of.

    Attributes:
        patterns: regular expression -> what to say in its place.
        tags: first key -> (where pydantic's place has a discriminator's tag, the tags there are).
        schema: makes the JSON Schema; asked for unknown keys alone.
    """

    patterns: Mapping[str, str]
    tags: Mapping[str, tuple[int, tuple[str, ...]]]
    schema: Callable[[], dict[str, Any]]


def spec_error(error: ValidationError, where: str, words: Words) -> SpecError:
    """The first problems as one error: ``spec.digest`` for a digest alone, else ``spec.field``."""
    problems = error.errors(include_url=False)
    lines = [_problem(p, words) for p in problems[:8]]
    digest = any("digest" in str(p["loc"][-1:]) or p["type"] == DIGEST_ERROR for p in problems)
    code = "spec.digest" if digest and len(problems) == 1 else "spec.field"
    first = ".".join(_key(p) for p in _place(problems[0], words))
    return SpecError(code, f"{where}: " + "; ".join(lines), where=f"{where}: {first}", actual=_shown(problems[0]))


def _place(problem: Any, words: Words) -> list[Any]:
    # The discriminator's tag is part of pydantic's location; people know only the keys they wrote.
    loc = list(problem["loc"])
    at, names = words.tags.get(loc[0] if loc else "", (0, ()))
    return loc[:at] + loc[at + 1 :] if names and len(loc) > at + 1 and loc[at] in names else loc


def _key(part: Any) -> str:
    """A part of a place: as it is written, what does not print escaped; pydantic's mark of a key in words."""
    text = str(part)[:80]
    return "(its name)" if text == "[key]" else text if text.isprintable() else show(text)


def _shown(problem: Any) -> str:
    value = problem.get("input")
    if problem["type"] == "missing":
        return ""
    return show(value[:160]) if isinstance(value, str) else show(dump_json(value).decode()[:160])[1:-1]


def _problem(problem: Any, words: Words) -> str:
    text = problem["msg"].removeprefix("Value error, ")
    text = text.replace("valid dictionary", "JSON object").replace("valid tuple", "JSON list")
    text = words.patterns.get(problem.get("ctx", {}).get("pattern", ""), text)
    place = ".".join(_key(p) for p in _place(problem, words)) or "(the whole spec)"
    if problem["type"] == "missing" and place == "base.digest":
        text = "a tag without a digest is refused; add the digest that the tag has today"
    if problem["type"] == "extra_forbidden":
        text = no_such_key(str(problem["loc"][-1]), _known(problem["loc"], words))
    got = f" (got {_shown(problem)})" if _shown(problem) else ""
    return f"{place}: {text.removesuffix(got)}{got}"


def no_such_key(name: str, known: Iterable[str]) -> str:
    """What to say of an unknown key: the known one that it looks like, or all that there are."""
    folded = {one.lower(): one for one in sorted(known)}
    near = difflib.get_close_matches(name.lower(), folded, 1, 0.7)
    return f"no such key; did you mean {show(folded[near[0]])}?" if near else (
        f"no such key; there are {', '.join(folded.values())}"
    )  # fmt: skip


def _known(loc: Sequence[Any], words: Words) -> set[str]:
    """Keys that the JSON Schema has where an unknown one stands."""
    schema = words.schema()
    at, tags = words.tags.get(loc[0], (0, ()))
    nodes = list(_plain(schema, schema))
    for number, part in enumerate(loc[:-1]):
        if tags and number == at and part in tags:
            nodes = [node for node in nodes if part in node.get("properties", {})]
        else:
            nodes = [found for node in nodes for below in _below(node, part) for found in _plain(schema, below)]
    return {name for node in nodes for name in node.get("properties", {})}


def _below(node: dict[str, Any], part: Any) -> list[dict[str, Any]]:
    if isinstance(part, int):
        return [node["items"]] if "items" in node else []
    if part in node.get("properties", {}):
        return [node["properties"][part]]
    others = [*node.get("patternProperties", {}).values(), node.get("additionalProperties")]
    return [one for one in others if isinstance(one, dict)]


def _plain(schema: dict[str, Any], node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A node's alternatives, references followed."""
    if "$ref" in node:
        node = schema["$defs"][node["$ref"].rpartition("/")[2]]
    either = [*node.get("anyOf", ()), *node.get("oneOf", ()), *node.get("allOf", ())]
    if not either:
        yield node
    for one in either:
        yield from _plain(schema, one)
