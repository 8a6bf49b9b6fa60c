"""What of the caller's process must not reach a program: groups, mask, descriptors, signals, terminal, rights."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import unittest
from typing import Any

from tests.chroot.lab import WAIT, SandboxCase

FIELDS = ("Groups", "NoNewPrivs", "Seccomp", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "SigIgn", "SigBlk", "Umask")
# What Docker grants, without MKNOD and NET_RAW.
GRANTED = 0xA00405FB
# Types a line into the terminal on standard input; says whether the kernel let it.
TYPIST = """
#include <errno.h>
#include <stdio.h>
#include <sys/ioctl.h>
int main(void) {
    char c = 'x';
    unsigned long high = 0x100000000UL | TIOCSTI;
    int plain = ioctl(0, TIOCSTI, &c) ? errno : 0, wide = ioctl(0, high, &c) ? errno : 0;
    printf("%d %d %d\\n", plain, wide, ioctl(0, TIOCGWINSZ, &(struct winsize){0}) ? errno : 0);
    return 0;
}
"""


class Leaks:
    """Holds for both ways; the classes below run it."""

    def status(self, **changes: Any) -> dict[str, str]:
        """Lines of /proc/self/status, as a program in the sandbox reads them."""
        rows = [line.partition(":") for line in self.out("cat /proc/self/status", **changes).splitlines()]
        return {name: value.strip() for name, _, value in rows if name in FIELDS}

    def test_no_right_but_those_that_are_granted(self) -> None:
        found = self.status()
        for name in ("CapPrm", "CapEff", "CapBnd"):
            self.assertEqual(int(found[name], 16) & ~GRANTED, 0, name)
        self.assertEqual((int(found["CapInh"], 16), int(found["CapAmb"], 16), found["NoNewPrivs"]), (0, 0, "1"))

    def test_a_user_of_the_image_has_none(self) -> None:
        found = self.status(user="someone")
        for name in ("CapPrm", "CapEff", "CapInh", "CapAmb"):
            self.assertEqual(int(found[name], 16), 0, name)

    def test_groups_are_the_image_s(self) -> None:
        """A host's docker or disk group is a way to the host."""
        self.assertIn(self.status(user="1234:1234")["Groups"], ("", "1234"))

    def test_mask_signals_and_descriptors(self) -> None:
        script = "umask; cat /proc/self/status; for fd in /proc/self/fd/*; do [ -e $fd ] && echo fd ${fd##*/}; done"
        request = self.request(checks=[{"name": "a", "argv": ["/bin/sh", "-c", script]}])
        secret = os.open("/etc/passwd", os.O_RDONLY)

        def ignore() -> None:
            os.umask(0o077)
            signal.signal(signal.SIGPIPE, signal.SIG_IGN)
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})

        try:
            with self.start(request, pass_fds=(secret,), preexec_fn=ignore) as process:
                process.communicate(timeout=WAIT)
        finally:
            os.close(secret)
        text = self.receipt()["checks"][0]["stdout"]["text"]
        rows = {line.partition(":")[0]: line.partition(":")[2].strip() for line in text.splitlines()}
        self.assertEqual(text.splitlines()[0], "0022")
        # 32 and 33 belong to the C library: nobody else can set them, and some supervisors leave 32 ignored.
        self.assertEqual((int(rows["SigIgn"], 16) & ~0x180000000, int(rows["SigBlk"], 16)), (0, 0))
        self.assertNotIn(f"fd {secret}\n", text)
        self.assertEqual(text.count("fd "), 3 + text.count("fd 3\n"), text)

    def test_a_check_has_no_terminal(self) -> None:
        self.assertNotEqual(self.shell("exec < /dev/tty")["exit"], 0)

    def test_a_program_cannot_type_into_the_caller_s_terminal(self) -> None:
        """Kernels before 6.2, Ubuntu 22.04's among them, let it; the caller's shell would run what was typed."""
        if os.uname().machine != "x86_64" or not shutil.which("cc"):
            self.skipTest("needs a C compiler and the filter of x86-64")
        (self.folder / "typist.c").write_text(TYPIST)
        target = str(self.root / "bin/typist")
        subprocess.run(["cc", "-static", "-o", target, str(self.folder / "typist.c")], check=True)
        outer, inner = pty.openpty()
        try:
            request = self.request(exec=["/bin/typist"])
            with self.start(request, stdin=inner, start_new_session=True) as process:
                out, errors = process.communicate(timeout=WAIT)
        finally:
            os.close(outer)
            os.close(inner)
            os.unlink(target)
        self.assertEqual(out.split(), [b"1", b"1", b"0"], errors)


@unittest.skipIf(os.geteuid() != 0, "needs root")
class AsRoot(Leaks, SandboxCase):
    isolation = "root"

    def start(self, request: dict[str, Any], **options: Any) -> subprocess.Popen[bytes]:
        """With groups of the host."""
        return super().start(request, extra_groups=[4, 6, 44], **options)

    def test_root_has_no_group_of_the_host(self) -> None:
        self.assertIn(self.status()["Groups"], ("", "0"))


class Rootless(Leaks, SandboxCase):
    isolation = "rootless"
