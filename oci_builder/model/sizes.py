"""Numbers of bytes, for people."""

from __future__ import annotations

# Decimal, as `ls --si`, registries and disks count. Two decimals where the unit is so large that one would hide much.
_UNITS = ("kB", "MB", "GB", "TB")
_DECIMALS = {"GB": 2, "TB": 2}


def human(size: int) -> str:
    """A size in bytes in the largest decimal unit that leaves a number of 1 or more; up to terabytes.

    >>> human(0), human(999), human(1000), human(1 << 20), human(22_100_000_000)
    ('0 B', '999 B', '1.0 kB', '1.0 MB', '22.10 GB')
    """
    if size < 1000:
        return f"{size} B"
    value = float(size)
    for unit in _UNITS:
        value /= 1000
        number = f"{value:.{_DECIMALS.get(unit, 1)}f}"
        if float(number) < 1000:  # 999,999 bytes are not 1000.0 kB
            break
    return f"{number} {unit}"
