"""Side records of blobs: what is dropped is forgotten at once, in memory as on the disk."""

from __future__ import annotations

from pathlib import Path

from oci_builder.model.digest import Digest
from oci_builder.store.records import Records

ONE, TWO = Digest.of(b"one"), Digest.of(b"two")


def test_a_dropped_record_is_forgotten_by_whoever_had_read_it(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.put(ONE, "diff_id", "x")
    records.put(TWO, "diff_id", "y")
    records.drop(ONE)
    assert (records.get(ONE, "diff_id"), records.get(TWO, "diff_id")) == (None, "y")
    assert (Records(tmp_path).get(ONE, "diff_id"), Records(tmp_path).get(TWO, "diff_id")) == (None, "y")


def test_values_of_one_blob_stand_beside_each_other_for_the_next_process(tmp_path: Path) -> None:
    records = Records(tmp_path)
    records.put(ONE, "a", 1)
    records.put(ONE, "b", [2])
    assert [Records(tmp_path).get(ONE, key) for key in ("a", "b", "c")] == [1, [2], None]


def test_a_damaged_record_is_none(tmp_path: Path) -> None:
    Records(tmp_path).put(ONE, "a", 1)
    for text in ("{", "[]", "[" * 100_000):
        (tmp_path / f"{ONE.hex}.json").write_text(text)
        assert Records(tmp_path).get(ONE, "a") is None
