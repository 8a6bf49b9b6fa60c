"""Does a real GPU agree with readiness? What it calls native or PTX must load, what it calls "will not run" must not.

    python tests/device/readiness_sample.py collect ENVIRONMENT FOLDER    cut modules out of real libraries, any machine
    python tests/device/readiness_sample.py check FOLDER                  on a machine with a GPU and its driver

``check`` needs nothing but Python and the driver; with nvcc it also builds extensions for ten architectures and
launches their kernel. It prints JSON and exits 1 when the GPU disagrees with a verdict, or when there is no GPU.
"""

from __future__ import annotations

import ctypes
import json
import random
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from oci_builder.payload.fatbin import Arch, Code, Container, MemorySource, embedded_containers, read_container
from oci_builder.payload.readiness.arch import NONE, Target

# Errors of cuModuleLoadData that mean "no code for this GPU or driver" (cuda.h): INVALID_PTX for an a-target's PTX,
# NO_BINARY_FOR_GPU, UNSUPPORTED_PTX_VERSION, INVALID_SOURCE for a bare cubin of another GPU.
REFUSALS = {218, 209, 222, 300}
MOST_BYTES = 24 << 20
BUILDS = {
    "sass-75": "arch=compute_75,code=sm_75",
    "sass-80": "arch=compute_80,code=sm_80",
    "sass-90": "arch=compute_90,code=sm_90",
    "sass-90a": "arch=compute_90a,code=sm_90a",
    "sass-100": "arch=compute_100,code=sm_100",
    "sass-100f": "arch=compute_100f,code=sm_100f",
    "ptx-80": "arch=compute_80,code=compute_80",
    "ptx-90": "arch=compute_90,code=compute_90",
    "ptx-90a": "arch=compute_90a,code=compute_90a",
    "ptx-100": "arch=compute_100,code=compute_100",
    "ptx-100a": "arch=compute_100a,code=compute_100a",
}
KERNEL = """
__global__ void twice(float *x) { x[threadIdx.x] *= 2.0f; }
extern "C" int run() {
    float host[32], *device = nullptr;
    for (int i = 0; i < 32; i++) host[i] = i;
    if (cudaMalloc(&device, sizeof host)) return -1;
    cudaMemcpy(device, host, sizeof host, cudaMemcpyHostToDevice);
    twice<<<1, 32>>>(device);
    int launched = cudaGetLastError();
    if (launched) return launched;
    int ran = cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost);
    for (int i = 0; i < 32 && !ran; i++) if (host[i] != 2.0f * i) return -2;
    return ran;
}
"""


def collect(environment: Path, folder: Path) -> None:
    """Cut modules out of an environment's libraries: up to three of each set of architectures, drawn at random."""
    folder.mkdir(parents=True, exist_ok=True)
    dice = random.Random(9)
    found: dict[str, list[tuple[Path, Container]]] = {}
    for path in sorted(environment.rglob("*.so*")):
        if path.is_file() and not path.is_symlink() and path.stat().st_size < 200 << 20:
            data = MemorySource(path.read_bytes())
            for box in embedded_containers(data):
                kinds = " ".join(f"{c.kind}{c.arch}{c.isa}" for c in box.entries if c.kind != "other")
                if kinds and box.end - box.start < 512 << 10:
                    found.setdefault(kinds, []).append((path, box))
    spent, count = 0, 0
    for boxes in found.values():
        for path, box in dice.sample(boxes, min(3, len(boxes))):
            if spent + box.end - box.start <= MOST_BYTES:
                spent += box.end - box.start
                with path.open("rb") as file:
                    file.seek(box.start)
                    (folder / f"{count:04}-{path.name}.fatbin").write_bytes(file.read(box.end - box.start))
                count += 1
    cubins = sorted(environment.rglob("*.cubin"))
    for path in dice.sample(cubins, min(5, len(cubins))):
        shutil.copyfile(path, folder / f"cubin-{path.name[-60:]}")
    print(json.dumps({"modules": count, "bytes": spent, "sets": len(found)}))


class Gpu:
    """The first GPU, through the driver's own interface."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self._check(self.cuda.cuInit(0))
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self._check(self.cuda.cuDeviceGet(ctypes.byref(device), 0))
        self._check(self.cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
        self._check(self.cuda.cuCtxSetCurrent(context))
        numbers = []
        for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
            value = ctypes.c_int()
            self._check(self.cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device))
            numbers.append(value.value)
        self.arch = f"sm_{numbers[0]}{numbers[1]}"

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise SystemExit(f"no usable GPU: CUDA driver error {status}")

    def load(self, image: bytes) -> int:
        """0 when the driver loads a module, else its error number."""
        module = ctypes.c_void_p()
        status: int = self.cuda.cuModuleLoadData(ctypes.byref(module), image)
        if not status:
            self.cuda.cuModuleUnload(module)
        return status


def sample(gpu: Gpu, target: Target, folder: Path) -> list[dict[str, object]]:
    """Load each collected module."""
    out = []
    for path in sorted(folder.glob("*.fatbin")):
        data = path.read_bytes()
        entries = read_container(MemorySource(data), 0, len(data)).entries
        out.append(_outcome(path.name, target.best(entries), gpu.load(data)))
    for path in sorted(folder.glob("cubin-*")):
        # These are all Blackwell kernels; facts.py reads their architecture, which needs pyelftools' neighbour only.
        data = path.read_bytes()
        arch = Arch((int.from_bytes(data[48:52], "little") >> 8) & 0xFF)
        out.append(_outcome(path.name, target.runs(Code("sass", arch)), gpu.load(data)))
    return out


def built(target: Target, work: Path) -> list[dict[str, object]]:
    """Build an extension for each architecture, judge the file, and launch its kernel in a process of its own."""
    out = []
    (work / "kernel.cu").write_text(KERNEL)
    for name, gencode in BUILDS.items():
        library = work / f"{name}.so"
        command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", "-gencode", gencode, "-o", str(library)]
        subprocess.run([*command, str(work / "kernel.cu")], check=True, capture_output=True)
        boxes = [box for box in embedded_containers(MemorySource(library.read_bytes())) if box.entries]
        verdicts = [target.best(box.entries) for box in boxes]
        verdict = min(verdicts, key=("none", "ptx", "native").index)
        code = f"import ctypes,sys; print(ctypes.CDLL({str(library)!r}).run())"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        out.append(_outcome(f"built {name}", verdict, int(run.stdout)))
    return out


def newer_ptx(gpu: Gpu, target: Target, work: Path) -> list[dict[str, object]]:
    """PTX of the newest ISA that the driver compiles, and of the next one."""
    source = work / "one.ptx"
    subprocess.run(["nvcc", "-ptx", "-arch=compute_80", "-o", source, work / "kernel.cu"], check=True)
    lines = source.read_text().splitlines()
    out = []
    for isa in (target.ptx_isa, (target.ptx_isa[0], target.ptx_isa[1] + 1)):
        changed = [f".version {isa[0]}.{isa[1]}" if line.startswith(".version") else line for line in lines]
        text = "\n".join(changed).encode() + b"\n\0"
        verdict = target.runs(Code("ptx", Arch(80), isa))
        out.append(_outcome(f"ptx isa {isa[0]}.{isa[1]}", verdict, gpu.load(text)))
    return out


def _outcome(name: str, verdict: str, status: int) -> dict[str, object]:
    agrees = status in REFUSALS if verdict == NONE else status == 0
    return {"name": name, "verdict": verdict, "status": status, "agrees": agrees}


def check(folder: Path) -> int:
    """Compare every verdict with what the GPU does."""
    gpu = Gpu()
    driver = Path("/proc/driver/nvidia/version")
    text = driver.read_text().splitlines()[0] if driver.exists() else "unknown"
    target = Target.parse(gpu.arch)
    outcomes = sample(gpu, target, folder)
    if shutil.which("nvcc"):
        with tempfile.TemporaryDirectory() as work:
            outcomes += built(target, Path(work)) + newer_ptx(gpu, target, Path(work))
    wrong = [o for o in outcomes if not o["agrees"]]
    counts = Counter(f"{o['verdict']}:{o['status']}" for o in outcomes)
    named = [o for o in outcomes if not str(o["name"])[:4].isdigit()]
    summary = {"gpu": gpu.arch, "driver": text, "modules": len(outcomes), "verdict:status": counts}
    print(json.dumps({**summary, "disagree": wrong, "named": named}, indent=1))
    return 1 if wrong or not outcomes else 0


if __name__ == "__main__":
    if sys.argv[1] == "collect":
        collect(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        sys.exit(check(Path(sys.argv[2])))
