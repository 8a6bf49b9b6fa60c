"""The root made of this machine runs: shell, tools, Python with every module of its library."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oci_builder.model.image import Image
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.rootfs.host import host_plan, python_executable
from oci_builder.rootfs.host_elf import configured_folders, loader_cache, read_linkage
from oci_builder.rootfs.layers_blocks import layer_blocks
from oci_builder.store.blobs import DirStore
from oci_builder.transports.host import load_host
from oci_builder.wire.compress import decode

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root for chroot")
EPOCH = 1_700_000_000
ENV = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Image, Path]]:
    """The image, and its root unpacked by GNU tar."""
    place = tmp_path_factory.mktemp("host")
    with DirStore(place / "store") as store:
        image = load_host(store, epoch=EPOCH)
        (layer,) = image.layers
        tar = decode(store.open(layer.descriptor.digest), "gzip", limits=DEFAULT_LIMITS, where="host")
        (place / "root").mkdir()
        unpack = subprocess.Popen(["tar", "-xpf", "-", "-C", place / "root"], stdin=subprocess.PIPE)
        assert unpack.stdin is not None
        for chunk in tar:
            unpack.stdin.write(chunk)
        unpack.stdin.close()
        assert unpack.wait() == 0
        yield image, place / "root"


def run(root: Path, *command: str) -> str:
    done = subprocess.run(["chroot", root, *command], env=ENV, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@needs_root
def test_the_shell_and_the_tools_run(machine: tuple[Image, Path]) -> None:
    out = run(machine[1], "/bin/sh", "-c", "id -u; ls / | cat; env true; test -x /usr/bin/env")
    assert out.split()[0] == "0"
    assert {"bin", "dev", "etc", "proc", "sys", "tmp", "usr", "var"} <= set(out.split())


@needs_root
def test_python_runs_under_its_name_and_its_own_path(machine: tuple[Image, Path]) -> None:
    program = "import sys; print(sys.version, sys.base_prefix, sep='|')"
    expected = f"{sys.version}|{sys.base_prefix}\n"
    assert run(machine[1], str(python_executable()), "-c", program) == expected
    assert run(machine[1], "python3", "-c", program) == expected


@needs_root
def test_extension_modules_find_their_libraries(machine: tuple[Image, Path]) -> None:
    names = ("ssl", "sqlite3", "ctypes", "lzma", "bz2", "zlib", "decimal", "readline", "uuid", "hashlib")
    have = [name for name in names if _imports(name)]
    program = f"import {', '.join(have)}, json, asyncio, multiprocessing, venv; print('fine')"
    assert run(machine[1], "python3", "-c", program) == "fine\n"


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


@needs_root
def test_a_virtual_environment_of_this_python_works_inside(machine: tuple[Image, Path], tmp_path: Path) -> None:
    """What the tiers are: their interpreter links to this machine's."""
    venv = tmp_path / "venv"
    subprocess.run([python_executable(), "-m", "venv", "--without-pip", venv], check=True)
    inside = machine[1] / "opt/venv"
    inside.parent.mkdir()
    subprocess.run(["cp", "-a", venv, inside], check=True)
    assert run(machine[1], "/opt/venv/bin/python", "-c", "import sys; print(sys.prefix)") == "/opt/venv\n"


@needs_root
def test_the_loader_cache_is_one_that_ldconfig_reads(machine: tuple[Image, Path]) -> None:
    out = run(machine[1], "ldconfig", "-p")
    assert "libc.so.6" in out
    for line in out.splitlines()[1:]:
        if "=>" in line:
            path = line.rpartition("=> ")[2]
            assert (machine[1] / path.lstrip("/")).resolve(), path
    run(machine[1], "ldconfig")
    run(machine[1], "ls", "/")


def test_the_root_is_small_and_normal(machine: tuple[Image, Path]) -> None:
    image, root = machine
    assert image.layers[0].tar_size < 150 << 20
    assert (root / "tmp").stat().st_mode & 0o7777 == 0o1777
    assert (root / "var/tmp").stat().st_mode & 0o7777 == 0o1777
    assert not [list((root / name).iterdir()) for name in ("dev", "proc", "sys") if list((root / name).iterdir())]
    plan = host_plan(epoch=EPOCH)
    for item in plan.items:
        entry = item.entry
        assert (entry.uid, entry.gid) == (0, 0)
        assert entry.mtime_ns <= EPOCH * 10**9
        assert not entry.mode & 0o6000
    assert image.settings["config"]["Env"] == [f"PATH={ENV['PATH']}"]


def test_it_repeats_on_one_machine(machine: tuple[Image, Path], tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from oci_builder.transports.host import load_host\n"
        "from oci_builder.store.blobs import DirStore\n"
        f"with DirStore(Path(sys.argv[1])) as store: print(load_host(store, epoch={EPOCH}).layers[0].diff_id)"
    )
    env = {"PATH": "/nowhere", "TZ": "Asia/Tokyo", "LC_ALL": "C", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], env=env, cwd="/", umask=0o077, capture_output=True, text=True
    )
    assert done.stdout.strip() == machine[0].layers[0].diff_id, done.stderr


def test_no_bytecode_whose_times_would_be_stale() -> None:
    """B155."""
    assert not [item.name for item in host_plan().items if item.name.endswith(b".pyc")]


def test_linkage_agrees_with_readelf() -> None:
    for place in (python_executable(), Path("/bin/ls").resolve()):
        try:
            out = subprocess.run(["readelf", "-dl", place], capture_output=True, text=True, check=True).stdout
        except FileNotFoundError:
            pytest.skip("needs readelf (binutils)")
        linkage = read_linkage(place)
        assert linkage is not None
        assert list(linkage.needed) == [line.split("[")[1][:-1] for line in out.splitlines() if "(NEEDED)" in line]
        assert f"interpreter: {linkage.interpreter}]" in out


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(58), b"\x7fELF\x02\x01" + b"\xff" * 500])
def test_malformed_elf_is_no_elf(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "f").write_bytes(data)
    assert read_linkage(tmp_path / "f") is None


def test_library_folders_come_from_the_configuration(tmp_path: Path) -> None:
    for name in ("one", "two", "conf.d"):
        (tmp_path / name).mkdir()
    (tmp_path / "ld.conf").write_text(
        f"# comment\ninclude conf.d/*.conf\n{tmp_path}/one\n/nowhere/at/all\ninclude ld.conf\n"
    )
    (tmp_path / "conf.d/a.conf").write_text(f"{tmp_path}/two # why\n")
    assert configured_folders(tmp_path / "ld.conf") == [tmp_path / "one", tmp_path / "two"]


def test_a_loader_cache_lists_every_library(tmp_path: Path) -> None:
    libraries = {f"lib{n}.so.{n % 3}": f"/x/lib{n}.so" for n in range(40)} | {"libz.so.1": "/lib/libz.so.1"}
    (tmp_path / "cache").write_bytes(loader_cache(libraries))
    try:
        out = subprocess.run(
            ["/sbin/ldconfig", "-p", "-C", tmp_path / "cache"], capture_output=True, text=True, check=True
        ).stdout
    except FileNotFoundError:
        pytest.skip("needs ldconfig")
    listed = {line.split()[0]: line.rpartition("=> ")[2] for line in out.splitlines() if "=>" in line}
    assert listed == libraries


def test_the_plan_reads_like_a_layer() -> None:
    assert sum(len(block) for block in layer_blocks(host_plan())) % 512 == 0


def test_scripts_find_their_shell_whatever_python_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a merged /usr, PATH finds /usr/bin/sh; a distribution's own Python brings no file that names /bin/sh."""
    monkeypatch.setattr("oci_builder.rootfs.host._Collector.python", lambda *_: None)
    names = {item.name for item in host_plan().items}
    assert (b"bin" if os.path.islink("/bin") else b"bin/sh") in names
