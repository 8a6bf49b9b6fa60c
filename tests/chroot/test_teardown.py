"""Clean-up never goes through a mount or a link (B199, B200), and tidies up after dead runs."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from pathlib import Path

from chroot_exec import teardown
from chroot_exec.errors import RunnerError
from tests.chroot.lab import PACKAGE, WAIT, mount, umount

MS_BIND = 4096
needs_root = unittest.skipIf(os.geteuid() != 0, "needs root to mount")


class Teardown(unittest.TestCase):
    def setUp(self) -> None:
        self.place = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.place)
        self.state = self.place / "state"
        self.state.mkdir(mode=0o700)

    def dead_run(self) -> Path:
        """What a run that was killed leaves."""
        folder = self.state / "run-dead"
        (folder / "base").mkdir(parents=True)
        (folder / "record").write_text(json.dumps({"pid": 1, "root": str(self.place / "tree")}) + "\n")
        return folder

    def sweep(self) -> str:
        """The code of the error that a sweep ends with, or empty."""
        try:
            teardown.sweep(str(self.state))
        except RunnerError as error:
            return error.code
        return ""

    def test_a_dead_run_is_removed(self) -> None:
        folder = self.dead_run()
        self.assertEqual(teardown.sweep(str(self.state)), [str(folder)])
        self.assertEqual(list(self.state.iterdir()), [])

    def test_placeholders_stay_while_others_run_in_the_tree(self) -> None:
        """Removing a folder takes what others have mounted upon it away from them."""
        tree = self.place / "tree"
        tree.mkdir()
        first = teardown.Run(str(self.state), str(tree))
        first.made("proc")
        (tree / "proc").mkdir()
        second = teardown.Run(str(self.state), str(tree))
        first.end()
        self.assertTrue((tree / "proc").is_dir())
        self.assertEqual(teardown.sweep(str(self.state)), [])
        second.end()
        self.assertEqual(teardown.sweep(str(self.state)), [first.folder])
        self.assertEqual((list(tree.iterdir()), list(self.state.iterdir())), ([], []))

    def test_somebody_elses_lock_on_a_tree_is_no_reason_to_wait(self) -> None:
        tree = self.place / "tree"
        tree.mkdir()
        fd = os.open(tree, os.O_RDONLY)
        self.addCleanup(os.close, fd)
        fcntl.flock(fd, fcntl.LOCK_EX)
        with unittest.mock.patch.object(teardown, "_TIDYING", 0.1):
            teardown.Run(str(self.state), str(tree)).end()
        self.assertEqual(list(self.state.iterdir()), [])

    def test_many_sweeps_at_once_remove_each_dead_run_once(self) -> None:
        """After a crash of many runs, those that start together all start."""
        for number in range(60):
            folder = self.state / f"run-dead{number}"
            (folder / "base").mkdir(parents=True)
            (folder / "record").write_text('{"pid": 1, "root": "/nowhere"}\n')
        command = [sys.executable, "-m", "chroot_exec", "sweep", str(self.state)]
        sweeps = [
            subprocess.Popen(command, cwd=PACKAGE.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            for _ in range(8)
        ]
        done = [(*process.communicate(timeout=WAIT), process.returncode) for process in sweeps]
        self.assertEqual([(errors, status) for _, errors, status in done], [(b"", 0)] * 8)
        removed = [name for out, _, _ in done for name in json.loads(out)["removed"]]
        self.assertEqual((len(removed), len(set(removed))), (60, 60))
        self.assertEqual(list(self.state.iterdir()), [])

    def test_a_dead_run_that_another_removes_is_left_to_it(self) -> None:
        folder = self.dead_run()
        with open(folder / "record", "rb") as record:
            fcntl.flock(record, fcntl.LOCK_EX)
            self.assertEqual(teardown.sweep(str(self.state)), [])
            self.assertTrue((folder / "base").is_dir())

    def test_a_sweep_makes_nothing(self) -> None:
        command = [sys.executable, "-m", "chroot_exec", "sweep", str(self.place / "new/state")]
        done = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True)
        self.assertEqual((json.loads(done.stdout), done.returncode), ({"removed": []}, 0))
        self.assertFalse((self.place / "new").exists())

    def test_a_run_that_died_before_its_record(self) -> None:
        """Killed between the folder and the record, between the record and its first line; and odd things there."""
        folders = [self.state / f"run-{name}" for name in ("none", "empty", "fifo", "folder", "link", "loop")]
        for folder in folders:
            folder.mkdir()
        (folders[1] / "record").touch()
        os.mkfifo(folders[2] / "record")
        (folders[3] / "record").mkdir()
        (folders[4] / "record").symlink_to("/etc/passwd")
        (folders[5] / "record").symlink_to("record")
        self.assertEqual(sorted(teardown.sweep(str(self.state))), sorted(map(str, folders)))
        self.assertEqual(list(self.state.iterdir()), [])
        self.assertTrue(os.path.exists("/etc/passwd"))

    def test_a_folder_of_somebody_else_s_stays(self) -> None:
        """Results of experiments are called run-001 as well; the caller names the folder."""
        for place in ("run-001/model", "run-002/base/model", "run-003/record/model"):
            (self.state / place).parent.mkdir(parents=True)
            (self.state / place).write_text("dear")
        (self.state / "run-004").write_text("a file")
        (self.state / "run-005").symlink_to(self.place)
        self.assertEqual(teardown.sweep(str(self.state)), [])
        self.assertEqual(len(list(self.state.rglob("model"))), 3)
        self.assertEqual(len(list(self.state.iterdir())), 5)

    def test_a_run_that_is_just_starting_is_left_alone(self) -> None:
        """Many at once: none takes another's folder for a dead one's."""
        program = (
            "import sys; from chroot_exec import teardown as t\n"
            "for _ in range(40):\n    t.sweep(sys.argv[1]); run = t.Run(sys.argv[1], '/'); run.made('x'); run.end()"
        )
        command = [sys.executable, "-c", program, str(self.state)]
        runs = [subprocess.Popen(command, cwd=PACKAGE.parent, stderr=subprocess.PIPE) for _ in range(6)]
        self.assertEqual([(run.communicate(timeout=WAIT)[1], run.returncode) for run in runs], [(b"", 0)] * 6)
        self.assertEqual(list(self.state.iterdir()), [])

    def test_the_user_s_own_state_folder_goes_when_it_is_empty(self) -> None:
        program = (
            "from chroot_exec import teardown as t\n"
            "for _ in range(40):\n    state = t.state_folder(''); t.sweep(state); t.Run(state, '/').end()"
        )
        environment = {**os.environ, "TMPDIR": str(self.place)}
        command = [sys.executable, "-c", program]
        runs = [
            subprocess.Popen(command, cwd=PACKAGE.parent, env=environment, stderr=subprocess.PIPE) for _ in range(6)
        ]
        self.assertEqual([(run.communicate(timeout=WAIT)[1], run.returncode) for run in runs], [(b"", 0)] * 6)
        self.assertEqual(list(self.place.iterdir()), [self.state])

    def test_a_torn_record_stops_nothing(self) -> None:
        folder = self.dead_run()
        (folder / "record").write_bytes(b"\0\0\0\n[]\n")
        self.assertEqual(teardown.sweep(str(self.state)), [str(folder)])

    def test_placeholders_of_a_dead_run_are_removed_and_nothing_else(self) -> None:
        folder = self.dead_run()
        tree = self.place / "tree"
        for name in ("made/deep", "used"):
            (tree / name).mkdir(parents=True)
        (tree / "used/theirs").write_text("x")
        (tree / "empty").write_text("")
        (tree / "outside").symlink_to("/etc")
        with open(folder / "record", "a") as file:
            for name in ("made", "made/deep", "used", "empty", "outside/hostname", "torn"):
                file.write(json.dumps({"made": name}) + "\n")
            file.write('{"made": "us')
        self.sweep()
        self.assertEqual(sorted(p.name for p in tree.iterdir()), ["outside", "used"])
        self.assertTrue((tree / "used/theirs").exists())

    @needs_root
    def test_a_busy_mount_of_the_hosts_devices_stops_it(self) -> None:
        """B199."""
        folder = self.dead_run()
        (folder / "base/dev").mkdir()
        mount("/dev", str(folder / "base/dev"), flags=MS_BIND)
        before = sorted(os.listdir("/dev"))
        fd = os.open(folder / "base/dev", os.O_RDONLY)
        try:
            self.assertEqual(self.sweep(), "teardown.busy")
            self.assertTrue((folder / "base/dev/null").is_char_device())
            self.assertEqual(sorted(os.listdir("/dev")), before)
        finally:
            os.close(fd)
        self.assertEqual(self.sweep(), "")
        self.assertEqual(sorted(os.listdir("/dev")), before)
        self.assertFalse(folder.exists())

    @needs_root
    def test_a_file_held_open_in_proc_stops_it(self) -> None:
        """B200: no removal, and an exit status that says so."""
        folder = self.dead_run()
        (folder / "base/proc").mkdir()
        (folder / "base/kept").write_text("kept")
        mount("proc", str(folder / "base/proc"), "proc")
        with open(folder / "base/proc/version"):
            done = subprocess.run(
                [sys.executable, "-m", "chroot_exec", "sweep", str(self.state)],
                capture_output=True,
                text=True,
                cwd=PACKAGE.parent,
            )
        self.assertEqual(done.returncode, 125)
        self.assertIn("teardown.busy", done.stderr)
        self.assertTrue((folder / "base/kept").exists())
        self.assertEqual(self.sweep(), "")

    @needs_root
    def test_remove_tree_refuses_a_mount_anywhere_below(self) -> None:
        tree, other = self.place / "tree", self.place / "other"
        (tree / "a/b").mkdir(parents=True)
        (tree / "first").write_text("")
        other.mkdir()
        (other / "precious").write_text("x")
        mount(str(other), str(tree / "a/b"), flags=MS_BIND)
        try:
            with self.assertRaises(RunnerError) as caught:
                teardown.remove_tree(str(tree))
        finally:
            umount(str(tree / "a/b"))
        self.assertEqual(caught.exception.code, "teardown.busy")
        self.assertTrue((tree / "first").exists())
        self.assertTrue((other / "precious").exists())

    def test_remove_tree_follows_no_link(self) -> None:
        tree, other = self.place / "tree", self.place / "other"
        tree.mkdir()
        other.mkdir()
        (other / "precious").write_text("x")
        (tree / "link").symlink_to(other)
        teardown.remove_tree(str(tree))
        self.assertTrue((other / "precious").exists())
        self.assertFalse(tree.exists())

    def test_remove_tree_opens_closed_folders(self) -> None:
        tree = self.place / "tree"
        (tree / "closed/deep").mkdir(parents=True)
        (tree / "closed").chmod(0)
        teardown.remove_tree(str(tree))
        self.assertFalse(tree.exists())

    def test_a_state_folder_of_others_is_refused(self) -> None:
        self.state.chmod(0o777)
        with self.assertRaises(RunnerError) as caught:
            teardown.state_folder(str(self.state))
        self.assertEqual(caught.exception.code, "state.owner")

    def test_mount_points_with_awkward_names(self) -> None:
        self.assertEqual(teardown._unescape(rb"/a\040b\011c\134d"), "/a b\tc\\d")


if __name__ == "__main__":
    unittest.main()
