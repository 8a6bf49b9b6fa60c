"""Sizes for people: one way for every screen and page."""

from __future__ import annotations

import pytest

from oci_builder.model.sizes import human


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"), (1, "1 B"), (999, "999 B"), (1000, "1.0 kB"), (1023, "1.0 kB"), (1500, "1.5 kB"),
        (999_949, "999.9 kB"), (999_999, "1.0 MB"), (1 << 20, "1.0 MB"), (999_950_000, "1.00 GB"),
        (1 << 30, "1.07 GB"), (22_100_000_000, "22.10 GB"), (1 << 40, "1.10 TB"), (5 * 10**15, "5000.00 TB"),
    ],
)  # fmt: skip
def test_a_size_for_people(size: int, text: str) -> None:
    assert human(size) == text
