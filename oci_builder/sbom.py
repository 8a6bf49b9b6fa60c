"""``oci-builder sbom``: CycloneDX bills of materials of an image and its tiers, from the files that are in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oci_builder.model.errors import SpecError, show
from oci_builder.model.events import Emit, silent
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.release.bills import Naming, bills, file_name, naming
from oci_builder.release.files import io_error, replace_file
from oci_builder.release.packages import read_packages
from oci_builder.release.walk import Walk


@dataclass(frozen=True, slots=True)
class BillOptions:
    """What the documents say they are of, where the image's own labels are not to be believed.

    Attributes:
        name, version: of the image; empty: from its labels.
        epoch: time of the documents, seconds since 1970; None: the image's.
        platform: which image of an index.
        image: name or digest of the one that is meant, where there are several.
    """

    name: str = ""
    version: str = ""
    epoch: int | None = None
    platform: str = "linux/amd64"
    limits: Limits = DEFAULT_LIMITS
    threads: int = 2
    image: str = ""


def make_bills(subject: Path, options: BillOptions | None = None, emit: Emit = silent) -> dict[str, bytes]:
    """``image`` and each tier's name -> its document. The same archive gives the same bytes.

    Args:
        subject: an image archive, a layout, a portable archive, an unpacked folder, or a folder that a build wrote.

    Raises:
        SpecError: ``spec.path``, ``spec.extra``; ``spec.name``: a name or version that is no text.
        FormatError, PolicyError, IntegrityError: what is wrong with it.
        TransportError: ``io.*``.
    """
    options = options or BillOptions()
    for option, text in (("--name", options.name), ("--version", options.version)):
        if not text.isprintable():
            raise SpecError("spec.name", f"{option} {show(text)}: not text that can be shown", where=option)
    source = _archive_of(subject)
    contents = read_packages(source, Walk(options.platform, options.limits, options.threads, emit, image=options.image))
    said = naming(contents, subject.resolve().name)
    epoch = said.epoch if options.epoch is None else options.epoch
    return bills(contents, Naming(options.name or said.name, options.version or said.version, epoch))


def _archive_of(subject: Path) -> Path:
    """A folder that a build wrote means the image in it."""
    inner = subject / "runtime.oci.tar"
    return inner if (subject / "container.json").is_file() and inner.is_file() else subject


def choose(made: dict[str, bytes], name: str) -> bytes:
    """One of the documents.

    Raises:
        SpecError: ``spec.tier``.
    """
    if name not in made:
        raise SpecError("spec.tier", f"there is no tier {name!r}; there are {', '.join(sorted(made))}", where=name)
    return made[name]


def write_bills(made: dict[str, bytes], folder: Path) -> list[Path]:
    """``image.cdx.json`` and one file a tier, in a folder; older ones are replaced.

    Raises:
        SpecError: ``spec.path``: a file has the folder's name, or that of one above it. TransportError: ``io.*``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise SpecError("spec.path", f"{show(str(folder))} is no folder", where=str(folder)) from None
    except OSError as error:
        raise io_error(error, folder) from None
    paths = [folder / file_name(name) for name in sorted(made)]
    for name, path in zip(sorted(made), paths, strict=True):
        replace_file(path, made[name])
    return paths
