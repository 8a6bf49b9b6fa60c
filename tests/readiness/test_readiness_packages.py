"""Packages, run-time compilers and rule files: the checks that need no compiler of their own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from oci_builder.model.errors import SpecError
from oci_builder.payload.readiness.allow import Rules
from oci_builder.payload.readiness.host import Glibc
from tests.lab.oracle import within
from tests.readiness.lab import assess, package, rows

SITE = "lib/python3.12/site-packages"


def test_prebuilt_kernels_of_another_version_are_found(tmp_path: Path) -> None:
    package(tmp_path / SITE, "flashinfer-python", "0.6.8.post1")
    package(tmp_path / SITE, "flashinfer-cubin", "0.6.7")
    package(tmp_path / SITE, "flashinfer-jit-cache", "0.6.8.post1+cu130")
    assert [r.severity for r in rows(assess(tmp_path), "pkg.equal")] == ["error"]


def test_a_local_version_part_makes_no_difference(tmp_path: Path) -> None:
    package(tmp_path / SITE, "flashinfer-python", "0.6.8.post1")
    package(tmp_path / SITE, "flashinfer-jit-cache", "0.6.8.post1+cu130")
    assert not rows(assess(tmp_path), "pkg.equal")


def test_versions_are_compared_within_one_environment(tmp_path: Path) -> None:
    package(tmp_path / "a" / SITE, "flashinfer-python", "1")
    package(tmp_path / "b" / SITE, "flashinfer-cubin", "2")
    assert not rows(assess(tmp_path), "pkg.equal")


@pytest.mark.parametrize(
    ("requirement", "found"),
    [
        ("nvidia-cublas==13.1.0.3", True),
        ('nvidia_cublas (==13.1.0.3) ; platform_system == "Linux"', True),
        ('nvidia-cublas==13.1.0.3 ; extra == "all"', False),
        ('nvidia-cublas==13.1.0.3; sys_platform == "win32"', False),
        ("nvidia-cublas==13.*", False),
        ("nvidia-cublas==13.2.0", False),
        ("nvidia-cublas>=14", False),
    ],
)
def test_an_exact_pin_that_does_not_hold_is_found(tmp_path: Path, requirement: str, found: bool) -> None:
    package(tmp_path / SITE, "torch", "2.11.0", requires=(requirement,))
    package(tmp_path / SITE, "nvidia-cublas", "13.2.0")
    assert bool(rows(assess(tmp_path), "pkg.pin")) is found


def test_a_missing_compiler_is_a_warning_for_a_guest_and_an_error_for_a_system(tmp_path: Path) -> None:
    """B187, B189."""
    package(tmp_path / SITE, "flashinfer-python", "1")
    (row,) = rows(assess(tmp_path), "jit.missing")
    assert row.severity == "warning" and "nvcc" in row.actual
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libc.so.6").write_bytes(b"x")
    assert [r.severity for r in rows(assess(tmp_path), "jit.missing")] == ["error"]


def test_present_tools_are_not_missing_and_a_dangling_link_is_not_present(tmp_path: Path) -> None:
    package(tmp_path / SITE, "deep-gemm", "1")
    for path in (
        "cuda/bin/nvcc", "cuda/bin/ptxas", "cuda/bin/cuobjdump", "cuda/nvvm/bin/cicc", "cuda/include/cuda.h",
        "cuda/include/cccl/cuda/std/cstdint",
    ):  # fmt: skip
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/g++").symlink_to("g++-12")
    assert [r.actual for r in rows(assess(tmp_path), "jit.missing")] == ["host compiler"]
    (tmp_path / "usr/bin/g++-12").write_text("x")
    assert not rows(assess(tmp_path), "jit.missing")


def test_a_kernel_that_the_manifest_names_and_nobody_shipped_is_found(tmp_path: Path) -> None:
    """B190, B193."""
    folder = tmp_path / SITE / "flashinfer_cubin/cubins/abc/fmha"
    folder.mkdir(parents=True)
    (folder / "checksums.txt").write_text("00  one.cubin\n11  include/two.h\n")
    (folder / "one.cubin").write_bytes(b"x")
    (row,) = rows(assess(tmp_path), "jit.kernels")
    assert "include/two.h" in row.message


@pytest.mark.parametrize("value", [":/usr/local/cuda", "/a:/b", "cuda", ""])
def test_a_cuda_home_that_is_not_one_folder_is_found(tmp_path: Path, value: str) -> None:
    """B194."""
    assert [r.severity for r in rows(assess(tmp_path, env={"CUDA_HOME": value}), "jit.env")] == ["error"]


def test_a_good_cuda_home_passes(tmp_path: Path) -> None:
    assert assess(tmp_path, env={"CUDA_HOME": "/usr/local/cuda"}).ok


@pytest.mark.parametrize(
    "text",
    [
        "[[allow]]\ncode='x'\n",
        "[[allow]]\ncode='x'\nreason='y'\nwhat='z'\n",
        "[[allow]]\ncode='x'\nreason='y'\npath=1\n",
        "[[allow]]\ncode='x'\nreason='y'\ntargets='sm_90'\n",
        "[[other]]\n",
        "[",
        "allow=3\n",
        "allow=['x']\n",
        "allow=" + "[" * 5000,
    ],
)
def test_a_rule_file_with_a_mistake_is_refused(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        Rules.parse(text, "rules.toml")
    assert caught.value.code == "spec.allow"


def test_b124_a_pipe_of_rules_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "rules.toml")
    with pytest.raises(SpecError, match="is not a file") as caught:
        Rules.load(tmp_path / "rules.toml")
    assert caught.value.code == "spec.allow"


def test_every_shipped_rule_has_a_reason() -> None:
    rules = Rules.load()
    for table in (rules.allow, rules.preload, rules.driver, rules.host, rules.jit, rules.equal):
        assert all(len(item.reason) > 10 for item in table)


@pytest.mark.parametrize("text", ["3.1", "2", "2.x", "", "glibc 2.35"])
def test_a_glibc_that_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(SpecError) as caught:
        Glibc.parse(text)
    assert caught.value.code == "spec.glibc"


def test_a_host_compiler_too_old_for_a_package_is_found(tmp_path: Path) -> None:
    package(tmp_path / SITE, "flashinfer-python", "1")
    (tmp_path / "usr/lib/gcc/x86_64-linux-gnu/11").mkdir(parents=True)
    assert [(r.severity, r.actual) for r in rows(assess(tmp_path), "jit.compiler")] == [("warning", "11")]
    (tmp_path / "usr/lib/gcc/x86_64-linux-gnu/13").mkdir()
    assert not rows(assess(tmp_path), "jit.compiler")


def test_text_files_that_make_no_sense_end_quickly_and_without_a_crash(tmp_path: Path) -> None:
    site = tmp_path / SITE
    package(site, "nvidia-cuda-runtime", "not.a.version")
    for name, text in {
        "etc/ld.so.conf": "include ld.so.conf\n" * 50_000 + "include " + "*" * 4000 + "\n",
        f"{SITE}/flashinfer_cubin/cubins/a/checksums.txt": " \nabc \n\n\tx\n",
        f"{SITE}/k.ptx": "\n" * 70_000 + ".version 9." + "9" * 9000,
        "cuda/include/cuda.h": "#define CUDA_VERSION " + "9" * 9000 + "\n",
        f"{SITE}/b-1.dist-info/METADATA": "Requires-Dist: " + "==" * 9000 + "\n",
        f"{SITE}/b-1.dist-info/RECORD": '"\n,,,\n"x.so\n../../../../../../x.so,,\n',
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with within(3):
        assess(tmp_path, env={"LD_LIBRARY_PATH": "\ud800:/x", "CUDA_HOME": "\ud800"})
