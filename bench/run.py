"""``make bench``: ours and the peers on the same trees, side by side in one run, with the limits that physics sets.

    python -m bench.run --tier base=DIR --tier vllm=DIR [--work DIR] [--json FILE] [--skip-peers]

Machines are noisy: read the ratios, not the seconds. Nothing here is a test and nothing is asserted.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from bench.consumers import bench_install, bench_pull, bench_unpack
from bench.measure import Run, ours, run, shell, size, warm
from bench.peers import contestants
from bench.session import DOCKER, OCI, PORTABLE, Bench


def bench_build(b: Bench, peers: bool, words: list[str]) -> None:
    """The three archives against the peers' two."""
    warm(*b.tiers.values())
    floor = b.row("floor: read, hash, compress distinct bytes", b.limits())
    taken = b.row(
        "ours: three archives from staged tiers", b.build(), oci=size(b.out / OCI), docker=size(b.out / DOCKER)
    )
    container = json.loads((b.out / "container.json").read_text())
    plain = sum(size(path) for path in b.tiers.values())
    b.rows["sizes"] = {"tiers as plain layers": plain, "image uncompressed": container["size"]["uncompressed"]}
    b.ratio("CPU over hashing and compressing once", taken.cpu / floor.cpu, "<= 1.3")
    oci, docker = size(b.out / OCI), size(b.out / DOCKER)
    if peers:
        # The largest peer needs five times the payload of disk; ours is made again for what comes after.
        shutil.rmtree(b.out)
        shutil.rmtree(b.cache)
        fastest = None
        for peer in contestants(b.tiers, b.work, words):
            b.row(f"peer: {peer.name}", peer.run, oci=peer.oci, docker=peer.docker)
            b.ratio(f"times faster than {peer.name}", peer.run.wall / taken.wall, ">= 5, buildah >= 8")
            if peer.docker:
                fastest = peer if fastest is None or peer.run.wall < fastest.run.wall else fastest
        if fastest:
            b.ratio(f"size of oci.tar over {fastest.name}", oci / fastest.oci, "<= 1.05")
            b.ratio(f"size of docker.tar.gz over {fastest.name}", docker / fastest.docker, "<= 1.05")
        b.build()


def bench_rebuild(b: Bench) -> None:
    """Nothing changed, then one tier changed."""
    b.row("ours: nothing has changed", ours("build", b.spec, "--out", b.out, "--cache", b.cache))
    last = list(b.tiers)[-1]
    extra = b.tiers[last] / "bench-changed-file"
    extra.write_bytes(os.urandom(1 << 20))
    try:
        b.row(f"ours: one file added to {last}", ours("build", b.spec, "--out", b.out, "--cache", b.cache))
    finally:
        extra.unlink()
    ours("build", b.spec, "--out", b.out, "--cache", b.cache)


def bench_docker_archive(b: Bench) -> None:
    """runtime.docker.tar.gz from finished layers against a copy of the same bytes."""
    target = b.work / "copy"
    code = (
        "import sys; from pathlib import Path; from bench.docker import rewrite; rewrite(Path(sys.argv[1]), "
        "Path(sys.argv[2]), Path(sys.argv[3]))"
    )
    # Our archives pass the page cache by: each finds what it reads in it, or cp would be measured against the disk.
    warm(b.out / DOCKER, b.cache / "store")
    copy = b.row("limit: cp of docker.tar.gz", run(["cp", b.out / DOCKER, target]))
    target.unlink()
    synced = b.row("limit: cp and sync of docker.tar.gz", shell(f"cp '{b.out / DOCKER}' '{target}'; sync '{target}'"))
    target.unlink()
    taken = b.row("ours: docker.tar.gz from finished layers", run([sys.executable, "-c", code, b.out, b.cache, target]))
    target.unlink()
    b.ratio("docker.tar.gz over cp", taken.wall / copy.wall, "<= 1.2")
    b.ratio("docker.tar.gz (which is synced) over cp and sync", taken.wall / synced.wall, "<= 1.2")


def bench_verify(b: Bench) -> None:
    """Both archives against hashing them, and the uncompressed layers, once."""
    oci, docker = b.out / OCI, b.out / DOCKER
    warm(oci, docker)
    floor = b.row("limit: sha256sum of both", run(["sha256sum", oci, docker]))
    floor += b.row("limit: sha256sum of the tars (scaled)", _tars(b))
    taken = b.row("ours: verify both", ours("verify", oci, docker, "--profile", "strict"))
    b.ratio("verify over hashing once", taken.wall / floor.wall, "<= 1.5")


def _tars(b: Bench) -> Run:
    """What sha256sum would take for the uncompressed layers: its time for the OCI archive, scaled to their size."""
    total = json.loads((b.out / "container.json").read_text())["size"]["uncompressed"]
    oci = b.out / OCI
    one = run(["sha256sum", oci])
    scale = total / size(oci)
    return Run(one.wall * scale, one.cpu * scale, one.peak)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tier", action="append", required=True, metavar="NAME=DIR")
    parser.add_argument("--work", type=Path, default=None)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--skip-peers", action="store_true")
    parser.add_argument("--peer", action="append", default=[], metavar="WORD", help="only peers with it in their name")
    options = parser.parse_args()
    tiers = {name: Path(path).resolve() for name, _, path in (t.partition("=") for t in options.tier)}
    with tempfile.TemporaryDirectory(prefix="oci-builder-bench-", dir=options.work) as folder:
        b = Bench(tiers, Path(folder))
        bench_build(b, not options.skip_peers, options.peer)
        b.save(options.json)
        bench_rebuild(b)
        bench_docker_archive(b)
        bench_verify(b)
        bench_install(b, b.out / PORTABLE)
        bench_pull(b, b.out / OCI)
        bench_unpack(b, b.out / OCI, b.out / DOCKER)
        b.save(options.json)
        peak = max(r["peak"] for name, r in b.rows.items() if name.startswith("ours"))
        b.ratio("peak memory of ours, MiB", peak, "<= 400")
        b.save(options.json)


if __name__ == "__main__":
    main()
