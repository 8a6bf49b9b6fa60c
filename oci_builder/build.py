"""``build``: one spec in, three archives and two records out; what has changed and nothing else."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from oci_builder import __version__
from oci_builder.model.errors import SpecError, disk_error
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Image, Layer
from oci_builder.model.jsontext import dump_json
from oci_builder.model.records import FileRecord, Tools, container_record, portable_record
from oci_builder.model.redact import redact, secret_values
from oci_builder.model.settings import image_settings, timestamp
from oci_builder.model.spec import PathTier, Spec, load_spec
from oci_builder.payload.cuda import stage_cuda
from oci_builder.payload.make import make_runtime
from oci_builder.payload.runtime import Runtime, add_licences
from oci_builder.payload.tidy import in_use, note_use, tidy
from oci_builder.rootfs.advice import advice
from oci_builder.rootfs.layers import WriteOptions, write_layer
from oci_builder.rootfs.layers_assemble import InlineFile, assemble, follow, place_files, place_tree, rewrite_parents
from oci_builder.rootfs.layers_base import read_base
from oci_builder.rootfs.layers_plan import BaseTree, LayerPlan, Normal, check_disjoint
from oci_builder.rootfs.plan import PlanOptions, plan_layers
from oci_builder.rootfs.scan import scan_tree
from oci_builder.rootfs.scan_content import content_digests
from oci_builder.store.blobs import DirStore
from oci_builder.store.cache import BuildCache
from oci_builder.store.scratch import scratch_folder
from oci_builder.transports.bases import Base, load_base
from oci_builder.transports.docker_archive import write_docker_archive
from oci_builder.transports.layerfiles import read_definitions
from oci_builder.transports.naming import Name
from oci_builder.transports.oci_archive import write_oci_archive
from oci_builder.transports.places import check_places, check_products
from oci_builder.transports.portable_archive import write_portable_archive
from oci_builder.transports.unchanged import Outputs, input_key
from oci_builder.wire.compress import Codec
from oci_builder.wire.tar import Kind

OCI, DOCKER, PORTABLE = "runtime.oci.tar", "runtime.docker.tar.gz", "runtime.tar.gz"
CONTAINER_JSON, PORTABLE_JSON = "container.json", "portable.json"
FILES = (OCI, DOCKER, PORTABLE, CONTAINER_JSON, PORTABLE_JSON)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build.

    Attributes:
        cache: folder of the blob store, the build cache and the environments that we make.
        jobs: threads; the bytes do not depend on it. Layers are read and compressed with ``MOST_THREADS`` at most.
        check: believe no file times: read every input again.
    """

    cache: Path
    jobs: int = 2
    check: bool = False


# Each thread costs about 4 MiB, and more than these gain nothing: 4.7 GB on 32 cores took 13.4 s and 204 MiB with 16
# threads, 14.9 s and 261 MiB with 32 (releases/supporting/image-h200-x2/threads.json).
MOST_THREADS = 16


@dataclass(frozen=True, slots=True)
class BuildResult:
    """What a build made.

    Attributes:
        out: folder of the five files.
        container, portable: the records.
        unchanged: nothing had to be done.
    """

    out: Path
    container: Mapping[str, Any]
    portable: Mapping[str, Any]
    unchanged: bool = False


def build(spec_path: Path, out: Path, options: BuildOptions, emit: Emit = silent) -> BuildResult:
    """Build the spec. Idempotent; each file appears in ``out`` only when it is complete, the records last.

    Raises:
        SpecError: ``spec.*``, ``layers.*``, ``scan.*``.
        OciBuilderError: what the base's source, the tiers and the disk can raise.
    """
    spec = load_spec(spec_path)
    folder = spec_path.absolute().parent
    check_places(spec, folder, out, options.cache)
    check_products(out, FILES)
    # Programs run in other folders, and an audit looks for whole paths.
    options = replace(options, cache=options.cache.absolute())
    try:
        out.mkdir(parents=True, exist_ok=True)
        options.cache.mkdir(parents=True, exist_ok=True)
        with DirStore(options.cache / "store") as store, BuildCache(options.cache / "build.sqlite") as cache:
            with in_use(options.cache / "tiers"):
                result = _Build(spec, folder, out, options, store, cache, emit).run()
            if not result.unchanged:
                tidy(options.cache / "tiers", emit)
            return result
    except OSError as error:
        raise disk_error(error, "building") from None


@dataclass(frozen=True, slots=True)
class _Made:
    """Plans and the layers they became."""

    plans: Sequence[LayerPlan]
    layers: Sequence[Layer]

    def counts(self) -> dict[str, int]:
        """Of a portable archive of these: paths counted once, though folders stand in several layers."""
        paths = {hashlib.blake2b(item.name, digest_size=8).digest() for plan in self.plans for item in plan.items}
        return {
            "files": sum(1 for plan in self.plans for item in plan.items if item.source.kind is Kind.FILE),
            "entries": len(paths),
            "content_size": sum(plan.content_size for plan in self.plans),
            "tar_size": sum(layer.tar_size - 1024 for layer in self.layers) + 1024,
        }


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Planning makes hundreds of thousands of values and no cycle: to look for cycles takes a quarter of its time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _set_aside() -> Iterator[None]:
    """What is planned stays until the end: the collector need not look through it again and again meanwhile."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class _Build:
    """One build in progress."""

    def __init__(
        self, spec: Spec, folder: Path, out: Path, options: BuildOptions, store: DirStore, cache: BuildCache, emit: Emit
    ) -> None:
        self.spec, self.folder, self.out, self.options = spec, folder, out, options
        self.store, self.cache, self.emit = store, cache, emit
        self.limits = spec.effective_limits
        self.normal = Normal(spec.epoch, spec.owner.uid, spec.owner.gid)
        self.codec = Codec(spec.compression.codec, spec.compression.level)
        self.threads = min(options.jobs, MOST_THREADS)
        self.write = WriteOptions(self.codec, self.threads, cache, options.check)
        self.name = Name(spec.reference, spec.full_reference)
        # Where the prefix really lies, once the base's links are known: the archives' entries do.
        self.place = spec.prefix.strip("/").encode()

    def run(self) -> BuildResult:
        work = self.options.cache / "tiers"
        runtime = make_runtime(self.spec, self.folder, work, self.options.jobs, self.emit)
        outputs = Outputs(self.out, FILES, self.cache)
        folders = {**runtime.tiers, **{f"../{name}": path for name, path in runtime.trees.items()}}
        ours = [path for path in folders.values() if path.is_relative_to(work)]
        key = input_key(self.spec, self.folder, folders, self.codec.describe(), __version__, ours)
        known = None if self.options.check or key is None else outputs.known(key)
        if key is not None and known is not None:
            self.store.note_use(outputs.blobs(key))
            self.cache.note_use()
            self.emit(Event("note", "build", message="nothing has changed"))
            return BuildResult(self.out, known[CONTAINER_JSON], known[PORTABLE_JSON], unchanged=True)
        base = load_base(self.spec, self.folder, self.store, self.write, self.emit)
        cuda = stage_cuda(
            self.spec, base.image.layers, self.store, work,
            limits=self.limits, threads=self.threads, emit=self.emit,
        )  # fmt: skip
        if cuda is not None:
            note_use(work, f"{self.folder} {self.spec.reference} cuda", [cuda.name])
        with _no_collection():
            plans = self._plans(add_licences(runtime, cuda), base)
        base.image.check_room([(plan.name, plan.content_size) for plan in plans], self.limits)
        with _set_aside():
            made = self._write(plans)
            self._check_ratio(made.layers)
            image, portable_only = self._image(base, made.layers), self._write(self._portable_plans(cuda))
            with scratch_folder(self.out) as staging:
                result = self._archives(image, base, made, portable_only, staging)
                outputs.publish(staging, key, self.store.used)
        return result

    def _write(self, plans: Sequence[LayerPlan]) -> _Made:
        return _Made(plans, [write_layer(plan, self.store, self.write, self.emit) for plan in plans])

    def _check_ratio(self, layers: Sequence[Layer]) -> None:
        """Say which layers any careful reader takes for decompression bombs: ours does."""
        limits = self.limits
        for layer in layers:
            if layer.tar_size > max(limits.ratio_floor, limits.ratio * layer.descriptor.size):
                message = f"{layer.tar_size} bytes in {layer.descriptor.size}, over {limits.ratio} times as many:"
                message += " verify and unpack take it only with --spec and a higher limits.ratio in the spec"
                self.emit(Event("warning", f"layer {layer.name}", message=message))

    def _portable_plans(self, cuda: Path | None) -> tuple[LayerPlan, ...]:
        """What only the portable archive has: a bare host has no base that brings CUDA's tools."""
        if cuda is None:
            return ()
        tree = scan_tree(cuda, emit=self.emit, limits=self.limits)
        return (assemble("cuda", place_tree(tree, self.place + b"/cuda", self.normal), normal=self.normal),)

    def _plans(self, runtime: Runtime, base: Base) -> tuple[LayerPlan, ...]:
        threads = self.threads
        base_tree = read_base(base.image.layers, self.store, limits=self.limits, threads=threads, emit=self.emit)
        trees = {name: scan_tree(path, emit=self.emit, limits=self.limits) for name, path in runtime.tiers.items()}
        for name, tier in self.spec.tiers.items():
            if isinstance(tier, PathTier):
                for message in advice(trees[name], self.normal):
                    self.emit(Event("warning", f"tier {name}", message=message))
        hashes = None if self.options.check else self.cache
        contents = content_digests(list(trees.values()), cache=hashes, threads=threads, emit=self.emit)
        options = PlanOptions(self.spec.prefix, self.normal, self.spec.never_share, base_tree)
        plans = [*plan_layers(trees, options, contents), *self._own_layers(runtime, base_tree)]
        self.place = follow(self.place, base_tree)
        moved = tuple(rewrite_parents(plan, base_tree, self.normal) for plan in plans)
        check_disjoint(moved, self.limits)
        return moved

    def _own_layers(self, runtime: Runtime, base_tree: BaseTree) -> list[LayerPlan]:
        """Layers of the interpreter and the source, of the inventories, and of the spec's layer definitions."""
        prefix = self.spec.prefix.lstrip("/").encode()
        scanned = {name: scan_tree(path, emit=self.emit, limits=self.limits) for name, path in runtime.trees.items()}
        placed = {n: place_tree(tree, prefix + b"/" + n.encode(), self.normal) for n, tree in scanned.items()}
        definitions = self._definitions()
        shipped = {path for files in definitions.values() for path in files}
        given = {n.encode(): InlineFile(data) for n, data in runtime.files.items() if n.encode() not in shipped}
        for name, files in (*((("inventory", given),) if given else ()), *definitions.items()):
            if name in placed:
                raise SpecError("layers.overlap", f"files: the build has a layer {name!r} of its own", where="files")
            placed[name] = place_files(files, prefix, self.normal)
        return [assemble(name, items, normal=self.normal, base=base_tree) for name, items in placed.items()]

    def _definitions(self) -> dict[str, dict[bytes, InlineFile]]:
        if self.spec.files is None:
            return {}
        return read_definitions(self.folder / self.spec.files, self.limits, self.emit)

    def _image(self, base: Base, layers: Sequence[Layer]) -> Image:
        created = {"created": timestamp(self.spec.epoch)}
        ours = [replace(layer, history={**created, **layer.history}) for layer in layers]
        image = base.image.append(*ours, limits=self.limits)
        self._warn_of_credentials()
        settings, annotations = image_settings(self.spec, base.image.settings, base.name, base.digest)
        return image.with_settings(settings, annotations)

    def _warn_of_credentials(self) -> None:
        """A spec's settings are in the image for everybody to read; ``record`` and ``publish`` refuse them."""
        known = secret_values(os.environ)
        for text in (*self.spec.env, *(f"{name}={value}" for name, value in self.spec.labels.items())):
            if redact(text, known) != text:
                name = redact(text.partition("=")[0], known)
                message = f"{name} looks like a credential; everybody who has the image can read it"
                self.emit(Event("warning", "build", message=message))

    def _archives(self, image: Image, base: Base, made: _Made, portable_only: _Made, staging: Path) -> BuildResult:
        whole = _Made([*portable_only.plans, *made.plans], [*portable_only.layers, *made.layers])
        tools = Tools(__version__, self.codec.describe())
        blobs = {layer.descriptor.id for layer in (*image.layers, *portable_only.layers)}
        with ThreadPoolExecutor(max(1, min(3, self.options.jobs)), "archive") as pool:
            # The cache's disk may have changed a layer since it was made, which no time of a file tells.
            proof = pool.submit(self.store.prove, blobs, self.emit)
            oci = pool.submit(write_oci_archive, image, self.name, self.store, staging / OCI, self.emit)
            docker = pool.submit(
                write_docker_archive, image, self.name, self.store, staging / DOCKER, self.emit, self.limits
            )
            portable = pool.submit(
                write_portable_archive, whole.layers, b"", self.store, staging / PORTABLE, self.emit, self.limits
            )
            proof.result()
            records = [
                FileRecord(r.path.name, r.sha256, r.size)
                for r in (oci.result(), docker.result(), portable.result())
            ]
        about = {"name": base.name, "digest": base.digest, "layers": base.image.base_layers}
        container = container_record(self.spec, image, about, records[0], records[1], tools)
        portable_json = portable_record(
            self.spec, self.place, records[2], made.layers, whole.counts(), tools
        )
        (staging / CONTAINER_JSON).write_bytes(dump_json(container) + b"\n")
        (staging / PORTABLE_JSON).write_bytes(dump_json(portable_json) + b"\n")
        return BuildResult(self.out, container, portable_json)
