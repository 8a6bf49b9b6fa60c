"""A tier imports, its versions are the inventory's, and what links the driver is deferred on a machine without one."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from . import inventory as inventories
from .common import CheckFailed, Result, absent
from .conditions import caches, gpus, network
from .gpu import NoGpu, gpu_facts
from .process import run

MODULES = {
    "base": ("torch", "triton", "transformers", "ray", "numpy", "nemo_rl"),
    "automodel": ("torch", "triton", "transformers", "ray", "nemo_automodel", "flash_attn", "mamba_ssm",
                  "transformer_engine.pytorch", "causal_conv1d", "grouped_gemm"),
    "vllm": ("torch", "triton", "transformers", "ray", "vllm", "flashinfer"),
}  # fmt: skip
# Check -> module. These need the driver's library to load or to come up, so a machine without one cannot judge them.
DRIVER_LINKED = {
    "deep_ep": "deep_ep", "deep_gemm": "deep_gemm", "vllm._C": "vllm._C",
    "vllm.cumem_allocator": "vllm.cumem_allocator", "mooncake": "mooncake.engine",
}  # fmt: skip
_DRIVER = re.compile(r"lib(cuda|nvidia-ml)\.so")


def check(tier: str, inventory: str, modules: Sequence[str], gpu: bool) -> Result:
    """The whole tier: conditions, versions, imports. With ``gpu`` there must be one, and torch must use it.

    Modules of packages that the build left out are not imported; they stand under ``omitted``, each with its reason.
    """
    result = Result()
    network(result)
    caches(result)
    if gpu:
        gpus(result)
    listed = inventories.read(Path(inventory))
    inventories.compare(result, listed)
    wanted = tuple(modules) or MODULES.get(tier, ())
    result.expect(bool(wanted), f"no modules are known for the tier {tier!r}; name them")
    omitted = {name: reason for name in wanted if (reason := listed.omission(name))}
    result.details["omitted"] = omitted
    result.expect(len(omitted) < len(wanted) or not wanted, "every module of the tier was left out")
    import_all(result, [name for name in wanted if name not in omitted], Path(inventory).parent)
    if gpu and "torch" in result.details["imported"]:
        torch_uses_gpus(result)
    return result


def import_all(result: Result, names: Sequence[str], runtime: Path) -> None:
    """Import each; one that fails does not stop the others, and one from outside of tier and runtime is wrong."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = import_one(result, name, runtime)
        except ImportError as error:
            result.add([absent(error)])
        except Exception as error:
            result.add([f"{name}: {type(error).__name__}: {error}"])
    result.details["imported"] = found


def import_one(result: Result, name: str, runtime: Path) -> str:
    """Import one; its version. A folder without a package in it imports too, and is none."""
    module = importlib.import_module(name)
    folders = list(getattr(module, "__path__", ()))
    if getattr(module, "__file__", None) is None and folders:
        result.add([f"{name} is a folder without a package: {', '.join(map(str, folders))}"])
    else:
        result.expect(at_home(module, runtime), f"{name} comes from {module.__file__}, which is not the runtime's")
    return str(getattr(module, "__version__", ""))


def at_home(module: ModuleType, runtime: Path) -> bool:
    """Whether a module lies below this interpreter's prefix or the runtime's; what has no file is built in."""
    if getattr(module, "__file__", None) is None:
        return True
    file = Path(str(module.__file__))
    homes = [Path(sys.prefix), Path(sys.base_prefix), runtime]
    return any(file.is_relative_to(home) or file.resolve().is_relative_to(home.resolve()) for home in homes)


def torch_uses_gpus(result: Result) -> None:
    """torch sees as many GPUs as the driver, and multiplies right on each."""
    import torch

    count = torch.cuda.device_count()
    result.expect(count == len(result.details.get("gpus", [])), f"torch sees {count} GPUs")
    for index in range(count):
        a, b = (torch.randn(512, 512, dtype=torch.bfloat16) for _ in range(2))
        got, right = (a.to(f"cuda:{index}") @ b.to(f"cuda:{index}")).cpu().double(), a.double() @ b.double()
        error = float((got - right).abs().max() / right.abs().max())
        result.expect(error < 2e-2, f"cuda:{index}: a bf16 product is off by {error}")


def driver_linked(module: str, gpu: bool, inventory: str = "") -> Result:
    """One module that needs the driver: it imports, or (no driver here, and none asked for) it is deferred.

    Deferring needs proof that nothing else is wrong: the module is there and all its other libraries resolve. A module
    that the inventory leaves out is skipped, which is no pass.
    """
    result = Result()
    if inventory and (why := inventories.read(Path(inventory)).omission(module)):
        result.skipped = why
        return result
    network(result)
    caches(result)
    try:
        result.details["gpus"] = gpu_facts()["gpus"]
    except NoGpu as error:
        if gpu:
            result.add([f"no GPU: {error}"])
            return result
        files = native_files(module)
        result.details["files"] = [str(f) for f in files]
        result.expect(bool(files), f"{module} has no native library")
        missing = sorted({line for file in files for line in unresolved(file) if not _DRIVER.match(line)})
        result.expect(not missing, f"{module}: libraries that are not the driver's are missing: {', '.join(missing)}")
        result.deferred = f"{module} needs the driver's library: {error}"
        return result
    import_one(result, module, Path(inventory).parent if inventory else Path(sys.prefix))
    return result


def native_files(module: str) -> list[Path]:
    """The shared libraries of a module, without importing it.

    Raises:
        CheckFailed: there is no such module.
    """
    top, _, rest = module.partition(".")
    spec = importlib.util.find_spec(top)
    if spec is None:
        raise CheckFailed(f"{top} is absent")
    places = [Path(p) for p in spec.submodule_search_locations or ()] or [Path(str(spec.origin)).parent]
    pattern = f"{rest.replace('.', '/')}*.so" if rest else f"*{top}*.so"
    found = [file for place in places for file in place.rglob(pattern)]
    # Extensions such as deep_ep_cpp stand beside their package.
    return sorted(found or [f for place in places for f in place.parent.glob(f"{top}*.so")])


def unresolved(library: Path) -> list[str]:
    """Names that the loader does not find for a library.

    Raises:
        CheckFailed: there is no ldd to ask, or the library is none that it can read.
    """
    ldd = shutil.which("ldd")
    if ldd is None:
        raise CheckFailed("ldd is absent: the libraries cannot be resolved")
    places = [*map(str, loaded_before(library)), os.environ.get("LD_LIBRARY_PATH", "")]
    done = run([ldd, str(library)], timeout=60, env={**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, places))})
    if done.status != 0:
        raise CheckFailed(f"ldd ended with {done.status} for {library}: {(done.stderr or done.stdout)[-300:].strip()}")
    return [line.split()[0] for line in done.stdout.splitlines() if "not found" in line]


def loaded_before(library: Path) -> list[Path]:
    """Folders of the tier whose libraries are in the process before an extension is: torch's, and what torch loads."""
    site = next((p for p in library.parents if p.name in ("site-packages", "dist-packages")), None)
    return [] if site is None else [p for p in (site / "torch/lib", *sorted(site.glob("nvidia/*/lib"))) if p.is_dir()]
