"""Planted faults outside of GPU code, each in a tree that is otherwise ready, and each found under its code."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.readiness.lab import assess, library, needs_gcc, package, rows

SITE = "lib/python3.12/site-packages"
pytestmark = needs_gcc


def stub(folder: Path, soname: str, version: str = "", symbol: str = "f") -> Path:
    """A library to link against that is not shipped: it has ``symbol``, under ``version`` if given."""
    folder.mkdir(parents=True, exist_ok=True)
    flags: tuple[str, ...] = (f"-Wl,-soname,{soname}", "-nostdlib")
    if version:
        script = folder / "map"
        script.write_text(f"{version} {{ global: {symbol}; }};\n")
        flags += (f"-Wl,--version-script={script}",)
    return library(folder / soname, source=f"int {symbol}(void){{return 1;}}", flags=flags)


def user(path: Path, needs: Path, *flags: str) -> Path:
    """A library that needs ``needs``."""
    return library(path, source="int f(void); int g(void){return f();}", flags=(str(needs), *flags))


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    """B183."""
    user(tmp_path / "root" / SITE / "ext.so", stub(tmp_path / "away", "libgone.so.3"))
    (row,) = rows(assess(tmp_path / "root"), "lib.missing")
    assert (row.severity, row.actual) == ("error", "libgone.so.3")


def test_the_driver_is_not_missing(tmp_path: Path) -> None:
    user(tmp_path / "root/ext.so", stub(tmp_path / "away", "libcuda.so.1"))
    assert assess(tmp_path / "root").ok


@pytest.mark.parametrize(
    ("place", "flags", "env"),
    [
        ("libs", ("-Wl,-rpath,$ORIGIN/../libs",), {}),
        ("libs", ("-Wl,-rpath,${ORIGIN}/../libs", "-Wl,--disable-new-dtags"), {}),
        ("opt/deep/libs", (), {"LD_LIBRARY_PATH": "/nowhere:/opt/deep/libs"}),
        ("usr/lib/x86_64-linux-gnu", (), {}),
    ],
)
def test_a_library_is_found_as_the_loader_looks(
    tmp_path: Path, place: str, flags: tuple[str, ...], env: dict[str, str]
) -> None:
    root = tmp_path / "root"
    user(root / "ext/ext.so", stub(root / place, "libnear.so.1"), *flags)
    assert not rows(assess(root, env=env), "lib.missing")


def test_a_library_off_the_search_path_is_missing_and_its_place_is_told(tmp_path: Path) -> None:
    """B191: shipped, but not where the reader looks."""
    root = tmp_path / "root"
    user(root / "ext/ext.so", stub(root / "elsewhere", "libnear.so.1"))
    (row,) = rows(assess(root), "lib.missing")
    assert "elsewhere/libnear.so.1" in row.message


def test_ld_so_conf_with_includes_and_links_is_followed(tmp_path: Path) -> None:
    root = tmp_path / "root"
    user(root / "ext.so", stub(root / "opt/real", "libnear.so.1"))
    (root / "opt/alias").symlink_to("/opt/real")
    conf = root / "etc/ld.so.conf.d"
    conf.mkdir(parents=True)
    (root / "etc/ld.so.conf").write_text("include ld.so.conf.d/*.conf  # all\n")
    (conf / "x.conf").write_text("/opt/alias\n")
    assert not rows(assess(root), "lib.missing")


def test_libraries_that_torch_loads_first_count_within_one_environment_only(tmp_path: Path) -> None:
    root = tmp_path / "root"
    torch = stub(root / SITE / "torch/lib", "libtorch_x.so")
    user(root / SITE / "ext/_C.so", torch)
    assert not rows(assess(root), "lib.missing")
    user(root / "other" / SITE / "ext/_C.so", torch)
    assert len(rows(assess(root), "lib.missing")) == 1


@pytest.mark.parametrize(
    ("version", "code"),
    [("GLIBC_2.38", "host.glibc"), ("GLIBCXX_3.4.32", "host.glibcxx"), ("CXXABI_1.3.15", "host.cxxabi")],
)
def test_a_symbol_of_a_newer_host_is_found(tmp_path: Path, version: str, code: str) -> None:
    soname = "libc.so.6" if version.startswith("GLIBC_") else "libstdc++.so.6"
    user(tmp_path / "root/ext.so", stub(tmp_path / "away", soname, version), "-nostdlib")
    (row,) = rows(assess(tmp_path / "root"), code)
    assert (row.severity, row.actual) == ("error", version)
    assert assess(tmp_path / "root", glibc="2.39").ok


def test_a_symbol_version_that_the_image_own_library_lacks_is_found(tmp_path: Path) -> None:
    root = tmp_path / "root"
    user(root / "opt/ext.so", stub(tmp_path / "away", "libq.so.1", "Q_2"), "-nostdlib")
    stub(root / "usr/lib64", "libq.so.1", "Q_1")
    (row,) = rows(assess(root), "lib.version")
    assert row.expected == "Q_2"


def test_mixed_cuda_majors_are_found(tmp_path: Path) -> None:
    """B183: cu12 in a cu13 image."""
    site = tmp_path / "root" / SITE
    new, old = (stub(site / "nvidia/cu/lib", f"libcudart.so.{n}") for n in (13, 12))
    user(site / "good.so", new)
    user(site / "old.so", old)
    package(site, "nvidia-cuda-runtime", "13.0.96")
    package(site, "nvidia-cublas-cu12", "12.8.4")
    found = rows(assess(tmp_path / "root"), "cuda.mix")
    assert [(r.severity, r.where.rpartition("/")[2]) for r in found] == [
        ("error", "old.so"),
        ("warning", "site-packages"),
    ]


@pytest.mark.parametrize(
    "path",
    ["usr/lib/x86_64-linux-gnu/libcuda.so.1", "opt/x/libnvidia-ml.so.999", "lib64/libnvidia-ptxjitcompiler.so.580.1"],
)
def test_a_driver_library_in_the_image_is_found(tmp_path: Path, path: str) -> None:
    """B164, B165."""
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_bytes(b"not even ELF")
    assert [r.where for r in rows(assess(tmp_path), "driver.shadow")] == [path]


def test_stubs_and_compat_folders_are_no_shadow_until_a_search_path_names_them(tmp_path: Path) -> None:
    """B167."""
    for folder in ("usr/local/cuda-13.0/compat", "usr/local/cuda-13.0/lib64/stubs"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "libcuda.so.1").write_bytes(b"x")
    (tmp_path / "usr/local/cuda").symlink_to("cuda-13.0")
    assert assess(tmp_path).ok
    report = assess(tmp_path, env={"LD_LIBRARY_PATH": "/usr/local/cuda/compat:/usr/local/cuda/lib64/stubs"})
    assert {r.code for r in report.rows if r.severity == "error"} == {"driver.compat_path", "driver.stubs_path"}


def test_an_executable_stack_is_found(tmp_path: Path) -> None:
    library(tmp_path / "x.so", flags=("-z", "execstack"))
    assert len(rows(assess(tmp_path), "elf.exec_stack")) == 1


def test_text_relocations_are_found(tmp_path: Path) -> None:
    source = '__asm__(".text\\n.globl h\\nh: .quad h\\n");'
    library(tmp_path / "x.so", source=source, flags=("-Wl,-z,notext",))
    assert len(rows(assess(tmp_path), "elf.textrel")) == 1


@pytest.mark.parametrize(
    ("run_path", "code"),
    [("/build/agent/lib", "rpath.foreign"), ("lib", "rpath.relative"), ("/opt/here", "rpath.absolute")],
)
def test_run_paths_that_tie_a_file_to_a_place_are_found(tmp_path: Path, run_path: str, code: str) -> None:
    (tmp_path / "opt/here").mkdir(parents=True)
    library(tmp_path / "opt/x.so", flags=(f"-Wl,-rpath,{run_path}",))
    assert [r.actual for r in rows(assess(tmp_path), code)] == [run_path]


def test_two_providers_of_one_soname_in_an_environment_are_found(tmp_path: Path) -> None:
    """B181."""
    site = tmp_path / SITE
    stub(site / "a/lib", "libnccl.so.2")
    stub(site / "b/lib", "libnccl.so.2")
    package(site, "a", "1")
    (row,) = rows(assess(tmp_path), "lib.duplicate")
    assert row.actual == "libnccl.so.2"


def test_a_damaged_elf_file_is_a_row_and_not_a_crash(tmp_path: Path) -> None:
    good = library(tmp_path / "x.so").read_bytes()
    (tmp_path / "x.so").write_bytes(good[: len(good) // 2])
    assert len(rows(assess(tmp_path), "elf.unreadable")) == 1


def test_a_library_of_another_machine_is_told(tmp_path: Path) -> None:
    data = bytearray(library(tmp_path / "x.so").read_bytes())
    data[18:20] = (183).to_bytes(2, "little")
    (tmp_path / "x.so").write_bytes(data)
    assert [r.actual for r in rows(assess(tmp_path), "elf.machine")] == ["AArch64"]


def test_a_tool_version_is_compared_with_its_headers(tmp_path: Path) -> None:
    home = tmp_path / "usr/local/cuda"
    for folder in ("bin", "include"):
        (home / folder).mkdir(parents=True)
    text = 'const char *v = "Cuda compilation tools, release 13.1, V13.1.80";int main(void){return 0;}'
    (tmp_path / "v.c").write_text(text)
    subprocess.run(["gcc", "-o", home / "bin/nvcc", tmp_path / "v.c"], check=True)
    (home / "include/cuda.h").write_text("#define CUDA_VERSION 13000\n")
    report = assess(tmp_path)
    assert [r.severity for r in rows(report, "jit.toolkit")] == ["error"]
    assert [r.actual for r in rows(report, "jit.driver")] == ["13.1"]
