"""``diff`` for people: what differs is named, and a long list is cut with its count."""

from __future__ import annotations

from typing import Any

import pytest

from oci_builder.difference import _SHOWN, Difference

NONE: dict[str, list[str]] = {"removed": [], "added": [], "changed": []}


def found(**changes: Any) -> Difference:
    layers = {"same": ["sha256:1"], "removed": [], "added": []}
    values: dict[str, Any] = {"layers": layers, "packages": [], "files": NONE, "config": {}}
    return Difference(**{**values, **changes})


def test_images_that_are_the_same_say_so_and_nothing_else() -> None:
    assert list(found().lines()) == ["no difference"]


@pytest.mark.parametrize(("count", "said"), [(_SHOWN, 0), (_SHOWN + 1, 1), (_SHOWN + 250, 250)])
def test_a_long_list_of_files_is_cut_and_says_how_many_are_left(count: int, said: int) -> None:
    lines = list(found(files={**NONE, "added": [f"opt/{i:04}" for i in range(count)]}).lines())
    assert f"files added: {count}" in lines
    assert sum(line.startswith("  + opt/") for line in lines) == _SHOWN
    assert [line for line in lines if "more" in line] == ([f"  … and {said} more (--json has them all)"] if said else [])


def test_what_came_and_went_is_told_apart() -> None:
    lines = list(
        found(
            layers={"same": [], "removed": ["sha256:a"], "added": ["sha256:b"]},
            packages=[
                {"name": "torch", "place": "envs/a", "old": "1.0", "new": "2.0"},
                {"name": "gone", "place": "envs/a", "old": "3", "new": None},
            ],
            config={"Env": [["A=1"], ["A=2"]]},
            files={"removed": ["r"], "added": ["a"], "changed": ["c"]},
        ).lines()
    )
    assert {"layers: 0 the same", "  - sha256:a", "  + sha256:b", "  - r", "  + a", "  ~ c"} <= set(lines)
    assert "package torch (envs/a): 1.0 -> 2.0" in lines
    assert "package gone (envs/a): 3 -> -" in lines
    assert "config Env: ['A=1'] -> ['A=2']" in lines
