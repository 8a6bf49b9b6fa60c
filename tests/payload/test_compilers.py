"""What a compiler makes does not tell where it ran: gcc through whole builds of uv, nvcc where this machine has one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from oci_builder.model.events import Event
from oci_builder.model.spec import RequirementsTier
from oci_builder.payload import compiler_worker as worker
from oci_builder.payload.compilers import _COMPILER, _settings, notes, plain_name, with_compilers
from oci_builder.payload.environments import realize
from tests.lab.uv import require_uv, write_sdist

NVCC = shutil.which("nvcc")

BACKEND = """
import os, pathlib, subprocess, sys, sysconfig, zipfile
def build_wheel(folder, config_settings=None, metadata_directory=None):
    source = os.path.abspath("here.c")
    header = os.path.join(sys.prefix, "beside.h")
    with open(header, "w") as out: out.write("static const char *header(void) { return __FILE__; }\\n")
    words = [os.environ.get("GCC") or os.environ.get("CC", "cc"), "-g", "-shared", "-fPIC", "-I", sys.prefix, "-o", "made.so", source]
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
def told() -> list[Event]:
    return []


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: list[Event]) -> Callable[..., bytes]:
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
        env = realize("base", tier, tmp_path, tmp_path / below / "work", told.append)
        return next(env.glob("lib/python*/site-packages/made.so")).read_bytes()

    return run


def test_a_compiled_package_is_the_same_bytes_in_another_folder(build: Callable[..., bytes]) -> None:
    assert build("one") == build("another/place of mine")


def test_a_compiled_package_names_no_folder_of_its_build(build: Callable[..., bytes], tmp_path: Path) -> None:
    """Neither its sources' (``__FILE__``, debugging information) nor the isolated environment's headers."""
    made = build("one")
    assert os.fsencode(tmp_path) not in made
    assert b"/build/source/here.c" in made and b"/build/isolated/beside.h" in made


def test_a_compiler_that_a_tier_names_by_its_path_is_covered(build: Callable[..., bytes], tmp_path: Path) -> None:
    gcc = str(shutil.which("gcc"))
    assert os.fsencode(tmp_path) not in build("one", CC=gcc)


def test_a_compiler_that_a_build_script_calls_by_its_path_is_told_of(
    build: Callable[..., bytes], tmp_path: Path, told: list[Event]
) -> None:
    """Nothing can stand before it. With uv's cache below ours the audit of a runtime refuses the library, too."""
    made = build("one", GCC=str(shutil.which("gcc")))
    assert os.fsencode(tmp_path) in made
    assert [e.message.split(" names ")[0] for e in told if e.kind == "warning"] == ["made: 'made.so'"]


def test_what_is_built_through_our_compilers_needs_no_word(build: Callable[..., bytes], told: list[Event]) -> None:
    build("one")
    assert not [event.message for event in told if event.kind == "warning"]


def test_nothing_of_the_compilers_stays_in_the_environment(build: Callable[..., bytes], tmp_path: Path) -> None:
    build("one")
    assert not [path for path in (tmp_path / "one/work").rglob("*") if path.name in ("compilers", "settings.json")]


def test_a_tier_below_a_name_with_a_space_has_words_without_one(tmp_path: Path) -> None:
    """torch writes PYTORCH_NVCC into a file of ninja, which hands it to a shell, as it is."""
    folder = tmp_path / "my cache:2/compilers"
    folder.parent.mkdir()
    with plain_name(folder) as name:
        made = with_compilers(name, tmp_path / "uv", tmp_path / "w/base", {"CUDA_HOME": "/cuda", "CC": "/bin/sh -x"})
        assert not [v for v in (made["PYTORCH_NVCC"], made["PATH"].split(":")[0], made["PYTHONPATH"]) if " " in v]
        assert (folder / "nvcc").is_file() and os.access(made["CUDACXX"], os.X_OK) and made["CC"] == "/bin/sh -x"
    assert not name.exists() and not name.parent.exists() and folder.is_dir()


def in_two_folders(tmp_path: Path, make: Callable[[Path, dict[str, str]], bytes]) -> tuple[bytes, bytes]:
    """What ``make`` gives in a checkout of uv's with the variables of a build, here and there."""
    made = []
    for name in ("one", "another"):
        source = tmp_path / name / "uv/git-v0/checkouts/ab/cd"
        source.mkdir(parents=True)
        said = with_compilers(tmp_path / name / "c", tmp_path / name / "uv", tmp_path / name / "w/base", {})
        made.append(make(source, {**os.environ, **said}))
    return made[0], made[1]


def test_rust_tells_no_folder(tmp_path: Path) -> None:
    """By cargo, rustup's too, which looks for rustc on a PATH of its own."""
    if shutil.which("cargo") is None or subprocess.run(["cargo", "--version"], capture_output=True).returncode:
        pytest.skip("needs cargo")

    def make(source: Path, env: dict[str, str]) -> bytes:
        (source / "src").mkdir()
        (source / "Cargo.toml").write_text(
            '[package]\nname = "made"\nversion = "0.1.0"\nedition = "2021"\n[lib]\ncrate-type = ["cdylib"]\n'
            "[profile.release]\ndebug = true\n"
        )
        text = "#[no_mangle]\npub extern \"C\" fn at(x: usize) -> u8 { let v = vec![0u8; 3]; v[x] }\n"
        (source / "src/lib.rs").write_text(text)
        words = ["cargo", "build", "--offline", "--release", "--quiet"]
        subprocess.run(words, env=env, cwd=source, check=True, capture_output=True)
        return (source / "target/release/libmade.so").read_bytes()

    one, two = in_two_folders(tmp_path, make)
    assert one == two
    assert os.fsencode(tmp_path) not in one and b"/build/source" in one


def test_fortran_tells_no_folder(tmp_path: Path) -> None:
    if shutil.which("gfortran") is None:
        pytest.skip("needs gfortran")

    def make(source: Path, env: dict[str, str]) -> bytes:
        (source / "a.f90").write_text("subroutine a(n)\n  integer :: n\n  open(unit=n)\nend subroutine\n")
        words = ["gfortran", "-g", "-fPIC", "-shared", "a.f90", "-o", "a.so"]
        subprocess.run(words, env=env, cwd=source, check=True)
        return (source / "a.so").read_bytes()

    one, two = in_two_folders(tmp_path, make)
    assert one == two
    assert os.fsencode(tmp_path) not in one and b"/build/source" in one


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_a_temporary_folder_has_one_name(tmp_path: Path) -> None:
    """scikit-build-core has its build in one."""

    def make(source: Path, env: dict[str, str]) -> bytes:
        with tempfile.TemporaryDirectory() as place:
            Path(place, "a.c").write_text("const char *where(void) { return __FILE__; }\n")
            subprocess.run(["gcc", "-g", "-c", f"{place}/a.c", "-o", "a.o"], env=env, cwd=place, check=True)
            return Path(place, "a.o").read_bytes()

    one, two = in_two_folders(tmp_path, make)
    assert one == two
    assert b"/build/temporary/a.c" in one


def test_what_build_systems_look_for_beside_a_compiler_is_there(tmp_path: Path) -> None:
    """CMake takes ar and ranlib from where the compiler is; a toolchain of one's own has its own."""
    for name in ("x86_64-conda-linux-gnu-cc", "x86_64-conda-linux-gnu-ar", "gcc-ranlib-12", "python3"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    said = {"CC": f"ccache {tmp_path}/x86_64-conda-linux-gnu-cc -m64"}
    made = with_compilers(tmp_path / "c", tmp_path / "uv", tmp_path / "w/base", said)["CC"].split(" ")
    assert (made[0], made[2]) == ("ccache", "-m64") and made[1] != said["CC"].split(" ")[1]
    assert {p.name for p in Path(made[1]).parent.iterdir()} == {
        "x86_64-conda-linux-gnu-cc", "x86_64-conda-linux-gnu-ar", "gcc-ranlib-12",
    }  # fmt: skip


def test_device_debugging_is_told_of(tmp_path: Path) -> None:
    worker.write_shim(tmp_path / "nvcc", ["true"])
    made = with_compilers(tmp_path / "c", tmp_path / "uv", tmp_path / "w/base", {"PATH": f"{tmp_path}:/bin"})
    for words in (["-c", "a.cu"], ["-G", "a.cu"], ["-G", "b.cu"]):
        subprocess.run([made["PYTORCH_NVCC"], *words], env={**os.environ, **made}, check=True)
    assert [note.split(" keeps")[0] for note in notes(tmp_path / "c")] == ["nvcc's device debugging (-G)"]


# ---- the names


def test_the_folders_that_uv_builds_in_have_one_name_each(tmp_path: Path) -> None:
    settings = _settings(tmp_path / "uv", tmp_path / "work/.x.partial-1/base", {})
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
    names = worker.known(_settings(tmp_path / "uv", tmp_path / "base", {}), [])
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
    done = subprocess.run(words, env={**os.environ, **made, "REAL": real}, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert b"/build/project/a.c" in (tmp_path / "a.o").read_bytes()


def test_compilers_are_known_by_their_names() -> None:
    yes = ("cc", "g++", "gcc-12", "x86_64-linux-gnu-gcc", "x86_64-linux-gnu-g++-12", "clang++-18", "c++")
    yes += ("x86_64-conda-linux-gnu-cc",)
    yes += ("gfortran", "gfortran-12", "f95", "rustc", "nvcc")
    no = ("rustc-dev", "rustdoc", "cargo", "gccgo", "cc1", "gcc-ar", "gcc-ranlib-12", "clang-format", "ccache", "c++filt", "x86_64-linux-gnu-cpp")
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
    done = subprocess.run(["nvcc", "--version"], env={**os.environ, **made}, capture_output=True, timeout=300, text=True)
    assert done.stdout == "real --version\n", done.stderr


def test_without_cuda_no_variable_speaks_of_it(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    made = with_compilers(tmp_path / "c", tmp_path / "uv", tmp_path / "w/base", {"PATH": f"{tmp_path}/bin"})
    assert made["PATH"] == f"{tmp_path}/c:{tmp_path}/bin"
    assert not [name for name in made if "NVCC" in name or "CUDA" in name or name == "RUSTC"]


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


def nvcc(place: Path, *calls: tuple[str, ...], said: dict[str, str] | None = None) -> Path:
    """Run nvcc through our folder, in uv's cache with ``a.cu``, a header of the environment to be found; that folder."""
    source, env = place / "uv/git-v0/checkouts/ab/cd", place / "work/.x.partial-7/base"
    source.mkdir(parents=True)
    env.mkdir(parents=True)
    (source / "a.cu").write_text(CUDA)
    (env / "twice.h").write_text("template <class T> __device__ T twice(T x) { return x + x; }\n")
    variables = with_compilers(place / "compilers", place / "uv", env, said or {})
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


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_an_nvcc_that_a_tier_names_by_its_path_is_covered(tmp_path: Path) -> None:
    said = {"PYTORCH_NVCC": str(NVCC), "CUDACXX": str(NVCC)}
    made = (nvcc(tmp_path / "one", ("-lineinfo", "-c", "a.cu", "-o", "a.o"), said=said) / "a.o").read_bytes()
    assert os.fsencode(tmp_path) not in made and re.search(rb"/build/source/a\.cu", made)


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
