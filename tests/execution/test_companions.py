"""What stands beside an archive: a report's layers, and the size that a record gives before anything is unpacked."""

from __future__ import annotations

from typing import Any

import pytest

from oci_builder.execution.companions import layer_facts, unpacked_size
from oci_builder.model.report import Report


def test_the_layers_of_the_first_archive_are_meant() -> None:
    rows = [{"diff_id": "sha256:a", "tar_size": 10}, {"diff_id": "sha256:b", "tar_size": 2048}]
    other = {"layers": [{"diff_id": "sha256:c", "tar_size": 5}]}
    assert layer_facts(Report(({"layers": rows}, other))) == (["sha256:a", "sha256:b"], 2058)


@pytest.mark.parametrize("subjects", [(), ({},), ({"layers": None},)], ids=["no archive", "a folder", "unknown"])
def test_where_no_layers_were_seen_nothing_is_known(subjects: tuple[dict[str, Any], ...]) -> None:
    assert layer_facts(Report(subjects)) == ([], 0)


@pytest.mark.parametrize(
    ("record", "size"),
    [
        ({"size": {"uncompressed": 1}}, 1), ({"size": {"uncompressed": 0}}, 0), ({"size": {"uncompressed": -1}}, 0),
        ({"size": {"uncompressed": True}}, 0), ({"size": {"uncompressed": "9"}}, 0), ({"size": 9}, 0), ({}, 0),
    ],
)  # fmt: skip
def test_a_record_s_size_counts_where_it_is_one(record: dict[str, Any], size: int) -> None:
    assert unpacked_size(record) == size
