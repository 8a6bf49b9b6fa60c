"""Where a receipt is written: a file appears whole; what is no file stays what it is."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import threading
import unittest

from chroot_exec.__main__ import _write

VALUE = {"answer": [1, 2]}


class Output(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.path = os.path.join(self.folder.name, "out")

    def test_a_file_is_replaced_whole(self) -> None:
        with open(self.path, "w") as file:
            file.write("old")
        before = os.stat(self.path).st_ino
        _write(self.path, VALUE)
        self.assertNotEqual(os.stat(self.path).st_ino, before)
        self.assertEqual((os.listdir(self.folder.name), self.read()), (["out"], VALUE))

    def test_a_link_stays_a_link(self) -> None:
        target = os.path.join(self.folder.name, "target")
        os.symlink(target, self.path)
        _write(self.path, VALUE)
        self.assertTrue(os.path.islink(self.path))
        self.assertEqual(self.read(), VALUE)

    def test_a_pipe_is_written_to(self) -> None:
        os.mkfifo(self.path)
        got: list[object] = []
        reader = threading.Thread(target=lambda: got.append(self.read()))
        reader.start()
        _write(self.path, VALUE)
        reader.join(10)
        self.assertEqual(got, [VALUE])
        self.assertTrue(stat.S_ISFIFO(os.lstat(self.path).st_mode))

    @unittest.skipUnless(os.geteuid() == 0, "making a device needs root")
    def test_a_device_stays_a_device(self) -> None:
        """With /dev/null the machine would be broken."""
        try:
            os.mknod(self.path, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
            open(self.path, "w").close()
        except OSError as error:
            self.skipTest(f"no devices here: {error}")
        _write(self.path, VALUE)
        self.assertTrue(stat.S_ISCHR(os.lstat(self.path).st_mode))

    def read(self) -> object:
        with open(self.path) as file:
            return json.load(file)


if __name__ == "__main__":
    unittest.main()
