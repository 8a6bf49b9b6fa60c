"""Blobs of the store as an Image: the documents and every layer's bytes held to what ``verify`` holds archives to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple

from oci_builder.judge.contents import Contents, Intake, Member
from oci_builder.judge.graph import Graph
from oci_builder.judge.hashing import Hashers
from oci_builder.judge.image import ImageView, check_image, layer_of
from oci_builder.judge.layer import read_layer
from oci_builder.judge.options import Findings, JudgeOptions
from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, ImageConfig, Manifest, parse_document
from oci_builder.model.errors import FormatError, IntegrityError
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Image, Layer
from oci_builder.model.jsontext import dump_json, load_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.store.blobs import DirStore
from oci_builder.transports.resolve import check_layers, check_platform
from oci_builder.wire.compress import Compression, decode, sniff

# Part of the key under which a verdict is kept: a new rule makes old verdicts unfit.
_RULES = 1


def admit_image(
    config_bytes: bytes, manifest: Manifest, store: DirStore, *, limits: Limits = DEFAULT_LIMITS,
    platform: str = "linux/amd64", emit: Emit = silent, threads: int = 2,
) -> Image:  # fmt: skip
    """The Image for documents whose layer blobs are in the store. Every layer is read once; the verdict is kept.

    Raises:
        FormatError, PolicyError, IntegrityError: what ``verify`` would find in such an image.
    """
    where = f"config {manifest.config.digest}"
    value = load_json(config_bytes, where, limits)
    config = parse_document(ImageConfig, config_bytes, where, limits)
    check_platform(config, platform, where)
    check_layers(manifest, config, where)
    judge_stored(config_bytes, config, manifest, store, limits=limits, emit=emit, threads=threads)
    pairs = list(zip(manifest.layers, config.rootfs.diff_ids, strict=True))
    with ThreadPoolExecutor(max(1, threads), "diff-id") as pool:
        sizes = list(pool.map(lambda p: prove_layer(p[0], Digest(p[1]), store, limits, emit), pairs))
    histories, empty = _histories(value, len(pairs))
    layers = tuple(
        Layer(_oci(d), Digest(diff_id), size, history)
        for (d, diff_id), size, history in zip(pairs, sizes, histories, strict=True)
    )
    settings = {k: v for k, v in value.items() if k not in ("rootfs", "history")}
    return Image(settings, layers, empty, None, len(layers))


def judge_stored(
    config_bytes: bytes, config: ImageConfig, manifest: Manifest, store: DirStore, *,
    limits: Limits = DEFAULT_LIMITS, emit: Emit = silent, threads: int = 2,
) -> None:  # fmt: skip
    """Hold an image whose layer blobs are in the store to the judge's rules. What passed is remembered.

    Raises:
        FormatError, PolicyError, IntegrityError: the most telling of what is wrong.
    """
    asked = [_RULES, Digest.of(config_bytes), [d.digest for d in manifest.layers], list(astuple(limits))]
    key = "judged-" + hashlib.sha256(dump_json(asked)).hexdigest()[:24]
    top = manifest.layers[-1].id if manifest.layers else None
    if top is not None and store.has(top) and store.recall(top, key):
        return
    findings = Findings(f"config {manifest.config.digest}")
    options = JudgeOptions(limits=limits, threads=threads, emit=emit)
    with Hashers() as hashers:
        graph = Graph(Intake(Contents(store.root, "identity"), options, findings, hashers))
        for descriptor in {d.digest: d for d in manifest.layers}.values():
            _read_stored(descriptor, store, graph)
        layers = [layer_of(graph, d, f"layer {n}") for n, d in enumerate(manifest.layers)]
        member = Member("config", len(config_bytes), Digest.of(config_bytes), config_bytes)
        check_image(graph, ImageView("image", config, member, layers), len(layers))
    findings.require()
    if top is not None:
        store.remember(top, key, True)


def _read_stored(descriptor: Descriptor, store: DirStore, graph: Graph) -> None:
    blob, name, intake = store.open(descriptor.id), descriptor.id.blob_path, graph.intake
    emit, task = intake.options.emit, f"judge layer {descriptor.digest[:19]}"

    def chunks() -> Iterator[bytes]:
        for chunk in blob.chunks():
            emit(Event("advance", task, len(chunk)))
            yield chunk

    emit(Event("start", task, total=blob.size))
    where, hashers = f"layer {descriptor.digest}", intake.hashers
    facts = read_layer(chunks(), where, intake.options, hashers, hashers.new("blob"))
    emit(Event("done", task))
    intake.remember(facts)
    graph.contents.members[name] = Member(name, blob.size, descriptor.id, layer=facts)
    if facts.diff_id is not None and not facts.problems:
        value = {"diff_id": facts.diff_id, "tar_size": facts.tar_size}
        store.remember(descriptor.id, "tar", value | ({"padded": True} if facts.padded else {}))


def prove_layer(descriptor: Descriptor, diff_id: Digest, store: DirStore, limits: Limits, emit: Emit = silent) -> int:
    """Bytes of the layer's tar, once its diff_id is proved. Proved layers are remembered in the store.

    Raises:
        IntegrityError: ``layer.diff_id``, ``blob.size``.
        FormatError: ``media.mismatch`` when bytes and media type disagree.
    """
    where = f"layer {descriptor.digest}"
    known = store.recall(descriptor.id, "tar") if store.has(descriptor.id) else None
    if known is None:
        blob = store.open(descriptor.id)
        if blob.size != descriptor.size:
            raise IntegrityError(
                "blob.size", f"{where}: {blob.size} bytes, the manifest says {descriptor.size}", where=where,
                expected=descriptor.size, actual=blob.size,
            )  # fmt: skip
        compression = media.LAYER_COMPRESSION[descriptor.media_type]
        actual = sniff(blob.pread(8, 0))
        if actual != compression:
            raise FormatError(
                "media.mismatch", f"{where}: declared as {compression}, the bytes are {actual}", where=where,
                expected=compression, actual=actual,
            )  # fmt: skip
        digest, size = _hash_tar(decode(blob, actual, limits=limits, where=where), emit, where)
        known = {"diff_id": digest, "tar_size": size}
        store.remember(descriptor.id, "tar", known)
    if known["diff_id"] != diff_id:
        raise IntegrityError(
            "layer.diff_id", f"{where}: its tar hashes to {known['diff_id']}, the config says {diff_id}", where=where,
            expected=diff_id, actual=known["diff_id"],
        )  # fmt: skip
    return int(known["tar_size"])


def _hash_tar(chunks: Iterator[bytes | memoryview], emit: Emit, task: str) -> tuple[Digest, int]:
    hashed, size = hashlib.sha256(), 0
    for chunk in chunks:
        hashed.update(chunk)
        size += len(chunk)
        emit(Event("advance", task, len(chunk)))
    return Digest.from_hex(hashed.hexdigest()), size


def _oci(descriptor: Descriptor) -> Descriptor:
    """The same layer under its OCI media type: one family in a manifest (containerd/nerdctl#4384)."""
    compression: Compression = media.LAYER_COMPRESSION[descriptor.media_type]  # type: ignore[assignment]
    return Descriptor(media_type=media.oci_layer(compression), digest=descriptor.digest, size=descriptor.size)


def _histories(
    config: dict[str, object], layers: int
) -> tuple[list[dict[str, object]], tuple[tuple[int, dict[str, object]], ...]]:
    """History entries of layers and of empty steps; a config without a history is given a plain one."""
    history = [h for h in config.get("history") or [] if isinstance(h, dict)]  # type: ignore[attr-defined]
    full: Sequence[dict[str, object]] = [h for h in history if not h.get("empty_layer")]
    if len(full) != layers:
        return [{"created_by": "base"} for _ in range(layers)], ()
    empty, before = [], 0
    for entry in history:
        if entry.get("empty_layer"):
            empty.append((before, entry))
        else:
            before += 1
    return list(full), tuple(empty)
