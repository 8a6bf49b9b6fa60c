"""The part of the base's CUDA toolkit that a bare host needs: the portable archive has no base to take it from."""

from __future__ import annotations

import hashlib
import os
import posixpath
import re
import shutil
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase, translate
from pathlib import Path

from oci_builder.model.errors import SpecError, disk_error, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.image import Layer
from oci_builder.model.jsontext import dump_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.model.sizes import human
from oci_builder.model.spec import Spec
from oci_builder.model.speccuda import Cuda
from oci_builder.payload.base_files import extract_files
from oci_builder.payload.partial import making, put
from oci_builder.payload.python import settle_copy
from oci_builder.rootfs.layers_assemble import follow
from oci_builder.rootfs.layers_base import BaseStore, read_base
from oci_builder.rootfs.layers_plan import BaseTree, is_below, parents

# DeepGEMM compiles with the first and takes the result apart with the last.
REQUIRED = ("bin/nvcc", "bin/ptxas", "bin/cuobjdump")
TERMS = "licences"
_FORMAT = 1
# The terms of NVIDIA's packages and of its images; they lie outside the toolkit.
_TERMS = ("usr/share/doc/cuda-*/copyright", "NGC-DL-CONTAINER-LICENSE")


def stage_cuda(
    spec: Spec,
    layers: Sequence[Layer],
    store: BaseStore,
    work: Path,
    *,
    limits: Limits = DEFAULT_LIMITS,
    threads: int = 2,
    emit: Emit = silent,
) -> Path | None:
    """A folder with ``bin``, ``include``, ``lib64`` and so on, as ``spec.cuda`` chooses; None when it is not set.

    Idempotent: the same layers and choice give the folder that stands there. Its links stay below it and are relative.

    Args:
        layers: the base's, lowest first.
        work: where the folder is made.

    Raises:
        SpecError: ``payload.cuda`` (no such toolkit, a required tool is missing, a chosen link leads out of the
            toolkit), ``layers.symlink`` (links that go in circles).
        FormatError, PolicyError, IntegrityError: what is wrong with a layer.
        TransportError: ``io.*``.
    """
    if spec.cuda is None:
        return None
    base = read_base(layers, store, limits=limits, threads=threads, emit=emit)
    identity = [_FORMAT, [layer.diff_id for layer in layers], spec.cuda.model_dump(by_alias=True), REQUIRED, _TERMS]
    place = work / f"cuda-{hashlib.sha256(dump_json(identity)).hexdigest()[:20]}"
    if place.is_dir():
        return place
    toolkit = _Toolkit(spec.cuda, base)
    try:
        with making(place) as staging:
            staging.mkdir(parents=True)
            written = extract_files(layers, store, toolkit.chooses, staging, limits=limits, threads=threads, emit=emit)
            put(toolkit.settle(staging, written, emit), place)
    except OSError as error:
        raise disk_error(error, "taking CUDA from the base") from None
    return place


def cuda_texts(cuda: Path) -> dict[str, bytes]:
    """What a staged toolkit brings, for ``collect_licences``.

    Raises:
        TransportError: ``io.*``.
    """
    places = [cuda / "EULA.txt", cuda / "LICENSE", *sorted(cuda.glob(f"{TERMS}/*.txt"))]
    try:
        found = {f"CUDA toolkit, {place.stem}": place.read_bytes() for place in places if place.is_file()}
    except OSError as error:
        raise disk_error(error, "reading CUDA's terms") from None
    return found or {"CUDA toolkit": b""}


class _Toolkit:
    """Which paths of the base belong to the toolkit, under which names, and which of them are chosen."""

    def __init__(self, cuda: Cuda, base: BaseTree) -> None:
        self.named = cuda.from_
        self.root = follow(os.fsencode(cuda.from_).strip(b"/"), base)
        if not self.root:
            raise SpecError("payload.cuda", f"cuda.from: {self.named} of the base leads to /", where="cuda.from")
        self.patterns = re.compile("|".join(translate(pattern) for pattern in cuda.include))
        # Link below the root -> where it leads in the end; None in circles.
        self.links = {link: _end(link, base) for link in base.symlinks if is_below(link, self.root)}
        self.aliases = [(end, link) for link, end in self.links.items() if end is not None and is_below(end, self.root)]
        self.aimed = {end for link, end in self.links.items() if end is not None and self._matches(link)}

    def chooses(self, path: bytes) -> bool:
        """Is this path of the image wanted?"""
        if not is_below(path, self.root):
            return any(fnmatchcase(os.fsdecode(path), pattern) for pattern in _TERMS)
        return path in self.aimed or self._matches(path)

    def settle(self, staging: Path, written: frozenset[bytes], emit: Emit) -> Path:
        """Make what was extracted a toolkit of its own: links, terms, modes and times.

        Raises:
            SpecError: ``payload.cuda``.
        """
        inside = {path for path in written if is_below(path, self.root)}
        root = staging / os.fsdecode(self.root)
        there = inside | {folder for path in inside for folder in parents(path) if is_below(folder, self.root)}
        for link, end in sorted(self.links.items()):
            if end in there:
                self._link(root, link, end)
            elif self._matches(link):
                self._leads_nowhere(link, end, emit)
        self._demand(root)
        for path in sorted(written - inside):
            name = posixpath.basename(posixpath.dirname(path)) or path
            (root / TERMS).mkdir(exist_ok=True)
            shutil.copyfile(staging / os.fsdecode(path), root / TERMS / f"{os.fsdecode(name)}.txt")
        settle_copy(root)
        size = sum(place.lstat().st_size for place in root.rglob("*"))
        emit(Event("note", "cuda", message=f"{len(inside)} files of {self.named} in the base, {human(size)}"))
        return root

    def _matches(self, path: bytes) -> bool:
        return any(self.patterns.match(os.fsdecode(name)) for name in self._names(path))

    def _names(self, path: bytes) -> Iterator[bytes]:
        """A path below the root, as its own name and by every link to a folder above it."""
        yield path[len(self.root) + 1 :]
        for end, link in self.aliases:
            if is_below(path, end):
                yield link[len(self.root) + 1 :] + path[len(end) :]

    def _link(self, root: Path, link: bytes, end: bytes) -> None:
        place = root / os.fsdecode(link[len(self.root) + 1 :])
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(os.fsdecode(posixpath.relpath(b"/" + end, b"/" + posixpath.dirname(link))))

    def _leads_nowhere(self, link: bytes, end: bytes | None, emit: Emit) -> None:
        if end is not None and end != self.root and not is_below(end, self.root):
            raise SpecError(
                "payload.cuda", f"cuda.include: {show(link)} leads out of {self.named}, to {show(b'/' + end)}; choose "
                "what does not", where="cuda.include", actual=show(link),
            )  # fmt: skip
        emit(Event("note", "cuda", message=f"{show(link)} is left out: what it leads to is not chosen or not there"))

    def _demand(self, root: Path) -> None:
        missing = [name for name in REQUIRED if not (root / name).is_file()]
        if missing:
            raise SpecError(
                "payload.cuda", f"cuda: {self.named} of the base brings no {', '.join(missing)}: take a devel image, "
                "or name them in cuda.include",
                where="cuda.from", expected=", ".join(REQUIRED), actual=", ".join(missing),
            )  # fmt: skip


def _end(link: bytes, base: BaseTree) -> bytes | None:
    try:
        return follow(link, base)
    except SpecError:
        return None
