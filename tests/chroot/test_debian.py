"""A whole distribution in the sandbox: Debian by mmdebstrap, with Python and gcc, as root and rootless.

Making it takes about half a minute and is done once for the temporary folder. OCI_BUILDER_DEBIAN names a root file
system that is used instead.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

from chroot_exec.teardown import remove_tree
from tests.chroot.lab import ORDINARY_UID, SandboxCase

PACKAGES = "python3,gcc,libc6-dev"
MAKING_SECONDS = 400


def debian() -> Path:
    """The root file system; made at most once, whoever asks first.

    Raises:
        unittest.SkipTest: not root, no mmdebstrap, or no mirror in reach.
    """
    given = os.environ.get("OCI_BUILDER_DEBIAN")
    if given:
        return Path(given)
    if os.geteuid():
        raise unittest.SkipTest("needs root to make a Debian tree; OCI_BUILDER_DEBIAN can name one")
    if not shutil.which("mmdebstrap"):
        raise unittest.SkipTest("needs mmdebstrap")
    state = Path(tempfile.gettempdir()) / "oci-builder-debian"
    state.mkdir(mode=0o755, exist_ok=True)
    if state.is_symlink() or state.stat().st_uid != os.geteuid() or state.stat().st_mode & 0o022:
        raise unittest.SkipTest(f"{state} belongs to somebody else")
    with (state / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (state / "root").exists():
            _make(state / "partial")
            (state / "partial").rename(state / "root")
    return state / "root"


def _make(folder: Path) -> None:
    if folder.exists():
        remove_tree(str(folder))
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=MAKING_SECONDS)
    except subprocess.TimeoutExpired:
        raise unittest.SkipTest(f"Debian was not made within {MAKING_SECONDS} seconds: a slow mirror?") from None
    if done.returncode:
        remove_tree(str(folder))
        raise unittest.SkipTest(f"no Debian mirror in reach: {done.stderr.strip()[-200:]}")


class AsRoot(SandboxCase):
    isolation = "root"

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.debian = cls.own(debian())

    @classmethod
    def own(cls, tree: Path) -> Path:
        """The tree as this way of running needs it."""
        return tree

    def debian_out(self, script: str, **changes: object) -> str:
        return self.out(script, root=str(self.debian), **changes)

    def test_python_starts(self) -> None:
        self.assertEqual(self.debian_out("python3 -c 'import hashlib, ctypes; print(1)'"), "1\n")

    def test_python_as_an_unknown_user(self) -> None:
        """B195."""
        self.assertEqual(self.debian_out("python3 -c 'import os; print(os.getuid())'", user="12345"), "12345\n")

    def test_python_with_an_empty_home(self) -> None:
        """B154."""
        self.assertEqual(
            self.debian_out("python3 -c 'import os; print(os.listdir())'", tmpfs=["/root"], workdir="/root"), "[]\n"
        )

    def test_gcc_works(self) -> None:
        script = "echo 'int main(void){return 7;}' | gcc -xc - -o /tmp/a; /tmp/a"
        self.assertEqual(self.shell(script, root=str(self.debian), check={"exit": 7})["outcome"], "pass")

    def test_pseudo_terminals(self) -> None:
        script = "python3 -c 'import os,pty; m,s=pty.openpty(); os.write(s,b\"x\"); print(os.read(m,1), os.ttyname(s))'"
        self.assertEqual(self.debian_out(script), "b'x' /dev/pts/0\n")

    def test_shared_memory_and_semaphores(self) -> None:
        code = (
            "from multiprocessing import *; s = Semaphore(0); p = Process(target=s.release); p.start();"
            "s.acquire(); p.join(); print(p.exitcode)"
        )
        self.assertEqual(self.debian_out(f"python3 -c '{code}'"), "0\n")

    def test_loopback_talks(self) -> None:
        code = (
            'import socket; s=socket.create_server(("127.0.0.1",0)); c=socket.create_connection(s.getsockname());'
            'a,_=s.accept(); c.send(b"hi"); print(a.recv(2).decode()); '
            'o=socket.socket(); print(o.connect_ex(("192.0.2.1",80)))'
        )
        self.assertEqual(self.debian_out(f"python3 -c '{code}'"), "hi\n101\n")

    def test_system_calls_that_change_the_host_are_refused(self) -> None:
        code = (
            "import ctypes,os; l=ctypes.CDLL(None,use_errno=True);"
            "r=lambda n,*a: (l.syscall(n,*a), ctypes.get_errno());"
            'print(r(246,0,0,0,0), r(321,0,0,0), r(425,1,0), r(175,0,0,b""))'
        )
        self.assertEqual(self.debian_out(f"python3 -c '{code}'"), " ".join(["(-1, 1)"] * 4) + "\n")


class Rootless(AsRoot):
    isolation = "rootless"

    @classmethod
    def own(cls, tree: Path) -> Path:
        """A copy that belongs to the ordinary user."""
        if os.geteuid():
            return tree
        place = cls.folder / "debian"
        subprocess.run(["cp", "-a", str(tree), str(place)], check=True)
        subprocess.run(["chown", "-hR", f"{ORDINARY_UID}:{ORDINARY_UID}", str(place)], check=True)
        return place


if __name__ == "__main__":
    unittest.main()
