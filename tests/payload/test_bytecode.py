"""Bytecode of a runtime: valid whatever happens to times, and the same bytes whoever makes it, once for all tiers."""

from __future__ import annotations

import importlib.util
import marshal
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oci_builder.model.errors import TransportError
from oci_builder.payload.bytecode import WORKER, Compiled, compile_tree, sources

BASE = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
TAG = sys.implementation.cache_tag
LIB = f"lib/python{sys.version_info.major}.{sys.version_info.minor}"
# Sets among the constants come out in the order of the hash seed.
SOURCE = "def f(x):\n    return x in {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}\nvalue = 1\n"


def runtime(place: Path) -> Path:
    """Two tiers and an interpreter's library."""
    for path, text in {
        f"envs/base/{LIB}/site-packages/pkg/mod.py": SOURCE, f"envs/vllm/{LIB}/site-packages/pkg/mod.py": SOURCE,
        f"envs/vllm/{LIB}/site-packages/pkg/template.py": "class {{ name }}:\n", f"python/{LIB}/os.py": "value = 2\n",
        f"envs/base/{LIB}/site-packages/pkg/nulls.py": "\0", "envs/base/bin/script.py": "value = 3\n",
        f"envs/base/{LIB}/site-packages/pkg/data.txt": "x", "source/mine.py": "value = 4\n",
    }.items():  # fmt: skip
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)
    return place


def compiled(root: Path, jobs: int = 2, cache: str = "cache") -> Compiled:
    return compile_tree(root, BASE, root.parent / cache, jobs)


def pyc(root: Path, tier: str = "base", module: str = "mod") -> Path:
    return root / f"envs/{tier}/{LIB}/site-packages/pkg/__pycache__/{module}.{TAG}.pyc"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return runtime(tmp_path / "runtime")


def value(root: Path, tier: str = "base") -> str:
    argv = [str(BASE), "-I", "-B", "-c", f"import sys; sys.path.insert(0, {str(root / f'envs/{tier}/{LIB}/site-packages')!r})\n"
            "from pkg import mod; print(mod.value, mod.f.__code__.co_filename)"]  # fmt: skip
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout.strip()


def test_one_file_for_all_tiers_and_none_for_what_cannot_be_compiled(root: Path) -> None:
    assert compiled(root, jobs=1) == Compiled(made=4, kept=1, left=2)
    assert pyc(root).stat().st_ino == pyc(root, "vllm").stat().st_ino
    assert not pyc(root, "vllm", "template").exists() and not pyc(root, "base", "nulls").exists()
    assert compiled(root) == Compiled(made=0, kept=5, left=2)


def test_only_libraries_are_compiled(root: Path) -> None:
    compiled(root)
    assert not list((root / "source").rglob("*.pyc")) and not list((root / "envs/base/bin").rglob("*.pyc"))


def test_it_is_checked_by_hash_and_names_neither_tier_nor_prefix(root: Path) -> None:
    """B155: times are normalised later."""
    compiled(root)
    data = pyc(root).read_bytes()
    assert data[:4] == importlib.util.MAGIC_NUMBER and int.from_bytes(data[4:8], "little") == 0b11
    assert data[8:16] == importlib.util.source_hash(SOURCE.encode())
    assert marshal.loads(data[16:]).co_filename == "pkg/mod.py"


def test_other_times_change_nothing_and_a_patched_source_counts(root: Path) -> None:
    """Upstream patches vLLM's sources at run time."""
    compiled(root)
    module = root / f"envs/base/{LIB}/site-packages/pkg/mod.py"
    os.utime(module, (time.time(), 7))
    assert value(root) == f"1 {module}"
    module.write_text(SOURCE.replace("value = 1", "value = 5"))
    os.utime(module, (0, 0))
    assert value(root).split()[0] == "5"


@pytest.mark.parametrize(("jobs", "seed"), [(1, "1"), (3, "2"), (16, "random")])
def test_the_same_bytes_whoever_makes_it(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, seed: str
) -> None:
    compiled(root)
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    monkeypatch.setenv("PYTHONOPTIMIZE", "2")
    other = runtime(tmp_path / "a longer/place")
    compiled(other, jobs)
    found = [{p.relative_to(top): p.read_bytes() for p in top.rglob("*.pyc")} for top in (root, other)]
    assert found[0] == found[1] and len(found[0]) == 3


def test_old_bytecode_is_replaced_and_its_other_names_stay(root: Path, tmp_path: Path) -> None:
    pyc(root).parent.mkdir()
    pyc(root).write_bytes(b"stale")
    os.link(pyc(root), tmp_path / "other")
    compiled(root)
    assert pyc(root).read_bytes()[:4] == importlib.util.MAGIC_NUMBER and (tmp_path / "other").read_bytes() == b"stale"


def test_files_of_the_cache_are_nobodys(root: Path) -> None:
    old = os.umask(0o077)
    try:
        compiled(root)
    finally:
        os.umask(old)
    assert {(p.stat().st_mode & 0o7777, p.stat().st_mtime) for p in root.rglob("*.pyc")} == {(0o644, 0)}


def test_links_are_followed_by_nobody_and_any_name_is_a_name(root: Path) -> None:
    site = root / f"envs/base/{LIB}/site-packages"
    (site / "linked.py").symlink_to(root / "source/mine.py")
    (site / os.fsdecode(b"caf\xe9.py")).write_text("value = 6\n")
    (site / "line\nbreak.py").write_text("value = 7\n")
    names = [name for _, name in sources(root)]
    assert "linked.py" not in names and os.fsdecode(b"caf\xe9.py") in names
    assert compiled(root, jobs=1).made == 6
    assert (site / f"__pycache__/line\nbreak.{TAG}.pyc").is_file()


def test_an_interpreter_that_fails_is_named(root: Path, tmp_path: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no memory >&2\nexit 3\n")
    broken.chmod(0o755)
    with pytest.raises(TransportError, match="no memory") as caught:
        compile_tree(root, broken, tmp_path / "cache", 2)
    assert caught.value.code == "payload.bytecode"


def test_company_changes_nothing(tmp_path: Path) -> None:
    """A name that something else in the process interned before: marshal writes down which strings are interned."""
    source = b"class A:\n    def f(self):\n        class S:\n            pass\n        return S, 'a b', ('c d',)\n"
    worker = WORKER.read_text().rpartition("main()")[0]

    def made(held: list[str]) -> bytes:
        program = f"{worker}\nheld = [sys.intern(n) for n in {held!r}]\nsys.stdout.buffer.write(bytecode({source!r}, 'x'))"
        return subprocess.run([BASE, "-I", "-S", "-c", program], capture_output=True, check=True).stdout

    alone = made([])
    assert made(["A.f", "A.f.<locals>.S", "a b", "c d"]) == alone
    found: dict[str, object] = {}
    exec(marshal.loads(alone[16:]), found)
    assert found["A"]().f()[1:] == ("a b", ("c d",))  # type: ignore[operator]
