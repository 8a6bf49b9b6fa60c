"""The default list of CUDA files against NVIDIA's own files, laid out as its image has them.

``OCI_BUILDER_CUDA_WHEELS`` names a folder with the 13.0 wheels of nvidia-cuda-nvcc, -runtime, -crt, -nvrtc, -cccl,
-cuobjdump, -nvdisasm, nvidia-nvvm and nvidia-nvjitlink.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from oci_builder.model.spec import Spec
from oci_builder.payload.cuda import REQUIRED, stage_cuda
from oci_builder.rootfs.layers import WriteOptions
from oci_builder.store.blobs import DirStore
from oci_builder.transports.bases import load_base

WHEELS = os.environ.get("OCI_BUILDER_CUDA_WHEELS") or "/nonexistent"
KERNEL = """
#include <cuda/std/array>
#include <cuda_fp16.h>
__global__ void scale(float *x, __half *y) { cuda::std::array<float, 2> a{x[0], sinf(x[1])}; x[2] = a[0] * a[1]; y[0] = __float2half(x[2]); }
int main() { return 0; }
"""


@pytest.fixture(scope="module")
def toolkit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the portable archive would bring, moved to a place with a space in its name."""
    if not list(Path(WHEELS).glob("nvidia_cuda_nvcc-13.0*.whl")) or not shutil.which("g++"):
        pytest.skip("needs OCI_BUILDER_CUDA_WHEELS and g++")
    place = tmp_path_factory.mktemp("cuda")
    image(place / "root", place / "wheels")
    spec = Spec.model_validate(
        {"name": "x", "tag": "t", "base": {"rootfs": str(place / "root")}, "prefix": "/opt/x",
         "tiers": {"base": {"path": "/x"}}, "cuda": {}}
    )  # fmt: skip
    with DirStore(place / "store") as store:
        layers = load_base(spec, place, store, WriteOptions()).image.layers
        found = stage_cuda(spec, layers, store, place / "work")
    assert found is not None
    for name in ("root", "wheels", "store"):
        shutil.rmtree(place / name)
    return found.rename(place / "a moved place")


def image(root: Path, wheels: Path) -> None:
    """/usr/local/cuda -> /etc/alternatives/cuda -> cuda-13.0, with targets/x86_64-linux, as the devel image has it."""
    for wheel in sorted(Path(WHEELS).glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(wheels)
    found, local = wheels / "nvidia/cu13", root / "usr/local"
    target = local / "cuda-13.0/targets/x86_64-linux"
    target.mkdir(parents=True)
    shutil.move(found / "include", target / "include")
    shutil.move(found / "lib", target / "lib")
    (target / "lib/libcudart.so").symlink_to("libcudart.so.13")  # of the -dev package; wheels have no links
    for name in ("bin", "nvvm"):
        shutil.move(found / name, local / "cuda-13.0" / name)
    for path in [*(local / "cuda-13.0/bin").iterdir(), *(local / "cuda-13.0/nvvm/bin").iterdir()]:
        path.chmod(0o755)
    (local / "cuda-13.0/include").symlink_to("targets/x86_64-linux/include")
    (local / "cuda-13.0/lib64").symlink_to("targets/x86_64-linux/lib")
    (root / "etc/alternatives").mkdir(parents=True)
    (root / "etc/alternatives/cuda").symlink_to("/usr/local/cuda-13.0")
    (root / "etc/alternatives/cuda-13").symlink_to("/usr/local/cuda-13.0")
    (local / "cuda").symlink_to("/etc/alternatives/cuda")
    (local / "cuda-13").symlink_to("/etc/alternatives/cuda-13")


def run(toolkit: Path, tool: str, *argv: object) -> subprocess.CompletedProcess[str]:
    words = [str(toolkit / "bin" / tool), *map(str, argv)]
    return subprocess.run(words, capture_output=True, text=True, env={"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"})


@pytest.mark.slow
def test_the_default_list_brings_what_compiling_takes(toolkit: Path) -> None:
    for name in (*REQUIRED, "bin/cudafe++", "bin/fatbinary", "bin/nvlink", "bin/nvdisasm", "include/cuda_runtime.h",
                 "include/cccl/cuda/std/array", "nvvm/bin/cicc", "lib64/libcudart.so.13", "lib64/libnvrtc.so.13",
                 "lib64/libcudadevrt.a"):  # fmt: skip
        assert (toolkit / name).is_file(), name
    assert list((toolkit / "nvvm/libdevice").glob("libdevice.*.bc"))
    assert not [p for p in toolkit.rglob("*") if p.is_symlink() and os.readlink(p).startswith("/")]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["compute_100", "compute_90"])
def test_its_nvcc_compiles_to_ptx(toolkit: Path, tmp_path: Path, target: str) -> None:
    (tmp_path / "k.cu").write_text(KERNEL)
    done = run(toolkit, "nvcc", f"-arch={target}", "-ptx", tmp_path / "k.cu", "-o", tmp_path / "k.ptx")
    assert done.returncode == 0, done.stderr
    assert f".target {target.replace('compute', 'sm')}" in (tmp_path / "k.ptx").read_text()


@pytest.mark.slow
def test_machine_code_goes_in_and_comes_out_again(toolkit: Path, tmp_path: Path) -> None:
    """What DeepGEMM does: compile for the GPU, and take the result apart."""
    (tmp_path / "k.cu").write_text(KERNEL)
    done = run(toolkit, "nvcc", "-arch=sm_100a", "-cubin", tmp_path / "k.cu", "-o", tmp_path / "k.cubin")
    assert done.returncode == 0, done.stderr
    for tool, words in (("cuobjdump", ("-elf",)), ("nvdisasm", ())):
        shown = run(toolkit, tool, *words, tmp_path / "k.cubin")
        assert shown.returncode == 0 and "scale" in shown.stdout, shown.stderr


@pytest.mark.slow
def test_a_program_links(toolkit: Path, tmp_path: Path) -> None:
    (tmp_path / "k.cu").write_text(KERNEL)
    done = run(toolkit, "nvcc", "-arch=sm_100", "-cudart", "shared", tmp_path / "k.cu", "-o", tmp_path / "k")
    assert done.returncode == 0, done.stderr
