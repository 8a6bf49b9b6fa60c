"""Commands about images: build, verify, inspect, diff, pull, push, unpack, exec, readiness, schema."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from oci_builder.cli.common import (
    ARCHIVE,
    IMAGE,
    MOST_JOBS,
    PLATFORM,
    Settings,
    cache_option,
    default_jobs,
    json_option,
    pass_settings,
    report_place,
    say,
    spec_and_limits,
    write_json,
)
from oci_builder.cli.gpus import GPU, GpuCommand
from oci_builder.cli.publishing import ALLOW, with_secrets
from oci_builder.cli.running import (
    Which,
    exec_command,
    execute_checks,
    readiness_command,
    show_report,
    tree_report,
    with_readiness,
)
from oci_builder.model.errors import OciBuilderError
from oci_builder.model.report import Finding, Report
from oci_builder.model.sizes import human

SPEC = click.option("--spec", "spec_path", type=ARCHIVE, default=None, help="Take limits from SPEC.")
HELD_TO = click.option(
    "--spec", "spec_path", type=ARCHIVE, default=None, help="Hold the image to SPEC too, and take limits from it."
)
JOBS = click.option(
    "--jobs", type=click.IntRange(1, MOST_JOBS), default=default_jobs, show_default="CPUs", help="Threads."
)


@click.command()
@click.argument("spec", type=ARCHIVE, default=Path("spec.json"))
@click.option("--out", type=ARCHIVE, default=Path("dist"), show_default=True, help="Folder for the three archives.")
@cache_option
@JOBS
@click.option("--check", is_flag=True, help="Believe no file times: read every input again.")
@json_option
@pass_settings
def build(
    settings: Settings, spec: Path, out: Path, cache: Path, jobs: int, check: bool, json_file: str | None
) -> None:
    """Build SPEC: everything that has changed, nothing else."""
    from oci_builder.build import BuildOptions
    from oci_builder.build import build as run

    with settings.emitting() as emit:
        result = run(spec, out, BuildOptions(cache, jobs, check), emit)
    write_json({"unchanged": result.unchanged, "container": result.container, "portable": result.portable}, json_file)
    if json_file == "-":
        return
    if result.unchanged:
        say("nothing has changed")
    for record in (*result.container["archives"].values(), result.portable):
        say(f"{out / record['file']}  {human(record['size'])}  sha256:{record['sha256']}")
    say(f"{result.container['reference']}  config {result.container['config']['digest']}")


@click.command(cls=GpuCommand, short_help="Verify one or two image archives, ours or anybody's.")
@click.argument("archives", type=ARCHIVE, nargs=-1, required=True)
@HELD_TO
@click.option("--profile", type=click.Choice(["foreign", "strict"]), default="foreign", show_default=True,
              help="strict holds archives to the rules of our own output.")  # fmt: skip
@PLATFORM
@IMAGE
@JOBS
@click.option("--exec", "execute", is_flag=True, help="Then unpack the image and run its checks in a sandbox.")
@click.option("--checks", type=ARCHIVE, default=None, show_default="the image's own",
              help="Checks to run (JSON).")  # fmt: skip
@GPU
@click.option("--target", default=None, metavar="sm_NN", help="Judge too whether it runs on this GPU (readiness).")
@click.option("--receipt", type=ARCHIVE, default=None, metavar="FILE",
              help="Write the checks' receipt (unsigned JSON) to FILE.")  # fmt: skip
@click.option("--secrets", is_flag=True, help="Search all that the archives hold for credentials and model weights.")
@ALLOW
@cache_option
@click.option("--json", "json_file", default=None, metavar="FILE", callback=report_place,
              help="Write the report to FILE, as JSON; - is standard output.")  # fmt: skip
@pass_settings
def verify(
    settings: Settings, archives: tuple[Path, ...], spec_path: Path | None, profile: str, platform: str, image: str,
    jobs: int, execute: bool, checks: Path | None, gpu: str | None, target: str | None, receipt: Path | None,
    secrets: bool, allow: Path | None, cache: Path, json_file: str | None,
) -> None:  # fmt: skip
    """Verify one or two image archives, ours or anybody's; two must be the same image.

    With --exec an unpacked folder will do: its checks run, and nothing else can be said of it.
    """
    from oci_builder.readiness import ReadinessOptions
    from oci_builder.release.walk import Walk
    from oci_builder.verify import VerifyOptions, verify_archives

    if len(archives) > 2:
        raise click.UsageError("one or two archives")
    if not execute and (idle := [n for n, v in (("--checks", checks), ("--gpu", gpu), ("--receipt", receipt)) if v]):
        raise click.UsageError(f"{idle[0]} goes with --exec: without it no check runs")
    spec, limits = spec_and_limits(spec_path)
    with settings.emitting() as emit:
        options = VerifyOptions(
            profile=profile, platform=platform, image=image, limits=limits, threads=jobs, emit=emit
        )
        asked = {"--receipt": receipt, "--secrets": secrets, "--spec": spec, "--profile": profile == "strict"}
        report = tree_report(archives, asked) if execute else None
        report = report or verify_archives(archives, options, spec)
        if target is not None and report.ok:
            wanted = ReadinessOptions(target=target, platform=platform, image=image)
            report = with_readiness(report, archives[0], wanted, emit)
        if secrets and all(error.code.startswith("platform.") for error in report.errors):
            report = with_secrets(report, archives, allow, Walk(platform, limits, jobs, emit, image=image))
    quiet = json_file == "-"
    if not quiet:
        show_report(report)
    if execute:
        prefix, which = spec.prefix if spec is not None else "", Which(platform, image)
        with _failure_in(report, json_file):
            report = execute_checks(settings, report, archives[0], checks, prefix, gpu, receipt, cache, which, quiet)
    write_json(report.to_json(), json_file)
    sys.exit(report.exit_status)


@contextmanager
def _failure_in(report: Report, json_file: str | None) -> Iterator[None]:
    """An error is a finding of the report, written before it goes on its way."""
    try:
        yield
    except OciBuilderError as error:
        failed = replace(report, findings=(*report.findings, Finding.of_error(error)))
        write_json(failed.to_json(), json_file)
        raise


@click.command("inspect", short_help="Show layers, sizes, and what each tier costs.")
@click.argument("archive", type=ARCHIVE)
@SPEC
@PLATFORM
@IMAGE
@json_option
@pass_settings
def inspect_command(
    settings: Settings, archive: Path, spec_path: Path | None, platform: str, image: str, json_file: str | None
) -> None:
    """Show layers, sizes, what each tier costs and what is shared."""
    from oci_builder.inspection import inspect_archive

    _, limits = spec_and_limits(spec_path)
    with settings.emitting() as emit:
        found = inspect_archive(archive, platform=platform, image=image, emit=emit, limits=limits)
    write_json(found.to_json(), json_file)
    if json_file != "-":
        for line in found.lines():
            say(line)


@click.command("diff")
@click.argument("old", type=ARCHIVE)
@click.argument("new", type=ARCHIVE)
@SPEC
@PLATFORM
@click.option("--image", "images", multiple=True, metavar="NAME|DIGEST",
              help="Which image of archives that hold several; a second one is for NEW.")  # fmt: skip
@json_option
@pass_settings
def diff_command(
    settings: Settings, old: Path, new: Path, spec_path: Path | None, platform: str, images: tuple[str, ...],
    json_file: str | None,
) -> None:  # fmt: skip
    """Show which layers, packages and files differ. Exit status 1 when something does."""
    from oci_builder.difference import diff_archives

    if len(images) > 2 or "" in images:
        raise click.BadParameter("once or twice, and not empty", param_hint="--image")
    _, limits = spec_and_limits(spec_path)
    with settings.emitting() as emit:
        which = (images[0], images[-1]) if images else ("", "")
        found = diff_archives(old, new, platform=platform, images=which, emit=emit, limits=limits)
    write_json(found.to_json(), json_file)
    if json_file != "-":
        for line in found.lines():
            say(line)
    sys.exit(0 if found.same else 1)


@click.command(short_help="Pull an image into an OCI layout, verified, resumable.")
@click.argument("reference")
@click.argument("dest", type=ARCHIVE)
@SPEC
@PLATFORM
@click.option("--plain-http", is_flag=True, help="Speak HTTP; loopback addresses need no flag.")
@cache_option
@json_option
@pass_settings
def pull(
    settings: Settings, reference: str, dest: Path, spec_path: Path | None, platform: str, plain_http: bool,
    cache: Path, json_file: str | None,
) -> None:  # fmt: skip
    """Pull REFERENCE@sha256:… into the OCI layout DEST, verified, resumable.

    DEST holds one image a platform: the same name is brought up to date, another image beside it is refused.
    """
    from oci_builder.pull import PullOptions
    from oci_builder.pull import pull as run

    _, limits = spec_and_limits(spec_path)
    options = PullOptions(platform=platform, plain_http=plain_http, limits=limits)
    with settings.emitting() as emit:
        found = run(reference, dest, options, emit)
    write_json(found.to_json(), json_file)
    if json_file != "-":
        say(f"{dest}: {found.manifest}")


@click.command(short_help="Push an OCI archive or layout, verified afterwards.")
@click.argument("archive", type=ARCHIVE)
@click.argument("reference")
@SPEC
@PLATFORM
@IMAGE
@click.option("--plain-http", is_flag=True, help="Speak HTTP; loopback addresses need no flag.")
@json_option
@pass_settings
def push(
    settings: Settings, archive: Path, reference: str, spec_path: Path | None, platform: str, image: str,
    plain_http: bool, json_file: str | None,
) -> None:  # fmt: skip
    """Push an OCI archive or layout to REFERENCE (name:tag), verified afterwards."""
    from oci_builder.push import PushOptions
    from oci_builder.push import push as run

    _, limits = spec_and_limits(spec_path)
    options = PushOptions(platform=platform, plain_http=plain_http, limits=limits, image=image)
    with settings.emitting() as emit:
        found = run(archive, reference, options, emit)
    write_json(found.to_json(), json_file)
    if json_file != "-":
        say(f"{reference}@{found.manifest}")


@click.command(short_help="Unpack an image's file system into an empty folder.")
@click.argument("archive", type=ARCHIVE)
@click.argument("folder", type=ARCHIVE)
@SPEC
@PLATFORM
@IMAGE
@JOBS
@click.option("--strict", is_flag=True, help="Refuse what is merely unusual.")
@json_option
@pass_settings
def unpack(
    settings: Settings, archive: Path, folder: Path, spec_path: Path | None, platform: str, image: str, jobs: int,
    strict: bool, json_file: str | None,
) -> None:  # fmt: skip
    """Unpack an image's file system into FOLDER, which must be absent or empty."""
    from oci_builder.unpack import UnpackOptions, unpack_image

    _, limits = spec_and_limits(spec_path)
    with settings.emitting() as emit:
        options = UnpackOptions(platform=platform, limits=limits, threads=jobs, strict=strict, image=image)
        report = unpack_image(archive, folder, options, emit)
    value: dict[str, Any] = report.to_json()
    write_json(value, json_file)
    if json_file != "-":
        say(f"{folder}: {json.dumps(value.get('summary', {}), sort_keys=True)}")


@click.command("schema")
def schema_command() -> None:
    """Print the JSON Schema of a spec."""
    from oci_builder.model.spec import json_schema

    click.echo(json.dumps(json_schema(), indent=2, sort_keys=True))


IMAGE_COMMANDS: tuple[click.Command, ...] = (
    build, verify, inspect_command, diff_command, pull, push, unpack, schema_command,
    exec_command, readiness_command,
)  # fmt: skip
