"""Which evidence is attached to an image, and that what comes back is compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor
from oci_builder.model.errors import IntegrityError
from oci_builder.model.jsontext import dump_json
from oci_builder.release.attach import Artifact, artifacts, attach
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.receipts import write_receipt
from tests.release.helpers import SUBJECTS, new_key, receipt

SUBJECT = Descriptor(media_type=media.OCI_MANIFEST, digest="sha256:" + "1" * 64, size=10)


@dataclass
class Memory:
    """A registry in memory, that may lose or change what it was given."""

    held: dict[Digest, Mapping[str, bytes]] = field(default_factory=dict)
    forget: bool = False
    change: bool = False

    def push_artifact(self, subject: Descriptor, artifact: Artifact) -> Digest:
        files = {n: Digest.of(d) for n, d in artifact.files.items()}
        digest = Digest.of(dump_json([subject.digest, artifact.artifact_type, files]))
        self.held[digest] = {n: d[:-1] + b"!" if self.change else d for n, d in artifact.files.items()}
        return digest

    def referrers(self, subject: Digest) -> Sequence[Descriptor]:
        kept = [] if self.forget else list(self.held)
        return [Descriptor(media_type=media.OCI_MANIFEST, digest=d, size=1) for d in kept]

    def pull_artifact(self, digest: Digest) -> Mapping[str, bytes]:
        return self.held[digest]


@pytest.fixture
def folder(tmp_path: Path) -> ReleaseFolder:
    made = ReleaseFolder(tmp_path / "v1-r1").create()
    for name in ("base.cdx.json", "image.cdx.json", "provenance.json", "qualification.json", "portable.json"):
        made.add(name, b"{}" + name.encode())
    write_receipt(made.receipts, receipt(), SUBJECTS, new_key())
    return made


def test_sboms_provenance_receipts_and_the_verdict_are_attached(folder: ReleaseFolder) -> None:
    kinds = [a.artifact_type.rsplit(".", 2)[-2] + "/" + next(iter(a.files)) for a in artifacts(folder)]
    assert len(kinds) == 5
    assert not any("portable" in k for k in kinds)


def test_attaching_twice_gives_the_same(folder: ReleaseFolder) -> None:
    registry = Memory()
    assert attach(registry, SUBJECT, artifacts(folder)) == attach(registry, SUBJECT, artifacts(folder))


def test_other_bytes_that_come_back_are_an_error(folder: ReleaseFolder) -> None:
    with pytest.raises(IntegrityError) as caught:
        attach(Memory(change=True), SUBJECT, artifacts(folder))
    assert caught.value.code == "blob.digest"


def test_a_referrer_that_is_not_listed_is_an_error(folder: ReleaseFolder) -> None:
    with pytest.raises(IntegrityError) as caught:
        attach(Memory(forget=True), SUBJECT, artifacts(folder))
    assert caught.value.code == "registry.referrer"
