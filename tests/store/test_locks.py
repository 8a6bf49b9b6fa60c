"""Locks between processes: who waits, who is told no, and that a dead holder holds nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from oci_builder.store.locks import alone, alone_in, alone_now, hold, in_use, lock_file

_INSIDE = """
import sys; from pathlib import Path; from oci_builder.store.locks import alone, alone_in
with (alone_in if Path(sys.argv[1]).is_dir() else alone)(Path(sys.argv[1])):
    print('inside', flush=True); sys.stdin.read()
"""


def somebody_inside(place: Path) -> subprocess.Popen[str]:
    """Another process that has the lock until it is killed or its input ends."""
    other = subprocess.Popen(
        [sys.executable, "-c", _INSIDE, str(place)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "inside\n"
    return other


@pytest.mark.parametrize("enter", [alone, alone_in], ids=["file", "folder"])
def test_whoever_waits_is_inside_when_the_other_is_dead(
    tmp_path: Path, enter: Callable[[Path], AbstractContextManager[object]]
) -> None:
    place = tmp_path / "lock" if enter is alone else tmp_path
    with somebody_inside(place) as other:
        other.kill()
    with enter(place):
        pass


def test_a_folder_is_refused_at_once_while_somebody_is_inside(tmp_path: Path) -> None:
    with somebody_inside(tmp_path) as other:
        with pytest.raises(BlockingIOError), alone_in(tmp_path, wait=False):
            pytest.fail("two were inside")
        other.communicate()
    with alone_in(tmp_path, wait=False) as fd:
        assert os.path.samestat(os.fstat(fd), os.stat(tmp_path))


def test_a_folder_is_given_back_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyError), alone_in(tmp_path):
        raise KeyError
    with alone_in(tmp_path, wait=False):
        pass


def test_what_is_no_folder_is_not_locked_as_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError), alone_in(tmp_path / "file"):
        pytest.fail("it was locked")


def test_a_file_tells_whether_somebody_is_inside(tmp_path: Path) -> None:
    place = tmp_path / "lock"
    with somebody_inside(place) as other:
        with alone_now(place) as free:
            assert not free
        other.communicate()
    with alone_now(place) as free:
        assert free


def test_a_file_is_in_use_as_long_as_anybody_holds_it(tmp_path: Path) -> None:
    place = tmp_path / "held"
    assert not in_use(place)
    place.write_text("content")
    first, second = hold(place), hold(place)
    first.close()
    assert in_use(place)
    second.close()
    assert not in_use(place)
    assert place.read_text() == "content"


def test_a_lock_is_no_link_to_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"), lock_file(tmp_path / "lock"):
        pytest.fail("it was followed")
    assert not (tmp_path / "elsewhere").exists()
