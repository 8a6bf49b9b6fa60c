"""Our own folders go without what somebody mounted in them, or what a link leads to."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oci_builder.store.removal import clear_folder, remove_folder

HERE = Path(__file__).parents[2]
# In a mount namespace of its own: a folder of ours has something of somebody's mounted in it when its time is over.
ENDS = """
import subprocess, sys
from pathlib import Path
from oci_builder.payload.partial import making
from oci_builder.store.removal import clear_folder
from oci_builder.store.scratch import scratch_folder
top, end = Path(sys.argv[1]), sys.argv[2]
def use(folder):
    (folder / "deep/mnt").mkdir(parents=True)
    subprocess.run(["mount", "--bind", top / "precious", folder / "deep/mnt"], check=True)
if end == "scratch":
    with scratch_folder(top) as folder: use(folder)
elif end == "making":
    with making(top / "place") as folder: use(folder)
else:
    use(top / "folder")
    clear_folder(top / "folder")
"""


@pytest.mark.parametrize("end", ["scratch", "making", "clear"])
def test_what_is_mounted_in_a_folder_of_ours_is_not_removed(tmp_path: Path, end: str) -> None:
    """B199, B200: rmtree empties what is mounted, and only then finds that the folder is busy."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True).returncode:
        pytest.skip("no namespaces here")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("x")
    words = ["unshare", "-rm", sys.executable, "-c", ENDS, str(tmp_path), end]
    done = subprocess.run(words, cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "precious/file").read_text() == "x"


def test_links_go_and_what_they_lead_to_stays(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/link").symlink_to(tmp_path / "precious")
    (tmp_path / "link").symlink_to(tmp_path / "precious")
    for name in ("folder", "link", "absent"):
        remove_folder(tmp_path / name)
    assert [path.name for path in tmp_path.rglob("*")] == ["precious", "file"]


def test_what_cannot_be_removed_stays_where_nobody_asks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(_place: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr("oci_builder.store.removal.remove_tree", refuse)
    clear_folder(tmp_path)
    with pytest.raises(OSError, match="Read-only"):
        remove_folder(tmp_path)


def test_there_is_one_way_to_remove_a_folder() -> None:
    """``compiler_worker`` runs alone, and removes what it has made in the moment before."""
    sources = (path for path in (HERE / "oci_builder").rglob("*.py") if path.name != "compiler_worker.py")
    assert [path.name for path in sources if re.search(r"\brmtree\(", path.read_text())] == []
