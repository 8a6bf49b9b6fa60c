"""The peers: other ways to the same two image archives from the same trees, each as its users would do it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from bench.measure import NOTHING, Failed, Run, have, run, shell, size
from bench.servers import dockerd

PREFIX = "/opt/rt/envs"


@dataclass(frozen=True, slots=True)
class Result:
    """A peer's run and the sizes of what it made, bytes."""

    name: str
    run: Run
    oci: int
    docker: int


def contestants(tiers: dict[str, Path], work: Path, words: list[str]) -> Iterator[Result]:
    """Each peer that is installed, in turn; its files are removed after it was measured.

    Args:
        words: only peers with one of these in their names; all when empty.
    """
    ways: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Path], Path], Run]]] = {
        "umoci insert + skopeo + pigz": (("umoci", "skopeo", "pigz"), _umoci),
        "buildah add + push": (("buildah", "pigz"), _buildah),
        "docker import + save": (("dockerd", "docker", "skopeo", "pigz"), _docker),
        "GNU tar + pigz -1 (layers only)": (("tar", "pigz"), lambda t, w: _tar(t, w, 1)),
        "GNU tar + pigz -6 (layers only)": (("tar", "pigz"), lambda t, w: _tar(t, w, 6)),
    }
    for name, (needs, way) in ways.items():
        if words and not any(word in name for word in words):
            continue
        if not have(*needs):
            print(f"  {name}: not installed, left out")
            continue
        folder = work / "peer"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        try:
            taken = way(tiers, folder)
            docker = folder / "docker.tar.gz"
            yield Result(name, taken, size(folder / "oci.tar"), size(docker) if docker.exists() else 0)
        except Failed as failure:
            print(f"  {name}: {failure}")
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _umoci(tiers: dict[str, Path], work: Path) -> Run:
    layout = work / "layout"
    total = run(["umoci", "init", "--layout", layout]) + run(["umoci", "new", "--image", f"{layout}:t"])
    for name, path in tiers.items():
        total += run(["umoci", "insert", "--image", f"{layout}:t", path, f"{PREFIX}/{name}"])
    total += run(["skopeo", "copy", "-q", f"oci:{layout}:t", f"oci-archive:{work}/oci.tar:t"])
    _only_size(work / "oci.tar")
    total += run(["skopeo", "copy", "-q", f"oci:{layout}:t", f"docker-archive:{work}/docker.tar:bench:t1"])
    shutil.rmtree(layout)
    return total + run(["pigz", "-6", work / "docker.tar"])


def _only_size(path: Path) -> None:
    """Give the blocks of a finished file back: the real tiers take 10 to 20 GB in each form."""
    length = path.stat().st_size
    os.truncate(path, 0)
    os.truncate(path, length)


def _buildah(tiers: dict[str, Path], work: Path) -> Run:
    env = {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}
    base = ["buildah", "--root", str(work / "root"), "--runroot", str(work / "run"), "--storage-driver", "vfs"]
    total = run([*base, "from", "--name", "c", "scratch"], env)
    for name, path in tiers.items():
        total += run([*base, "add", "-q", "c", path, f"{PREFIX}/{name}"], env)
    total += run([*base, "commit", "-q", "c", "bench:t1"], env)
    total += run([*base, "push", "-q", "bench:t1", f"oci-archive:{work}/oci.tar:t"], env)
    total += run([*base, "push", "-q", "bench:t1", f"docker-archive:{work}/docker.tar:bench:t1"], env)
    total += run(["pigz", "-6", work / "docker.tar"])
    run([*base, "rm", "-a"], env)
    return total + NOTHING


def _docker(tiers: dict[str, Path], work: Path) -> Run:
    """One layer of all tiers: an import makes no second one. The engine's own CPU time is not in the sum."""
    places = " ".join(f"--transform 's,^{p},{PREFIX[1:]}/{n},' {str(p)!r}" for n, p in tiers.items())
    with dockerd(work / "engine") as client:
        total = shell(f"tar -P -cf - {places} | {' '.join(client)} import - bench:t1")
        total += run([*client, "save", "-o", work / "docker.tar", "bench:t1"])
    total += run(["skopeo", "copy", "-q", f"docker-archive:{work}/docker.tar", f"oci-archive:{work}/oci.tar:t"])
    return total + run(["pigz", "-6", work / "docker.tar"])


def _tar(tiers: dict[str, Path], work: Path, level: int) -> Run:
    """No image at all: only what tarring and compressing each tier costs."""
    total = NOTHING
    for name, path in tiers.items():
        total += shell(f"tar -C {str(path)!r} -cf - . | pigz -{level} > {work}/{name}.tar.gz")
    shell(f"cat {work}/*.tar.gz > {work}/oci.tar")
    return total
