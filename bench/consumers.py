"""What users do with finished archives, ours against the peers: unpack, load, pull, install."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from bench.measure import Run, have, ours, run, warm
from bench.servers import dockerd, registry
from bench.session import Bench

_HELPER = Path(__file__).resolve().parent.parent / "layers/files/ensure_runtime.sh"


def bench_unpack(b: Bench, oci: Path, docker: Path) -> None:
    """unpack against umoci (with skopeo in front), docker load and podman load of the same image."""
    target, layout = b.work / "tree", b.work / "layout"
    warm(oci, docker)
    taken = b.row("ours: unpack", ours("unpack", oci, target))
    shutil.rmtree(target)
    copied = b.row("peer: skopeo to a layout", run(["skopeo", "copy", "-q", f"oci-archive:{oci}", f"oci:{layout}:t"]))
    peer = b.row("peer: umoci unpack", run(["umoci", "unpack", "--image", f"{layout}:t", target]))
    shutil.rmtree(target)
    shutil.rmtree(layout)
    b.ratio("unpack, times faster than umoci", peer.wall / taken.wall, "> 1")
    b.ratio("unpack, times faster than skopeo + umoci", (copied.wall + peer.wall) / taken.wall, "> 1")
    for name, load, archive in (("docker load", _docker_load, docker), ("podman load", _podman_load, oci)):
        if loaded := load(b, archive):
            b.row(f"peer: {name}", loaded)
            b.ratio(f"unpack, times faster than {name}", loaded.wall / taken.wall, "> 1")


def _docker_load(b: Bench, docker: Path) -> Run | None:
    if not have("dockerd", "docker"):
        return None
    with dockerd(b.work / "engine") as client:
        return run([*client, "load", "-q", "-i", docker])


def _podman_load(b: Bench, oci: Path) -> Run | None:
    if not have("podman"):
        return None
    root = b.work / "podman"
    with tempfile.TemporaryDirectory() as short:  # podman takes 50 characters at most
        base = ["podman", "--root", str(root), "--runroot", short, "--storage-driver", "overlay"]
        try:
            return run([*base, "load", "-q", "-i", oci])
        finally:
            run([*base, "rmi", "-af"])
            shutil.rmtree(root, ignore_errors=True)


def bench_pull(b: Bench, oci: Path) -> None:
    """pull against skopeo, both from a registry on loopback into an OCI layout; each order once."""
    if not have("docker-registry", "skopeo"):
        return
    ref = json.loads((b.out / "container.json").read_text())["manifest"]["digest"]
    with registry(b.work / "registry") as host:
        run(["skopeo", "copy", "-q", "--dest-tls-verify=false", f"oci-archive:{oci}", f"docker://{host}/bench:t1"])
        mine = [_pull(b, f"{host}/bench@{ref}")]
        theirs = [_skopeo(b, f"{host}/bench@{ref}"), _skopeo(b, f"{host}/bench@{ref}")]
        mine.append(_pull(b, f"{host}/bench@{ref}"))
    best, other = min(mine, key=lambda r: r.wall), min(theirs, key=lambda r: r.wall)
    b.row("ours: pull", best)
    b.row("peer: skopeo copy from the registry", other)
    b.ratio("pull over skopeo", best.wall / other.wall, "<= 1")


def _pull(b: Bench, ref: str) -> Run:
    target = b.work / "pulled"
    taken = ours("pull", ref, target)
    shutil.rmtree(target)
    return taken


def _skopeo(b: Bench, ref: str) -> Run:
    target = b.work / "copied"
    taken = run(["skopeo", "copy", "-q", "--src-tls-verify=false", f"docker://{ref}", f"oci:{target}:t"])
    shutil.rmtree(target)
    return taken


def bench_install(b: Bench, portable: Path) -> None:
    """ensure_runtime.sh (which also hashes the archive and records every file) against tar xzf."""
    target = b.work / "installed"
    warm(portable)
    sha = json.loads((b.out / "portable.json").read_text())["sha256"]
    taken = b.row("ours: ensure_runtime.sh", run(["bash", _HELPER, portable, sha, target]))
    shutil.rmtree(target)
    target.mkdir()
    peer = b.row("peer: tar xzf of the portable archive", run(["tar", "-C", target, "-xzf", portable]))
    shutil.rmtree(target)
    b.ratio("install, times faster than tar xzf", peer.wall / taken.wall, "> 1")
