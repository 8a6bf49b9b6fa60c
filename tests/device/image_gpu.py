"""From a build to checks on real GPUs, step by step, each with its own time limit; whatever happens, results stay.

    sh tests/device/run.sh image OUT        build an image of this machine, verify, unpack, run the checks in it
    sh tests/device/run.sh threads OUT      build, verify and unpack one big tier with 1, 4, 16 and all threads
    … --small --root ROOT --env ENV         the same path without a GPU, with a small root, to try the script itself

The image's base is this machine's root file system without driver, caches and the environment; the environment is its
tier; checks and inventory are a layer of shipped files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chroot_gpu import EXCLUDED, NO_MULTICAST, ORDINARY_UID, REPOSITORY, Session, prepare, request, run_request

PREFIX, MOVED = "/opt/rt", "/srv/moved/rt"
# The whole of a part, in seconds: the machine's commands are ended after ten minutes.
BUDGET = 570
LIMIT = 500
GPU_MODULES = ("torch", "triton", "transformers", "numpy", "scipy", "safetensors", "tokenizers")
SMALL_MODULES = ("json", "hashlib")
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
PATH = f"{PREFIX}/envs/base/bin:/usr/local/cuda/bin:{SYSTEM_PATH}:/opt/gcc/bin"
KEPT_VARIABLES = ("CUDA_HOME", "CUDAHOSTCXX", "LIBRARY_PATH")
INVENTORY = """
import importlib.metadata, json
found = [d for d in importlib.metadata.distributions() if d.metadata["Name"]]
print(json.dumps([{"name": d.metadata["Name"], "version": d.version} for d in found]))
"""


class Steps:
    """Runs ``oci-builder`` step by step, until the time is over."""

    def __init__(self, session: Session, options: argparse.Namespace) -> None:
        self.session, self.options = session, options
        self.deadline = time.monotonic() + options.budget
        self.good = True

    def left(self) -> float:
        """Seconds that are left."""
        return self.deadline - time.monotonic()

    def skip(self, name: str, needed: float) -> bool:
        """Whether there is too little time for a step; then it is noted as not run."""
        if self.left() > needed:
            return False
        self.session.say(f"{name}: NOT RUN, {self.left():.0f} s are left")
        self.session.summary.setdefault("not_run", []).append(name)
        self.good = False
        return True

    def cli(self, name: str, limit: float, *arguments: str, needed: float = 15, user: Path | None = None) -> int:
        """One command of ``oci-builder``; its status, 124 when it took too long, 125 when it was not run.

        With ``user`` it is an ordinary user's, whose home that is; the programs are then the copies in the work folder.
        """
        if self.skip(name, needed):
            return 125
        place = self.session.work if user else REPOSITORY
        path = os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH")]))
        seconds = str(int(min(limit, self.left())))
        command = ["timeout", "-k", "10", seconds, sys.executable, "-c", "from oci_builder.cli import main; main()"]
        environment = {**os.environ, **NO_MULTICAST, "PYTHONPATH": path}
        who: dict[str, Any] = {}
        if user is not None:
            environment.update(HOME=str(user), TMPDIR=str(user))
            who = {"user": ORDINARY_UID, "group": ORDINARY_UID, "extra_groups": [], "cwd": str(user)}
        status = self.session.timed(name, [*command, *arguments], env=environment, **who)
        self.good = self.good and status == 0
        return status

    def requested(self, name: str, value: dict[str, Any], needed: float = 40) -> None:
        """One request to the chroot runner."""
        if not self.skip(name, needed):
            self.good = run_request(self.session, name, value) and self.good


def write_spec(session: Session, options: argparse.Namespace) -> dict[str, Any]:
    """The spec and its shipped files: the checks and the inventory of the environment."""
    layers = session.work / "layers"
    (layers / "files").mkdir(parents=True)
    shutil.copy(REPOSITORY / "layers/checks.toml", layers)
    shutil.copytree(REPOSITORY / "layers/files/checks", layers / "files/checks",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    clean = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    python = str(options.env / "bin/python3")
    found = subprocess.run([python, "-c", INVENTORY], capture_output=True, text=True, env=clean, check=True)
    (layers / "files/inventory.json").write_text(found.stdout)
    (layers / "inventory.toml").write_text(
        'name = "inventory"\n[[file]]\nfrom = "files/inventory.json"\nto = "inventory-base.json"\n'
    )
    listed = {"checks": checks(session, options, "single")}
    (layers / "files/checks.json").write_text(json.dumps(listed, indent=1))
    ours = [str(p.resolve()).lstrip("/") for p in (options.env, REPOSITORY, session.out, session.work)]
    exclude = [*(ours if options.root == "/" else ()), *EXCLUDED, *options.exclude]
    kept = [f"{name}={os.environ[name]}" for name in KEPT_VARIABLES if os.environ.get(name)]
    spec = {
        "name": "device-check", "tag": "r1", "epoch": 0, "base": {"rootfs": options.root, "exclude": exclude},
        "tiers": {"base": {"path": str(options.env)}}, "prefix": PREFIX, "files": "layers",
        "env": [f"PATH={PATH}", "PYTHONDONTWRITEBYTECODE=1", *kept],
        "labels": {"io.github.oci-builder.prefix": PREFIX},
    }  # fmt: skip
    (session.work / "spec.json").write_text(json.dumps(spec, indent=1))
    return spec


def checks(session: Session, options: argparse.Namespace, stage: str) -> list[dict[str, Any]]:
    """The shipped list for this image, with NVLink multicast off; where there are several GPUs, their exchange too."""
    modules = SMALL_MODULES if options.small else GPU_MODULES
    words = [word for module in modules for word in ("--module", module)]
    wanted = "container-check" if options.small else stage
    command = [sys.executable, str(REPOSITORY / "layers/files/checks"), "list", "--prefix", PREFIX, "--tiers", "base"]
    more = ["--stage", wanted, "--gpus", str(max(2, session.gpus)), *words]
    done = subprocess.run([*command, *more], capture_output=True, text=True, check=True)
    found = list(json.loads(done.stdout)["checks"])
    if wanted == "single" and session.gpus > 1:
        found += checks(session, options, "nccl")[2:]
    for check in found:
        check["env"] = {**NO_MULTICAST, "MAX_JOBS": "8"}
    return found


def image(steps: Steps) -> None:
    """The chain on this machine's environment as the only tier."""
    chain(steps, spec_of(steps, lambda: write_spec(steps.session, steps.options)))


def spec_of(steps: Steps, write: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The spec: a new one where something is built, else the one that was built from."""
    if steps.options.phase in ("root", "user"):
        return dict(json.loads((steps.session.work / "spec.json").read_text()))
    return write()


PHASES = ("build", "root", "user")


def chain(steps: Steps, spec: dict[str, Any]) -> None:
    """Build with all threads and verify; run all of it as root; then as an ordinary user. Each, or one phase alone."""
    wanted = [steps.options.phase] if steps.options.phase else PHASES
    if "build" in wanted and not built(steps):
        return
    if "root" in wanted:
        as_root(steps, spec)
    if "user" in wanted and not steps.options.root_only:
        rootless(steps, spec, archives(steps), [*jobs(), *gpu(steps)])


def archives(steps: Steps) -> list[str]:
    """The two image archives."""
    return [str(steps.session.work / "dist" / name) for name in ("runtime.oci.tar", "runtime.docker.tar.gz")]


def jobs() -> list[str]:
    """As many threads as there are processors."""
    return ["--jobs", str(os.cpu_count())]


def gpu(steps: Steps) -> list[str]:
    """All GPUs, where there are any."""
    return [] if steps.options.small else ["--gpu", "all"]


def built(steps: Steps) -> bool:
    """Build once, and verify; whether there are archives."""
    session, options = steps.session, steps.options
    out, cache = session.work / "dist", session.work / "cache"
    build = ["build", str(session.work / "spec.json"), "--out", str(out), "--cache", str(cache), *jobs()]
    if steps.cli("build", 180, *build):
        return False
    if options.root != "/":
        steps.cli("rebuild-unchanged", 60, *build)
    shutil.copy(out / "container.json", session.out)
    session.summary["sizes"] = {p.name: p.stat().st_size for p in sorted(out.iterdir()) if p.is_file()}
    # Space is short on such machines: what is no longer needed goes.
    shutil.rmtree(cache / "store", ignore_errors=True)
    (out / "runtime.tar.gz").unlink()
    if not options.brief:
        steps.cli("verify", 90, "verify", *archives(steps), *jobs(), "--json", str(session.out / "verify.json"))
    return True


def as_root(steps: Steps, spec: dict[str, Any]) -> None:
    """Every check in the chroot; then, in the tree that was staged, two prefixes, and one GPU alone."""
    session, cache = steps.session, steps.session.work / "cache"
    gates = ["--exec", "--cache", str(cache), "--receipt", str(session.out / "gates.json"), *jobs(), *gpu(steps)]
    steps.cli("verify-exec", steps.options.limit, "verify", *archives(steps), *gates, needed=60)
    sign(steps, archives(steps), session.out / "gates.json")
    for tree in () if steps.options.brief else cache.glob("staged/*/rootfs"):
        moved_and_alone(steps, spec, tree, "root")
    shutil.rmtree(cache / "staged", ignore_errors=True)


def sign(steps: Steps, archives: list[str], receipt: Path) -> None:
    """Sign what the checks said, with a key that is made for this run and thrown away with it."""
    session = steps.session
    if not receipt.exists():
        return
    private, folder = session.work / "key", session.out / "signed"
    folder.mkdir(exist_ok=True)
    named = [word for archive in archives for word in ("--archive", archive)]
    if not private.exists() and steps.cli("key", 20, "key", "new", str(private)):
        return
    shutil.copy(private.with_name("key.pub"), session.out / "key.pub")
    said = session.work / receipt.name
    said.write_text(json.dumps(json.loads(receipt.read_text())["predicate"]))
    step = "sign" if receipt.stem == "gates" else f"sign-{receipt.stem}"
    steps.cli(step, 60, "receipt", "sign", str(said), str(folder), *named, "--key", str(private))


def rootless(steps: Steps, spec: dict[str, Any], archives: list[str], more: list[str]) -> None:
    """The same as an ordinary user, who verifies, unpacks and runs all of it without any right of root.

    With several GPUs that is the exchange between them, too, and that one of them alone is refused.
    """
    session = steps.session
    shutil.copytree(REPOSITORY / "oci_builder", session.work / "oci_builder", dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    home = session.work / "user"
    home.mkdir()
    os.chown(home, ORDINARY_UID, ORDINARY_UID)
    for place in (Path(archives[0]).parent, *map(Path, archives)):
        place.chmod(place.stat().st_mode | 0o755)
    gates = ["--exec", "--cache", str(home / "cache"), "--receipt", str(home / "gates.json"), *more]
    steps.cli("rootless", steps.options.limit, "verify", *archives, *gates, needed=60, user=home)
    if (home / "gates.json").exists():
        kept = session.out / "gates-rootless.json"
        shutil.copy(home / "gates.json", kept)
        sign(steps, archives, kept)
        require_ordinary(steps, kept)
    for tree in home.glob("cache/staged/*/rootfs"):
        moved_and_alone(steps, spec, tree, "rootless")
    shutil.rmtree(home, ignore_errors=True)


def require_ordinary(steps: Steps, receipt: Path) -> None:
    """The receipt must say itself that no right of root was used; else it proves nothing about ordinary users."""
    sandbox = json.loads(receipt.read_text())["predicate"]["details"]["sandbox"]
    if sandbox["isolation"] != "rootless" or "user" not in sandbox["namespaces"]:
        steps.session.say(f"{receipt.name}: not rootless: {sandbox}")
        steps.good = False


def moved_and_alone(steps: Steps, spec: dict[str, Any], tree: Path, isolation: str) -> None:
    """The relocation check with the prefix at two places; and with one GPU the exchange between GPUs must fail."""
    again = {"source": str(tree / PREFIX.lstrip("/")), "target": MOVED}
    more: dict[str, Any] = {"config": {"Env": spec["env"]}, "binds": [again]}
    common = {"timeout": 150, "env": NO_MULTICAST}
    program = [f"{PREFIX}/envs/base/bin/python3", f"{PREFIX}/checks"]
    argv = [*program, "relocation", "--prefix", PREFIX, "--prefix", MOVED]
    relocation = {"name": "relocation", "argv": argv, "result": "json", **common}
    refused = {"name": "one-rank-is-refused", "argv": [*program, "nccl"], "exit": 1,
               "stdout": [r'"outcome": "fail", "reason": "1 GPUs, 2 wanted'], **common}  # fmt: skip
    end = "" if isolation == "root" else f"-{isolation}"
    if steps.options.small:
        more["gpu"] = None
    steps.requested(f"relocation{end}", request(str(tree), isolation, [relocation], **more))
    if not steps.options.small:
        more["gpu"] = {"devices": ["0"]}
        steps.requested(f"one-gpu{end}", request(str(tree), isolation, [refused], **more))


def threads(steps: Steps) -> None:
    """One tier without a base, from warm caches: how build, verify and unpack scale with threads."""
    session, options = steps.session, steps.options
    tier = session.work / "tier"
    names = [] if options.small else [n for n in ("nvidia", "torch", "triton", "transformers") if selected(options, n)]
    site = site_packages(options)
    wanted = [str(site / name) for name in names] or [f"{site}/."]
    subprocess.run(["cp", "-al", *wanted, made(tier)], check=True)
    spec = {"name": "device-threads", "tag": "r1", "epoch": 0, "base": {"scratch": True}, "prefix": PREFIX,
            "tiers": {"base": {"path": str(tier)}}}  # fmt: skip
    (session.work / "spec.json").write_text(json.dumps(spec))
    subprocess.run(["sh", "-c", f"find {tier} -type f -print0 | xargs -0 cat >/dev/null"], check=True)
    counts = sorted({n for n in (1, 4, 16, os.cpu_count() or 1) if n <= (os.cpu_count() or 1)}, reverse=True)
    for count in counts:
        one_count(steps, count)
    digests = {n: v["oci"] for n, v in session.summary["threads"].items() if "oci" in v}
    session.summary["same_bytes"] = len(set(digests.values())) == 1
    steps.good = steps.good and session.summary["same_bytes"]


def one_count(steps: Steps, count: int) -> None:
    """Build cold, verify both archives, unpack: with so many threads."""
    session = steps.session
    out, cache, tree = (session.work / f"{name}-{count}" for name in ("dist", "cache", "tree"))
    jobs = ["--jobs", str(count)]
    found = session.summary.setdefault("threads", {}).setdefault(str(count), {})
    spec = str(session.work / "spec.json")
    if not steps.cli(f"build-{count}", 150, "build", spec, "--out", str(out), "--cache", str(cache), *jobs):
        record = json.loads((out / "container.json").read_text())
        found["oci"] = record["archives"]["runtime.oci.tar"]["sha256"]
        session.summary["sizes"] = {p.name: p.stat().st_size for p in sorted(out.iterdir()) if p.is_file()}
        session.summary["tar_size"] = sum(layer["tar_size"] for layer in record["layers"])
        archives = [str(out / "runtime.oci.tar"), str(out / "runtime.docker.tar.gz")]
        steps.cli(f"verify-{count}", 120, "verify", *archives, *jobs, "--json", str(session.work / "v.json"))
        steps.cli(f"unpack-{count}", 90, "unpack", archives[0], str(tree), *jobs)
        steps.session.timed(f"sha256sum-{count}", ["sha256sum", *archives])
    for place in (out, cache, tree):
        shutil.rmtree(place, ignore_errors=True)


def site_packages(options: argparse.Namespace) -> Path:
    """The environment's packages."""
    return next(iter(sorted(options.env.glob("lib/python3*/site-packages"))))


def selected(options: argparse.Namespace, name: str) -> bool:
    """Whether the environment has a package."""
    return (site_packages(options) / name).is_dir()


def made(folder: Path) -> str:
    """A new folder."""
    folder.mkdir()
    return str(folder)


def parser(parts: tuple[str, ...]) -> argparse.ArgumentParser:
    """Options of a part."""
    parser = argparse.ArgumentParser(description="From a build to checks on real GPUs.")
    parser.add_argument("part", choices=parts)
    parser.add_argument("out", type=Path)
    parser.add_argument("--env", type=Path, default=Path("/opt/torch/.venv"))
    parser.add_argument("--root", default="/")
    parser.add_argument("--exclude", action="append", default=[], help="more that the base leaves out")
    parser.add_argument("--budget", type=float, default=BUDGET)
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for the checks of one user")
    parser.add_argument("--phase", choices=PHASES, help="only this; what it needs is in --work")
    parser.add_argument("--work", type=Path, help="a folder that stays, for the phases of one run")
    parser.add_argument("--root-only", action="store_true", help="leave out what an ordinary user does")
    parser.add_argument("--brief", action="store_true", help="build and run the checks, leave out the rest")
    parser.add_argument("--only", action="append", default=[], metavar="CHECK", help="the image lists only these")
    parser.add_argument("--small", action="store_true", help="no GPU: only what a CPU can show")
    return parser


def run_part(options: argparse.Namespace, parts: dict[str, Callable[[Steps], None]]) -> int:
    """Run one part; 0 when everything passed and nothing was left out."""
    os.environ.update(NO_MULTICAST)
    session = prepare(options.out, facts=("df -h / /var/tmp",), work=options.work)
    steps = Steps(session, options)
    try:
        parts[options.part](steps)
    except Exception as error:
        session.say(f"the script failed: {type(error).__name__}: {error}")
        steps.good = False
    finally:
        session.summary["good"] = steps.good
        session.save("summary.json", session.summary)
        if not options.work:
            shutil.rmtree(session.work, ignore_errors=True)
    session.say("all passed" if steps.good else "NOT all passed")
    return 0 if steps.good else 1


if __name__ == "__main__":
    sys.exit(run_part(parser(("image", "threads")).parse_args(), {"image": image, "threads": threads}))
