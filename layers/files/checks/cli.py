"""The command line of the checks."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from . import generation, imports, jit, nccl, operators, ray_dispatch, relocation, training
from .common import Result, finish, guarded
from .conditions import caches, network


def conditions_network() -> Result:
    """The gate's own check of the network."""
    result = Result()
    network(result)
    return result


def conditions_caches() -> Result:
    """The gate's own check of the caches."""
    result = Result()
    caches(result)
    return result


def parser() -> argparse.ArgumentParser:
    """Every check and its options."""
    top = argparse.ArgumentParser(prog="checks", description="Checks of a runtime on real GPUs.")
    sub = top.add_subparsers(dest="name", required=True)
    one = sub.add_parser("imports", help="a tier imports and its versions are the inventory's")
    one.add_argument("--tier", required=True)
    one.add_argument("--inventory", required=True)
    one.add_argument("--module", action="append", default=[], help="instead of the tier's own list")
    one.add_argument("--gpu", action="store_true", help="there must be a GPU")
    one = sub.add_parser("import", help="one module that needs the driver; deferred without one")
    one.add_argument("module", choices=sorted(imports.DRIVER_LINKED))
    one.add_argument("--gpu", action="store_true", help="there must be a GPU: nothing is deferred")
    one.add_argument("--inventory", default="", help="a module that it leaves out is skipped")
    one = sub.add_parser("operators", help="compiled operators against plain arithmetic on the CPU")
    one.add_argument("--tier", required=True, choices=sorted(operators.OPERATORS))
    one.add_argument("--inventory", required=True)
    one.add_argument("--only", action="append", default=[], metavar="MODULE")
    one = sub.add_parser("relocation", help="the runtime works from two prefixes")
    one.add_argument("--prefix", action="append", required=True)
    one.add_argument("--tier", default="base")
    sub.add_parser("jit", help="nvcc, Triton, and an extension of torch")
    one = sub.add_parser("training", help="backward and optimizer")
    one.add_argument("--require-flash", action="store_true")
    one.add_argument("--inventory", default="", help="what is absent must be left out by it")
    one = sub.add_parser("generation", help="vLLM, and its log-probabilities against Hugging Face's")
    one.add_argument("--hf-python", default=sys.executable, help="interpreter of the tier that judges")
    one.add_argument("--attention", default="", metavar="NAME", help="vLLM must use this attention, such as FLASHINFER")
    one = sub.add_parser("ray_dispatch", help="one Ray worker a tier, through the overlay")
    one.add_argument("--envs", required=True, help="folder of the tiers")
    one = sub.add_parser("nccl", help="collectives and a sharded step on N ranks")
    one.add_argument("--ranks", type=int, default=0, help="default: all visible GPUs")
    one.add_argument("--at-least", type=int, default=2, help="how many the gate wants")
    one.add_argument("--nccl-version", default="")
    sub.add_parser("network-blocked", help="no way out")
    sub.add_parser("caches-empty", help="no cache holds a file")
    _more(sub)
    return top


def _more(sub: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    from . import listing, runner

    listing.options(sub.add_parser("list", help="the checks for the chroot runner, as data"))
    runner.options(sub.add_parser("run", help="several checks: a table and a receipt"))
    sub.add_parser("relocation-probe")
    sub.add_parser("nccl-rank").add_argument("--out", type=Path, required=True)
    one = sub.add_parser("generation-part")
    one.add_argument("part", choices=sorted(generation.PARTS))
    one.add_argument("--folder", type=Path, required=True)


def driver_linked(options: argparse.Namespace) -> Result:
    """The check of one module."""
    return imports.driver_linked(imports.DRIVER_LINKED[options.module], options.gpu, options.inventory)


def chosen(options: argparse.Namespace) -> Callable[[], Result] | None:
    """The check that the options name."""
    checks: dict[str, Callable[[], Result]] = {
        "imports": lambda: imports.check(options.tier, options.inventory, options.module, options.gpu),
        "import": lambda: driver_linked(options),
        "relocation": lambda: relocation.check(options.prefix, options.tier),
        "operators": lambda: operators.check(options.tier, options.inventory, options.only),
        "jit": jit.check,
        "training": lambda: training.check(options.require_flash, options.inventory),
        "generation": lambda: generation.check(options.hf_python, options.attention),
        "ray_dispatch": lambda: ray_dispatch.check(Path(options.envs)),
        "nccl": lambda: nccl.check(options.ranks, options.at_least, options.nccl_version),
        "network-blocked": conditions_network,
        "caches-empty": conditions_caches,
        "relocation-probe": relocation.probe,
        "generation-part": lambda: generation.part(options.part, options.folder),
    }
    return checks.get(options.name)


def unwind_when_asked() -> None:
    """A request to end unwinds, so that what was started is ended too; a second one does not interrupt that."""
    requests = [n for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]

    def end(number: int, _: object) -> None:
        for request in requests:
            signal.signal(request, signal.SIG_IGN)
        sys.exit(128 + number)

    for request in requests:
        signal.signal(request, end)


def main(argv: Sequence[str]) -> int:
    """Run one check and print its result, or one of the two commands about several."""
    options = parser().parse_args(argv)
    unwind_when_asked()
    check = chosen(options)
    if check is not None:
        return finish(guarded(check))
    if options.name == "nccl-rank":
        from .nccl_rank import rank

        return rank(options.out)
    from . import listing, runner

    return listing.main(options) if options.name == "list" else runner.main(options)
