"""Real container programs, started for one test module and stopped after it, with all state in a folder of theirs."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("clients.sh")
HELLO = "/opt/rt/envs/one/bin/hello"
SAYS = "VALUE = 'one'\n"
START_SECONDS = 300


@dataclass(frozen=True)
class Programs:
    """Where programs come from: this machine, or the folder of current clients.

    Attributes:
        prefix: words before a command; they replace themselves by it.
        env: variables that its commands get beside the test's.
    """

    prefix: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)

    def start(self, *words: str | Path, log: Path) -> subprocess.Popen[bytes]:
        """Start a server, its output in a file."""
        with log.open("wb") as out:
            return subprocess.Popen(
                [*self.prefix, *map(str, words)], stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env}, start_new_session=True,
            )  # fmt: skip

    def call(self, *words: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, whatever its exit status."""
        return subprocess.run(
            [*self.prefix, *map(str, words)], capture_output=True, text=True, timeout=timeout,
            stdin=subprocess.DEVNULL, env={**os.environ, **self.env}, errors="backslashreplace",
        )  # fmt: skip

    def run(self, *words: str | Path, timeout: float = 300) -> str:
        """Standard output of a command that must succeed."""
        done = self.call(*words, timeout=timeout)
        assert done.returncode == 0, f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout


HERE = Programs()


@contextmanager
def short_folder() -> Iterator[Path]:
    """A folder with a short path: socket paths end at 107 bytes. What is left mounted in it is unmounted first."""
    folder = Path(tempfile.mkdtemp(prefix="ob", dir="/tmp"))
    try:
        yield folder
    finally:
        unmount_below(folder)
        shutil.rmtree(folder, ignore_errors=True)


def unmount_below(folder: Path) -> None:
    """Unmount everything below a folder, deepest first."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    for place in sorted((line.split()[1] for line in lines), key=len, reverse=True):
        if place.startswith(f"{folder}/"):
            subprocess.run(["umount", "-l", place], capture_output=True)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a server to end, then make it."""
    process.terminate()
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_it_answers(programs: Programs, process: subprocess.Popen[bytes], log: Path, *probe: str) -> None:
    """Poll a server with a client's command. Where it cannot run at all (a sandbox), the test is skipped."""
    end = time.monotonic() + START_SECONDS
    while programs.call(*probe).returncode:
        text = log.read_text(errors="replace")
        if process.poll() is not None:
            pytest.skip(f"{probe[0]}'s server does not run on this machine: {text[-300:]}")
        if time.monotonic() > end:
            stop(process)
            pytest.fail(f"no answer within {START_SECONDS} s: {text[-2000:]}")
        time.sleep(0.2)


@dataclass(frozen=True)
class Docker:
    """A running Docker Engine."""

    programs: Programs
    socket: Path

    def __call__(self, *words: str | Path) -> str:
        return self.programs.run("docker", "-H", f"unix://{self.socket}", *words)

    def load(self, archive: Path) -> str:
        """Load an archive; what it says."""
        return self("load", "-i", archive)

    def image_id(self, reference: str) -> str:
        return self("image", "inspect", "-f", "{{.Id}}", reference).strip()

    def execute(self, reference: str, *words: str) -> str:
        """Standard output of a program in a container without network."""
        return self("run", "--rm", "--network", "none", reference, *words)

    def forget(self) -> None:
        """Remove all images, so that the next load starts afresh."""
        if ids := self("image", "ls", "-aq").split():
            self("image", "rm", "-f", *sorted(set(ids)))


@contextmanager
def docker_engine(programs: Programs, *, containerd_store: bool = False) -> Iterator[Docker]:
    """A Docker Engine of its own, without network."""
    with short_folder() as folder:
        config, log, socket = folder / "daemon.json", folder / "log", folder / "s"
        config.write_text(json.dumps({"features": {"containerd-snapshotter": True}} if containerd_store else {}))
        process = programs.start(
            "dockerd", "--config-file", config, "--data-root", folder / "d", "--exec-root", folder / "e",
            "-p", folder / "p", "-H", f"unix://{socket}", "--iptables=false", "--ip6tables=false", "--bridge=none",
            log=log,
        )  # fmt: skip
        try:
            wait_until_it_answers(programs, process, log, "docker", "-H", f"unix://{socket}", "version")
            yield Docker(programs, socket)
        finally:
            stop(process)


@contextmanager
def containerd(programs: Programs) -> Iterator[tuple[str, ...]]:
    """A containerd of its own; yields the words of its client."""
    with short_folder() as folder:
        config, log, socket = folder / "c.toml", folder / "log", folder / "s"
        off = ["io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime", "io.containerd.cri.v1.images"]
        config.write_text(
            f'version = 2\nroot = "{folder}/r"\nstate = "{folder}/t"\ndisabled_plugins = {json.dumps(off)}\n'
            f'[grpc]\naddress = "{socket}"\n'
        )
        process = programs.start("containerd", "--config", config, log=log)
        ctr = ("ctr", "-a", str(socket))
        try:
            wait_until_it_answers(programs, process, log, *ctr, "version")
            yield ctr
        finally:
            stop(process)


@contextmanager
def podman_storage(programs: Programs) -> Iterator[tuple[str, ...]]:
    """Options of podman and buildah for a storage of their own."""
    with short_folder() as folder:
        yield ("--root", str(folder / "root"), "--runroot", str(folder / "run"))
        programs.call("umount", "-R", folder / "root/overlay")


# Lower than any sandbox's own: raising them needs a capability that sandboxes hold back.
ULIMITS = ("--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096")


def plain_copy(archive: Path, folder: Path) -> Path:
    """The same archive uncompressed, for clients that read no gzip (skopeo, crane)."""
    out = folder / archive.name.removesuffix(".gz")
    with gzip.open(archive) as source, out.open("wb") as sink:
        shutil.copyfileobj(source, sink, 1 << 20)
    return out


def missing(programs: Sequence[str]) -> list[str]:
    """Programs that this machine lacks."""
    return [p for p in programs if shutil.which(p) is None]
