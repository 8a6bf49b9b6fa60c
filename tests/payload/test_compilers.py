"""What a compiler makes does not tell where it ran: gcc through whole builds of uv, nvcc where this machine has one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from oci_builder.model.events import silent
from oci_builder.model.spec import RequirementsTier
from oci_builder.payload import compiler_worker as worker
from oci_builder.payload.compilers import _COMPILER, _settings, with_compilers
from oci_builder.payload.environments import realize
from tests.lab.uv import require_uv, write_sdist

NVCC = shutil.which("nvcc")

BACKEND = """
import os, pathlib, subprocess, sys, sysconfig, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    source = os.path.abspath("here.c")
    header = os.path.join(sys.prefix, "beside.h")
    with open(header, "w") as out: out.write("static const char *header(void) { return __FILE__; }\\n")
    words = [os.environ.get("CC", "cc"), "-g", "-shared", "-fPIC", "-I", sys.prefix, "-o", "made.so", source]
    subprocess.run(words, check=True)
    with zipfile.ZipFile(pathlib.Path(folder, "made-1-py3-none-any.whl"), "w") as out:
        out.writestr(zipfile.ZipInfo("made.so"), open("made.so", "rb").read())
        out.writestr(zipfile.ZipInfo("made-1.dist-info/METADATA"), "Metadata-Version: 2.1\\nName: made\\nVersion: 1\\n")
        out.writestr(zipfile.ZipInfo("made-1.dist-info/WHEEL"), "Wheel-Version: 1.0\\nTag: py3-none-any\\n")
        out.writestr(zipfile.ZipInfo("made-1.dist-info/RECORD"), "made.so,,\\n")
    return "made-1-py3-none-any.whl"
"""
SOURCE = (
    '#include "beside.h"\nconst char *where(void) { return __FILE__; }\nconst char *too(void) { return header(); }\n'
)
PROJECT = '[project]\nname = "made"\nversion = "1"\n[build-system]\nrequires = []\nbuild-backend = "b"\nbackend-path = ["."]\n'


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bytes]:
    """Build a package of one C file below a folder, with a cache of its own; the library's bytes."""
    require_uv()
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    texts = {
        "b.py": BACKEND,
        "here.c": SOURCE,
        "pyproject.toml": PROJECT,
        "PKG-INFO": "Metadata-Version: 2.1\nName: made\nVersion: 1\n",
    }
    digest = write_sdist(tmp_path, "made-1", texts)
    (tmp_path / "list.txt").write_text(f"made==1 --hash=sha256:{digest}\n")
    monkeypatch.setenv("UV_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("UV_NO_INDEX", "1")

    def run(below: str, **variables: str) -> bytes:
        monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / below / "uv"))
        tier = RequirementsTier(requirements="list.txt", build_env=variables)
        env = realize("base", tier, tmp_path, tmp_path / below / "work", silent)
        return next(env.glob("lib/python*/site-packages/made.so")).read_bytes()

    return run


def test_a_compiled_package_is_the_same_bytes_in_another_folder(build: Callable[..., bytes]) -> None:
    assert build("one") == build("another/place of mine")


def test_a_compiled_package_names_no_folder_of_its_build(build: Callable[..., bytes], tmp_path: Path) -> None:
    """Neither its sources' (``__FILE__``, debugging information) nor the isolated environment's headers."""
    made = build("one")
    assert os.fsencode(tmp_path) not in made
    assert b"/build/source/here.c" in made and b"/build/isolated/beside.h" in made


def test_a_compiler_named_by_its_path_is_run_as_it_is(build: Callable[..., bytes], tmp_path: Path) -> None:
    assert os.fsencode(tmp_path) in build("one", CC=str(shutil.which("gcc")))


def test_nothing_of_the_compilers_stays_in_the_environment(build: Callable[..., bytes], tmp_path: Path) -> None:
    build("one")
    assert not [path for path in (tmp_path / "one/work").rglob("*") if path.name in ("compilers", "settings.json")]


# ---- the names


def test_the_folders_that_uv_builds_in_have_one_name_each(tmp_path: Path) -> None:
    settings = _settings(tmp_path / "uv", tmp_path / "work/.x.partial-1/base")
    texts = {
        f"-I{tmp_path}/uv/sdists-v9/pypi/a/1/Zx9/src/include": "/build/source",
        f"{tmp_path}/uv/sdists-v9/path/8fe1/Zx9/src": "/build/source",
        f"{tmp_path}/uv/git-v0/checkouts/08ab/4c3e/csrc/a.cu": "/build/source",
        f"{tmp_path}/uv/builds-v0/.tmpabc/include": "/build/isolated",
    }
    for text, name in texts.items():
        found = [known for known in worker.known(settings, [text]) if known[0] not in settings["places"]]
        assert [known[1] for known in found] == [name] and found[0][0] in text


def test_headers_of_the_interpreter_do_not_tell_where_it_lies(tmp_path: Path) -> None:
    """Python.h with its assertions: nvcc is not told NDEBUG, and the audit refused the library."""
    for name in ("python/bin", "python/include/python3.13", "base/bin"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "python/bin/python3.13").touch()
    (tmp_path / "base/bin/python").symlink_to(tmp_path / "python/bin/python3.13")
    names = worker.known(_settings(tmp_path / "uv", tmp_path / "base"), [])
    assert (
        worker.renamed(f"{tmp_path}/python/include/python3.13/object.h", names)
        == "/build/python/include/python3.13/object.h"
    )


def test_the_innermost_folder_gives_the_name() -> None:
    names = worker.known({"places": {"/w": "/build", "/w/env": "/build/environment"}, "patterns": {}}, [])
    assert [worker.renamed(path, names) for path in ("/w/env/a.h", "/w/a.h", "/w", "/w2/a.h")] == [
        "/build/environment/a.h", "/build/a.h", "/build", "/w2/a.h",
    ]  # fmt: skip


def test_of_a_stages_arguments_only_names_are_replaced() -> None:
    """The others are files that it opens."""
    said = ["--orig_src_path_name", "/w/a.cu", "--ident=/w/a.cu", "-o", "/w/a.ptx", "/w/a.cpp1.ii"]
    assert worker.told(said, [("/w", "/b")]) == [
        "--orig_src_path_name", "/b/a.cu", "--ident=/b/a.cu", "-o", "/w/a.ptx", "/w/a.cpp1.ii",
    ]  # fmt: skip


def test_of_a_preprocessed_source_only_line_markers_change(tmp_path: Path) -> None:
    file = tmp_path / "a.ii"
    file.write_text('# 1 "/w/a.h" 1\nchar *x = "/w/a.h";\n# 7 "/w2/a.h"\n  # 1 "/w/b.h"\n')
    worker.rename_lines(file, [("/w", "/b")])
    assert file.read_text() == '# 1 "/b/a.h" 1\nchar *x = "/w/a.h";\n# 7 "/w2/a.h"\n  # 1 "/w/b.h"\n'


NEXT = """#!/usr/bin/env python3
import os, shutil, sys
name = os.path.basename(sys.argv[0])
behind = [f for f in os.environ["PATH"].split(":") if f != os.path.dirname(os.path.abspath(sys.argv[0]))]
real = shutil.which(name, path=":".join(behind))
os.execv(real, [real, *sys.argv[1:]])
"""


@pytest.mark.parametrize("text", [NEXT, 'exec "$REAL" "$@"\n'], ids=["as ccache", "without a first line"])
def test_a_compiler_that_leads_to_another_one_does_not_come_back_to_us(tmp_path: Path, text: str) -> None:
    """ccache takes the first of its name on PATH that is not itself, and so do the wrappers of clusters."""
    real = shutil.which("gcc")
    if real is None:
        pytest.skip("needs gcc")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/gcc").write_text(text)
    (tmp_path / "bin/gcc").chmod(0o755)
    source = tmp_path / "w/checkout/a.c"
    source.parent.mkdir(parents=True)
    source.write_text("const char *where(void) { return __FILE__; }\n")
    path = {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    made = with_compilers(tmp_path / "c", tmp_path / "uv", tmp_path / "w/base", path)
    words = ["gcc", "-c", str(source), "-o", str(tmp_path / "a.o")]
    done = subprocess.run(words, env={**os.environ, **made, "REAL": real}, capture_output=True, timeout=20)
    assert done.returncode == 0, done.stderr
    assert b"/build/project/a.c" in (tmp_path / "a.o").read_bytes()


def test_compilers_are_known_by_their_names() -> None:
    yes = ("cc", "g++", "gcc-12", "x86_64-linux-gnu-gcc", "x86_64-linux-gnu-g++-12", "clang++-18", "c++")
    yes += ("x86_64-conda-linux-gnu-cc",)
    no = ("gccgo", "cc1", "gcc-ar", "gcc-ranlib-12", "clang-format", "ccache", "c++filt", "x86_64-linux-gnu-cpp")
    assert [name for name in yes + no if _COMPILER.match(name)] == list(yes)


# ---- nvcc


def test_our_own_folder_is_not_taken_for_cudas(tmp_path: Path) -> None:
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        worker.write_shim(tmp_path / name / "nvcc", ["true"])
    path = f"{tmp_path}/ours:{tmp_path}/theirs"
    assert worker.find_nvcc(tmp_path / "ours", {"PATH": path}) == f"{tmp_path}/theirs/nvcc"


def test_an_nvcc_that_is_laid_out_otherwise_is_run_as_it_is(tmp_path: Path) -> None:
    worker.write_shim(tmp_path / "nvcc", ["true"])
    assert worker.staged_nvcc(tmp_path / "settings.json", str(tmp_path / "nvcc")) == tmp_path / "nvcc"


def test_an_nvcc_that_looks_for_another_one_does_not_find_us(tmp_path: Path) -> None:
    for name, text in (("bin", NEXT), ("real", "#!/bin/sh\necho real $1\n")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "nvcc").write_text(text)
        (tmp_path / name / "nvcc").chmod(0o755)
    path = {"PATH": f"{tmp_path}/bin:{tmp_path}/real:{os.environ['PATH']}"}
    made = with_compilers(tmp_path / "c", tmp_path / "uv", tmp_path / "w/base", path)
    done = subprocess.run(["nvcc", "--version"], env={**os.environ, **made}, capture_output=True, timeout=20, text=True)
    assert done.stdout == "real --version\n", done.stderr


def test_without_cuda_no_variable_speaks_of_it(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    made = with_compilers(tmp_path / "c", tmp_path / "uv", tmp_path / "w/base", {"PATH": f"{tmp_path}/bin"})
    assert made == {"PATH": f"{tmp_path}/c:{tmp_path}/bin"}


def test_what_a_tier_says_of_nvcc_stays(tmp_path: Path) -> None:
    said = {"CUDA_HOME": "/cuda", "PYTORCH_NVCC": "/mine", "NVCC_PREPEND_FLAGS": "-g"}
    made = with_compilers(tmp_path / "c", tmp_path / "uv", tmp_path / "w/base", said)
    assert (made["PYTORCH_NVCC"], made["NVCC_PREPEND_FLAGS"]) == ("/mine", "--objdir-as-tempdir -g")


CUDA = r"""
#include "twice.h"
#include <cassert>
#include <cstdio>
namespace { __device__ int counter; template <class T> __global__ void add(T *x) { assert(x); *x = twice(*x) + counter; } }
void run(float *x) { add<float><<<1, 32>>>(x); printf("%s\n", __FILE__); }
"""


def nvcc(place: Path, *calls: tuple[str, ...]) -> Path:
    """Run nvcc through our folder, in uv's cache with ``a.cu``, a header of the environment to be found; that folder."""
    source, env = place / "uv/git-v0/checkouts/ab/cd", place / "work/.x.partial-7/base"
    source.mkdir(parents=True)
    env.mkdir(parents=True)
    (source / "a.cu").write_text(CUDA)
    (env / "twice.h").write_text("template <class T> __device__ T twice(T x) { return x + x; }\n")
    variables = with_compilers(place / "compilers", place / "uv", env, {})
    for words in calls:
        subprocess.run(
            [variables["PYTORCH_NVCC"], "-arch=sm_90", f"-I{env}", *words],
            env={**os.environ, **variables, "TMPDIR": str(place)}, cwd=source, check=True, capture_output=True,
        )  # fmt: skip
    return source


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_nvccs_objects_are_the_same_bytes_in_another_folder(tmp_path: Path) -> None:
    """With line tables, which hold the source's name; twice in one folder differs without the temporary names."""
    call = ("-lineinfo", "-c", "a.cu", "-o", "a.o")
    one, two = ((nvcc(tmp_path / name, call) / "a.o").read_bytes() for name in ("one", "another"))
    assert one == two
    assert os.fsencode(tmp_path) not in one and re.search(rb"/build/source/a\.cu", one)


def test_sources_are_told_from_other_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.cu", "a.o", "-x.cu"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert [word for word in ("a.cu", "a.o", "-x.cu", "@a.cu", "b.cu", "cu", "") if worker.is_source(word)] == ["a.cu"]


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_nvcc_links_device_code(tmp_path: Path) -> None:
    """For that it looks beside itself; CMake tries it before anything else."""
    calls = ("-rdc=true", "-c", "a.cu", "-o", "a.o"), ("-dlink", "a.o", "-o", "b.o")
    one, two = ((nvcc(tmp_path / name, *calls) / "b.o").read_bytes() for name in ("one", "another"))
    assert one == two
