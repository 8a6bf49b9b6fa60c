"""The chroot runner by itself: its request, its walk inside a root that nobody trusts, its clean-up, and real sandboxes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import unittest
from pathlib import Path
from typing import Any

from bare import PYTHON, ROOT, Case

from chroot_exec import __version__, devices, errors, process, protocol, resolve, teardown


def refused(value: object) -> str:
    """The code with which a request is refused, or empty."""
    try:
        protocol.parse_request(json.dumps(value))
    except errors.RequestError as error:
        return error.code
    return ""


class Protocol(Case):
    def test_a_request_is_checked_strictly(self) -> None:
        good: dict[str, Any] = {"schema": "chroot-exec/1", "root": "/r", "exec": ["true"]}
        self.assertEqual(refused(good), "")
        for bad in (
            {**good, "unknown": 1}, {**good, "root": "relative"}, {**good, "exec": "true"}, {**good, "checks": [{}]},
            {**good, "network": "some"}, {**good, "rlimits": {"x": 1}}, {**good, "exec": None}, [], None,
        ):  # fmt: skip
            with self.subTest(bad):
                self.assertEqual(refused(bad), "request.field")

    def test_a_wrong_request_is_exit_2_without_a_traceback(self) -> None:
        (self.place / "request.json").write_text("{")
        done = subprocess.run(
            [PYTHON, "-S", "-m", "chroot_exec", str(self.place / "request.json")], cwd=ROOT, capture_output=True, text=True
        )
        self.assertEqual((done.returncode, "Traceback" in done.stderr), (2, False))

    def test_output_is_kept_from_both_ends(self) -> None:
        capture = process.Capture(10)
        capture.feed(b"01234567890123456789")
        self.assertEqual((capture.size, capture.kept[:5], capture.kept[-5:]), (20, b"01234", b"56789"))


class Hostile(Case):
    def test_links_and_dots_never_leave_the_root(self) -> None:
        root, outside = self.place / "root", self.place / "outside"
        root.mkdir()
        outside.mkdir()
        (root / "dev").symlink_to(outside)
        (root / "etc").symlink_to("../../outside")
        walk = resolve.Root(str(root))
        self.addCleanup(walk.close)
        for path in ("/dev/null", "/etc/hosts", "/../../x/y"):
            os.close(walk.open(path, "file"))
        self.assertEqual(list(outside.iterdir()), [])

    def test_a_file_in_the_place_of_a_node_is_refused(self) -> None:
        (self.place / "null").write_text("")
        with self.assertRaises(errors.RunnerError) as caught:
            devices.require_character_device("/dev/null", os.stat(self.place / "null"), 1, 3)
        self.assertEqual(caught.exception.code, "device.type")

    def test_removal_follows_no_link(self) -> None:
        tree, other = self.place / "tree", self.place / "other"
        tree.mkdir()
        other.mkdir()
        (other / "precious").write_text("x")
        (tree / "link").symlink_to(other)
        teardown.remove_tree(str(tree))
        self.assertTrue((other / "precious").exists())


def shell_root(folder: Path) -> None:
    """A root of this machine's shell and its libraries."""
    listed = subprocess.run(["ldd", os.path.realpath("/bin/sh")], capture_output=True, text=True).stdout.split()
    for name in ["/bin/sh", *(word for word in listed if word.startswith("/"))]:
        place = folder / name.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, place)


class Sandbox(Case):
    """Real ones, as far as this machine lets this user make namespaces."""

    def setUp(self) -> None:
        super().setUp()
        flags = [] if os.geteuid() == 0 else ["-r"]
        try:
            able = subprocess.run(["unshare", *flags, "-mpf", "true"], capture_output=True).returncode == 0
        except OSError:
            able = False
        if not able:
            self.skipTest("no namespaces here")
        shell_root(self.place / "root")
        (self.place / "state").mkdir(mode=0o700)

    def run_checks(self, *checks: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        request = {"schema": protocol.SCHEMA, "root": str(self.place / "root"), "state": str(self.place / "state"),
                   "checks": list(checks)}  # fmt: skip
        done = subprocess.run(
            [PYTHON, "-S", "-m", "chroot_exec", "-"], cwd=ROOT, input=json.dumps(request).encode(), capture_output=True
        )
        value: dict[str, Any] = json.loads(done.stdout)
        return done.returncode, value

    def shell(self, script: str, **more: Any) -> dict[str, Any]:
        entry: dict[str, Any] = self.run_checks({"name": "a", "argv": ["/bin/sh", "-c", script], **more})[1]["checks"][0]
        return entry

    def test_devices_and_loopback_and_nothing_of_the_host(self) -> None:
        check = self.shell("echo x > /dev/null && read -r line < /proc/net/dev && echo $$ /home* /dev/null")
        self.assertEqual((check["outcome"], check["stdout"]["text"]), ("pass", "2 /home* /dev/null\n"), check)

    def test_status_and_timeouts_and_leftovers(self) -> None:
        self.assertEqual(self.shell("exit 7")["exit"], 7)
        self.assertEqual(self.shell("while :; do :; done", timeout=0.3)["code"], "check.timeout")
        self.assertEqual([p.name for p in (self.place / "state").iterdir()], [])

    def test_the_receipt_says_what_ran_it(self) -> None:
        status, receipt = self.run_checks({"name": "a", "argv": ["/bin/sh", "-c", ":"]})
        self.assertEqual((status, receipt["outcome"], receipt["runner"]["version"]), (0, "pass", __version__))


if __name__ == "__main__":
    unittest.main()
