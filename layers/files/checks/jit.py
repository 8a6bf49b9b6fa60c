"""Compilers at run time: nvcc with cuobjdump, Triton, a C++ and CUDA extension through ninja; each result is run."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

from .common import Result, scratch_folder
from .conditions import all_conditions, cache_files
from .process import run

_SOURCE = r"""
#include <cstdio>
__global__ void add(const int *a, const int *b, int *c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    c[i] = a[i] + b[i];
}
int main() {
    const int n = 1 << 20;
    int *a, *b, *c, *host = new int[n];
    for (int i = 0; i < n; i++) host[i] = i;
    if (cudaMalloc(&a, n * 4) || cudaMalloc(&b, n * 4) || cudaMalloc(&c, n * 4)) return 2;
    cudaMemcpy(a, host, n * 4, cudaMemcpyHostToDevice);
    cudaMemcpy(b, host, n * 4, cudaMemcpyHostToDevice);
    add<<<n / 256, 256>>>(a, b, c);
    if (cudaMemcpy(host, c, n * 4, cudaMemcpyDeviceToHost) != cudaSuccess) return 3;
    for (int i = 0; i < n; i++) if (host[i] != 2 * i) return 4;
    puts("right");
}
"""
_EXTENSION_CPP = "torch::Tensor twice(torch::Tensor x);"
_EXTENSION_CUDA = r"""
#include <torch/types.h>
__global__ void twice_kernel(const float *x, float *out, long n) {
    long i = blockIdx.x * (long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = 2.0f * x[i];
}
torch::Tensor twice(torch::Tensor x) {
    auto out = torch::empty_like(x);
    long n = x.numel();
    twice_kernel<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), out.data_ptr<float>(), n);
    return out;
}
"""


def check() -> Result:
    """The tools, then the three ways; one that fails does not stop the others."""
    result = Result()
    all_conditions(result)
    if result.reasons:
        return result
    extend_path()
    capability = result.details["gpus"][0]["capability"].replace(".", "")
    tools(result)
    for way in (nvcc, triton, extension):
        try:
            way(result, capability)
        except ImportError as error:
            result.add([f"{way.__name__}: {error}"])
        except Exception as error:
            result.add([f"{way.__name__}: {type(error).__name__}: {str(error)[-800:]}"])
    return result


def extend_path() -> None:
    """The interpreter's own programs (ninja) first, CUDA's last."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    own = os.path.dirname(sys.executable)
    os.environ["PATH"] = os.pathsep.join([own, os.environ.get("PATH", os.defpath), f"{home}/bin"])


def tools(result: Result) -> None:
    """Where the tools are, and their versions."""
    compiler = os.environ.get("CXX", "c++" if shutil.which("c++") else "g++")
    for tool in ("nvcc", "cuobjdump", compiler, "ninja"):
        place = shutil.which(tool)
        if result.expect(place is not None, f"{tool} is not on the PATH"):
            done = run([str(place), "--version"], timeout=60)
            lines = [line for line in done.stdout.splitlines() if re.search(r"\d\.\d", line)]
            result.details[tool] = {"path": place, "version": (lines[0] if lines else "")[:120]}
            result.expect(done.status == 0, f"{tool} --version ended with {done.status}")


def nvcc(result: Result, capability: str) -> None:
    """A kernel for exactly this GPU; cuobjdump sees its machine code, and it computes right."""
    folder = Path(scratch_folder("nrl-nvcc-"))
    (folder / "sum.cu").write_text(_SOURCE)
    arch = f"sm_{capability}"
    built = run(["nvcc", f"-arch={arch}", "sum.cu", "-o", "sum"], timeout=120, cwd=str(folder))
    if not result.expect(built.status == 0, f"nvcc ended with {built.status}: {built.stderr[-800:]}"):
        return
    listed = run(["cuobjdump", "--list-elf", "sum"], timeout=60, cwd=str(folder)).stdout
    result.expect(arch in listed, f"cuobjdump finds no {arch} code: {listed[-200:]!r}")
    ran = run([str(folder / "sum")], timeout=60)
    result.expect(ran.status == 0 and "right" in ran.stdout, f"the kernel of nvcc ended with {ran.status}")
    result.details["nvcc_kernel"] = {"arch": arch, "seconds": round(built.seconds, 2)}


def triton(result: Result, capability: str) -> None:
    """A kernel into the empty cache."""
    import torch
    import triton as package

    from .triton_kernel import scaled_sum

    n = 100_003
    x, y = torch.randn(n, device="cuda"), torch.randn(n, device="cuda")
    out = torch.empty_like(x)
    scaled_sum[(package.cdiv(n, 1024),)](x, y, out, n, SIZE=1024)
    result.expect(torch.allclose(out, 2 * x + y), "Triton's kernel gave wrong sums")
    made = [name for name in cache_files("TRITON_CACHE_DIR") if name.endswith(".cubin")]
    result.expect(bool(made), "Triton's kernel was not compiled here: its cache has no cubin")
    result.details["triton"] = {"version": package.__version__, "cubins": len(made)}


def extension(result: Result, capability: str) -> None:
    """A C++ and CUDA extension of torch, built by ninja into the empty cache."""
    import torch
    from torch.utils import cpp_extension

    os.environ["TORCH_CUDA_ARCH_LIST"] = f"{capability[:-1]}.{capability[-1]}"
    os.environ.setdefault("MAX_JOBS", "4")
    module = cpp_extension.load_inline(
        "nrl_twice", cpp_sources=[_EXTENSION_CPP], cuda_sources=[_EXTENSION_CUDA], functions=["twice"]
    )
    x = torch.randn(100_003, device="cuda")
    result.expect(torch.equal(module.twice(x), 2 * x), "the extension's kernel gave wrong values")
    made = [name for name in cache_files("TORCH_EXTENSIONS_DIR") if name.endswith(".so")]
    result.expect(bool(made), "the extension was not built here: its cache has no library")
    result.details["extension"] = {"libraries": made}
