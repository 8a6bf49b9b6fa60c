"""Run the steps of an image's recipe, as Modal's client sends them, in a root file system of Debian.

What is not Modal's: the base (Debian 12 by mmdebstrap for Ubuntu), the Python that Modal copies in (Debian's own, with
pip, under its name), and the builder (a chroot in a mount namespace, step by step). The commands are those that are
sent, run by ``/bin/sh -c`` as a Dockerfile's are.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

# A package index with a certificate of its own is reached here as from this machine.
_BUNDLE = "/etc/ssl/host-certificates.crt"
_PASSED = ("PIP_INDEX_URL", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_PYTHON = (
    "apt-get update -q && apt-get install -q -y --no-install-recommends python3-pip && "
    "rm -f /usr/lib/python3*/EXTERNALLY-MANAGED && ln -sf /usr/bin/python3 /usr/local/bin/python3"
)


class Root:
    """A root file system in which steps are run, with this machine's network."""

    def __init__(self, debian: Path, folder: Path) -> None:
        self.path = folder
        subprocess.run(["cp", "-a", "--reflink=auto", f"{debian}/.", folder], check=True)
        (folder / "etc/resolv.conf").unlink(missing_ok=True)
        shutil.copy("/etc/resolv.conf", folder / "etc/resolv.conf")
        self.env = {
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8",
            "DEBIAN_FRONTEND": "noninteractive", **{n: os.environ[n] for n in _PASSED if n in os.environ},
        }  # fmt: skip
        found = os.environ.get("SSL_CERT_FILE", "/etc/ssl/certs/ca-certificates.crt")
        if Path(found).is_file():
            (folder / _BUNDLE.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, folder / _BUNDLE.lstrip("/"))
            self.env |= {"PIP_CERT": _BUNDLE, "SSL_CERT_FILE": _BUNDLE}

    def shell(self, command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run ``/bin/sh -c COMMAND`` in it; nothing that is mounted for it is left."""
        root = shlex.quote(str(self.path))
        inside = f"chroot {root} /bin/sh -c {shlex.quote(command)}"
        outer = f"mount --rbind /dev {root}/dev && mount -t proc proc {root}/proc && exec {inside}"
        return subprocess.run(
            ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc", outer], capture_output=True, text=True,
            env={**self.env, **env}, stdin=subprocess.DEVNULL, timeout=1500,
        )  # fmt: skip

    def follow(self, lines: Sequence[str], given: Mapping[str, Path]) -> None:
        """Run a recipe; a step that fails is an assertion that says which.

        Args:
            given: what COPY takes -> the file here.
        """
        for line in lines:
            word, _, rest = line.partition(" ")
            if word == "RUN":
                done = self.shell(rest)
                assert done.returncode == 0, f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
            elif word == "COPY" and rest == "/python/. /usr/local":
                done = self.shell(_PYTHON)
                assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
            elif word == "COPY":
                self._copy(rest, given)
            elif word == "ENV":
                name, _, value = rest.partition("=")
                self.env[name] = value
            else:
                assert word in ("FROM", "ENTRYPOINT"), f"a step of another kind: {line}"

    def _copy(self, words: str, given: Mapping[str, Path]) -> None:
        """``COPY . /`` lays the context's files over the root."""
        assert words == ". /", f"COPY {words}"
        for name, path in given.items():
            target = self.path / name.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
