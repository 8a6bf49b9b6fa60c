"""``releases/<release>/``: what is remembered of a release. Files are created once and never rewritten.

``qualification.json`` follows from the others. When it changes, the one before stays as ``qualification.N.json``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest
from oci_builder.model.errors import CheckFailed, ConflictError, FormatError, PolicyError, SpecError, show
from oci_builder.model.gates import Gate, TrustPolicy, parse_trust
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.model.receipts import DOCKER, OCI, PORTABLE, parse_time
from oci_builder.model.spec import Spec
from oci_builder.release.files import create_exclusively, io_error, locked, open_file, read_file, replace_file
from oci_builder.release.gates import Candidate, Qualification, qualify
from oci_builder.release.receipts import Answer, judge, recorded_files

QUALIFICATION = "qualification.json"
SUPERSEDED = "superseded.json"
_QUALIFICATION = re.compile(r"qualification(\.[0-9]+)?\.json\Z")
# As a publication takes them: whatever has such a name is sent and attached.
_MADE_BY_RECORD = re.compile(r"(provenance.*\.json|inventory.*\.json|.*\.cdx\.json)\Z", re.DOTALL)
_SPEC = "spec.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}\Z")


@dataclass(frozen=True, slots=True)
class ReleaseFolder:
    """One release on disk: ``portable.json``, ``container.json``, ``receipts/``, inventories, SBOMs, the verdict."""

    root: Path

    @property
    def release(self) -> str:
        """The release id: the folder's name; of a superseded candidate, that of the release it belongs to.

        Raises:
            SpecError: ``release.name``: the folder's name is none for a release.
        """
        place = self.root.resolve()
        name = place.parent.parent.name if place.parent.name == "superseded" else place.name
        if not _NAME.match(name):
            raise SpecError(
                "release.name", f"{show(name)} is no name of a release: letters, digits and . _ - are", where=name
            )
        return name

    @property
    def receipts(self) -> Path:
        """The folder of the receipts."""
        return self.root / "receipts"

    def lock(self) -> AbstractContextManager[None]:
        """One process at a time judges the folder and records the verdict, or puts files into it."""
        return locked(self.root)

    def create(self) -> ReleaseFolder:
        """Make the folders; idempotent.

        Raises:
            TransportError: ``io.*``.
        """
        try:
            self.receipts.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise io_error(error, self.receipts) from None
        return self

    def add(self, name: str, data: bytes) -> Path:
        """Create one file.

        Raises:
            ConflictError: ``release.exists``.
            SpecError: ``release.name``: not a plain file name.
            TransportError: ``io.*``.
        """
        if not _NAME.match(name):
            raise SpecError("release.name", f"{show(name)} is not a plain file name", where=name)
        create_exclusively(self.root / name, data)
        return self.root / name

    def document(self, name: str) -> Any:
        """A JSON file of the folder, or None where there is none.

        Raises:
            FormatError: ``json.*``.
            TransportError: ``io.*``.
        """
        path = self.root / name
        if not path.is_file():
            return None
        return load_json(read_file(path, DEFAULT_LIMITS.document), str(path))

    def envelopes(self) -> dict[str, bytes]:
        """Receipt file name -> bytes.

        Raises:
            TransportError: ``io.*``.
        """
        try:
            names = sorted(p.name for p in self.receipts.glob("*.json") if p.is_file())
        except OSError as error:
            raise io_error(error, self.receipts) from None
        return {name: read_file(self.receipts / name, DEFAULT_LIMITS.document) for name in names}

    def require_own_files(self) -> None:
        """A release's files are files: what is sent from it must not be something elsewhere.

        Raises:
            PolicyError: ``release.link``. TransportError: ``io.*``.
        """
        try:
            places = [*self.root.iterdir(), *(self.receipts.iterdir() if self.receipts.is_dir() else ())]
        except OSError as error:
            raise io_error(error, self.root) from None
        for path in places:
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                raise PolicyError(
                    "release.link", f"{show(str(path))} is a link or no file; a release holds files", where=str(path)
                )  # fmt: skip

    def subjects(self) -> dict[str, str]:
        """Archive name -> sha256 hex, from ``portable.json`` and ``container.json``.

        Raises:
            SpecError: ``release.folder``: there is no portable.json.
            FormatError: ``release.subject``, ``digest.*``: a digest is missing or malformed.
        """
        portable = self.document("portable.json")
        if portable is None:
            raise SpecError(
                "release.folder", f"{show(str(self.root))} is no release folder: no portable.json", where=str(self.root)
            )
        if not isinstance(portable, dict):
            where = str(self.root / "portable.json")
            raise FormatError("release.subject", f"{show(where)} is no object", where=where)
        found = {PORTABLE: portable.get("sha256")}
        container = self.document("container.json")
        archives = container.get("archives", {}) if isinstance(container, dict) else {}
        for name in (OCI, DOCKER):
            if isinstance(archives, dict) and name in archives:
                found[name] = _sha256_of(archives[name])
        return {name: _hex(value, f"{self.root}: {name}") for name, value in found.items()}

    def superseded_by(self) -> str | None:
        """The portable sha256 that replaced this candidate, if one did."""
        document = self.document(SUPERSEDED)
        if document is None:
            return None
        return _hex(document.get("by") if isinstance(document, dict) else None, f"{self.root}: {SUPERSEDED}")

    def differing(self, files: Mapping[str, str]) -> list[str]:
        """Which of these files (name -> sha256 hex) are not there, or have other bytes.

        Raises:
            TransportError: ``io.*``.
        """
        return sorted(name for name, sha256 in files.items() if _digest_of(self.root / name) != sha256)

    def check_files(self, policy: TrustPolicy, now: datetime) -> None:
        """What was recorded is what lies here, no more and no less, by at least one believed record receipt.

        A folder without such a receipt is for ``require_proven``.

        Raises:
            CheckFailed: ``release.rewritten``, naming the files.
        """
        verdicts = self._recorded_differences(policy, now)
        if verdicts and all(verdicts):
            names = ", ".join(show(name) for name in min(verdicts, key=len))
            where = str(self.root)
            raise CheckFailed(
                "release.rewritten", f"{show(where)}: changed, gone or added since it was recorded: {names}",
                where=where,
            )  # fmt: skip

    def require_proven(self, policy: TrustPolicy, now: datetime) -> None:
        """What only ``record`` makes has a believed record receipt; a folder without such files needs none.

        Raises:
            CheckFailed: ``release.unproven``, naming the files that anybody may have written.
        """
        names = self._made_by_record()
        if names and not self._recorded_differences(policy, now):
            where, some = str(self.root), ", ".join(show(name) for name in names[:4])
            raise CheckFailed(
                "release.unproven",
                f"{show(where)}: no record receipt of a trusted key vouches for {some}{' …' if names[4:] else ''}; "
                "record the build again with a key that the trust policy lists",
                where=where,
            )  # fmt: skip

    def protected(self, policy: TrustPolicy, now: datetime) -> bool:
        """Whether a believed record receipt has the digests of the files, so that a change would be found out."""
        return bool(self._recorded_differences(policy, now))

    def _recorded_differences(self, policy: TrustPolicy, now: datetime) -> list[list[str]]:
        """For each believed record receipt the files that are not as it says."""
        subjects, found = self.subjects(), []
        for name, data in self.envelopes().items():
            believed = judge(data, policy, now=now, subjects=subjects, where=name).answer is Answer.VERIFIED
            said = recorded_files(data, name) if believed else None
            if said:
                # A spec that was not kept with the release must not judge it later.
                here = {*self._made_by_record(), *([_SPEC] if (self.root / _SPEC).exists() else ())}
                found.append(sorted({*self.differing(said), *(here - said.keys())}))
        return found

    def _made_by_record(self) -> list[str]:
        try:
            return sorted(p.name for p in self.root.iterdir() if _MADE_BY_RECORD.match(p.name))
        except OSError as error:
            raise io_error(error, self.root) from None

    def evaluate(self, gates: tuple[Gate, ...], policy: TrustPolicy, now: datetime, spec: str | None) -> Qualification:
        """The qualification as the files of this folder give it.

        Raises:
            FormatError, TransportError: as the readers above.
        """
        candidate = Candidate(self.release, self.subjects(), spec, self.superseded_by())
        return qualify(candidate, gates, self.envelopes(), policy, now)

    def recorded(self) -> dict[str, Any] | None:
        """``qualification.json``, or None.

        Raises:
            FormatError: ``json.*``, ``release.qualification`` when it has no time, or gates that are none.
        """
        value = self.document(QUALIFICATION)
        if value is None:
            return None
        try:
            parse_time(value["evaluated_at"])
            gates = [(gate["name"], gate["state"]) for gate in value["gates"]]
            texts = [value["state"], *value["not_tested"], *(word for pair in gates for word in pair)]
            if not all(isinstance(text, str) for text in texts):
                raise TypeError("its words are no text")
            return dict(value)
        except (KeyError, TypeError, ValueError) as error:
            where = str(self.root / QUALIFICATION)
            raise FormatError(
                "release.qualification", f"{show(where)} is no qualification: {error}", where=where
            ) from None

    def was_qualified(self) -> bool:
        """Whether any qualification that was recorded here, the present or an earlier one, says ``pass``.

        What was qualified once may have been delivered: keys that expire and gates that are added do not undo that.

        Raises:
            FormatError: ``json.*``. TransportError: ``io.*``.
        """
        try:
            names = sorted(p.name for p in self.root.iterdir() if _QUALIFICATION.match(p.name))
        except OSError as error:
            raise io_error(error, self.root) from None
        found = [self.document(name) for name in names]
        return any(isinstance(value, dict) and value.get("state") == "pass" for value in found)

    def compare(self, gates: tuple[Gate, ...], policy: TrustPolicy, spec: str | None) -> dict[str, Any]:
        """Recompute ``qualification.json`` at its own recorded time and compare.

        Returns: the recorded qualification, when it is what the files give.

        Raises:
            CheckFailed: ``qualification.missing``, or ``qualification.differs`` with what differs.
            FormatError, TransportError: as above.
        """
        recorded = self.recorded()
        if recorded is None:
            where = str(self.root)
            raise CheckFailed("qualification.missing", f"{show(where)}: no {QUALIFICATION}", where=where)
        fresh = self.evaluate(gates, policy, parse_time(recorded["evaluated_at"]), spec).to_json()
        nothing = object()  # a key that is not there is not one without a value
        keys = fresh.keys() | recorded.keys()
        differing = sorted(k for k in keys if fresh.get(k, nothing) != recorded.get(k, nothing))
        if differing:
            raise CheckFailed(
                "qualification.differs",
                f"{show(str(self.root / QUALIFICATION))} is not what its files give: {', '.join(differing)} "
                f"(recorded {recorded.get('state')}, recomputed {fresh['state']})",
                where=str(self.root), expected=fresh["state"], actual=recorded.get("state"),
            )  # fmt: skip
        return recorded

    def record(self, qualification: Qualification) -> Path:
        """Write ``qualification.json``; an older, different one is kept under the next free number.

        Idempotent where only the time differs: then nothing is written. Whoever judges and records holds ``lock``.

        Raises:
            TransportError: ``io.*``.
        """
        path = self.root / QUALIFICATION
        value = qualification.to_json()
        old = self.recorded()
        if old is None:
            create_exclusively(path, pretty(value))
        elif {**old, "evaluated_at": ""} != {**value, "evaluated_at": ""}:
            self._keep(path.read_bytes())
            replace_file(path, pretty(value))
        return path

    def _keep(self, data: bytes) -> None:
        for number in range(1, 10_000):
            try:
                create_exclusively(self.root / f"qualification.{number}.json", data)
                return
            except ConflictError:
                continue
        raise ConflictError("release.exists", f"{show(str(self.root))}: too many qualifications", where=str(self.root))


def read_trust(path: Path) -> TrustPolicy:
    """Read a trust policy file.

    Raises:
        SpecError: as ``parse_trust``; ``spec.path``.
        TransportError: ``io.*``.
    """
    try:
        path.lstat()
    except FileNotFoundError:
        message = f"no policy of trusted keys at {show(str(path))}: name one with --trust"
        raise SpecError("spec.path", message, where=str(path)) from None
    except (OSError, ValueError):
        pass  # reading says what it is
    return parse_trust(read_file(path, DEFAULT_LIMITS.document), str(path))


def spec_sha256(spec: Spec) -> str:
    """Digest of what is built, in hex: the canonical spec without its gates, which may grow after the build."""
    return Digest.of(spec.model_copy(update={"gates": ()}).canonical()).hex


def pretty(value: object) -> bytes:
    """JSON for files that people read in a repository: the canonical order, indented."""
    return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _digest_of(path: Path) -> str:
    if not path.is_file():
        return ""
    digest = hashlib.sha256()
    try:
        with open_file(path) as file:
            while data := file.read(1 << 20):
                digest.update(data)
    except OSError as error:
        raise io_error(error, path) from None
    return digest.hexdigest()


def _sha256_of(value: object) -> object:
    return value.get("sha256") if isinstance(value, dict) else value


def _hex(value: object, where: str) -> str:
    text = str(value or "")
    return Digest.parse(text if text.startswith("sha256:") else f"sha256:{text}", where).hex
