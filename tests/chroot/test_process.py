"""How programs end: status, signals, time, output, and what they leave behind (C12-06)."""

from __future__ import annotations

import hashlib
import itertools
import os
import pty
import selectors
import signal
import subprocess
import time
import types
import unittest
import unittest.mock
from pathlib import Path
from typing import Any

from chroot_exec import cudaprobe, process, receipt
from tests.chroot.lab import WAIT, SandboxCase, any_word, processes_with, until


class Properties:
    """Holds for root and rootless."""

    def test_exit_status(self) -> None:
        check = self.shell("exit 7")
        self.assertEqual((check["outcome"], check["code"], check["exit"]), ("fail", "check.exit", 7))

    def test_an_expected_failure_passes(self) -> None:
        self.assertEqual(self.shell("exit 7", check={"exit": 7})["outcome"], "pass")

    def test_a_signal(self) -> None:
        check = self.shell("kill -SEGV $$")
        self.assertEqual((check["code"], check["exit"], check["signal"]), ("check.signal", 139, "SIGSEGV"))

    def test_status_of_the_runner(self) -> None:
        for script, status in (("true", 0), ("false", 1)):
            self.run_checks({"name": "a", "argv": ["/bin/sh", "-c", script]}, status=status)

    def test_a_program_that_is_not_there(self) -> None:
        check = self.run_checks({"name": "a", "argv": ["/no/such"]}, status=1)["checks"][0]
        self.assertEqual((check["outcome"], check["code"], check["exit"]), ("error", "check.start", 127))
        self.assertIn("/no/such", check["message"])

    def test_a_program_that_cannot_run(self) -> None:
        check = self.run_checks({"name": "a", "argv": ["/etc/passwd"]}, status=1)["checks"][0]
        self.assertEqual((check["outcome"], check["code"], check["exit"]), ("error", "check.start", 126))

    def test_patterns(self) -> None:
        for more, code in (
            ({"stdout": ["^one$", "two"]}, ""),
            ({"stdout": ["^three$"]}, "check.output"),
            ({"stderr": ["two"]}, "check.output"),
            ({"reject": ["^tw"]}, "check.output"),
            ({"reject": ["three"]}, ""),
        ):
            with self.subTest(more):
                self.assertEqual(self.shell("echo one; echo two", check=more)["code"], code)

    def test_a_check_s_own_result(self) -> None:
        """A skipped or deferred check never counts as a pass."""
        for text, deferrable, outcome, code in (
            ('{"outcome": "pass"}', False, "pass", ""),
            ('{"outcome": "fail", "reason": "r"}', False, "fail", "check.fail"),
            ('{"outcome": "deferred", "reason": "no driver"}', True, "deferred", "check.deferred"),
            ('{"outcome": "deferred", "reason": "no driver"}', False, "fail", "check.deferred"),
            ('{"outcome": "deferred"}', True, "fail", "check.result"),
            ('{"outcome": "skipped", "reason": "r"}', True, "fail", "check.skipped"),
            ("all fine", True, "fail", "check.result"),
        ):
            with self.subTest(text, deferrable=deferrable):
                more = {"result": "json", "deferrable": deferrable}
                check = self.shell(f"echo first; echo '{text}'", check=more)
                self.assertEqual((check["outcome"], check["code"]), (outcome, code))

    def test_a_result_does_not_hide_an_exit_status(self) -> None:
        check = self.shell('echo \'{"outcome": "pass"}\'; exit 3', check={"result": "json"})
        self.assertEqual((check["outcome"], check["code"]), ("fail", "check.exit"))

    def test_a_pattern_that_never_ends(self) -> None:
        check = self.shell("echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaab", check={"stdout": ["^(a+)+$"]})
        self.assertEqual(check["code"], "check.pattern")

    def test_timeout_ends_the_whole_tree(self) -> None:
        word = any_word()
        script = f"(trap '' TERM; sleep {word}) & trap '' TERM; sleep {word}; sleep {word}"
        check = self.shell(script, check={"timeout": 0.5})
        self.assertEqual((check["outcome"], check["code"], check["timed_out"]), ("fail", "check.timeout", True))
        self.assertEqual(processes_with(word), [])

    def test_a_month_is_no_time_too_long(self) -> None:
        self.assertEqual(self.shell("echo done", check={"timeout": 9e8})["outcome"], "pass")

    def test_a_daemon_that_stays(self) -> None:
        word = any_word()
        check = self.shell(f"(sleep {word} &) ; (sleep {word} >/dev/null 2>&1 &); echo done")
        self.assertEqual((check["outcome"], check["left_running"]), ("pass", 2))
        self.assertEqual(processes_with(word), [])

    def test_output_is_capped_and_digested_whole(self) -> None:
        check = self.shell("head -c 20000000 /dev/zero; echo end", output_limit=1000)
        whole = hashlib.sha256(bytes(20_000_000) + b"end\n").hexdigest()
        stdout = check["stdout"]
        self.assertEqual((stdout["bytes"], stdout["sha256"], stdout["truncated"]), (20_000_004, whole, True))
        self.assertTrue(stdout["text"].endswith("end\n"))
        self.assertLess(len(stdout["text"]), 1100)

    def test_output_that_never_ends_is_bounded_by_time(self) -> None:
        for seconds in (0.5, 5, 50):
            check = self.shell("exec cat /dev/zero", check={"timeout": seconds})
            self.assertEqual(check["code"], "check.timeout")
            if check["stdout"]["bytes"] > 1 << 20:
                return
        self.fail("there was no time for a megabyte")

    def test_output_that_is_no_text(self) -> None:
        self.assertEqual(self.shell(r"printf '\377\000x'")["stdout"]["text"], "\\xff\0x")

    def test_the_runner_killed_takes_everything_along(self) -> None:
        word = any_word()
        check = {"name": "a", "argv": ["sleep", word]}
        with self.start(self.request(checks=[check])) as runner:
            until(lambda: processes_with(word))
            runner.kill()
            runner.communicate()
        until(lambda: not processes_with(word))
        left = [p.name for p in self.state.iterdir() if p.name.startswith("run-")]
        self.assertEqual(len(left), 1)
        self.out("true")
        self.assertEqual([p.name for p in self.state.iterdir()], ["receipt.json"])

    def test_a_sandbox_killed_from_outside_is_an_error_and_leaves_nothing(self) -> None:
        """Its keeper, and its PID 1: neither death is taken for an end of the program."""
        for depth in (1, 2):
            with self.subTest(depth):
                word = any_word()
                with self.start(self.request(checks=[{"name": "a", "argv": ["sleep", word]}])) as runner:
                    until(lambda word=word: processes_with(word))
                    victim = runner.pid
                    for _ in range(depth):
                        victim = int(Path(f"/proc/{victim}/task/{victim}/children").read_text().split()[0])
                    os.kill(victim, signal.SIGKILL)
                    runner.communicate(timeout=WAIT)
                check = self.receipt()["checks"][0]
                self.assertEqual((runner.returncode, check["outcome"], check["code"]), (125, "error", "sandbox.died"))
                until(lambda word=word: not processes_with(word))
                self.assertEqual([p.name for p in self.state.iterdir()], ["receipt.json"])

    def test_placeholders_in_a_tree_go_after_a_kill(self) -> None:
        """A direct run makes folders to mount on; the next run takes away those of a dead one."""
        word = any_word()
        before = sorted(self.root.rglob("*"))
        check = {"name": "a", "argv": ["sleep", word]}
        binds = [{"source": str(self.folder / "chroot_exec"), "target": "/placed/here"}]
        with self.start(self.request(checks=[check], write="direct", binds=binds)) as runner:
            until(lambda: processes_with(word))
            runner.kill()
            runner.communicate()
        until(lambda: not processes_with(word))
        self.assertTrue((self.root / "placed/here").is_dir())
        self.out("true")
        self.assertEqual(sorted(self.root.rglob("*")), before)

    def test_a_later_run_leaves_a_running_one_alone(self) -> None:
        word = any_word()
        with self.start(self.request(checks=[{"name": "a", "argv": ["sleep", word]}])) as runner:
            until(lambda: processes_with(word))
            self.out("true")
            self.assertIsNone(runner.poll())
            runner.kill()
            runner.communicate()
        self.out("true")

    def execute(self, *argv: str, **changes: Any) -> tuple[int, bytes, bytes]:
        with self.start(self.request(exec=list(argv), **changes)) as runner:
            out, err = runner.communicate(timeout=WAIT)
        return runner.returncode, out, err

    def test_exec_passes_the_status_and_the_streams(self) -> None:
        status, out, err = self.execute("/bin/sh", "-c", "echo out; echo err >&2; exit 42")
        self.assertEqual((status, out, err), (42, b"out\n", b"err\n"))

    def test_exec_reads_standard_input(self) -> None:
        with self.start(self.request(exec=["cat"]), stdin=subprocess.PIPE) as runner:
            self.assertEqual(runner.communicate(b"through\n", timeout=WAIT)[0], b"through\n")

    def test_exec_of_the_image_s_own_command(self) -> None:
        config = {"Entrypoint": ["/bin/sh", "-c"], "Cmd": ["echo from the image"]}
        self.assertEqual(self.execute(config=config)[1], b"from the image\n")
        self.assertEqual(self.execute("echo given", config=config)[1], b"given\n")
        self.assertEqual(self.execute("echo", "bare", config=config, entrypoint=[])[1], b"bare\n")

    def test_exec_by_signal(self) -> None:
        self.assertEqual(self.execute("/bin/sh", "-c", "kill -KILL $$")[0], 137)

    def test_exec_not_found(self) -> None:
        self.assertEqual(self.execute("no-such-program")[0], 127)
        self.assertEqual(self.execute("/etc/passwd")[0], 126)

    def why(self, *argv: str, **changes: Any) -> str:
        """Why a program could not be started, by the receipt."""
        self.execute(*argv, **changes)
        return str(self.receipt()["exec"]["message"])

    def test_why_a_program_could_not_be_started(self) -> None:
        shared = self.folder / "broken"
        shared.mkdir(exist_ok=True)
        shared.chmod(0o755)
        (shared / "script").write_text("#!/opt/no/python\n")
        (shared / "text").write_text("plain")
        (shared / "link").unlink(missing_ok=True)
        (shared / "link").symlink_to("nowhere")
        program = bytearray(Path(os.path.realpath("/bin/true")).read_bytes())
        at = program.index(b"/lib64/ld-linux") if b"/lib64/ld-linux" in program else program.index(b"/lib/ld-linux")
        program[at : at + 4] = b"/Lib"
        (shared / "program").write_bytes(program)
        for name in ("script", "text", "program"):
            (shared / name).chmod(0o755)
        more = {"binds": [{"source": str(shared), "target": "/b"}], "env": {"PATH": "/bin:/b"}}
        for name, words in (
            ("none", ["'none'", "/bin:/b"]),
            ("/b/none", ["'/b/none' is not in the image"]),
            ("script", ["'/b/script' needs '/opt/no/python'"]),
            ("/b/program", ["'/b/program' needs '/Lib"]),
            ("/b/link", ["'/b/link' is a link"]),
            ("/b/text", ["'/b/text'", "format"]),
            ("/etc/passwd", ["'/etc/passwd'", "Permission"]),
        ):
            with self.subTest(name):
                for word in words:
                    self.assertIn(word, self.why(name, **more))

    def test_a_working_folder_that_cannot_be_entered_is_named(self) -> None:
        closed = self.folder / "closed"
        closed.mkdir(exist_ok=True)
        closed.chmod(0)
        binds = [{"source": str(closed), "target": "/closed"}]
        self.assertIn("'/closed'", self.why("true", binds=binds, workdir="/closed", user="someone"))

    def test_nothing_is_said_of_a_program_that_ran(self) -> None:
        self.assertEqual(self.why("/bin/sh", "-c", "exit 127"), "")

    def test_the_runner_s_own_failure_is_told_apart(self) -> None:
        status, _, _ = self.execute("true", user="nobody-here")
        self.assertEqual(status, 125)
        self.assertEqual(self.receipt()["error"]["code"], "user.unknown")

    def test_signals_are_forwarded(self) -> None:
        script = "trap 'echo caught; exit 9' TERM; echo ready; while :; do sleep 0.05; done"
        with self.start(self.request(exec=["/bin/sh", "-c", script])) as runner:
            assert runner.stdout
            self.assertEqual(runner.stdout.readline(), b"ready\n")
            runner.send_signal(signal.SIGTERM)
            self.assertEqual(runner.stdout.readline(), b"caught\n")
            self.assertEqual(runner.wait(timeout=WAIT), 9)

    def test_a_signal_to_the_runner_ends_the_checks_and_is_no_verdict(self) -> None:
        """Even a check that catches it gets no outcome, and none is started after it."""
        word, begun = any_word(), self.folder / "begun"
        begun.mkdir(exist_ok=True)
        begun.chmod(0o777)
        hold = f"trap '' TERM INT; echo > /begun/mark; exec sleep {word}"
        checks = [
            {"name": "first", "argv": ["true"]},
            {"name": "held", "argv": ["/bin/sh", "-c", hold]},
            {"name": "next", "argv": ["/bin/sh", "-c", "echo > /begun/next"]},
        ]
        binds = [{"source": str(begun), "target": "/begun", "read_only": False}]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with self.subTest(number), self.start(self.request(checks=checks, binds=binds)) as runner:
                until((begun / "mark").exists)
                runner.send_signal(number)
                self.assertEqual(runner.wait(timeout=WAIT), 128 + number)
                receipt = self.receipt()
                self.assertEqual((receipt["outcome"], receipt["interrupted"]), ("error", number))
                self.assertEqual(receipt["error"]["code"], "run.interrupted")
                self.assertEqual([c["name"] for c in receipt["checks"]], ["first"])
                self.assertFalse((begun / "next").exists())
                self.assertEqual(list(self.state.glob("run-*")), [])
                # The kernel ends a namespace's processes a moment after its first one.
                until(lambda: not processes_with(word))
            (begun / "mark").unlink()

    def test_a_signal_that_is_ignored_ends_nothing(self) -> None:
        """As under nohup."""

        def ignore() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

        word = any_word()
        checks = [{"name": "slow", "argv": ["/bin/sh", "-c", "sleep 1; exit 0", word]}]
        with self.start(self.request(checks=checks), preexec_fn=ignore) as runner:
            until(lambda: processes_with(word) or runner.poll() is not None)
            runner.send_signal(signal.SIGHUP)
            self.assertEqual(runner.wait(timeout=WAIT), 0)

    def test_the_keyboard_interrupts_once(self) -> None:
        """A terminal signals the program's own group; the runner must not pass on a second one."""
        more = "i=0; while [ $i -lt 10 ]; do sleep 0.05; i=$((i+1)); done"  # time for a second one
        script = f"n=; trap 'echo caught; n=1' INT; echo ready; while [ -z $n ]; do sleep 0.05; done; {more}; exit 3"
        master, slave = pty.openpty()
        request = self.request(exec=["/bin/sh", "-c", script])

        def own_terminal() -> None:
            import fcntl
            import termios

            os.setsid()
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        with self.start(request, stdin=slave, stdout=slave, preexec_fn=own_terminal) as runner:
            os.close(slave)
            text = self._read(master, b"ready")
            os.write(master, b"\x03")
            text += self._read(master, b"caught")
            self.assertEqual(runner.wait(timeout=WAIT), 3)
            text += self._read(master, b"")
        os.close(master)
        self.assertEqual(text.count(b"caught"), 1)

    def _read(self, fd: int, end: bytes) -> bytes:
        data = b""
        while not end or end not in data:
            try:
                more = os.read(fd, 4096)
            except OSError:
                break
            data += more
        return data


class OurOwnTime(unittest.TestCase):
    """A machine that is busy elsewhere changes no verdict."""

    def test_output_is_read_to_its_end_however_late(self) -> None:
        capture, clock = process.Capture(1000), itertools.count(step=60)
        program = process.Program([], {}, "/", lambda: None, (capture, capture))
        pipes = [os.pipe() for _ in range(3)]
        for (reader, writer), feed in zip(pipes, (os.close, os.close, program._feeder(capture)), strict=True):
            program._selector.register(reader, selectors.EVENT_READ, feed)
            self.addCleanup(os.close, reader)
            self.addCleanup(os.close, writer)
        os.write(pipes[2][1], b"the end")
        with unittest.mock.patch.object(process.time, "monotonic", lambda: next(clock)):
            program._drain()
        self.assertEqual(capture.kept, b"the end")

    def test_a_pattern_has_its_own_time(self) -> None:
        with receipt._time_limit(0.2):
            time.sleep(0.4)
        with self.assertRaises(TimeoutError), receipt._time_limit(0.2):
            while True:
                pass

    def test_what_cuda_said_outlasts_a_try_without_an_answer(self) -> None:
        """Else a fabric that is not ready is called a driver that hangs, as the last try has a second only."""
        said, clock = iter([{"cuInit": 802, "devices": []}, {}]), itertools.count()
        with (
            unittest.mock.patch.object(cudaprobe, "_in_child", lambda *_: next(said)),
            unittest.mock.patch.object(cudaprobe, "time", types.SimpleNamespace(monotonic=lambda: next(clock), sleep=id)),
        ):
            self.assertEqual(cudaprobe.wait_ready("", {}, 5, lambda: None)[1], "gpu.not_ready")


class AsRoot(Properties, SandboxCase):
    isolation = "root"


class Rootless(Properties, SandboxCase):
    isolation = "rootless"


if __name__ == "__main__":
    unittest.main()
