"""What a platform may be called: ``os/architecture`` or ``os/architecture/variant`` (image-spec image-index.md)."""

from __future__ import annotations

import re

from oci_builder.model.errors import SpecError, show

_PLATFORM = re.compile(r"[a-z0-9]+/[a-z0-9_]+(/[a-z0-9.]+)?\Z")


def check_platform_name(text: str) -> str:
    """``text``, if it can be a platform's name.

    Raises:
        SpecError: ``spec.platform``.

    >>> check_platform_name("linux/arm64/v8")
    'linux/arm64/v8'
    """
    if not _PLATFORM.match(text):
        raise SpecError(
            "spec.platform", f"{show(text[:80])} is no platform: expected os/architecture, as linux/amd64",
            where="platform", expected="os/architecture[/variant]", actual=text[:80],
        )  # fmt: skip
    return text
