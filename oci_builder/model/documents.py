"""OCI and Docker documents: parsed strictly, unknown keys kept, original bytes beside the value.

Sources: image-spec descriptor.md, manifest.md, image-index.md, config.md; docker distribution manifest-v2-2.md.
"""

from __future__ import annotations

import calendar
from functools import cache
from typing import Annotated, Any, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)
from pydantic_core import PydanticCustomError

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.errors import FormatError, OciBuilderError, PolicyError, show
from oci_builder.model.jsontext import load_json
from oci_builder.model.limits import DEFAULT_LIMITS, Limits

_MEDIA_TYPE = r"^[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}/[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]{0,126}$"


def digest_value(value: object) -> str:
    """Validate a digest for pydantic, which lets only its own kinds of error collect."""
    try:
        return Digest.parse(value)
    except FormatError as error:
        raise PydanticCustomError(DIGEST_ERROR, "{text}", {"text": error.message}) from None


DIGEST_ERROR = "json_digest"
DigestField = Annotated[str, BeforeValidator(digest_value)]
Size = Annotated[StrictInt, Field(ge=0)]
MediaType = Annotated[StrictStr, Field(pattern=_MEDIA_TYPE)]


def time_value(text: str) -> str:
    """Refuse a day or time that no calendar or clock has (``ValueError``); the form was looked at before."""
    month, day, hour, minute, second = (int(text[at : at + 2]) for at in (5, 8, 11, 14, 17))
    zone = (0, 0) if text.endswith("Z") else (int(text[-5:-3]), int(text[-2:]))
    days = calendar.monthrange(int(text[:4]), month)[1] if 1 <= month <= 12 else 0
    # Offsets of 24 hours and 60 minutes are taken by Go on purpose.
    if not 1 <= day <= days or hour > 23 or minute > 59 or second > 59 or zone[0] > 24 or zone[1] > 60:
        raise ValueError("there is no such day or time")
    return text


# Of RFC 3339, what Go's decoder takes: it refuses the whole document for another one.
_TWO = "[0-9]{2}"
_TIME = rf"^{_TWO}{_TWO}-{_TWO}-{_TWO}T{_TWO}:{_TWO}:{_TWO}(\.[0-9]+)?(Z|[+-]{_TWO}:{_TWO})$"
Time = Annotated[StrictStr, Field(pattern=_TIME), AfterValidator(time_value)]
# A set of words, as Go writes one.
Words = dict[StrictStr, dict[str, Any] | None]


class Document(BaseModel):
    """Base of all parsed documents: immutable, unknown keys kept."""

    model_config = ConfigDict(frozen=True, extra="allow", populate_by_name=True, arbitrary_types_allowed=True)


class Platform(Document):
    """What an index entry runs on (image-index.md)."""

    architecture: StrictStr
    os: StrictStr
    variant: StrictStr | None = None


class Descriptor(Document):
    """A reference to a blob: media type, digest and size (descriptor.md)."""

    media_type: MediaType = Field(alias="mediaType")
    digest: DigestField
    size: Size
    urls: tuple[StrictStr, ...] | None = None
    annotations: dict[StrictStr, StrictStr] | None = None
    data: StrictStr | None = None
    platform: Platform | None = None
    artifact_type: StrictStr | None = Field(default=None, alias="artifactType")

    @property
    def id(self) -> Digest:
        """The digest as a ``Digest``."""
        return Digest.parse(self.digest)

    def to_json(self) -> dict[str, Any]:
        """The descriptor as JSON keys; absent keys stay absent."""
        return self.model_dump(by_alias=True, exclude_none=True)


class Manifest(Document):
    """One image (manifest.md), or Docker's schema 2."""

    schema_version: StrictInt = Field(alias="schemaVersion")
    media_type: MediaType | None = Field(default=None, alias="mediaType")
    config: Descriptor
    layers: tuple[Descriptor, ...]
    annotations: dict[StrictStr, StrictStr] | None = None
    subject: Descriptor | None = None
    artifact_type: StrictStr | None = Field(default=None, alias="artifactType")


class Index(Document):
    """A list of manifests (image-index.md), or Docker's manifest list."""

    schema_version: StrictInt = Field(alias="schemaVersion")
    media_type: MediaType | None = Field(default=None, alias="mediaType")
    manifests: tuple[Descriptor, ...]
    annotations: dict[StrictStr, StrictStr] | None = None


class Healthcheck(Document):
    """How Docker asks whether a container is well; times in nanoseconds (moby, HealthcheckConfig)."""

    test: tuple[StrictStr, ...] | None = Field(default=None, alias="Test")
    interval: StrictInt | None = Field(default=None, alias="Interval")
    timeout: StrictInt | None = Field(default=None, alias="Timeout")
    start_period: StrictInt | None = Field(default=None, alias="StartPeriod")
    start_interval: StrictInt | None = Field(default=None, alias="StartInterval")
    retries: StrictInt | None = Field(default=None, alias="Retries")


class RunConfig(Document):
    """The ``config`` object of an image config: how a container of it starts (config.md).

    What only Docker reads is here too: it loads no image in which one of these is of another type (moby, Config).
    """

    env: tuple[StrictStr, ...] | None = Field(default=None, alias="Env")
    entrypoint: tuple[StrictStr, ...] | None = Field(default=None, alias="Entrypoint")
    cmd: tuple[StrictStr, ...] | None = Field(default=None, alias="Cmd")
    user: StrictStr | None = Field(default=None, alias="User")
    working_dir: StrictStr | None = Field(default=None, alias="WorkingDir")
    labels: dict[StrictStr, StrictStr] | None = Field(default=None, alias="Labels")
    exposed_ports: Words | None = Field(default=None, alias="ExposedPorts")
    volumes: Words | None = Field(default=None, alias="Volumes")
    stop_signal: StrictStr | None = Field(default=None, alias="StopSignal")
    args_escaped: StrictBool | None = Field(default=None, alias="ArgsEscaped")
    hostname: StrictStr | None = Field(default=None, alias="Hostname")
    domainname: StrictStr | None = Field(default=None, alias="Domainname")
    image: StrictStr | None = Field(default=None, alias="Image")
    attach_stdin: StrictBool | None = Field(default=None, alias="AttachStdin")
    attach_stdout: StrictBool | None = Field(default=None, alias="AttachStdout")
    attach_stderr: StrictBool | None = Field(default=None, alias="AttachStderr")
    tty: StrictBool | None = Field(default=None, alias="Tty")
    open_stdin: StrictBool | None = Field(default=None, alias="OpenStdin")
    stdin_once: StrictBool | None = Field(default=None, alias="StdinOnce")
    on_build: tuple[StrictStr, ...] | None = Field(default=None, alias="OnBuild")
    stop_timeout: StrictInt | None = Field(default=None, alias="StopTimeout")
    shell: StrictStr | tuple[StrictStr, ...] | None = Field(default=None, alias="Shell")
    healthcheck: Healthcheck | None = Field(default=None, alias="Healthcheck")


class RootFS(Document):
    """The layers' diff_ids, lowest first (config.md)."""

    type: StrictStr
    # Docker writes none for an image without layers.
    diff_ids: Annotated[tuple[DigestField, ...], BeforeValidator(lambda value: () if value is None else value)] = ()


class History(Document):
    """How one layer came to be; ``empty_layer`` marks a step without one (config.md)."""

    created: Time | None = None
    created_by: StrictStr | None = None
    author: StrictStr | None = None
    comment: StrictStr | None = None
    empty_layer: StrictBool | None = None


class ImageConfig(Document):
    """An image config (config.md), and what Docker keeps beside it."""

    architecture: StrictStr
    os: StrictStr
    variant: StrictStr | None = None
    os_version: StrictStr | None = Field(default=None, alias="os.version")
    os_features: tuple[StrictStr, ...] | None = Field(default=None, alias="os.features")
    created: Time | None = None
    author: StrictStr | None = None
    config: RunConfig | None = None
    rootfs: RootFS
    history: tuple[History, ...] | None = None
    id: StrictStr | None = None
    parent: StrictStr | None = None
    comment: StrictStr | None = None
    container: StrictStr | None = None
    container_config: dict[str, Any] | None = None
    docker_version: StrictStr | None = None


class DockerArchiveItem(Document):
    """One image of a Docker archive's ``manifest.json`` (moby image/tarexport)."""

    config: StrictStr = Field(alias="Config")
    repo_tags: tuple[StrictStr, ...] | None = Field(default=None, alias="RepoTags")
    layers: tuple[StrictStr, ...] | None = Field(default=None, alias="Layers")


D = TypeVar("D", bound=Document)

# Keys that only the *other* kind of document has: a reader that picks by key would see another image (CVE-2021-41190).
_FOREIGN_KEYS: dict[type[Document], frozenset[str]] = {
    Manifest: frozenset({"manifests", "fsLayers", "history", "signatures"}),
    Index: frozenset({"config", "layers", "fsLayers", "history", "signatures"}),
}


def parse_document(model: type[D], data: bytes, where: str, limits: Limits = DEFAULT_LIMITS) -> D:
    """Parse and check one document.

    Raises:
        FormatError: ``json.*`` (syntax, duplicate, number, depth, field, digest, ambiguous), ``media.mismatch``,
            ``media.schema1``.
        PolicyError: ``limit.document``, ``limit.manifests``, ``limit.layers``.
    """
    return validate(model, load_json(data, where, limits), where, limits)


def validate(model: type[D], value: Any, where: str, limits: Limits = DEFAULT_LIMITS) -> D:
    """As ``parse_document``, for a value that ``load_json`` has read."""
    if not isinstance(value, dict):
        raise FormatError("json.field", f"{where}: expected a JSON object, got {type(value).__name__}", where=where)
    _one_schema(model, value, where)
    try:
        document = model.model_validate(value)
    except ValidationError as error:
        raise field_error(error, where) from None
    _check_kind(document, where, limits)
    return document


def field_error(error: ValidationError, where: str) -> OciBuilderError:
    """The first problem of a pydantic error as ours: field, value, and what would be right."""
    first = error.errors(include_url=False)[0]
    place = ".".join(str(p) for p in first["loc"]) or "(document)"
    if first["type"] == DIGEST_ERROR:
        return FormatError("json.digest", f"{where}: {place}: {first['msg']}", where=f"{where}: {place}")
    shown, right = show(repr(first.get("input"))[:120]), first["msg"].removeprefix("Value error, ")
    return FormatError(
        "json.field", f"{where}: {place}: {right} (got {shown})", where=f"{where}: {place}",
        expected=right, actual=shown,
    )  # fmt: skip


def _one_schema(model: type[Document], value: dict[str, Any], where: str) -> None:
    both = _FOREIGN_KEYS.get(model, frozenset()) & value.keys()
    both |= _respelled(model, value)
    if value.get("schemaVersion") == 1 or ("fsLayers" in value and "config" not in value):
        raise FormatError(
            "media.schema1", f"{where}: Docker manifest schema 1 is not supported; ask for schema 2 or OCI", where=where
        )
    if both:
        keys = ", ".join(sorted(show(k) for k in both))
        raise FormatError(
            "json.ambiguous",
            f"{where}: keys of two kinds of document ({keys}) in a {model.__name__.lower()}",
            where=where,
            actual=keys,
        )


def _respelled(model: type[Document], value: dict[str, Any]) -> set[str]:
    """Keys, at any depth, that Go's decoder takes for others ("Layers" for "layers", a long s for an s)."""
    inner = _inner_documents(model)
    folded = {name.casefold() for name in inner}
    found = {key for key in value if key not in inner and key.casefold() in folded}
    for name, kind in inner.items():
        below = value.get(name)
        for item in below if isinstance(below, list) else [below]:
            if kind is not None and isinstance(item, dict):
                found |= _respelled(kind, item)
    return found


@cache
def _inner_documents(model: type[Document]) -> dict[str, type[Document] | None]:
    """The keys of a document, and what kind of document is under each, if one is."""
    out: dict[str, type[Document] | None] = {}
    for name, info in model.model_fields.items():
        kinds = [info.annotation]
        while kinds and not (isinstance(kinds[0], type) and issubclass(kinds[0], Document)):
            kinds = [*get_args(kinds[0]), *kinds[1:]]
        out[info.alias or name] = kinds[0] if kinds else None  # type: ignore[assignment]
    return out


def _check_kind(document: Document, where: str, limits: Limits) -> None:
    if isinstance(document, Manifest | Index) and document.schema_version != 2:
        raise FormatError(
            "json.field", f"{where}: schemaVersion must be 2", where=where, expected="2", actual=document.schema_version
        )
    if isinstance(document, Manifest):
        expect_media(document.media_type, media.MANIFEST_TYPES, where)
        _check_layer_count(len(document.layers), where, limits)
    if isinstance(document, ImageConfig):
        _check_layer_count(len(document.rootfs.diff_ids), where, limits)
    if isinstance(document, DockerArchiveItem):
        _check_layer_count(len(document.layers or ()), where, limits)
    if isinstance(document, Index):
        expect_media(document.media_type, media.INDEX_TYPES, where)
        if len(document.manifests) > limits.manifests:
            raise PolicyError(
                "limit.manifests",
                f"{where}: {len(document.manifests)} descriptors, the limit is {limits.manifests}",
                where=where,
            )


def _check_layer_count(count: int, where: str, limits: Limits) -> None:
    if count > limits.layers:
        raise PolicyError("limit.layers", f"{where}: {count} layers, the limit is {limits.layers}", where=where)


def expect_media(actual: str | None, allowed: frozenset[str], where: str) -> None:
    """Refuse a media type outside ``allowed``; ``None`` passes (OCI makes the key optional).

    Raises:
        FormatError: ``media.mismatch``.
    """
    if actual is not None and actual not in allowed:
        wanted = " or ".join(sorted(allowed))
        raise FormatError(
            "media.mismatch",
            f"{where}: media type {show(actual)}, expected {wanted}",
            where=where,
            expected=wanted,
            actual=actual,
        )
