"""Names of Python packages, in the one spelling by which they are compared."""

from __future__ import annotations

import re

_SEPARATORS = re.compile(r"[-_.]+")


def normalize(package: str) -> str:
    """PEP 503 form of a package name.

    >>> normalize("Flash_Attn")
    'flash-attn'
    """
    return _SEPARATORS.sub("-", package).lower()
