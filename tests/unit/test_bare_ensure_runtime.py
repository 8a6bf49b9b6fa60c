"""ensure_runtime.sh on archives that plain tarfile made: it installs, re-checks, and refuses."""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import tarfile
import unittest
from pathlib import Path

from bare import FILES, PYTHON, Case, sha256

TOP = "opt/rt"


def archive(path: Path, files: dict[str, bytes], more: tuple[tarfile.TarInfo, ...] = ()) -> str:
    """A portable archive; returns its SHA-256."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in {"envs/base/marker": b"", **files}.items():
            info = tarfile.TarInfo(f"{TOP}/{name}")
            info.size, info.mode, info.mtime = len(data), 0o755 if name.startswith("bin/") else 0o644, 1_700_000_000
            tar.addfile(info, io.BytesIO(data))
        for info in more:
            tar.addfile(info)
    path.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
    return sha256(path.read_bytes())


def member(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


@unittest.skipUnless(shutil.which("bash"), "needs bash")
class EnsureRuntime(Case):
    def setUp(self) -> None:
        super().setUp()
        self.archive = self.place / "runtime.tar.gz"
        link = member(f"{TOP}/bin/again", tarfile.SYMTYPE, "tool")
        self.sha = archive(self.archive, {"bin/tool": b"#!/bin/sh\necho ran\n", "lib/data": bytes(100_000)}, (link,))
        self.prefix = self.place / "prefix"

    def install(self, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
        argv = words or (self.archive, self.sha, self.prefix)
        return self.call("bash", FILES / "ensure_runtime.sh", *argv, NRL_PYTHON=PYTHON, **env)

    def test_it_installs_and_says_where(self) -> None:
        done = self.install()
        self.assertEqual((done.returncode, done.stdout), (0, f"{self.prefix}\n"), done.stderr)
        self.assertEqual(self.call(self.prefix / "bin/again").stdout, "ran\n")
        self.assertEqual((self.prefix / "lib/data").read_bytes(), bytes(100_000))

    def test_nothing_but_the_prefix_is_left(self) -> None:
        before = {p.name for p in self.place.iterdir()}
        self.install()
        self.assertEqual({p.name for p in self.place.iterdir()} - before, {"prefix"})

    def test_a_matching_installation_is_kept(self) -> None:
        self.install()
        inode = self.prefix.stat().st_ino
        self.assertEqual(self.install().returncode, 0)
        self.assertEqual(self.prefix.stat().st_ino, inode)

    def test_a_tampered_installation_is_found(self) -> None:
        self.install()
        (self.prefix / "lib/data").write_bytes(bytes(99_999) + b"x")
        self.assertEqual(self.install().returncode, 3)

    def test_another_installation_is_never_replaced(self) -> None:
        self.install()
        other = self.place / "other.tar.gz"
        sha = archive(other, {"bin/tool": b"other"})
        self.assertEqual(self.install(other, sha, self.prefix).returncode, 6)
        self.assertEqual(self.call(self.prefix / "bin/tool").stdout, "ran\n")

    def test_a_wrong_digest_unpacks_nothing(self) -> None:
        done = self.install(self.archive, "0" * 64, self.prefix)
        self.assertEqual((done.returncode, self.prefix.exists()), (3, False), done.stderr)

    def test_hostile_entries_are_refused_and_land_nowhere(self) -> None:
        for name, bad in (
            ("dots", member(f"{TOP}/../../escaped", tarfile.REGTYPE)),
            ("absolute", member(f"{self.place}/escaped", tarfile.REGTYPE)),
            ("device", member(f"{TOP}/null", tarfile.CHRTYPE)),
            ("through", member(f"{TOP}/out/escaped", tarfile.REGTYPE)),
        ):
            with self.subTest(name):
                path = self.place / f"{name}.tar.gz"
                out = member(f"{TOP}/out", tarfile.SYMTYPE, str(self.place))
                sha = archive(path, {"bin/tool": b""}, (out, bad) if name == "through" else (bad,))
                done = self.install(path, sha, self.place / name)
                self.assertIn(done.returncode, (3, 4), done.stderr)
                self.assertFalse((self.place / name).exists())
                self.assertFalse((self.place / "escaped").exists())

    def test_four_at_once_give_one_tree(self) -> None:
        argv = ["bash", str(FILES / "ensure_runtime.sh"), str(self.archive), self.sha, str(self.prefix)]
        env = {"PATH": os.environ.get("PATH", os.defpath), "HOME": "/nonexistent", "NRL_PYTHON": PYTHON}
        started = [subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(4)]
        answers = [(p.communicate(timeout=300)[0], p.returncode) for p in started]
        self.assertEqual(answers, [(f"{self.prefix}\n".encode(), 0)] * 4)

    def test_addresses_other_than_the_hub_are_refused(self) -> None:
        done = self.install("https://example.org/x.tar.gz", self.sha, self.prefix, PROXY="http://127.0.0.1:9")
        self.assertEqual(done.returncode, 4, done.stderr)


if __name__ == "__main__":
    unittest.main()
