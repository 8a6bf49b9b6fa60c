"""GPU verdicts of files and packages, on shared objects that gcc builds around fat binaries made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.readiness.lab import assess, cubin, entry, fatbin, library, needs_gcc, package, rows

SITE = "lib/python3.12/site-packages"


@needs_gcc
@pytest.mark.parametrize(
    ("code", "verdict"),
    [
        (fatbin(entry("sass", 90), entry("sass", 100)), "native"),
        (fatbin(entry("sass", 90), entry("sass", 100, "f")), "native"),
        (fatbin(entry("sass", 80), entry("ptx", 80)), "ptx"),
        (fatbin(entry("sass", 90)), "none"),
        (fatbin(entry("sass", 90, "a")), "none"),
        (fatbin(entry("sass", 90), entry("ptx", 90, "a")), "none"),
        (fatbin(entry("sass", 100)) + fatbin(entry("sass", 90, "a")) * 5, "native"),
        (fatbin(entry("sass", 100)) + fatbin(entry("sass", 80), entry("sass", 90)) * 2, "partial"),
        (fatbin(entry("sass", 100))[:-8], "unreadable"),
    ],
)
def test_the_verdict_of_a_library(tmp_path: Path, code: bytes, verdict: str) -> None:
    library(tmp_path / SITE / "ext.so", code=code)
    (file,) = assess(tmp_path).gpu
    assert file.verdict == verdict


@needs_gcc
def test_an_extension_for_sm_90_only_is_an_error_that_names_its_package(tmp_path: Path) -> None:
    """B185: found before anyone pays for the machine."""
    site = tmp_path / SITE
    library(site / "ext/_C.so", code=fatbin(entry("sass", 90)))
    package(site, "My_Ext", "1.2", ("ext/_C.so",))
    report = assess(tmp_path)
    (row,) = rows(report, "gpu.none")
    assert (row.severity, row.package, row.where) == ("error", "my-ext 1.2", f"{SITE}/ext/_C.so")
    assert report.exit_status == 1
    assert report.packages() == {"my-ext 1.2": "none"}


@needs_gcc
def test_ptx_newer_than_the_driver_is_no_help_and_the_reason_is_given(tmp_path: Path) -> None:
    library(tmp_path / "a.so", code=fatbin(entry("sass", 90), entry("ptx", 90, isa=(9, 1))))
    (row,) = rows(assess(tmp_path), "gpu.none")
    assert "9.0" in row.message and "R580" in row.message


@needs_gcc
def test_kernels_in_plain_data_count(tmp_path: Path) -> None:
    """cuFFT keeps one empty module in .nv_fatbin and its kernels in ordinary data."""
    code = fatbin(entry("sass", 75))
    source = tmp_path / "data.bin"
    source.write_bytes(fatbin(entry("sass", 100)) * 3)
    asm = f'__asm__(".section .data\\n.balign 8\\n.incbin \\"{source}\\"\\n.text\\n");'
    library(tmp_path / "root/libfft.so", code=code, source=asm)
    (file,) = assess(tmp_path / "root").gpu
    assert (file.verdict, file.native, file.other) == ("native", 3, 1)


@needs_gcc
def test_a_device_linked_library_is_not_judged_by_its_link_inputs(tmp_path: Path) -> None:
    linked = tmp_path / "in.bin"
    linked.write_bytes(fatbin(entry("sass", 100)))
    asm = f'__asm__(".section __nv_relfatbin,\\"a\\"\\n.incbin \\"{linked}\\"\\n.text\\n");'
    library(tmp_path / "root/a.so", code=fatbin(entry("sass", 90)), source=asm)
    (file,) = assess(tmp_path / "root").gpu
    assert file.verdict == "none"


@needs_gcc
def test_a_static_library_is_read_member_by_member_and_only_warned_about(tmp_path: Path) -> None:
    import subprocess

    (tmp_path / "k.bin").write_bytes(fatbin(entry("sass", 80)))
    (tmp_path / "a.c").write_text(f'__asm__(".section __nv_relfatbin,\\"a\\"\\n.incbin \\"{tmp_path}/k.bin\\"\\n");')
    subprocess.run(["gcc", "-c", "-o", tmp_path / "a.o", tmp_path / "a.c"], check=True)
    root = tmp_path / "root"
    root.mkdir()
    subprocess.run(["ar", "rc", root / "libk.a", tmp_path / "a.o"], check=True)
    (row,) = rows(assess(root), "gpu.none")
    assert row.severity == "warning" and "static" in row.message


@pytest.mark.parametrize(
    ("data", "verdict"),
    [
        (cubin(100), "native"),
        (cubin(100, note="sm_100f"), "native"),
        (cubin(103, note="sm_103a"), "none"),
        (cubin(100, flags=8), "native"),
        (cubin(90), "none"),
    ],
)
def test_a_cubin_is_judged_by_its_note_and_flags(tmp_path: Path, data: bytes, verdict: str) -> None:
    (tmp_path / "k.cubin").write_bytes(data)
    assert [f.verdict for f in assess(tmp_path).gpu] == [verdict]


def test_an_a_cubin_without_a_note_runs_on_its_own_gpu_only(tmp_path: Path) -> None:
    (tmp_path / "k.cubin").write_bytes(cubin(100, flags=8))
    assert [f.verdict for f in assess(tmp_path, "sm_103").gpu] == ["none"]


def test_loose_ptx_is_judged_by_its_target_line(tmp_path: Path) -> None:
    (tmp_path / "k.ptx").write_text("// made by hand\n.version 8.4\n.target sm_90a, texmode_independent\n")
    assert [f.verdict for f in assess(tmp_path).gpu] == ["none"]
    assert [f.verdict for f in assess(tmp_path, "sm_90").gpu] == ["ptx"]


def test_loose_kernels_of_a_package_are_one_row(tmp_path: Path) -> None:
    site = tmp_path / SITE
    (site / "kernels").mkdir(parents=True)
    for number in (100, 103):
        for copy in range(3):
            (site / f"kernels/k{number}_{copy}.cubin").write_bytes(cubin(number))
    package(site, "kernels", "1", tuple(f"kernels/k{n}_{c}.cubin" for n in (100, 103) for c in range(3)))
    (file,) = assess(tmp_path).gpu
    assert (file.package, file.files, file.native, file.other) == ("kernels 1", 6, 3, 3)


@needs_gcc
def test_the_allow_list_turns_an_error_into_a_note_with_its_reason(tmp_path: Path) -> None:
    library(tmp_path / "hopper.so", code=fatbin(entry("sass", 90, "a")))
    rules = '[[allow]]\ncode="gpu.none"\npath="*hopper.so"\ntargets=["sm_100"]\nreason="Hopper only"\n'
    report = assess(tmp_path, rules=rules)
    assert report.ok
    assert [r.allowed for r in rows(report, "gpu.none")] == ["Hopper only"]
    assert report.packages() == {"hopper.so": "allowed"}


@needs_gcc
def test_an_allow_entry_for_another_gpu_does_not_apply(tmp_path: Path) -> None:
    library(tmp_path / "hopper.so", code=fatbin(entry("sass", 90, "a")))
    rules = '[[allow]]\ncode="gpu.none"\npath="*hopper.so"\ntargets=["sm_120"]\nreason="x"\n'
    assert not assess(tmp_path, rules=rules).ok


@needs_gcc
def test_rows_come_worst_first_and_in_the_same_order_every_time(tmp_path: Path) -> None:
    library(tmp_path / "b.so", code=fatbin(entry("sass", 100)))
    library(tmp_path / "a.so", code=fatbin(entry("sass", 90)))
    library(tmp_path / "c.so", code=fatbin(entry("ptx", 80)))
    first, second = assess(tmp_path), assess(tmp_path)
    assert first.rows[0].severity == "error"
    assert [f.verdict for f in first.gpu] == ["none", "ptx", "native"]
    assert first.to_json() == second.to_json()
