"""The stand-in with a project, and ``oci-builder stage NAME --on modal`` against it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.lab.modal_plane_client import ROOT, Ran, RunningPlane, bare_python
from tests.lab.modal_plane_project import VOLUME, Project, make_project

MAIN = "from oci_builder.cli import main; main()"


class Lab:
    """The stand-in and a project; ``stage`` is ``oci-builder stage NAME --on modal``."""

    def __init__(self, plane: RunningPlane, project: Project) -> None:
        self.plane, self.project = plane, project

    def start(self, name: str, *words: str, code: str = MAIN, agree: bool = True, **env: str) -> subprocess.Popen[str]:
        """The command, running."""
        given = [w for w in self.project.words if agree or w != "--yes"]
        return subprocess.Popen(
            [sys.executable, "-c", code, "stage", name, "--on", "modal", *given, *words], cwd=ROOT,
            env=self.plane.env(**env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def stage(self, name: str, *words: str, code: str = MAIN, agree: bool = True, **env: str) -> Ran:
        """The command, to its end."""
        return ended(self.start(name, *words, code=code, agree=agree, **env))

    @property
    def volume(self) -> Path:
        """Folder of the volume."""
        return self.plane.volume(VOLUME)


def ended(process: subprocess.Popen[str]) -> Ran:
    """What a command said, once it has ended."""
    try:
        out, err = process.communicate(timeout=600)
    except BaseException:
        process.kill()
        raise
    return Ran(process.returncode, out, err)


@contextmanager
def running_lab(folder: Path) -> Iterator[Lab]:
    """A lab below ``folder``."""
    plane = RunningPlane(folder / "plane", bare_python(folder / "python"))
    try:
        yield Lab(plane, make_project(folder / "project", plane))
    finally:
        plane.stop()
