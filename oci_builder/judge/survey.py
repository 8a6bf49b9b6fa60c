"""The judge's verdict on an archive's documents, before (or without) its layers being read.

For verbs that take one image out of an archive: they read the layers themselves, each against its digest and diff_id.
What stands in a blob's name is believed here; that the bytes keep it is theirs to prove.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from oci_builder.judge.archive import Judged, judge
from oci_builder.judge.contents import Contents, Intake, Member, blob_name, is_document
from oci_builder.judge.hashing import Hashers
from oci_builder.judge.image import ImageView
from oci_builder.judge.layer import LayerFacts
from oci_builder.judge.options import Findings, JudgeOptions
from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, Manifest, parse_document
from oci_builder.model.errors import FormatError
from oci_builder.model.jsontext import dump_json
from oci_builder.wire.compress import Compression, sniff

_UNREAD = Digest.of(b"not read")


def sight(name: str, size: int, head: bytes, read: Callable[[], bytes], options: JudgeOptions) -> Member:
    """A member seen, and read if it may be a document.

    Args:
        head: its first bytes, 64 or all.
        read: gives all of it.
    """
    if is_document(head, size, options.limits):
        data = read()
        return Member(name, len(data), Digest.of(data), data)
    return sight_layer(name, size, head)


def sight_layer(name: str, size: int, head: bytes) -> Member:
    """A member that is a layer, whose bytes somebody else reads."""
    named = blob_name(name)
    # Content is unknown: so that two members are never taken for one, a nameless one has a digest of its name.
    digest = Digest.from_hex(named) if named else Digest.of(_UNREAD.encode() + name.encode(errors="surrogateescape"))
    return Member(name, size, digest, layer=LayerFacts(compression=sniff(head)))


def survey(
    path: Path, members: Mapping[str, Member], links: Mapping[str, str], options: JudgeOptions
) -> tuple[Judged, Findings]:
    """Judge the documents.

    Raises:
        OciBuilderError: the most telling of what ``verify`` would find in them; ``platform.ambiguous`` also where
            ``verify`` only warns: an archive may hold many images, but one must be meant.
    """
    findings = Findings(path.name)
    with Hashers() as hashers:
        contents = Contents(path, "identity", members=dict(members), links=dict(links))
        judged = judge(Intake(contents, options, findings, hashers))
    require_image(judged, findings, options)
    return judged, findings


def survey_manifest(descriptor: Descriptor, data: bytes, config: bytes, options: JudgeOptions) -> None:
    """Judge one image's documents, whose layers are still elsewhere: as if they lay in a layout.

    Args:
        descriptor, data: of the manifest.

    Raises:
        OciBuilderError: as ``survey``.
    """
    where = str(descriptor.digest)
    manifest = parse_document(Manifest, data, where, options.limits)
    index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [descriptor.to_json()]}
    documents = {
        "oci-layout": dump_json({"imageLayoutVersion": "1.0.0"}), "index.json": dump_json(index),
        descriptor.id.blob_path: data, manifest.config.id.blob_path: config,
    }  # fmt: skip
    members = {name: Member(name, len(text), Digest.of(text), text) for name, text in documents.items()}
    for layer in manifest.layers:
        # What a layer is will show when it is here; until then it is what its media type says.
        kind: Compression = media.LAYER_COMPRESSION.get(layer.media_type, "identity")  # type: ignore[assignment]
        name = layer.id.blob_path
        members.setdefault(name, Member(name, layer.size, layer.id, layer=LayerFacts(compression=kind)))
    survey(Path(where), members, {}, options)


def require_image(judged: Judged, findings: Findings, options: JudgeOptions) -> ImageView:
    """The one image that is meant.

    Raises:
        OciBuilderError: as ``survey``.
    """
    findings.require()
    if judged.image is None or any(finding.code == "platform.ambiguous" for finding in findings.found):
        where = judged.contents.path.name
        said = [finding.message for finding in findings.found if finding.code == "platform.ambiguous"]
        what = said[0] if said else "no image"
        raise FormatError("platform.ambiguous", f"{where}: {what}", where=where, expected="1")
    return judged.image
