"""Small root file systems and a way to run requests in them, for tests that need nothing installed."""

from __future__ import annotations

import ctypes
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[2] / "chroot_exec"
ORDINARY_UID = 12345
# Seconds after which something hangs, on a machine of any speed.
WAIT = 300
PROGRAMS = (
    "cat", "chroot", "df", "echo", "env", "head", "id", "ls", "mkdir", "mknod", "mount", "readlink", "rm", "sleep",
    "stat", "touch", "true", "unshare", "wc",
)  # fmt: skip


def _closure(program: str) -> list[str]:
    """The libraries that a program is linked with, and its loader."""
    done = subprocess.run(["ldd", program], capture_output=True, text=True)
    return re.findall(r"(?:=> )?(/\S+) \(0x", done.stdout)


def tiny_root(path: Path) -> Path:
    """A root file system of a shell and a few tools of this machine, with passwd and group."""
    programs = [p for p in (shutil.which(name) for name in PROGRAMS) if p]
    shell = os.path.realpath("/bin/sh")
    for source in [*programs, shell]:
        _copy(source, path / "bin" / Path(source).name)
        for library in _closure(source):
            _copy(library, path / library.lstrip("/"))
    (path / "bin/sh").unlink(missing_ok=True)
    (path / "bin/sh").symlink_to(Path(shell).name)
    for folder in ("etc", "tmp", "var/tmp", "home/someone", "usr/lib"):
        (path / folder).mkdir(parents=True, exist_ok=True)
    (path / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nsomeone:x:1234:1234::/home/someone:/bin/sh\n")
    (path / "etc/group").write_text("root:x:0:\nsomeone:x:1234:\nvideo:x:44:someone,other\n")
    return path


def _copy(source: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists():
        shutil.copy(source, target)


def until(true: Callable[[], Any], seconds: float = WAIT) -> None:
    """Wait for something to be true; the time is only for what never comes."""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            raise AssertionError(f"it did not come within {seconds:.0f} s")
        time.sleep(0.02)


def any_word() -> str:
    """A number that no other process has on its command line; good for ``sleep``."""
    return str(10**6 + secrets.randbelow(10**8))


def processes_with(word: str) -> list[str]:
    """Process numbers of this machine whose command line has a word."""
    found = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and word.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                found.append(folder.name)
        except OSError:
            continue
    return found


def mount_points(*own: Path) -> list[str]:
    """This process's mounts, without what other tests have mounted in their temporary folders at the same time.

    Args:
        own: folders whose mounts count although they are temporary.
    """
    temporary = tuple({"/tmp/", "/var/tmp/", "/dev/shm/", f"{tempfile.gettempdir()}/"})
    mine = tuple(f"{place}/" for place in own)
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    places = [(f"{line.split()[4]}/", line) for line in lines]
    return [line for place, line in places if place.startswith(mine) or not place.startswith(temporary)]


class SandboxCase(unittest.TestCase):
    """A test that runs requests. ``isolation`` decides how; rootless ones run as an ordinary user."""

    isolation = "root"

    @classmethod
    def setUpClass(cls) -> None:
        cls.folder = Path(tempfile.mkdtemp(prefix="chroot-"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        cls.folder.chmod(0o755)
        cls.root = tiny_root(cls.folder / "root")
        cls.python = sys.executable
        if cls.isolation == "root":
            if os.geteuid():
                raise unittest.SkipTest("needs root")
        elif os.geteuid() == 0:
            cls.python = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else ""
            if not cls.python:
                raise unittest.SkipTest("no Python that an ordinary user can start")
        # Elsewhere than in the checkout: the runner is usable alone, and an ordinary user can read it.
        shutil.copytree(PACKAGE, cls.folder / "chroot_exec", ignore=shutil.ignore_patterns("__pycache__"))
        cls.state = cls.folder / "state"
        cls.state.mkdir(mode=0o700)
        if cls.isolation == "rootless" and os.geteuid() == 0:
            for path in (cls.root, *cls.root.rglob("*"), cls.state):
                os.chown(path, ORDINARY_UID, ORDINARY_UID, follow_symlinks=False)
        cls._require_namespaces()

    @classmethod
    def _require_namespaces(cls) -> None:
        done = subprocess.run(
            ["unshare", *(["-r"] if cls.isolation == "rootless" else []), "-mpf", "true"],
            capture_output=True, text=True, **cls._user(),
        )  # fmt: skip
        if done.returncode:
            raise unittest.SkipTest(f"no namespaces here: {done.stderr.strip()}")

    @classmethod
    def _user(cls) -> dict[str, Any]:
        ordinary = cls.isolation == "rootless" and os.geteuid() == 0
        return {"user": ORDINARY_UID, "group": ORDINARY_UID, "extra_groups": []} if ordinary else {}

    def request(self, **changes: Any) -> dict[str, Any]:
        """A request for the tiny root."""
        base = {"schema": "chroot-exec/1", "root": str(self.root), "state": str(self.state)}
        return {**base, "isolation": self.isolation, **changes}

    def start(self, request: dict[str, Any], **options: Any) -> subprocess.Popen[bytes]:
        """Start the runner on a request; ``receipt`` in the folder is its output."""
        path = self.folder / "request.json"
        path.write_text(json.dumps(request))
        out = self.state / "receipt.json"
        out.unlink(missing_ok=True)
        return subprocess.Popen(
            [self.python, "-m", "chroot_exec", str(path), "--output", str(out)],
            cwd=self.folder, stdout=options.pop("stdout", subprocess.PIPE), stderr=subprocess.PIPE,
            stdin=options.pop("stdin", subprocess.DEVNULL), **self._user(), **options,
        )  # fmt: skip

    def receipt(self) -> dict[str, Any]:
        """The receipt of the last run."""
        return json.loads((self.state / "receipt.json").read_text())  # type: ignore[no-any-return]

    def run_checks(self, *checks: dict[str, Any], status: int | None = None, **changes: Any) -> dict[str, Any]:
        """Run checks and return the receipt."""
        with self.start(self.request(checks=list(checks), **changes)) as process:
            _, errors = process.communicate(timeout=WAIT)
        self.assertTrue((self.state / "receipt.json").exists(), errors.decode())
        receipt = self.receipt()
        if status is not None:
            self.assertEqual(process.returncode, status, json.dumps(receipt, indent=1))
        return receipt

    def shell(self, script: str, **changes: Any) -> dict[str, Any]:
        """One shell script as a check; its entry in the receipt. ``check`` in changes adds to the check."""
        check = {"name": "shell", "argv": ["/bin/sh", "-c", script], "timeout": WAIT, **changes.pop("check", {})}
        receipt = self.run_checks(check, **changes)
        if not receipt["checks"]:
            self.fail(f"no check was run: {receipt['error']}")
        return receipt["checks"][0]  # type: ignore[no-any-return]

    def out(self, script: str, **changes: Any) -> str:
        """What a script prints; it must pass."""
        check = self.shell(script, **changes)
        self.assertEqual(check["outcome"], "pass", check)
        return str(check["stdout"]["text"])


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    """mount(2) for tests."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), None):
        raise OSError(ctypes.get_errno(), f"mount {target}")


def umount(target: str) -> None:
    """umount(2) for tests."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(target.encode(), 0):
        raise OSError(ctypes.get_errno(), f"umount {target}")
