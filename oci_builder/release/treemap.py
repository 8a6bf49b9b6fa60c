"""Squarified treemap (Bruls, Huizing, van Wijk 2000): areas in proportion to sizes, rectangles near to squares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# What is left beside a rectangle that takes nearly everything may round to nothing.
_LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class Rect:
    """A rectangle: ``index`` of its value, and its place."""

    index: int
    x: float
    y: float
    w: float
    h: float


def squarify(values: Sequence[int], width: float, height: float) -> tuple[Rect, ...]:
    """Place ``values`` in ``width`` by ``height``; zeros get no rectangle. Largest first, from the top left."""
    order = sorted((i for i, v in enumerate(values) if v > 0), key=lambda i: (-values[i], i))
    if not order:
        return ()
    scale = width * height / sum(values[i] for i in order)
    areas = {i: values[i] * scale for i in order}
    out: list[Rect] = []
    x = y = 0.0
    while order:
        row = _best_row(order, areas, min(width, height))
        order = order[len(row) :]
        thick = sum(areas[i] for i in row) / min(width, height)
        out += _place(row, areas, (x, y), thick, vertical=width >= height)
        if width >= height:
            x, width = x + thick, max(width - thick, _LEAST)
        else:
            y, height = y + thick, max(height - thick, _LEAST)
    return tuple(out)


def _best_row(order: Sequence[int], areas: dict[int, float], side: float) -> list[int]:
    row = [order[0]]
    for index in order[1:]:
        if _worst([areas[i] for i in (*row, index)], side) > _worst([areas[i] for i in row], side):
            break
        row.append(index)
    return row


def _worst(areas: Sequence[float], side: float) -> float:
    """The worst aspect ratio of a row of rectangles along ``side``."""
    total = sum(areas)
    return max(side**2 * max(areas) / total**2, total**2 / (side**2 * min(areas)))


def _place(
    row: Sequence[int], areas: dict[int, float], corner: tuple[float, float], thick: float, *, vertical: bool
) -> list[Rect]:
    x, y = corner
    out = []
    for index in row:
        length = areas[index] / thick
        out.append(Rect(index, x, y, thick, length) if vertical else Rect(index, x, y, length, thick))
        x, y = (x, y + length) if vertical else (x + length, y)
    return out
