"""The variables that a program starts with: the image's, then the request's, then the check's; none of the host's."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Ray's sockets stand 66 bytes below its temporary folder, and a socket's path ends at 107 (ray #7945, verl #1120).
_LONGEST_TMPDIR = 40


def environment(
    config: Mapping[str, Any], layers: tuple[Mapping[str, str], ...], home: str, note: Callable[[str], None]
) -> dict[str, str]:
    """Merge the variables; later ``layers`` win over earlier ones and over the image config's ``Env``.

    Args:
        home: HOME where nothing else says so.
        note: told of values that are known to make programs fail.
    """
    out = {"PATH": PATH, "HOME": home}
    pairs = [item.partition("=") for item in config.get("Env") or []]
    out.update((name, value) for name, equals, value in pairs if name and equals)
    odd = ["".join(pair) for pair in pairs if not pair[0] or not pair[1]]
    if odd:
        # Images in the wild have such; other runtimes run them all the same.
        note(f"left out of the image's Env, for they are no NAME=value: {len(odd)}, the first is {odd[0][:100]!a}")
    for layer in layers:
        out.update(layer)
    if len(os.fsencode(out.get("TMPDIR", ""))) > _LONGEST_TMPDIR:
        note(f"TMPDIR is longer than {_LONGEST_TMPDIR} bytes: socket paths below it can pass the kernel's 107")
    return out


def prepend(variables: Mapping[str, str], name: str, value: str) -> str:
    """``value`` before what the colon-separated variable ``name`` holds; once, and without empty elements."""
    rest = [part for part in variables.get(name, "").split(":") if part and part != value]
    return ":".join([value, *rest])


def append(variables: Mapping[str, str], name: str, value: str) -> str:
    """``value`` after what the variable holds, unless it is in there."""
    rest = [part for part in variables.get(name, "").split(":") if part]
    return ":".join(rest if value in rest else [*rest, value])
