"""Software bills of materials: a tier's inventory as CycloneDX 1.6 JSON. The only file that imports cyclonedx.

The same inventory gives the same bytes: the serial number is derived from the content (RFC 9562, version 5) and the
time is the spec's epoch.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, Property, XsUri
from cyclonedx.model.bom import Bom, BomMetaData
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.model.tool import ToolRepository
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.spdx import is_expression, is_supported_id
from packageurl import PackageURL

from oci_builder import __version__
from oci_builder.model.errors import FormatError
from oci_builder.model.jsontext import dump_json

MEDIA_TYPE = "application/vnd.cyclonedx+json"
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
        omitted = [Property(name=f"{_PROPERTY}omitted", value=f"{n}: {r}") for n, r in inventory["omitted"].items()]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise FormatError("json.type", f"this is no inventory: {type(error).__name__} {error}") from None
    about = Component(type=ComponentType.APPLICATION, name=f"{subject}/{tier}", version=version, bom_ref=f"tier-{tier}")
    tool = Component(type=ComponentType.APPLICATION, name="oci-builder", version=__version__)
    identity = dump_json([__version__, dict(inventory), subject, version, epoch]).decode()
    bom = Bom(
        components=components,
        serial_number=uuid.uuid5(_NAMESPACE, identity),
        metadata=BomMetaData(
            component=about, timestamp=datetime.fromtimestamp(epoch, UTC), properties=omitted,
            tools=ToolRepository(components=[tool]),
        ),
    )  # fmt: skip
    bom.register_dependency(about, components)
    return JsonV1Dot6(bom).output_as_string(indent=1).encode() + b"\n"


def _component(package: Mapping[str, Any]) -> Component:
    name, version = str(package["name"]), str(package["version"])
    hashes = [str(value) for value in package.get("hashes", ())]
    purl = PackageURL("pypi", None, name, version)
    source = str(package.get("source", "index"))
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=version,
        bom_ref=purl.to_string(),
        purl=purl,
        licenses=list(_licences(str(package.get("licence", "")))),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=hashes[0])] if len(hashes) == 1 else (),
        properties=list(_properties(package, hashes)),
        external_references=list(_origin(source)),
    )


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
