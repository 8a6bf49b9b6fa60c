"""Whether a program that takes long gets on, seen from outside: a slow machine must be told from a hang."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from .common import say
from .process import Look

# Seconds without any sign after which nothing will come; and between two lines on standard error.
PATIENCE, LINE_EVERY = 300.0, 15.0
# Bytes that are read between two looks: an import from a slow disk is at work, a thread that polls is not.
_READ = 1 << 20
COMPILERS = frozenset({"nvcc", "cicc", "ptxas", "ptxas-blackwell", "cudafe++", "fatbinary", "nvlink", "cc1plus",
                       "cc1", "as", "ld", "collect2", "c++", "g++", "gcc", "clang"})  # fmt: skip


@dataclass
class Progress:
    """Looks at one program; call it from ``run``.

    A sign is new output, a new file in a cache, a compiler at work, or much that was read. CPU time alone is none:
    waiting for a GPU burns it.

    Attributes:
        name: what its lines begin with.
        caches: folders in which compilers leave files.
        patience: seconds without a sign after which it says no.
    """

    name: str
    caches: Iterable[Path] = ()
    patience: float = PATIENCE
    last_sign: float = 0.0
    seconds: float = 0.0
    stuck: bool = False
    sign: str = "it started"
    said: str = ""
    _printed: float = 0.0
    _cpu: float = 0.0
    _rate: float = 0.0
    _seen: dict[str, int] = field(default_factory=lambda: {"output": 0, "files": 0, "read": 0})

    def __call__(self, look: Look) -> bool:
        """Note what changed; whether there is still hope."""
        passed, self.seconds = look.seconds - self.seconds, look.seconds
        self.said = look.words
        cpu = sum(map(cpu_seconds, look.pids))
        self._rate, self._cpu = max(0.0, cpu - self._cpu) / max(passed, 1e-3), cpu
        if signs := self._signs(look):
            self.last_sign, self.sign = look.seconds, ", ".join(signs)
        self.stuck = look.seconds - self.last_sign > self.patience
        if look.seconds - self._printed >= LINE_EVERY:
            self._printed = look.seconds
            said = f"; it says: {one_line(self.said)[-120:]}" if self.said.strip() else ""
            say(f"{self.name}: {self.words()}{said}\n", sys.stderr)
        return not self.stuck

    def _signs(self, look: Look) -> list[str]:
        files = sum(len(names) for cache in self.caches for _, _, names in os.walk(cache))
        now = {"output": look.written, "files": files, "read": sum(map(bytes_read, look.pids))}
        signs = []
        if now["output"] != self._seen["output"]:
            signs.append("output")
        if now["files"] != self._seen["files"]:
            signs.append(f"{now['files']} files in the caches")
        if now["read"] - self._seen["read"] >= _READ:
            signs.append(f"{now['read'] - self._seen['read'] >> 20} MiB read")
        self._seen = now
        running = [name for pid in look.pids if (name := program(pid)) in COMPILERS]
        return signs + [f"{running.count(name)} {name}" for name in sorted(set(running))]

    def words(self) -> str:
        """Where it stands, in one line."""
        ago = self.seconds - self.last_sign
        return f"{self.seconds:.0f} s, {self._rate:.1f} CPUs busy; last sign {ago:.0f} s ago: {self.sign}"

    def verdict(self) -> str:
        """Why it was ended, for a reason."""
        if self.stuck:
            return f"hung: no sign of life for {self.seconds - self.last_sign:.0f} s ({self.words()})"
        return f"slow: it still got on when its time was over ({self.words()})"


def one_line(text: str) -> str:
    """Text that a terminal shows in one line and is not moved by."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(text.split()))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of the children that it has waited for; 0 when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def bytes_read(pid: int) -> int:
    """Bytes that a process has read, by calls and by touching what is mapped; 0 where the kernel does not say.

    What came from a disk by a call counts twice. Libraries are mapped, and a gigabyte of them loads without a call.
    """
    try:
        words = Path(f"/proc/{pid}/io").read_text().split()
        return int(words[1]) + int(words[9])
    except (OSError, ValueError, IndexError):
        return 0


def program(pid: int) -> str:
    """The name of a process's program; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""
