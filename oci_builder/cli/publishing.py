"""Commands that bring a release together and send it out: record, publish, sbom."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oci_builder.cli.common import ARCHIVE, IMAGE, PLATFORM, Settings, json_option, pass_settings, say, write_json
from oci_builder.model.errors import OciBuilderError, SpecError
from oci_builder.model.report import Finding, Report

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oci_builder.release.delivery import Publication
    from oci_builder.release.walk import Walk

RELEASE = click.argument("release", type=ARCHIVE)
SPEC = click.option(
    "--spec", "spec_path", type=ARCHIVE, default=Path("spec.json"), show_default=True,
    help="What the build was made from.",
)  # fmt: skip
JUDGED_BY = click.option(
    "--spec", "spec_path", type=ARCHIVE, default=None, show_default="RELEASE/spec.json, else spec.json",
    help="Whose gates judge the release.",
)  # fmt: skip
TRUST = click.option(
    "--trust", type=ARCHIVE, default=Path("releases/trust.json"), show_default=True, help="Trusted keys."
)
KEY = click.option("--key", type=ARCHIVE, required=True, help="Private key file (0600).")
ALLOW = click.option(
    "--allow", type=ARCHIVE, default=None, help="What the secrets scan lets through (JSON), each with its reason."
)


def spec_of(release: Path, spec_path: Path | None) -> Path:
    """The spec whose gates judge a release: the one that was asked for, the one that it was recorded with, ours."""
    kept = release / "spec.json"
    return spec_path or (kept if kept.is_file() else Path("spec.json"))


def with_secrets(report: Report, archives: Sequence[Path], allow: Path | None, how: Walk) -> Report:
    """A report of good bytes with what a search for credentials and weights adds, or why there was none.

    Whichever image is meant makes no difference: all of them are searched.

    Raises:
        SpecError: ``spec.allow``.
    """
    from oci_builder.release.scan import read_allowed, scan_archives

    options = read_allowed(allow)
    try:
        found = tuple(scan_archives(archives, options, how).findings)
    except OciBuilderError as error:
        found = (Finding.of_error(error, "secrets"),)
    return Report(report.subjects, report.findings + found)


@click.command(short_help="Make a release folder from a finished build.")
@click.argument("dist", type=ARCHIVE)
@RELEASE
@SPEC
@TRUST
@KEY
@ALLOW
@json_option
@pass_settings
def record(
    settings: Settings, dist: Path, release: Path, spec_path: Path, trust: Path, key: Path, allow: Path | None,
    json_file: str | None,
) -> None:  # fmt: skip
    """Make the folder RELEASE from a finished build in DIST: records, inventories, SBOMs, provenance, verdict."""
    from oci_builder.qualification import Rules, update_release
    from oci_builder.record import RecordRequest
    from oci_builder.record import record as run
    from oci_builder.release.folder import ReleaseFolder
    from oci_builder.release.scan import read_allowed
    from oci_builder.release.signing import load_key

    rules = Rules.load(spec_path, trust)
    folder, allowed = ReleaseFolder(release), read_allowed(allow)
    request = RecordRequest(dist, folder, spec_path, load_key(key), allowed, policy=rules.policy)
    with settings.emitting() as emit:
        done = run(request, emit)
    verdict = update_release(release, rules, datetime.now(UTC))
    made: dict[str, Any] = {"folder": str(done.folder), "files": dict(done.files), "again": done.again}
    write_json({**made, "state": verdict["state"]}, json_file)
    if json_file != "-":
        say(f"{done.folder}: {'as it was' if done.again else f'{len(done.files)} files'}, {verdict['state']}")


@click.command(short_help="Publish a release to a Hugging Face dataset or a registry.")
@RELEASE
@click.option("--archives", type=ARCHIVE, default=Path("dist"), show_default=True, help="Folder of the archives.")
@click.option("--helper", type=ARCHIVE, required=True, help="ensure_runtime.sh as it is shipped.")
@click.option("--repo", default="", metavar="OWNER/NAME",
              help="Hugging Face dataset; the token is taken from HF_TOKEN.")  # fmt: skip
@click.option("--to-registry", "reference", default="", metavar="NAME[:TAG]",
              help="Place in an OCI registry; without :TAG by digest alone.")  # fmt: skip
@click.option("--endpoint", default="", show_default="the client's", help="Another Hub.")
@click.option("--plain-http", is_flag=True, help="Speak HTTP to the registry; loopback addresses need no flag.")
@JUDGED_BY
@TRUST
@KEY
@ALLOW
@json_option
@pass_settings
def publish(
    settings: Settings, release: Path, archives: Path, helper: Path, repo: str, reference: str, endpoint: str,
    plain_http: bool, spec_path: Path | None, trust: Path, key: Path, allow: Path | None, json_file: str | None,
) -> None:  # fmt: skip
    """Publish RELEASE to a Hugging Face dataset, or to an OCI registry with its evidence as referrers.

    Nothing is sent before every file was scanned for credentials and weights. What arrived is read back by hash, and
    the delivery receipt goes into RELEASE, whose verdict is recorded anew.
    """
    if bool(repo) == bool(reference):
        raise click.UsageError("one of --repo and --to-registry")
    what = _publication(release, archives, helper, (spec_of(release, spec_path), trust, key, allow))
    with settings.emitting() as emit:
        done = _to_registry(what, reference, plain_http, emit) if reference else _to_hub(what, repo, endpoint, emit)
    write_json(done, json_file)
    if json_file != "-":
        for name, value in done.items():
            say(f"{name} {', '.join(value) if isinstance(value, list) else value}")


def _publication(
    release: Path, archives: Path, helper: Path, rest: tuple[Path, Path, Path, Path | None]
) -> Publication:
    from oci_builder.qualification import Rules
    from oci_builder.release.delivery import Judge, Publication
    from oci_builder.release.folder import ReleaseFolder
    from oci_builder.release.scan import read_allowed
    from oci_builder.release.signing import load_key

    spec_path, trust, key, allow = rest
    if not release.is_dir():
        raise SpecError("release.folder", f"{release} is no release folder; oci-builder record makes one")
    rules = Rules.load(spec_path, trust)
    judge = Judge(rules.gates, rules.policy, rules.spec)
    signer, allowed = load_key(key), read_allowed(allow)
    return Publication(ReleaseFolder(release), archives, helper, signer, allow=allowed, judge=judge)


def _to_hub(what: Publication, repo: str, endpoint: str, emit: Any) -> dict[str, Any]:
    from oci_builder.publish import publish as run
    from oci_builder.release.publish import HubTarget

    if not os.environ.get("HF_TOKEN"):
        raise SpecError("spec.token", "set HF_TOKEN to a token that may write to the dataset")
    done = run(what, HubTarget(repo, endpoint=endpoint), emit)
    return {"commit": done.commit, "card": done.card_commit, "receipt": str(done.receipt)}


def _to_registry(what: Publication, reference: str, plain_http: bool, emit: Any) -> dict[str, Any]:
    from oci_builder.publish_registry import publish_registry
    from oci_builder.transports.registry_policy import RegistryOptions

    return publish_registry(what, reference, RegistryOptions(plain_http=plain_http), emit).to_json()


@click.command(short_help="CycloneDX bills of materials of an image and its tiers.")
@click.argument("subject", type=ARCHIVE)
@click.option("--tier", default="", help="Print this tier's document, not the image's.")
@click.option("--out", type=ARCHIVE, default=None, help="Write image.cdx.json and TIER.cdx.json into it.")
@click.option("--name", default="", show_default="as its labels say",
              help="What the image is called.")  # fmt: skip
@click.option("--version", "version", default="", show_default="as its labels say", help="Its version.")
@click.option("--epoch", type=click.IntRange(0, 2**33 - 1), default=None, show_default="the image's",
              help="Their time, in seconds since 1970.")  # fmt: skip
@PLATFORM
@IMAGE
@pass_settings
def sbom(
    settings: Settings, subject: Path, tier: str, out: Path | None, name: str, version: str, epoch: int | None,
    platform: str, image: str,
) -> None:  # fmt: skip
    """CycloneDX bills of materials of SUBJECT (archive, layout, folder): the image's, or each tier's.

    Packages are read from the files that are there; what a tier's own inventory adds is used where it agrees.
    """
    from oci_builder.sbom import BillOptions, choose, make_bills, write_bills

    with settings.emitting() as emit:
        made = make_bills(subject, BillOptions(name, version, epoch, platform, image=image), emit)
    if out is None:
        sys.stdout.buffer.write(choose(made, tier or "image"))
        return
    for path in write_bills({tier: choose(made, tier)} if tier else made, out):
        say(str(path))


PUBLISHING_COMMANDS: tuple[click.Command, ...] = (record, publish, sbom)
