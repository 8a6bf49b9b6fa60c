"""What both appliers of layers, the one on disk and the one in memory, must do alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from oci_builder.model.errors import PolicyError
from oci_builder.model.limits import Limits

T = TypeVar("T")

# How often hard links that stand before their target are tried again; each may wait for the next.
_ROUNDS = 8


@dataclass(frozen=True, slots=True)
class HardLink:
    """A hard link that waits for its target; there may be millions of them."""

    name: bytes
    link: bytes


def require_few(waiting: int, limits: Limits) -> None:
    """Bound the hard links of a layer whose target is not in it before them.

    Raises:
        PolicyError: ``limit.entries``.
    """
    if waiting > limits.late_links:
        message = f"more than {limits.late_links} hard links of a layer stand before their target"
        raise PolicyError("limit.entries", f"{message}; limits.late_links can be raised")


def link_late(waiting: list[HardLink], link: Callable[[HardLink], bool]) -> HardLink | None:
    """Make the links that stood before their target; backwards, as each may wait for the next.

    Args:
        waiting: in the layer's order.
        link: makes one; false when its target is not there (yet).

    Returns: the first whose target never came; None when all are made.
    """
    for _ in range(_ROUNDS):
        left = [entry for entry in reversed(waiting) if not link(entry)]
        if not left:
            return None
        if len(left) == len(waiting):
            break
        waiting = left[::-1]
    return waiting[0]


def if_there(look: Callable[[], T]) -> T | None:
    """What ``look`` finds; None when there is no such folder, or a file is in its way.

    Raises:
        PolicyError: ``path.loop``.
    """
    try:
        return look()
    except FileNotFoundError:
        return None
    except PolicyError as error:
        if error.code != "path.parent":
            raise
        return None
