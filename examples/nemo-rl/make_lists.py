"""Make the three requirement lists from upstream's ``uv.lock`` (tag v0.7.0): run once, the lists are committed.

    python make_lists.py UV_LOCK      # needs uv 0.11.18 on PATH and a package index

``uv export --frozen`` gives each tier's names, versions and hashes from the lock alone. Two things are changed:
torch, torchvision and triton come from the package index at the same versions (those wheels are cu130 builds too), and
so does vllm's wheel, whose hash is the locked one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
EXTRAS = ("fsdp", "automodel", "vllm", "sglang", "mcore", "modelopt", "nvrx", "nemo-gym")
MOVED = ("torch", "torchvision", "triton")
VLLM_HASH = re.compile(r"^vllm @ \S+_x86_64\.whl.*\\\n\s+--hash=(sha256:[0-9a-f]{64})\n", re.MULTILINE)


def main() -> None:
    """Write base.txt, automodel.txt and vllm.txt beside this file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "uv.lock").write_bytes(Path(sys.argv[1]).read_bytes())
        extras = "".join(f"{extra} = []\n" for extra in EXTRAS)
        (folder / "pyproject.toml").write_text(
            '[project]\nname = "nemo-rl"\nversion = "0.7.0"\nrequires-python = ">=3.13.13, <3.14"\n'
            f"[project.optional-dependencies]\n{extras}"
            '[dependency-groups]\nbuild = []\ndev = []\n[tool.uv]\ndefault-groups = ["build", "dev"]\n'
        )
        for tier in ("base", "automodel", "vllm"):
            extra = [] if tier == "base" else ["--extra", tier]
            argv = ["uv", "export", "--frozen", "--offline", "--no-header", "--no-annotate", "--no-emit-project"]
            text = subprocess.run([*argv, *extra], cwd=folder, check=True, capture_output=True, text=True).stdout
            (HERE / f"{tier}.txt").write_text("".join(entries(text, folder)))


def entries(text: str, folder: Path) -> list[str]:
    """The list's entries with the changes above."""
    out = []
    for entry in re.split(r"(?m)^(?=\S)", text):
        name = re.split(r"[ =@\[]", entry, maxsplit=1)[0]
        if "3rdparty/Automodel" in entry:
            # A path of upstream's checkout; named, so that the spec can say that it is left out.
            out.append("nemo-automodel @ file:3rdparty/Automodel-workspace/Automodel\n")
        elif name in MOVED:
            out.append(from_index(f"{name}=={entry.split('==')[1].split('+')[0].split()[0]}", folder))
        elif name == "vllm":
            match = VLLM_HASH.search(text)
            if match and "x86_64.whl" in entry.split("\n")[0]:
                out.append(f"vllm==0.20.0 \\\n    --hash={match.group(1)}\n")
        elif "platform_machine != 'x86_64'" not in entry.split("\n")[0]:
            out.append(entry)
    return out


def from_index(requirement: str, folder: Path) -> str:
    """One requirement with the index's hashes."""
    (folder / "one.in").write_text(requirement + "\n")
    return subprocess.run(
        ["uv", "pip", "compile", "--quiet", "--no-deps", "--generate-hashes", "--python-version", "3.13",
         "--python-platform", "x86_64-manylinux_2_35", "--no-header", "--no-annotate", "--no-emit-index-url",
         str(folder / "one.in")],
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip


if __name__ == "__main__":
    main()
