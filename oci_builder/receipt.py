"""``oci-builder receipt`` and ``oci-builder key``: sign, verify and show receipts; make keys."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

from oci_builder.model.errors import SpecError, show
from oci_builder.model.gates import TrustPolicy
from oci_builder.model.receipts import Receipt, parse_closed
from oci_builder.release.files import input_error, open_file, read_file
from oci_builder.release.folder import read_trust
from oci_builder.release.provenance import is_provenance, judge_provenance
from oci_builder.release.receipts import Answer, Verdict, judge, read_envelope, write_receipt
from oci_builder.release.signing import load_key, load_public, new_key, save_key

_BLOCK = 4 << 20


def make_key(path: Path) -> dict[str, str]:
    """Make a key pair: ``path`` (0600) and ``path.pub``.

    Returns: id and base64 public key, as a trust policy's entry wants them.

    Raises:
        ConflictError: ``key.exists``; TransportError: ``io.*``.
    """
    public = load_public(save_key(new_key(), path))
    return {"id": f"sha256:{hashlib.sha256(public).hexdigest()}", "public": base64.b64encode(public).decode()}


def archive_digests(archives: Sequence[Path]) -> dict[str, str]:
    """File name -> sha256 hex of its bytes.

    Raises:
        SpecError: ``receipt.archive``: two files of one name; ``spec.path``: a pipe or device.
        TransportError: ``io.*``.
    """
    out: dict[str, str] = {}
    for path in archives:
        if path.name in out:
            raise SpecError("receipt.archive", f"two archives named {show(path.name)}", where=str(path))
        digest = hashlib.sha256()
        try:
            with open_file(path) as file:
                while data := file.read(_BLOCK):
                    digest.update(data)
        except OSError as error:
            raise input_error(error, path) from None
        out[path.name] = digest.hexdigest()
    return out


def sign_receipt(source: Path, folder: Path, subjects: Mapping[str, str], key: Path) -> Path:
    """Sign a receipt's JSON (the predicate) about ``subjects`` and create its file in ``folder``.

    Raises:
        SpecError: ``spec.path``: there is no such folder. FormatError: ``json.*``, ``receipt.*``;
        PolicyError: ``key.mode``; ConflictError: ``release.exists``; TransportError: ``io.*``.
    """
    if not folder.is_dir():
        raise SpecError("spec.path", f"{show(str(folder))} is no folder; make it, or name one", where=str(folder))
    receipt = parse_closed(Receipt, read_file(source, 4 << 20), str(source))
    return write_receipt(folder, receipt, subjects, load_key(key))


def verify_receipt(path: Path, trust: Path | None, now: datetime, subjects: Mapping[str, str] | None = None) -> Verdict:
    """Judge a receipt file, or a signed provenance. ``answer.exit_status`` is 0, 3 (failed) or 1 (cannot tell).

    Args:
        trust: the policy's file; without one no key is trusted.
        subjects: archive name -> sha256. Nothing can be told unless the receipt names every one of them.

    Raises:
        SpecError: ``trust.*``: the trust policy is wrong; TransportError: ``io.*``.
    """
    data, policy = read_envelope(path), TrustPolicy() if trust is None else read_trust(trust)
    one = judge_provenance if is_provenance(data) else judge
    verdict = one(data, policy, now=now, subjects=subjects, where=str(path))
    missing = sorted((subjects or {}).keys() - verdict.digests.keys())
    if verdict.answer is not Answer.VERIFIED or not missing:
        return verdict
    names = ", ".join(show(name) for name in missing)
    return replace(verdict, answer=Answer.CANNOT_TELL, reasons=(f"it does not name {names}",), code="receipt.subject")


def show_receipt(verdict: Verdict) -> dict[str, Any]:
    """The verdict and what the receipt says, as JSON; its words are hearsay unless the answer is ``verified``."""
    said = verdict.statement.predicate.model_dump(mode="json") if verdict.statement else None
    return {**verdict.to_json(), "receipt": said}
