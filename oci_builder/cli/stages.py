"""``oci-builder stage``: one stage of a release, on this machine or on Modal, with the same code."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import click
from click.core import ParameterSource

from oci_builder import __version__
from oci_builder.cli.common import (
    ARCHIVE,
    Settings,
    cache_option,
    complain,
    json_option,
    pass_settings,
    say,
    write_json,
)
from oci_builder.cli.signals import ending_statuses
from oci_builder.model.errors import PolicyError, SpecError, show
from oci_builder.model.events import Emit

if TYPE_CHECKING:
    from oci_builder.engines.stages import Request, Stage

# Spelt out here, so that --help needs neither the verbs nor their packages; a test compares it with STAGES.
NAMES = (
    "build", "package", "container", "container-check", "single", "nccl8", "nccl8-u24", "qualification", "repack",
    "publish",
)  # fmt: skip


@click.command("stage", short_help="Run one stage of a release, here or on Modal.")
@click.argument("name", type=click.Choice(NAMES), metavar="NAME")
@click.option("--on", "engine", type=click.Choice(["local", "modal"]), default="local", show_default=True,
              help="Where it runs: this machine, or Modal.")  # fmt: skip
@click.option("--spec", "spec_path", type=ARCHIVE, default=Path("spec.json"), show_default=True,
              help="What is built.")  # fmt: skip
@click.option("--out", type=ARCHIVE, default=Path("dist"), show_default=True, help="Folder of the archives.")
@cache_option
@click.option("--release", type=ARCHIVE, default=None, help="Release folder: records, receipts, the verdict.")
@click.option("--trust", type=ARCHIVE, default=Path("releases/trust.json"), show_default=True, help="Trusted keys.")
@click.option("--key", type=ARCHIVE, default=None, help="Signs the receipt; on Modal it is used here and not sent.")
@click.option("-o", "--option", "given", multiple=True, metavar="NAME=VALUE",
              help="An option of the stage's own (docs/stages.md); may be repeated.")  # fmt: skip
@click.option("--scratch", type=float, default=None, metavar="GIB", help="Disk that this spec really takes (local).")
@click.option("--timeout", type=float, default=None, metavar="SECONDS", help="Instead of the stage's own (local).")
@click.option("--any-gpu", is_flag=True, help="Another GPU than the stage's, for supporting evidence (local).")
@click.option("--budget", type=ARCHIVE, default=None, show_default="budget.toml, if any",
              help="Rates and limits (TOML).")  # fmt: skip
@click.option("-y", "--yes", is_flag=True, help="Go on without asking whether it may cost that.")
@json_option
@pass_settings
def stage_command(settings: Settings, /, name: str, engine: str, json_file: str | None, yes: bool, budget: Path | None,
                  scratch: float | None, timeout: float | None, any_gpu: bool, **asked: Any) -> None:  # fmt: skip
    """Run stage NAME: build, package, container, container-check, single, nccl8, nccl8-u24, qualification, repack or
    publish. nccl8 runs on Ubuntu 22.04 and then on 24.04; nccl8-u24 only the second."""
    from oci_builder.engines.local import LocalRunner
    from oci_builder.engines.stages import sequence
    from oci_builder.engines.stages_first import before

    _check_key(asked["key"], asked["release"])
    if _typed("trust") and not asked["trust"].is_file():
        raise SpecError("stage.option", f"--trust: {show(str(asked['trust']))} is no file", where="--trust")
    stages = sequence(name)
    requests = {stage.name: _request(stage, **asked) for stage in stages}
    # What comes second has no receipt to show before the first has run.
    before(stages[0], requests[name])
    runner = LocalRunner(scratch, timeout, any_gpu)
    results: list[dict[str, Any]] = []
    with ending_statuses():
        if engine == "modal":
            # Before there are bars, which would draw over the question.
            _only_local(scratch, timeout, any_gpu)
            _agree(stages, budget, yes)
        else:
            for stage in stages:
                runner.check(stage.name, requests[stage.name])
        with settings.emitting() as emit:
            for stage in stages:
                result = _run(runner, engine, stage.name, requests[stage.name], emit)
                results.append(_signed(result, asked["key"], requests[stage.name]))
                if result["outcome"] != "pass":
                    break
    settings.answer = results[0] if len(results) == 1 else results
    write_json(settings.answer, json_file)
    if json_file is None:
        for result in results:
            _show(result)
    sys.exit(results[-1]["exit"])


def _run(runner: Any, engine: str, name: str, request: Request, emit: Emit) -> dict[str, Any]:
    if engine == "local":
        found: dict[str, Any] = runner.run(name, request, emit)
        return found
    from oci_builder.engines.modal_client import load_engine

    return dict(load_engine().run_on_modal(name, request, emit))


def _request(stage: Stage, spec_path: Path, out: Path, cache: Path, release: Path | None, trust: Path,
             key: Path | None, given: tuple[str, ...]) -> Request:  # fmt: skip
    from oci_builder.engines.stages import KEY_SECRET, Request
    from oci_builder.engines.stages_options import parse_options

    options = parse_options(stage, given)
    # To record takes no policy, though the key is judged by one where there is one.
    if "trust" in stage.options and (stage.name != "container" or _typed("trust") or trust.is_file()):
        options.setdefault("trust", str(trust.absolute()))
    # A key goes along only where a stage signs by itself; every other receipt is signed here.
    own = str(key.absolute()) if key is not None and KEY_SECRET in stage.needs.secrets else ""
    return Request(
        str(spec_path.absolute()), str(out.absolute()), str(cache.absolute()),
        "" if release is None else str(release.absolute()), key=own, options=options, version=__version__,
        attempt=uuid4().hex,
    )  # fmt: skip


def _check_key(key: Path | None, release: Path | None) -> None:
    """A key that cannot be used is found out before the stage has run, not after.

    Raises:
        SpecError: ``stage.option``; what ``load_key`` raises.
    """
    from oci_builder.release.signing import load_key

    if key is not None:
        if not os.path.lexists(key):
            raise SpecError("stage.option", f"--key {show(str(key))} is not there", where="--key")
        load_key(key)
        if release is None:
            raise SpecError("stage.option", "--key signs into a release folder: name it with --release")


def _only_local(scratch: float | None, timeout: float | None, any_gpu: bool) -> None:
    """What would be ignored is refused; what would stop the stage after it was agreed to is found out before.

    Raises:
        SpecError: ``stage.option``, ``modal.config``.
    """
    from oci_builder.engines.modal_client import load_engine

    asked = {"--scratch": scratch is not None, "--timeout": timeout is not None, "--any-gpu": any_gpu}
    asked |= {f"--{name}": _typed(name) for name in ("out", "cache")}
    if names := [name for name, given in asked.items() if given]:
        raise SpecError(
            "stage.option", f"{', '.join(names)}: of this machine only; on Modal archives and cache are on the volume, "
            "and time, disk and GPUs are the stage's own", where=names[0],
        )  # fmt: skip
    load_engine()


def _typed(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _agree(stages: tuple[Stage, ...], path: Path | None, yes: bool) -> None:
    """Say what it may cost, hold it against the budget, and ask.

    Raises:
        PolicyError: ``budget.*``; ``budget.agreed``: nobody said yes.
    """
    from oci_builder.engines.budget import check_budget, cost, lines, load_budget

    default = Path("budget.toml")
    budget = load_budget(path or (default if os.path.lexists(default) else None))
    costs = [cost(stage, budget) for stage in stages]
    for line in lines(costs, budget):
        click.echo(line, err=True)
    check_budget(costs, budget)
    if yes:
        return
    try:
        agreed = sys.stdin.isatty() and click.confirm("Start it?", err=True)
    except click.Abort:  # the end of input and Ctrl-C are answers, too
        click.echo(err=True)
        agreed = False
    if not agreed:
        raise PolicyError("budget.agreed", "nothing was started: say --yes to agree to what it may cost")


def _signed(result: dict[str, Any], key: Path | None, request: Request) -> dict[str, Any]:
    from oci_builder.engines.run import sign_result

    if key is None or not request.release:
        return result
    receipts = Path(request.release) / "receipts"
    receipts.mkdir(parents=True, exist_ok=True)
    written = sign_result(result, key, receipts)
    return {**result, "receipt_path": str(written)} if written else result


def _show(result: Mapping[str, Any]) -> None:
    for check in result["checks"]:
        say(f"{check['outcome']:<8} {check['name']}" + (f": {check['reason']}" if check["reason"] else ""))
    for name, sha256 in sorted(result["outputs"].items()):
        say(f"{sha256}  {name}")
    for note in result["notes"]:
        say(note)
    if result["receipt_path"]:
        say(f"receipt {result['receipt_path']}")
    elif result["receipt"] is not None:
        say("receipt not signed: name --key and --release to keep it")
    if result["error"]:
        complain(f"error[{result['error']['code']}]: {result['error']['message']}")
    if result["kept"]:
        complain(f"kept for diagnosis: {result['kept']}")
    say(f"{result['stage']}: {result['outcome']} ({result['engine']})")


STAGE_COMMANDS: tuple[click.Command, ...] = (stage_command,)
