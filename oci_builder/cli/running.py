"""Commands that run an image's programs or judge its files: exec, readiness, and ``verify --exec``."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

if TYPE_CHECKING:
    from oci_builder.readiness import ReadinessOptions

from oci_builder.cli.common import (
    ARCHIVE,
    IMAGE,
    PLATFORM,
    Settings,
    cache_option,
    complain,
    json_option,
    pass_settings,
    say,
    write_json,
)
from oci_builder.cli.gpus import GPU, GpuCommand
from oci_builder.cli.signals import ending_statuses
from oci_builder.model.errors import CheckFailed, ConflictError, OciBuilderError, SpecError, show
from oci_builder.model.events import Emit
from oci_builder.model.receipts import Check
from oci_builder.model.report import Finding, Report
from oci_builder.release.files import create_exclusively, require_file_place


class Which(NamedTuple):
    """The image of an archive that is meant: its platform, and its name or digest where several have that."""

    platform: str = "linux/amd64"
    image: str = ""


ANY = Which()


def show_report(report: Report) -> None:
    """A report for people: the subjects, then every finding, then the verdict; nothing of what was not verified."""
    if not report.subjects and report.ok:
        return
    for subject in report.subjects:
        # A Docker archive needs no manifest: its image goes by its config's digest.
        named = [f"{what} {subject[what]}" for what in ("manifest", "config") if subject.get(what)][:1]
        say(f"{subject.get('path')}: " + ", ".join([str(subject.get("kind")), *named] if named else ["no one image"]))
    for finding in report.findings:
        more = f" (expected {finding.expected}, got {finding.actual})" if finding.expected else ""
        more = more or (f" ({finding.actual})" if finding.actual and str(finding.actual) not in finding.message else "")
        told = show(finding.where) in finding.message or finding.message.startswith(finding.where)
        where = "" if told else f" {finding.where}"
        say(f"{finding.severity}[{finding.code}]{where}: {finding.message}{more}")
    count = len(report.findings) - len(report.errors)
    configs = [subject.get("config") for subject in report.subjects]
    if report.ok and len(configs) == 2 and configs[0] and configs[0] == configs[1]:
        # Their manifests differ: the layers are compressed in one of them only.
        say(f"the same image: config {configs[0]}")
    say(f"ok, {count} warnings" if report.ok else f"not ok: {len(report.errors)} errors, {count} warnings")


def with_readiness(report: Report, archive: Path, options: ReadinessOptions, emit: Emit) -> Report:
    """A good report with readiness's findings: only bytes that are what they claim are worth judging."""
    from oci_builder.readiness import readiness

    return Report(report.subjects, report.findings + readiness(archive, options, emit=emit).findings())


def stage_archive(archive: Path, cache: Path, emit: Emit, which: Which = ANY, needed: int = 0) -> Any:
    """The archive's unpacked tree in the cache, to be entered as a context while it is used; a folder as it stands.

    Args:
        needed: bytes that it takes unpacked, 0 where that is not known.
    """
    from oci_builder.execution.staging import Unpacked, stage
    from oci_builder.model.digest import Digest
    from oci_builder.unpack import UnpackOptions, unpack_image

    def unpack(source: Path, folder: Path) -> Unpacked:
        done = unpack_image(source, folder, UnpackOptions(which.platform, image=which.image), emit)
        return Unpacked(Digest(done.manifest), done.config)

    return stage(archive, cache / "staged", unpack, which=which, needed=needed, emit=emit)


def tree_report(subjects: Sequence[Path], asked: Mapping[str, object]) -> Report | None:
    """What verification says of an unpacked folder: nothing. None for everything else.

    Args:
        asked: options, by name, that only an archive can be held to.
    """
    from oci_builder.execution.staging import is_tree

    if len(subjects) != 1 or not is_tree(subjects[0]):
        return None
    for option, value in asked.items():
        if value:
            raise click.UsageError(f"{option} needs an archive: a folder has no digests that could vouch for it")
    return Report()


def execute_checks(
    settings: Settings, report: Report, archive: Path, checks: Path | None, prefix: str, gpu: str | None,
    receipt: Path | None, cache: Path, which: Which, quiet: bool,
) -> Report:  # fmt: skip
    """Run the gates of ``verify --exec``: the report with every check, and with what they refused as findings.

    Of a folder (a report without subjects) only the third can be tried.
    """
    from oci_builder.execution.companions import layer_facts, portable_beside
    from oci_builder.execution.gates import GateContext, by_findings, execute, verify_exec
    from oci_builder.execution.run import ExecOptions, gpu_selection, image_checks, load_checks
    from oci_builder.release.host import this_host

    _require_place(receipt)
    selected, env = gpu_selection("" if gpu == "all" else gpu) if gpu is not None else (None, {})
    wanted = load_checks(checks) if checks is not None else None
    diff_ids, needed = layer_facts(report)

    def choose(staged: Any) -> Any:
        return wanted if wanted is not None else image_checks(staged.root, prefix or _prefix(staged.config))

    with ending_statuses(), settings.emitting() as emit:
        options, stage = ExecOptions(gpu=selected, env=env), lambda: stage_archive(archive, cache, emit, which, needed)
        if not report.subjects:
            return _shown(report, execute(stage, choose, options, this_host(), emit)[0], quiet, by_findings(report))
        portable = portable_beside(archive, diff_ids, cache / "staged", emit) if report.ok else None
        statement = verify_exec(report, stage, choose, options, GateContext(portable=portable, emit=emit))
    # Said before it is written: a disk that has filled up meanwhile takes no outcome away.
    done = _shown(report, statement.predicate.checks, quiet)
    if receipt is not None:
        text = statement.model_dump_json(by_alias=True, exclude_none=True, indent=1) + "\n"
        create_exclusively(receipt, text.encode())
    return done


def _require_place(receipt: Path | None) -> None:
    """Refuse a receipt that could not be written, before the checks take their time."""
    if receipt is None:
        return
    if os.path.lexists(receipt):
        raise ConflictError("release.exists", f"{receipt} is there already, and a receipt is never written anew")
    require_file_place(receipt)


def _shown(report: Report, ran: Sequence[Check], quiet: bool, untried: Sequence[Check] = ()) -> Report:
    if not quiet:
        for check in (*untried, *ran):
            say(f"{check.outcome:<8} {check.name}" + (f": {check.reason}" if check.reason else ""))
    # A bad archive has its own findings already, and its gates say no more than these.
    refused = [c for c in ran if report.ok and c.outcome not in ("pass", "deferred")]
    return replace(
        report, findings=report.findings + tuple(_refusal(c) for c in refused),
        checks=tuple({"name": c.name, "outcome": c.outcome, "reason": c.reason} for c in (*untried, *ran)),
    )  # fmt: skip


def _refusal(check: Check) -> Finding:
    said = check.reason or check.outcome
    return Finding(
        f"check.{check.outcome}", "error", check.name, expected="pass", actual=check.outcome,
        message=f"{check.name}: {said}", exit_status=CheckFailed.exit_status,
    )  # fmt: skip


def _prefix(config: Mapping[str, Any]) -> str:
    labels = config.get("Labels") or {}
    found = labels.get("io.github.oci-builder.prefix", "")
    if not found:
        raise SpecError("spec.checks", "it does not say where its checks are; name them with --checks (or --spec)")
    return str(found)


@click.command(
    "exec", cls=GpuCommand, short_help="Run a command in an image, or in an unpacked one.",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)  # fmt: skip
@click.argument("subject", type=ARCHIVE)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.option("--user", default="", metavar="USER[:GROUP]", show_default="the image's",
              help="Who runs it, by names or numbers.")  # fmt: skip
@click.option("-e", "--env", "env", multiple=True, metavar="NAME=VALUE", help="Set a variable; may be repeated.")
@click.option("--bind", "binds", multiple=True, metavar="SOURCE:TARGET[:rw]",
              help="Show a path of this machine, read-only without :rw; may be repeated.")  # fmt: skip
@click.option("-w", "--workdir", default="", metavar="DIR", show_default="the image's", help="Working directory.")
@click.option("--network", type=click.Choice(["none", "host"]), default="none", show_default=True,
              help="Whether it has this machine's network.")  # fmt: skip
@click.option("--isolation", type=click.Choice(["auto", "root", "rootless"]), default="auto", show_default=True,
              help="As root, or in a user namespace; auto: as root where we are.")  # fmt: skip
@click.option("--entrypoint", default=None, help="Replace the image's entrypoint; empty for none.")
@GPU
@PLATFORM
@IMAGE
@cache_option
@pass_settings
def exec_command(
    settings: Settings, subject: Path, command: tuple[str, ...], user: str, env: tuple[str, ...],
    binds: tuple[str, ...], workdir: str, network: str, isolation: str, entrypoint: str | None, gpu: str | None,
    platform: str, image: str, cache: Path,
) -> None:  # fmt: skip
    """Run COMMAND in SUBJECT (an archive, or an unpacked folder); its exit status is passed on."""
    from oci_builder.execution.run import ExecOptions, gpu_selection, run_in

    selected, site = gpu_selection("" if gpu == "all" else gpu) if gpu is not None else (None, {})
    options = ExecOptions(
        user=user, workdir=workdir, network=network, isolation=isolation, gpu=selected, env={**site, **_pairs(env)},
        binds=tuple(_bind(b) for b in binds),
        entrypoint=None if entrypoint is None else tuple(e for e in (entrypoint,) if e),
    )  # fmt: skip
    with ending_statuses(), settings.emitting() as emit:
        staged = stage_archive(subject, cache, emit, Which(platform, image))
    argv = command[1:] if command[:1] == ("--",) else command
    try:
        with staged:
            ended = run_in(staged.root, staged.config, argv, options)
    except OciBuilderError as error:
        if error.code.startswith("request."):
            raise
        # As with docker run: the runner's own failures are told apart from the program's exit statuses.
        complain(f"error[{error.code}]: {error.message}")
        sys.exit(127 if error.code.startswith("exec.") else 125)
    if ended.receipt["sandbox"].get("root") == "read-only":
        complain(f"note: no overlay here for {show(str(staged.root))}: it was read-only but for /tmp and /run")
    for note in ended.receipt["sandbox"].get("notes", ()):
        if note.startswith("["):  # with a code: what the program may have stumbled over
            complain("note" + note.replace("] ", "]: ", 1))
    if ended.message:
        ours = bool(command) and command[0].startswith("-") and command[0] != "--"
        complain(f"error[exec.start]: {ended.message}" + ("; options of exec stand before SUBJECT" if ours else ""))
    sys.exit(ended.status)


def _pairs(items: tuple[str, ...]) -> dict[str, str]:
    out = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not name or not equals:
            # A value whose name was forgotten is often a token: it is not quoted.
            shown = name if name and name in os.environ else "a word (not shown: it may be a secret)"
            raise click.BadParameter(f"{shown} is not NAME=VALUE", param_hint="--env")
        out[name] = value
    return out


def _bind(text: str) -> Any:
    from chroot_exec.protocol import Bind

    source, _, rest = text.partition(":")
    target, _, mode = rest.partition(":")
    if not source or not target or mode not in ("", "ro", "rw"):
        raise click.BadParameter(f"{text!r} is not SOURCE:TARGET[:rw]", param_hint="--bind")
    return Bind(str(Path(source).absolute()), target, mode != "rw")


@click.command("readiness", short_help="Judge without a GPU whether an image runs on a node.")
@click.argument("subject", type=ARCHIVE)
@click.option("--target", default="sm_100", show_default=True, metavar="sm_NN", help="The GPU's architecture.")
@click.option("--glibc", default="2.35", show_default=True, metavar="VERSION", help="glibc of the oldest host.")
@click.option("--driver", type=int, default=580, show_default=True, help="Branch of the oldest driver.")
@click.option("--allow", type=ARCHIVE, default=None, help="Rules of your own (TOML) beside the built-in ones.")
@PLATFORM
@IMAGE
@json_option
@pass_settings
def readiness_command(
    settings: Settings, subject: Path, target: str, glibc: str, driver: int, allow: Path | None, platform: str,
    image: str, json_file: str | None,
) -> None:  # fmt: skip
    """Judge without a GPU whether SUBJECT (archive or folder) runs on a GPU node."""
    from oci_builder.readiness import ReadinessOptions, readiness

    with settings.emitting() as emit:
        options = ReadinessOptions(
            target=target, glibc=glibc, driver=driver, allow=allow, platform=platform, image=image
        )
        report = readiness(subject, options, emit=emit)
    write_json(report.to_json(), json_file)
    if json_file != "-":
        for line in report.to_text().splitlines():
            say(line)
    sys.exit(report.exit_status)
