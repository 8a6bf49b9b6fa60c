"""Two packages that own one file: what stands there is no matter of which was unpacked last."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from oci_builder.model.events import Event
from oci_builder.model.spec import RequirementsTier
from oci_builder.payload.environments import realize
from oci_builder.payload.overlaps import settle_overlaps
from tests.lab.uv import require_uv

require_uv()


def wheel(folder: Path, name: str, files: dict[str, str]) -> str:
    """A wheel ``NAME-1``; the line of a list for it."""
    info = f"{name}-1.dist-info"
    texts = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    path, rows = folder / f"{name}-1-py3-none-any.whl", [f"{info}/RECORD,,"]
    with zipfile.ZipFile(path, "w") as out:
        for place, text in texts.items():
            out.writestr(zipfile.ZipInfo(place), text)
            digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
            rows.append(f"{place},sha256={digest},{len(text)}")
        out.writestr(zipfile.ZipInfo(f"{info}/RECORD"), "\n".join(rows) + "\n")
    return f"{name}==1 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Path, list[str]]]:
    """Make a tier of wheels of these files, with a cache of its own; it, and its warnings."""
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_NO_INDEX", "1")

    def run(packages: dict[str, dict[str, str]], below: str = "one") -> tuple[Path, list[str]]:
        lines = [wheel(tmp_path, name, files) for name, files in packages.items()]
        (tmp_path / "list.txt").write_text("".join(lines))
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / below / "uv"))
        told: list[Event] = []
        env = realize("base", RequirementsTier(requirements="list.txt"), tmp_path, tmp_path / below / "w", told.append)
        return env, [event.message for event in told if event.kind == "warning"]

    return run


def test_the_last_by_name_has_the_file_in_each_build(install: Callable[..., tuple[Path, list[str]]]) -> None:
    """``tests/__init__.py``, and what wheels bring by the other ways to the same place."""
    packages: dict[str, dict[str, str]] = {}
    for number in range(10):
        name = f"p{number}"
        place = "tests/__init__.py" if number % 2 else f"{name}-1.data/purelib/tests/__init__.py"
        packages[name] = {place: f"{name}\n", f"{name}-1.data/data/share/x.conf": f"{name}\n"}
        packages[name] |= {f"{name}/{other}.py": "" for other in range(20)}
    for below in ("one", "two", "three"):
        env, told = install(packages, below)
        assert next(env.glob("lib/python*/site-packages/tests/__init__.py")).read_text() == "p9\n"
        assert (env / "share/x.conf").read_text() == "p9\n"
        (line,) = told
        assert "p0, p1, p2 and 7 more each bring" in line and line.endswith("that of p9 stands there")


def test_the_same_content_needs_no_word(install: Callable[..., tuple[Path, list[str]]]) -> None:
    env, told = install({"a": {"shared/__init__.py": "x\n"}, "b": {"shared/__init__.py": "x\n"}})
    assert told == []
    assert next(env.glob("lib/python*/site-packages/shared/__init__.py")).stat().st_nlink > 1


def test_launchers_of_one_name_are_told(install: Callable[..., tuple[Path, list[str]]]) -> None:
    """Not where they call the same thing, as mlflow's and mlflow-skinny's."""
    points = {n: f"[console_scripts]\nrun = {n}:main\nsame= shared.cli : main [x]\n" for n in "ab"}
    _, told = install({n: {f"{n}.py": "", f"{n}-1.dist-info/entry_points.txt": text} for n, text in points.items()})
    assert told == ["a, b each bring 'bin/run': which launcher stands there is left to chance, omit one of them"]


def test_a_folder_among_the_programs_is_no_program(install: Callable[..., tuple[Path, list[str]]]) -> None:
    env, told = install({"a": {"a-1.data/data/bin/tool.d/settings": "x\n"}})
    assert (env / "bin/tool.d/settings").read_text() == "x\n" and told == []


def test_entry_points_that_make_no_sense_are_nobodys(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "x-1.dist-info").mkdir(parents=True)
        (tmp_path / name / "x-1.dist-info/entry_points.txt").write_bytes(b"no section\n[console_scripts\xff]\n= =\n")
    assert settle_overlaps(tmp_path / "env", {name: tmp_path / name for name in ("a", "b")}) == []
