"""Software bills of materials as CycloneDX 1.6 JSON: of a tier from its inventory, of an image from its files.

The only file that imports cyclonedx.
The same inventory gives the same bytes: the serial number is derived from the content (RFC 9562, version 5) and the
time is the spec's epoch.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType, Patch, PatchClassification, Pedigree
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.spdx import is_expression, is_supported_id
from packageurl import PackageURL

from oci_builder import __version__
from oci_builder.model.errors import FormatError
from oci_builder.model.jsontext import dump_json
from oci_builder.release.files import hide
from oci_builder.release.packages import Contents

SUFFIX = ".cdx.json"
_NAMESPACE = uuid.UUID("6f0c3d5e-8c1b-5d5c-9f0a-3f6a7d1c2b90")
_PROPERTY = "oci-builder:"


def sbom(inventory: Mapping[str, Any], *, subject: str, version: str, epoch: int) -> bytes:
    """The bill of materials of one tier.

    What was left out stands in the metadata as ``oci-builder:omitted``, name and reason: it is part of what is true
    about the tier. Where a list accepts several files of a version, all their hashes are properties, not the
    component's hash: the list does not say which one was installed.

    Args:
        inventory: as ``payload.inventory`` gives it.
        subject, version: image name and tag, or release.
        epoch: seconds since 1970, the time of the document.

    Raises:
        FormatError: ``json.type`` when it is no inventory.
    """
    try:
        tier = str(inventory["tier"])
        components = [_component(package) for package in inventory["packages"]]
        said = list(_said(inventory))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError("json.type", f"this is no inventory: {type(error).__name__} {error}") from None
    about = Component(type=ComponentType.APPLICATION, name=f"{subject}/{tier}", version=version, bom_ref=f"tier-{tier}")
    return _document(about, components, said, epoch, [dict(inventory), subject, version, epoch])


def image_sbom(contents: Contents, *, subject: str, version: str, epoch: int) -> bytes:
    """The bill of materials of a whole image: every tier's packages once, the base's, and interpreters.

    A Python package says by ``oci-builder:tier`` or ``oci-builder:place`` where it stands. A package database that
    cannot be read is named as ``oci-builder:unread``: what is in it is missing here.

    Args:
        contents: as ``read_packages`` gives them; an image's manifest becomes the document's subject.
        subject, version: image name and tag.
        epoch: seconds since 1970, the time of the document.
    """
    found = contents.image.manifest if contents.image else None
    manifest = found.digest if found else ""
    about = Component(
        type=ComponentType.CONTAINER, name=subject, version=version, bom_ref="image",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=manifest.removeprefix("sha256:"))] if manifest else (),
    )  # fmt: skip
    python = [(p, f"{_PROPERTY}tier", name) for name, tier in contents.tiers.items() for p in tier["packages"]]
    python += [(p, f"{_PROPERTY}place", p["place"]) for p in contents.elsewhere]
    merged: dict[str, Component] = {}
    for package, key, value in python:
        component = merged.setdefault(_identity(package), _component(package, bom_ref=_identity(package)))
        component.properties.add(Property(name=key, value=str(value)))
    system = [_system(package) for package in contents.system]
    interpreters = [_interpreter(place, found) for place, found in sorted(contents.interpreters.items())]
    components = [*merged.values(), *system, *interpreters]
    said = [Property(name=f"{_PROPERTY}unread", value=place) for place in contents.unread]
    said += [Property(name=p.name, value=f"{n}: {p.value}") for n, t in contents.tiers.items() for p in _said(t)]
    identity = [manifest, subject, version, epoch, contents.tiers, contents.elsewhere, contents.system]
    return _document(about, components, said, epoch, [*identity, contents.interpreters, contents.unread])


def _said(inventory: Mapping[str, Any]) -> Iterator[Property]:
    """What was left out and why, and where an inventory and its environment disagree."""
    yield from (Property(name=f"{_PROPERTY}omitted", value=f"{n}: {r}") for n, r in inventory["omitted"].items())
    for key in ("absent", "unlisted"):
        yield from (Property(name=f"{_PROPERTY}{key}", value=str(v)) for v in inventory.get(key, ()))


def _document(
    about: Component, components: Sequence[Component], said: Sequence[Property], epoch: int, identity: list[Any]
) -> bytes:
    tool = Component(type=ComponentType.APPLICATION, name="oci-builder", version=__version__)
    bom = Bom(
        components=components,
        serial_number=uuid.uuid5(_NAMESPACE, dump_json([__version__, *identity]).decode()),
        metadata=BomMetaData(
            component=about, timestamp=datetime.fromtimestamp(epoch, UTC), properties=said,
            tools=ToolRepository(components=[tool]),
        ),
    )  # fmt: skip
    bom.register_dependency(about, components)
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    value = json.loads(text)
    shown = hide(value)  # names, versions and places are the packages' own words
    return (text if shown == value else json.dumps(shown, indent=1)).encode() + b"\n"


def _identity(package: Mapping[str, Any]) -> str:
    """Equal name, version and files: the same package, wherever it stands."""
    ref = _ref("pypi", _purl("pypi", package), package)
    return f"{ref}#{str(package['record'])[:16]}" if package.get("record") else ref


def _purl(kind: str, package: Mapping[str, Any], **qualifiers: str) -> PackageURL | None:
    """None for a name that no package URL can hold."""
    try:
        vendor = str(package.get("vendor") or "") or None
        made = PackageURL(kind, vendor, str(package["name"]), str(package["version"]), qualifiers)
        made.to_string()
    except (ValueError, TypeError):
        return None
    return made


def _ref(kind: str, purl: PackageURL | None, package: Mapping[str, Any]) -> str:
    return purl.to_string() if purl else f"{kind}:{package['name']}@{package['version']}"


def _system(package: Mapping[str, str]) -> Component:
    purl = _purl(package["type"], package, **{k: package[k] for k in ("arch", "distro") if package[k]})
    ref = f"{_ref(package['type'], purl, package)}#{package['arch']}" if purl is None else purl.to_string()
    return Component(
        type=ComponentType.LIBRARY, name=package["name"], version=package["version"], bom_ref=ref, purl=purl,
        licenses=list(_licences(package["licence"])),
    )  # fmt: skip


def _interpreter(place: str, version: str) -> Component:
    purl = _purl("generic", {"name": "cpython", "version": version})
    return Component(
        type=ComponentType.PLATFORM, name="cpython", version=version, bom_ref=f"cpython-{place}", purl=purl,
        properties=[Property(name=f"{_PROPERTY}place", value=place)],
    )  # fmt: skip


def _component(package: Mapping[str, Any], bom_ref: str = "") -> Component:
    name, version = str(package["name"]), str(package["version"])
    hashes = [str(value) for value in package.get("hashes", ())]
    purl = _purl("pypi", package)
    source = str(package.get("source", "index"))
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=bom_ref or _ref("pypi", purl, package),
        purl=purl,
        licenses=list(_licences(str(package.get("licence", "")))),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=hashes[0])] if len(hashes) == 1 else (),
        properties=list(_properties(package, hashes)),
        external_references=list(_origin(source)),
        pedigree=_pedigree(package.get("fixes", ())),
    )


def _pedigree(fixes: Sequence[Mapping[str, str]]) -> Pedigree | None:
    """Where a package is not as its file brought it."""
    notes = [f"{fix['path']}: SHA-256 {fix['patched']}, was {fix['sha256']}: {fix['why']}" for fix in fixes]
    patches = [Patch(type=PatchClassification.UNOFFICIAL)]
    return Pedigree(patches=patches, notes="\n".join(notes)) if notes else None


def _licences(text: str) -> Iterator[DisjunctiveLicense | LicenseExpression]:
    """SPDX where it is SPDX, else the words of the package's own metadata."""
    if is_supported_id(text):
        yield DisjunctiveLicense(id=text)
    elif text:
        yield LicenseExpression(text) if is_expression(text) else DisjunctiveLicense(name=text)


def _properties(package: Mapping[str, Any], hashes: list[str]) -> Iterator[Property]:
    if len(hashes) > 1:
        yield from (Property(name=f"{_PROPERTY}accepted-sha256", value=value) for value in hashes)
    if package.get("record"):
        yield Property(name=f"{_PROPERTY}record-sha256", value=str(package["record"]))
    for place in package.get("licence_files", ()):
        yield Property(name=f"{_PROPERTY}licence-file", value=str(place))


def _origin(source: str) -> Iterator[ExternalReference]:
    if source.startswith("git+"):
        yield ExternalReference(type=ExternalReferenceType.VCS, url=XsUri(source.removeprefix("git+")))
    elif "://" in source:
        yield ExternalReference(type=ExternalReferenceType.DISTRIBUTION, url=XsUri(source))
