"""What is said about a staged tree that will not be in the image what it was on disk."""

from __future__ import annotations

import os
import py_compile
from pathlib import Path

import pytest

from oci_builder.build import BuildOptions, build
from oci_builder.model.events import Event
from oci_builder.rootfs.advice import advice
from oci_builder.rootfs.layers_plan import Normal
from oci_builder.rootfs.scan import scan_tree
from tests.conftest import write_spec

CHECKED = py_compile.PycInvalidationMode.CHECKED_HASH
BY_TIME = py_compile.PycInvalidationMode.TIMESTAMP
MADE = 1_700_000_000


def tree_of(folder: Path, mode: py_compile.PycInvalidationMode) -> Path:
    root = folder / "tier"
    (root / "lib").mkdir(parents=True)
    (root / "lib/m.py").write_text("VALUE = 1\n")
    os.utime(root / "lib/m.py", (MADE, MADE))
    py_compile.compile(str(root / "lib/m.py"), invalidation_mode=mode, doraise=True)
    root.chmod(0o755)
    return root


@pytest.mark.parametrize(("mode", "epoch", "words"), [
    (BY_TIME, MADE - 1, ["checked by time"]), (BY_TIME, MADE, []), (CHECKED, MADE - 1, []),
])  # fmt: skip
def test_b155_bytecode_that_the_epoch_makes_stale_is_told_of(
    tmp_path: Path, mode: py_compile.PycInvalidationMode, epoch: int, words: list[str]
) -> None:
    said = list(advice(scan_tree(tree_of(tmp_path, mode)), Normal(epoch)))
    assert [word in text for word, text in zip(words, said, strict=True)] == [True] * len(words)


def test_bytecode_that_was_stale_before_is_nobody_s_news(tmp_path: Path) -> None:
    root = tree_of(tmp_path, BY_TIME)
    os.utime(root / "lib/m.py", (MADE + 5, MADE + 5))
    assert list(advice(scan_tree(root), Normal(MADE - 1))) == []


@pytest.mark.parametrize(("mode", "told"), [(0o700, True), (0o750, True), (0o711, True), (0o755, False)])
def test_b121_b139_a_tier_that_others_cannot_enter_is_told_of(tmp_path: Path, mode: int, told: bool) -> None:
    root = tree_of(tmp_path, CHECKED)
    root.chmod(mode)
    assert any("may enter" in text for text in advice(scan_tree(root), Normal())) is told


def test_a_build_says_it(tmp_path: Path) -> None:
    root = tree_of(tmp_path, BY_TIME)
    root.chmod(0o700)
    events: list[Event] = []
    build(write_spec(tmp_path, {"one": root}, epoch=0), tmp_path / "out", BuildOptions(tmp_path / "cache"), events.append)
    assert [e.task for e in events if e.kind == "warning"] == ["tier one", "tier one"]
