"""A whole distribution in the sandbox: Debian by mmdebstrap, with Python and gcc, as root and rootless."""

from __future__ import annotations

import unittest

from tests.chroot.distribution import debian
from tests.chroot.lab import SandboxCase


class AsRoot(SandboxCase):
    isolation = "root"

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.debian = debian()

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
    """The tree is root's: an ordinary user needs no copy of it."""

    isolation = "rootless"


if __name__ == "__main__":
    unittest.main()
