"""Build scripts that fetch what no list has a hash of: those that are known are told not to, and what is seen is said."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from oci_builder.model.events import Event
from oci_builder.model.spec import RequirementsTier
from oci_builder.payload.compilers import notes, with_compilers
from oci_builder.payload.environments import realize
from tests.lab.uv import require_uv, write_sdist

# As flash-attn's setup.py: a finished wheel, if there is one; else the sources are compiled.
BACKEND = """
import os, pathlib, urllib.request, zipfile
URL = "http://me:secret@releases.example/v1/fast-1-py3-none-any.whl?token=secret"
def build_wheel(folder, config_settings=None, metadata_directory=None):
    how = "compiled"
    if os.environ.get("FLASH_ATTENTION_FORCE_BUILD") != "TRUE":
        how = urllib.request.urlopen(URL).read().decode()
    with zipfile.ZipFile(pathlib.Path(folder, "fast-1-py3-none-any.whl"), "w") as out:
        out.writestr(zipfile.ZipInfo("fast.py"), f"HOW = {how!r}\\n")
        out.writestr(zipfile.ZipInfo("fast-1.dist-info/METADATA"), "Metadata-Version: 2.1\\nName: fast\\nVersion: 1\\n")
        out.writestr(zipfile.ZipInfo("fast-1.dist-info/WHEEL"), "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        out.writestr(zipfile.ZipInfo("fast-1.dist-info/RECORD"), "fast.py,,\\n")
    return "fast-1-py3-none-any.whl"
"""
PROJECT = '[project]\nname = "fast"\nversion = "1"\n[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n'


class Proxy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"fetched")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with HTTPServer(("127.0.0.1", 0), Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_port}")
        yield
        server.shutdown()


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: None) -> Callable[..., tuple[str, list[str]]]:
    require_uv()
    texts = {"b.py": BACKEND, "pyproject.toml": PROJECT, "PKG-INFO": "Metadata-Version: 2.1\nName: fast\nVersion: 1\n"}
    digest = write_sdist(tmp_path, "fast-1", texts)
    (tmp_path / "list.txt").write_text(f"fast==1 --hash=sha256:{digest}\n")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_NO_INDEX", "1")

    def run(**variables: str) -> tuple[str, list[str]]:
        told: list[Event] = []
        tier = RequirementsTier(requirements="list.txt", build_env=variables)
        env = realize("base", tier, tmp_path, tmp_path / "work", told.append)
        warnings = [event.message for event in told if event.kind == "warning"]
        return next(env.glob("lib/python*/site-packages/fast.py")).read_text(), warnings

    return run


def test_build_scripts_that_are_known_compile(build: Callable[..., tuple[str, list[str]]]) -> None:
    assert build() == ("HOW = 'compiled'\n", [])


def test_what_a_build_script_fetched_is_told_without_who_asked(build: Callable[..., tuple[str, list[str]]]) -> None:
    made, told = build(FLASH_ATTENTION_FORCE_BUILD="FALSE")
    assert made == "HOW = 'fetched'\n", "a tier may say otherwise"
    place = "http://releases.example/v1/fast-1-py3-none-any.whl"
    assert told == [f"the build of fast 1 fetched from {place}, and nothing pins what came"]


def after(tmp_path: Path, program: str, **said: str) -> list[str]:
    """What is noted when a Python of a build has run a program."""
    made = with_compilers(tmp_path / "c", tmp_path / "uv", tmp_path / "w/base", said)
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **made}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [note.removeprefix("a build fetched from ").partition(",")[0] for note in notes(tmp_path / "c")]


CONNECT = "import socket\ntry: socket.create_connection(({!r}, 9), 0.01)\nexcept OSError: pass"


@pytest.mark.parametrize(("host", "said"), [("192.0.2.1", ["192.0.2.1:9"]), ("127.0.0.1", []), ("localhost", []), ("::1", [])])
def test_connections_to_other_machines_are_told(tmp_path: Path, host: str, said: list[str]) -> None:
    assert after(tmp_path, CONNECT.format(host)) == said


def test_programs_that_fetch_are_told_by_name(tmp_path: Path) -> None:
    program = "import subprocess\nfor n in ('curl', 'true'):\n try: subprocess.run([n, '--version'])\n except OSError: pass"
    assert after(tmp_path, program) == ["somewhere with curl"]


def test_nothing_of_the_notice_is_in_a_builds_way(tmp_path: Path) -> None:
    """A ``sitecustomize`` of its own has its turn, the module path is its own, and nothing is imported beforehand."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/sitecustomize.py").write_text("import sys\nsys.mine = True\n")
    program = "import sys, sitecustomize\nassert sys.mine and 'mine' in sitecustomize.__file__\n"
    program += "assert not [p for p in sys.path if 'watch' in p]\nassert 'urllib' not in sys.modules\n"
    assert after(tmp_path, program, PYTHONPATH=str(tmp_path / "mine")) == []
