"""Requests are checked before anything happens; users, variables and filters are plain functions."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from chroot_exec import seccomp
from chroot_exec.environment import append, environment, prepend
from chroot_exec.errors import RequestError, RunnerError
from chroot_exec.identity import find_identity
from chroot_exec.process import Capture
from chroot_exec.protocol import parse_request
from tests.chroot.lab import PACKAGE

CHECK = {"name": "a", "argv": ["true"]}
GOOD: dict[str, Any] = {"schema": "chroot-exec/1", "root": "/r", "checks": [CHECK]}


class Requests(unittest.TestCase):
    def code(self, value: Any) -> str:
        text = value if isinstance(value, str) else json.dumps(value)
        with self.assertRaises(RequestError) as caught:
            parse_request(text)
        return caught.exception.code

    def test_a_good_one(self) -> None:
        request = parse_request(
            json.dumps({**GOOD, "gpu": {"devices": ["0"]}, "binds": [{"source": "/a", "target": "/b"}]})
        )
        self.assertEqual(request.gpu and request.gpu.devices, ("0",))
        self.assertTrue(request.binds[0].read_only)

    def test_not_json(self) -> None:
        for text in ("", "{", '{"a": 1, "a": 2}', "[" * 100000):
            with self.subTest(text[:20]):
                self.assertEqual(self.code(text), "request.json")

    def test_fields(self) -> None:
        for change in (
            {"unknown": 1}, {"root": "relative"}, {"root": 1}, {"root": "/a\0b"}, {"schema": "chroot-exec/2"},
            {"isolation": "none"}, {"write": "no"}, {"network": "bridge"}, {"hostname": "a b"}, {"shm_size": -1},
            {"shm_size": True}, {"shm_size": 1.5}, {"binds": [{"source": "/a"}]},
            {"binds": [{"source": "a", "target": "/b"}]},
            {"env": {"A=B": "x"}}, {"env": {"": "x"}}, {"env": {"A": 1}}, {"rlimits": {"nothing": 1}},
            {"gpu": {"source": "x"}},
            {"config": {"Env": "A=1"}}, {"config": {"Cmd": "a string"}}, {"config": 1}, {"checks": []},
            {"checks": "a"},
            {"exec": ["true"]}, {"tmpfs": ["relative"]}, {"read_only": 1}, {"env": {"A": "\ud800"}},
            {"env": {"A\ud800": "x"}}, {"workdir": "relative"}, {"checks": [{**CHECK, "workdir": "relative"}]},
        ):  # fmt: skip
            with self.subTest(change):
                self.assertEqual(self.code({**GOOD, **change}), "request.field")

    def test_the_sandbox_s_own_places_are_not_covered(self) -> None:
        """Else a bind takes away what makes it a sandbox, or fails with words about something else."""
        own = ("/", "//", "/.", "/a/..", "/proc", "/proc/", "/a/../proc", "//proc/sys", "/proc/x", "/sys", "/dev")
        for place in (*own, "relative", ""):
            for change in (
                {"binds": [{"source": "/etc", "target": place}]}, {"tmpfs": [place]},
                {"checks": [{**CHECK, "twins": [{"source": "/opt", "target": place}]}]},
            ):  # fmt: skip
                with self.subTest(change):
                    self.assertEqual(self.code({**GOOD, **change}), "request.field")
        for place in ("/dev/extra", "/tmp", "/run/x", "/process", "/sysroot"):
            with self.subTest(place):
                request = parse_request(json.dumps({**GOOD, "binds": [{"source": "/etc", "target": place}]}))
                self.assertEqual(request.binds[0].target, place)

    def test_checks(self) -> None:
        for change in ({"name": ""}, {"name": "a/b"}, {"argv": []}, {"argv": "true"}, {"timeout": 0}, {"timeout": "1"},
                       {"stdout": ["("]}, {"shell": "x"}, {"exit": "0"}):  # fmt: skip
            with self.subTest(change):
                self.assertEqual(self.code({**GOOD, "checks": [{**CHECK, **change}]}), "request.field")
        self.assertEqual(self.code({**GOOD, "checks": [CHECK, CHECK]}), "request.field")

    def test_the_schema_has_no_other_keys_than_the_code(self) -> None:
        self.assertEqual(self.code({"schema": "chroot-exec/1", "checks": [CHECK]}), "request.field")

    def test_config_may_hold_anything_else(self) -> None:
        self.assertEqual(parse_request(json.dumps({**GOOD, "config": {"Labels": {"a": 1}, "Env": None}})).root, "/r")

    def test_command_line(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "r.json"
            path.write_text("{}")
            for argument, status in ((str(path), 2), (folder + "/none", 2)):
                done = subprocess.run(
                    [sys.executable, "-m", "chroot_exec", argument], capture_output=True, text=True, cwd=PACKAGE.parent
                )
                self.assertEqual(done.returncode, status)
                self.assertNotIn("Traceback", done.stderr)


class Users(unittest.TestCase):
    PASSWD = b"root:x:0:0:r:/root:/bin/sh\n\nweb:x:33:34:w:/srv:/bin/sh\nbad:x:a:b:::\n7:x:77:78::relative:\n"
    GROUP = b"root:x:0:\nvideo:x:44:web,other\nweb:x:34:\nx:x:45:web\n"

    def find(self, user: str) -> tuple[int, int, tuple[int, ...], str]:
        identity = find_identity(user, self.PASSWD, self.GROUP)
        return identity.uid, identity.gid, identity.groups, identity.home

    def test_forms(self) -> None:
        for user, wanted in (
            ("", (0, 0, (), "/root")), ("web", (33, 34, (44, 45), "/srv")), ("33", (33, 34, (44, 45), "/srv")),
            ("web:video", (33, 44, (), "/srv")), ("web:99", (33, 99, (), "/srv")), ("500", (500, 0, (), "/")),
            ("500:500", (500, 500, (), "/")), ("7", (77, 78, (), "/")),
            ("web:", (33, 34, (44, 45), "/srv")), ("500:", (500, 0, (), "/")), (":", (0, 0, (), "/root")),
        ):  # fmt: skip
            with self.subTest(user):
                self.assertEqual(self.find(user), wanted)

    def test_unknown(self) -> None:
        for user in ("who", "web:who", "bad", "4294967295", "-1", "who:"):
            with self.subTest(user), self.assertRaises(RunnerError) as caught:
                self.find(user)
            self.assertEqual(caught.exception.code, "user.unknown")


class Variables(unittest.TestCase):
    def test_later_layers_win(self) -> None:
        notes: list[str] = []
        out = environment(
            {"Env": ["A=1", "B=1", "C=a=b"]}, ({"B": "2"}, {"B": "3", "HOME": "/h"}), "/home", notes.append
        )
        self.assertEqual((out["A"], out["B"], out["C"], out["HOME"]), ("1", "3", "a=b", "/h"))
        self.assertEqual(notes, [])

    def test_what_is_no_variable_is_left_out_and_noted(self) -> None:
        """Docker runs such images."""
        notes: list[str] = []
        out = environment({"Env": ["FOO", "=x", "", "B=1"]}, (), "/", notes.append)
        self.assertEqual((out["B"], "FOO" in out, "" in out, len(notes)), ("1", False, False, 1))

    def test_a_long_temporary_folder_is_noted(self) -> None:
        """B197, B198."""
        notes: list[str] = []
        environment({}, ({"TMPDIR": "/" + "t" * 70},), "/", notes.append)
        self.assertEqual(len(notes), 1)

    def test_lists(self) -> None:
        self.assertEqual(prepend({"P": ":/b::/a:"}, "P", "/a"), "/a:/b")
        self.assertEqual(append({"P": "/b:"}, "P", "/a"), "/b:/a")
        self.assertEqual(append({}, "P", "/a"), "/a")


class Streams(unittest.TestCase):
    def test_any_cut_gives_the_same(self) -> None:
        data = bytes(range(256)) * 40
        for step in (1, 7, 100, 5000, len(data)):
            capture = Capture(1000)
            for at in range(0, len(data), step):
                capture.feed(data[at : at + step])
            with self.subTest(step):
                self.assertTrue(capture.kept.startswith(data[:500]))
                self.assertTrue(capture.kept.endswith(data[-500:]))
                self.assertEqual(capture.size, len(data))

    def test_short_output_is_whole(self) -> None:
        capture = Capture(10)
        for part in (b"123", b"4567", b"890"):
            capture.feed(part)
        self.assertEqual((capture.kept, capture.truncated), (b"1234567890", False))


class Filter(unittest.TestCase):
    def run_filter(self, arch: int, number: int, argument: int = 0) -> int:
        """A tiny machine for the instructions that the filter has."""
        code = list(struct.iter_unpack("=HBBI", seccomp.program()))
        at = value = 0
        while True:
            operation, true, false, operand = code[at]
            at += 1
            if operation == 0x20:
                value = {0: number, 4: arch, 16: argument, 24: argument}[operand]
            elif operation == 0x06:
                return int(operand)
            else:
                at += true if (value == operand if operation == 0x15 else value >= operand) else false

    def test_what_is_denied(self) -> None:
        native = 0xC000003E
        for number in seccomp.DENIED.values():
            self.assertEqual(self.run_filter(native, number), 0x00050001)
        for number in (0, 1, 59, 231, 334, 435, 500):
            self.assertEqual(self.run_filter(native, number), 0x7FFF0000)

    def test_what_is_denied_of_ioctl(self) -> None:
        for argument in seccomp.DENIED_IOCTLS.values():
            self.assertEqual(self.run_filter(0xC000003E, 16, argument), 0x00050001)
        for argument in (0, 0x5401, 0x5413, 0x80045430):
            self.assertEqual(self.run_filter(0xC000003E, 16, argument), 0x7FFF0000)

    def test_what_is_denied_of_socket(self) -> None:
        """A network namespace does not hold AF_VSOCK; every other family it does, or they are local."""
        for argument in range(46):
            wanted = 0x00050001 if argument == 40 else 0x7FFF0000
            self.assertEqual(self.run_filter(0xC000003E, 41, argument), wanted)

    def test_other_call_tables_are_denied(self) -> None:
        self.assertEqual(self.run_filter(0x40000003, 1), 0x00050001)
        self.assertEqual(self.run_filter(0xC000003E, 0x40000001), 0x00050001)


class Independence(unittest.TestCase):
    def test_nothing_but_the_standard_library_is_imported(self) -> None:
        code = (
            "import sys; before = set(sys.modules); import chroot_exec.__main__;"
            "print(*{m.split('.')[0] for m in set(sys.modules) - before})"
        )
        done = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
        foreign = set(done.stdout.split()) - set(sys.stdlib_module_names) - {"chroot_exec"}
        self.assertEqual((done.returncode, foreign), (0, set()))


if __name__ == "__main__":
    unittest.main()
