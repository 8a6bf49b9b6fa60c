"""Stages about evidence: ``qualification``, ``repack``, ``publish``; the verbs, with a request's paths."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from oci_builder.engines.repacking import run_repack
from oci_builder.engines.stages_build import allowed
from oci_builder.engines.stages_files import digest_of
from oci_builder.engines.stages_request import Outcome, Request
from oci_builder.model.errors import SpecError
from oci_builder.model.events import Emit
from oci_builder.model.receipts import PORTABLE
from oci_builder.publish import publish
from oci_builder.publish_registry import publish_registry
from oci_builder.qualification import Rules, summary, update_release
from oci_builder.release.delivery import Judge, Publication
from oci_builder.release.folder import QUALIFICATION, ReleaseFolder
from oci_builder.release.host import utc_now
from oci_builder.release.publish import HubTarget
from oci_builder.release.signing import SigningKey, load_key
from oci_builder.transports.registry_policy import RegistryOptions


def qualification_stage(request: Request, emit: Emit) -> Outcome:
    """Judge the release folder now and record it; the one before stays under a number.

    Raises:
        SpecError: ``stage.option``, ``release.folder``; what ``update_release`` raises.
    """
    folder = _folder(request)
    found = update_release(folder.root, _rules(request), utc_now())
    data = (folder.root / QUALIFICATION).read_bytes()
    return Outcome({QUALIFICATION: digest_of(data)}, details={"state": found["state"]}, notes=tuple(summary(found)))


def repack_stage(request: Request, emit: Emit) -> Outcome:
    """Repair packaging files; the checks are those of ``container-check``, on the new build, before it takes its place.

    Raises:
        SpecError: ``stage.option``; what ``run_repack`` raises.
    """
    for needed in (_folder, _key):
        needed(request)
    done = run_repack(request, emit)
    notes = (f"the old build is in {done.previous}", f"receipt {done.receipt}")
    return Outcome({PORTABLE: done.sha256}, details={"receipt": str(done.receipt)}, notes=notes)


def publish_stage(request: Request, emit: Emit) -> Outcome:
    """Send the release to the Hub (``repo``, token from ``HF_TOKEN``) or to an OCI registry (``registry``).

    Raises:
        SpecError: ``stage.option``, ``spec.token``; what ``publish`` and ``publish_registry`` raise.
    """
    if bool(request.options.get("repo")) == bool(request.options.get("registry")):
        raise SpecError("stage.option", "publish takes one of the options repo and registry", where="options")
    what = _publication(request)
    if request.options.get("registry"):
        made = publish_registry(what, request.text("registry"), RegistryOptions(), emit).to_json()
    else:
        made = _to_hub(what, request, emit)
    notes = tuple(f"{name} {value}" for name, value in made.items() if isinstance(value, str))
    return Outcome(what.folder.subjects(), details=made, notes=notes)


def _to_hub(what: Publication, request: Request, emit: Emit) -> dict[str, Any]:
    if not os.environ.get("HF_TOKEN"):
        raise SpecError("spec.token", "set HF_TOKEN to a token that may write to the dataset")
    target = HubTarget(request.text("repo"), endpoint=str(request.options.get("endpoint") or ""))
    done = publish(what, target, emit)
    return {"commit": done.commit, "card": done.card_commit, "receipt": str(done.receipt)}


def _publication(request: Request) -> Publication:
    rules, folder = _rules(request), _folder(request)
    judge = Judge(rules.gates, rules.policy, rules.spec)
    return Publication(
        folder, Path(request.out), request.path("helper"), _key(request), allow=allowed(request), judge=judge
    )


def _folder(request: Request) -> ReleaseFolder:
    if not request.release:
        raise SpecError("stage.option", "the stage needs a release folder", where="release")
    return ReleaseFolder(Path(request.release))


def _rules(request: Request) -> Rules:
    return Rules.load(Path(request.spec), request.path("trust"))


def _key(request: Request) -> SigningKey:
    if not request.key:
        raise SpecError("stage.option", "the stage signs its own receipt and needs a key", where="key")
    return load_key(Path(request.key))
