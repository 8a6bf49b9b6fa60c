"""Three tiers on a machine with GPUs, from its own environment and carried packages; then every check of one GPU.

    python3 tests/device/tiers_gpu.py assemble FROM      make the tiers below /opt/rt, as far as FROM has them
    python3 tests/device/tiers_gpu.py host OUT [NAME…]   run their checks (or these) without a network, on this machine
    sh tests/device/run.sh tiers OUT                     the same from an image: build, verify, unpack, chroot

FROM holds folders of packages, as ``pip install --target`` makes them: ``common`` and ``shared`` for all tiers (Ray;
transformers), ``automodel``, ``built`` (operators compiled there) and ``vllm`` for one; ``source`` is upstream's code
with its overlay. What a tier lacks is in its inventory as left out, with the reason, and no check counts it as a pass.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

from chroot_gpu import EXCLUDED, NO_MULTICAST, REPOSITORY, Session
from image_gpu import KEPT_VARIABLES, PATH, PREFIX, Steps, chain, parser, run_part, spec_of

ENV = Path("/opt/torch/.venv")
ENVS = Path(PREFIX) / "envs"
_CLONE_NEWNET, _SIOCSIFFLAGS, _UP_AND_RUNNING = 0x40000000, 0x8914, 0x41
TIERS = ("base", "automodel", "vllm")
CHECKS = REPOSITORY / "layers/files/checks"
# Packages of the machine's environment that no tier needs; without them the image is half as large.
UNWANTED = (
    "jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt", "cupy-cuda13x", "flax", "orbax-checkpoint", "tensorstore",
    "onnx", "onnxruntime", "onnxscript", "onnx-ir", "chex", "optax", "diffrax", "equinox", "lineax", "optimistix", "e3nn",
    "botorch", "gpytorch", "numpyro", "torch-geometric", "timm", "scikit-image", "scikit-learn", "statsmodels", "seaborn",
    "matplotlib", "h5py", "hypothesis", "tensorboard", "xarray", "sentence-transformers", "treescope", "torchmetrics",
    "pytorch-lightning", "lightning", "torchdiffeq", "linear-operator", "sacrebleu", "cmake", "patsy", "formulaic",
    "peft", "accelerate",
)  # fmt: skip
ABSENT = "not on this machine: it was not carried there"
# What a tier of the real runtime has and this one may lack; then it is left out, and said to be.
WANTED = {
    "base": (),
    "automodel": ("nemo-automodel", "flash-attn", "transformer-engine", "mamba-ssm", "causal-conv1d", "nv-grouped-gemm",
                  "deep-ep"),
    "vllm": ("vllm", "flashinfer-python", "deep-gemm", "deep-ep", "mooncake-transfer-engine-cuda13",
             "flashinfer-cubin", "flashinfer-jit-cache"),
}  # fmt: skip
# Checks of one module each that has no package here.
LEFT_OUT = ("import:deep_ep", "import:deep_gemm", "import:mooncake")
VARIABLES = {
    "PYTHONPATH": f"{PREFIX}/source", "NO_VCS_VERSION": "1", "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    "PYTHONDONTWRITEBYTECODE": "1", "MAX_JOBS": "8", **NO_MULTICAST,
}  # fmt: skip
DROP = """
import importlib.metadata, pathlib, re, shutil, sys
site, names = pathlib.Path(sys.argv[1]), set(sys.argv[2:])
for d in importlib.metadata.distributions(path=[str(site)]):
    if re.sub(r"[-_.]+", "-", d.metadata["Name"] or "").lower() in names:
        files = [pathlib.Path(d.locate_file(f)) for f in d.files or ()]
        for path in files:
            path.unlink(missing_ok=True)
        for folder in {f.parent for f in files if "__pycache__" not in f.parts and site in f.parents} - {site}:
            shutil.rmtree(folder / "__pycache__", ignore_errors=True)
        shutil.rmtree(d._path, ignore_errors=True)
"""
INVENTORY = """
import importlib.metadata, json
found = [d for d in importlib.metadata.distributions() if d.metadata["Name"]]
print(json.dumps([{"name": d.metadata["Name"], "version": d.version} for d in found]))
"""


def site(tier: str) -> Path:
    """A tier's packages."""
    return next(iter(sorted((ENVS / tier).glob("lib/python3*/site-packages"))))


def shell(*command: str) -> None:
    """Run a command or stop."""
    subprocess.run(command, check=True)


def drop(tier: str, *names: str) -> None:
    """Remove packages from a tier; links elsewhere stay."""
    shell(sys.executable, "-c", DROP, str(site(tier)), *names)
    # An empty folder would still be found as a namespace package without a version.
    shell("find", str(site(tier)), "-mindepth", "1", "-depth", "-type", "d", "-empty", "-delete")


def overlay(tier: str, folder: Path) -> None:
    """Link a folder of packages over a tier's."""
    if folder.is_dir():
        shell("cp", "-alf", f"{folder}/.", str(site(tier)))


def assemble(given: Path) -> None:
    """Make the tiers anew, by hard links."""
    shutil.rmtree(PREFIX, ignore_errors=True)
    ENVS.mkdir(parents=True)
    for name in ("common", "shared", "automodel", "built", "vllm"):
        compiled = [sys.executable, "-m", "compileall", "-q", "-j0", "--invalidation-mode", "checked-hash"]
        subprocess.run([*compiled, str(given / name)], check=False, stdout=subprocess.DEVNULL)
    shell("cp", "-al", str(ENV), str(ENVS / "base"))
    drop("base", *UNWANTED, "transformers", "tokenizers")
    overlay("base", given / "common")
    for tier in TIERS[1:]:
        shell("cp", "-al", str(ENVS / "base"), str(ENVS / tier))
    for tier in TIERS:
        overlay(tier, given / "shared")
    drop("automodel", "transformers")
    for tier in TIERS[1:]:
        overlay(tier, given / tier)
    overlay("automodel", given / "built")
    shutil.copytree(CHECKS, f"{PREFIX}/checks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(given / "source", f"{PREFIX}/source", ignore=shutil.ignore_patterns("__pycache__"))
    for tier in TIERS:
        write_inventory(tier)


def write_inventory(tier: str) -> None:
    """What a tier has, and what it lacks."""
    done = subprocess.run([str(ENVS / tier / "bin/python3"), "-I", "-c", INVENTORY], capture_output=True, check=True)
    packages = json.loads(done.stdout)
    there = {re.sub(r"[-_.]+", "-", package["name"]).lower() for package in packages}
    omitted = {name: ABSENT for name in WANTED[tier] if name not in there}
    value = {"tier": tier, "packages": packages, "omitted": omitted}
    Path(PREFIX, f"inventory-{tier}.json").write_text(json.dumps(value, indent=1))


def checks(gpus: int = 1) -> list[dict[str, Any]]:
    """The shipped lists for these tiers, without the modules that they lack, with this machine's variables."""
    found = listed("single")
    if gpus > 1:
        found += listed("nccl", "--gpus", str(gpus))[2:]
        # As many as there are: a list asks for one.
        found = [{**check, "gpus": gpus} if check["name"] == "ray_dispatch" else check for check in found]
    return [{**check, "env": VARIABLES} for check in found if not check["name"].startswith(LEFT_OUT)]


def listed(stage: str, *more: str) -> list[dict[str, Any]]:
    """The shipped list of a stage."""
    argv = [sys.executable, str(CHECKS), "list", "--stage", stage, "--prefix", PREFIX, "--tiers", ",".join(TIERS)]
    done = subprocess.run([*argv, *more], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout)["checks"])


def generation_with(attention: str) -> dict[str, Any]:
    """The check of generation with another attention than vLLM chooses here."""
    check = next(check for check in checks() if check["name"] == "generation")
    return {**check, "name": f"generation:{attention}", "argv": [*check["argv"], "--attention", attention]}


def host(out: Path, names: list[str]) -> int:
    """The checks on the machine itself, in a network of their own without a way out, from empty caches."""
    out.mkdir(parents=True, exist_ok=True)
    home = Path("/var/tmp/checks-home")
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    (out / "list.json").write_text(json.dumps({"checks": [*checks(), generation_with("FLASHINFER")]}, indent=1))
    receipt = next(out / f"host-{n}.json" for n in range(100) if not (out / f"host-{n}.json").exists())
    python = str(ENVS / "base/bin/python3")
    argv = [python, f"{PREFIX}/checks", "run", "--list", str(out / "list.json"), "--json", str(receipt)]
    only = [word for name in names for word in ("--only", name)]
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if os.environ.get(name)}
    env = {"PATH": PATH, "HOME": str(home), **kept, **VARIABLES}
    return subprocess.run([*argv, *only], env=env, cwd="/", preexec_fn=without_network).returncode


def without_network() -> None:
    """In a child: a network of its own, with loopback up and nothing else."""
    if ctypes.CDLL(None).unshare(_CLONE_NEWNET):
        raise OSError("no network namespace can be made here")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _UP_AND_RUNNING))


def write_spec(session: Session, steps: Steps) -> dict[str, Any]:
    """An image of the three tiers over this machine's root file system."""
    layers = session.work / "layers"
    (layers / "files").mkdir(parents=True)
    shutil.copy(REPOSITORY / "layers/checks.toml", layers)
    shutil.copytree(f"{PREFIX}/checks", layers / "files/checks")
    shutil.copytree(f"{PREFIX}/source", layers / "files/source")
    only = steps.options.only
    found = [check for check in checks(session.gpus) if not only or check["name"] in only]
    (layers / "files/checks.json").write_text(json.dumps({"checks": found}, indent=1))
    lines = ['name = "tiers"', '[[file]]\nfrom = "files/source"\nto = "source"']
    for tier in TIERS:
        shutil.copy(f"{PREFIX}/inventory-{tier}.json", layers / "files")
        lines.append(f'[[file]]\nfrom = "files/inventory-{tier}.json"\nto = "inventory-{tier}.json"')
    (layers / "tiers.toml").write_text("\n".join(lines) + "\n")
    ours = [str(p.resolve()).lstrip("/") for p in (ENV.parent, Path(PREFIX), REPOSITORY, session.out, session.work)]
    kept = [f"{name}={os.environ[name]}" for name in KEPT_VARIABLES if os.environ.get(name)]
    variables = [f"{name}={value}" for name, value in VARIABLES.items() if name not in NO_MULTICAST]
    spec = {
        "name": "device-tiers", "tag": "r1", "epoch": 0,
        "base": {"rootfs": "/", "exclude": [*ours, *EXCLUDED, *steps.options.exclude]},
        "tiers": {tier: {"path": str(ENVS / tier)} for tier in TIERS}, "prefix": PREFIX, "files": "layers",
        "env": [f"PATH={PATH}", *variables, *kept], "labels": {"io.github.oci-builder.prefix": PREFIX},
    }  # fmt: skip
    (session.work / "spec.json").write_text(json.dumps(spec, indent=1))
    return spec


def tiers(steps: Steps) -> None:
    """From the build on, see ``image_gpu.py``."""
    chain(steps, spec_of(steps, lambda: write_spec(steps.session, steps)))


def main() -> int:
    """One of the three parts."""
    words = sys.argv[1:]
    if len(words) == 2 and words[0] == "assemble":
        assemble(Path(words[1]))
        return 0
    if len(words) >= 2 and words[0] == "host":
        return host(Path(words[1]), words[2:])
    return run_part(parser(("tiers",)).parse_args(), {"tiers": tiers})


if __name__ == "__main__":
    sys.exit(main())
