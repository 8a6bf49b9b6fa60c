"""The host as the GPU code sees it: files below a root, and a few programs that are asked for lists."""

from __future__ import annotations

import glob
import os
import subprocess
from dataclasses import dataclass

PROGRAM_FOLDERS = (
    "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", "/usr/local/nvidia/bin",
)  # fmt: skip
_PROGRAM_SECONDS = 30


@dataclass(frozen=True)
class Host:
    """Paths below ``root``; ``/`` for the real machine."""

    root: str = "/"

    def path(self, path: str) -> str:
        """Where the host's absolute ``path`` really is."""
        return path if self.root == "/" else self.root.rstrip("/") + path

    def inner(self, real: str) -> str:
        """The reverse of ``path``."""
        top = self.root.rstrip("/")
        return real[len(top) :] if top and real.startswith(top + "/") else real

    def read(self, path: str) -> str:
        """A small text file; empty when there is none."""
        try:
            with open(self.path(path), encoding="utf-8", errors="replace") as file:
                return file.read(1 << 20)
        except OSError:
            return ""

    def names(self, folder: str) -> list[str]:
        """Names in a folder, sorted; none when there is none."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def glob(self, pattern: str) -> list[str]:
        """Matching host paths, sorted."""
        return sorted(self.inner(p) for p in glob.glob(self.path(pattern)))

    def exists(self, path: str) -> bool:
        """Whether something is there, links followed."""
        return os.path.exists(self.path(path))

    def program(self, name: str) -> str:
        """Host path of a program, or empty."""
        for folder in PROGRAM_FOLDERS:
            if os.access(self.path(f"{folder}/{name}"), os.X_OK):
                return f"{folder}/{name}"
        return ""

    def ask(self, name: str, *arguments: str) -> list[str]:
        """Lines that a program of the host prints; none when it is absent or fails."""
        program = self.program(name)
        if not program:
            return []
        try:
            done = subprocess.run(
                [self.path(program), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=_PROGRAM_SECONDS, env={"PATH": ":".join(PROGRAM_FOLDERS), "LC_ALL": "C"},
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired):
            return []
        return done.stdout.splitlines() if done.returncode == 0 else []
