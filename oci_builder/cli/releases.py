"""Commands about evidence: key, receipt, qualification, repack, report; with those of ``publishing``."""

from __future__ import annotations

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import click
from click.core import ParameterSource

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
from oci_builder.cli.publishing import ALLOW, JUDGED_BY, KEY, PUBLISHING_COMMANDS, RELEASE, SPEC, TRUST, spec_of
from oci_builder.model.redact import redact_value, secret_values
from oci_builder.release.files import require_report_place


def _now() -> datetime:
    return datetime.now(UTC)


@click.group()
def key() -> None:
    """Signing keys."""


@key.command("new")
@click.argument("path", type=ARCHIVE)
@json_option
def key_new(path: Path, json_file: str | None) -> None:
    """Make an Ed25519 key pair: PATH (0600) and PATH.pub. Nothing is overwritten."""
    from oci_builder.receipt import make_key

    made = make_key(path)
    write_json(made, json_file)
    if json_file != "-":
        say(made["id"])
        say(made["public"])


@click.group()
def receipt() -> None:
    """Signed receipts: in-toto statements in DSSE envelopes."""


@receipt.command("sign")
@click.argument("source", type=ARCHIVE)
@click.argument("folder", type=ARCHIVE)
@click.option("--archive", "archives", type=ARCHIVE, multiple=True, required=True, help="What the receipt is about.")
@KEY
def receipt_sign(source: Path, folder: Path, archives: tuple[Path, ...], key: Path) -> None:
    """Sign the receipt in SOURCE (JSON) about the archives, into FOLDER. Created exclusively."""
    from oci_builder.receipt import archive_digests, sign_receipt

    say(str(sign_receipt(source, folder, archive_digests(archives), key)))


@receipt.command("verify")
@click.argument("path", type=ARCHIVE)
@TRUST
@click.option("--archive", "archives", type=ARCHIVE, multiple=True, help="The receipt must name every one of these.")
@json_option
def receipt_verify(path: Path, trust: Path, archives: tuple[Path, ...], json_file: str | None) -> None:
    """Three answers: verified (0), failed (3), cannot tell (1)."""
    from oci_builder.receipt import archive_digests, verify_receipt

    verdict = verify_receipt(path, trust, _now(), archive_digests(archives) if archives else None)
    value = verdict.to_json()
    write_json(value, json_file)
    if json_file != "-":
        say(f"{verdict.answer.value}: {path}")
        for reason in verdict.reasons:
            say(f"  {reason}")
    sys.exit(verdict.answer.exit_status)


@receipt.command("show")
@click.argument("path", type=ARCHIVE)
@TRUST
def receipt_show(path: Path, trust: Path) -> None:
    """What a receipt says; hearsay unless it is verified."""
    from oci_builder.receipt import show_receipt, verify_receipt

    # Whoever was handed a receipt may have no policy: what it says is hearsay then, and shown as that.
    named = click.get_current_context().get_parameter_source("trust") is ParameterSource.COMMANDLINE
    verdict = verify_receipt(path, trust if named or os.path.lexists(trust) else None, _now())
    shown = redact_value(show_receipt(verdict), secret_values(os.environ))
    click.echo(json.dumps(shown, indent=2, sort_keys=True, ensure_ascii=True))
    sys.exit(verdict.answer.exit_status)


@click.command()
@RELEASE
@JUDGED_BY
@TRUST
@click.option("--update", is_flag=True, help="Judge now and record it; the one before stays under a number.")
@json_option
def qualification(release: Path, spec_path: Path | None, trust: Path, update: bool, json_file: str | None) -> None:
    """Recompute RELEASE/qualification.json and compare."""
    from oci_builder.qualification import Rules, check_release, summary, unprotected, update_release

    rules = Rules.load(spec_of(release, spec_path), trust)
    found = update_release(release, rules, _now()) if update else check_release(release, rules)
    if warning := unprotected(release, rules, _now()):
        complain(f"warning: {warning}")
    write_json(found, json_file)
    if json_file != "-":
        for line in summary(found):
            say(line)


@click.command()
@RELEASE
@click.argument("page", type=ARCHIVE)
@JUDGED_BY
@TRUST
@json_option
def report(release: Path, page: Path, spec_path: Path | None, trust: Path, json_file: str | None) -> None:
    """Write one self-contained HTML page about RELEASE."""
    from oci_builder.qualification import Rules
    from oci_builder.report import report_data, write_report

    require_report_place(page, b"<!doctype html>")
    rules = Rules.load(spec_of(release, spec_path), trust)
    data = report_data(release, rules.gates, rules.policy, _now(), rules.spec)
    write_report(data, page)
    write_json(data, json_file)
    if json_file != "-":
        say(str(page))


@click.command(short_help="Repair packaging files of a candidate, compiling nothing.")
@click.argument("dist", type=ARCHIVE)
@RELEASE
@SPEC
@TRUST
@KEY
@click.option(
    "--checks", type=ARCHIVE, default=None, show_default="its own", help="Offline checks (JSON) of the new build."
)
@click.option("--marker", default=None, metavar="NAME", show_default="runtime.json",
              help="Marker file in the portable archive.")  # fmt: skip
@ALLOW
@cache_option
@pass_settings
def repack(
    settings: Settings, dist: Path, release: Path, spec_path: Path, trust: Path, key: Path, checks: Path | None,
    marker: str | None, allow: Path | None, cache: Path,
) -> None:  # fmt: skip
    """Repair packaging files of an unqualified candidate in DIST without compiling anything again."""
    from oci_builder.engines.repacking import run_repack
    from oci_builder.engines.stages_request import Request
    from oci_builder.execution.run import load_checks

    options = {"trust": str(trust), "marker": marker or "", "checks": str(checks or ""), "allow": str(allow or "")}
    if checks is not None:
        load_checks(checks)  # what is wrong with them is said before the build
    with settings.emitting() as emit:
        asked = Request(str(spec_path), str(dist), str(cache), str(release), key=str(key), options=options)
        done = run_repack(asked, emit)
    say(f"portable sha256:{done.sha256}; the old build is in {done.previous}; receipt {done.receipt}")


RELEASE_COMMANDS: tuple[click.Command, ...] = (key, receipt, qualification, report, repack, *PUBLISHING_COMMANDS)
