"""The spec: everything that a build depends on, as one checked value.

Requirements section 12 fixes the smallest spec that must work. Unknown keys are errors here: a misspelt key that is
silently ignored is a build of something else.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    Tag,
    ValidationError,
    field_validator,
    model_validator,
)

from oci_builder.model.documents import digest_value
from oci_builder.model.env import is_hollow
from oci_builder.model.errors import OciBuilderError, SpecError, show
from oci_builder.model.jsontext import dump_json, load_json
from oci_builder.model.limits import Limits
from oci_builder.model.speccuda import Cuda
from oci_builder.model.specerrors import Words, no_such_key, spec_error
from oci_builder.model.specvalues import (
    SpecModel,
    check_git_url,
    check_inside,
    check_patterns,
    check_place,
    check_prefix,
    check_user,
    read_input,
)

_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=[^\0\n]*\Z")

# distribution/reference: path components and tags.
NAME_PATTERN = r"^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*$"
TAG_PATTERN = r"^[A-Za-z0-9_][A-Za-z0-9._-]{0,127}$"
COMMIT_PATTERN = r"^[0-9a-f]{40}([0-9a-f]{24})?$"
TIER_PATTERN = r"^[a-z0-9][a-z0-9._-]{0,62}$"
_ABSOLUTE = r"^/[^\x00-\x1f\x7f]*$"
_LABEL = r"^[^\x00-\x1f\x7f]+$"
# What an error says in the place of each.
_PATTERNS = {
    _ABSOLUTE: "must be an absolute path without control characters",
    _LABEL: "must not be empty, nor hold control characters",
    NAME_PATTERN: "must be lower-case words of a-z and 0-9, joined by . _ or -, with / between them (no tag)",
    TAG_PATTERN: "must be 1 to 128 of A-Z a-z 0-9 . _ -, and not begin with . or -",
    TIER_PATTERN: "must be 1 to 63 of a-z 0-9 . _ -, and begin with a letter or digit",
}


DigestField = Annotated[
    str, BeforeValidator(digest_value), Field(json_schema_extra={"pattern": "^sha256:[0-9a-f]{64}$"})
]


Place = Annotated[StrictStr, Field(min_length=1), AfterValidator(check_place)]


ImageName = Annotated[
    StrictStr, Field(min_length=1, description="name or digest of the image, where an archive holds several")
]


class RegistryBase(SpecModel):
    """A base image in a registry, by digest. The digest may name an index or a manifest."""

    registry: StrictStr = Field(description="reference, e.g. docker.io/nvidia/cuda:13.0.2-devel-ubuntu22.04")
    digest: DigestField = Field(description="digest of the index or manifest; a tag alone is refused")
    manifest: DigestField | None = Field(default=None, description="expected digest of the platform's manifest")
    config: DigestField | None = Field(default=None, description="expected digest of the image config")
    plain_http: StrictBool = Field(default=False, description="speak HTTP to a registry that is not on loopback")


class OciBase(SpecModel):
    """A base image in an OCI layout folder or OCI archive."""

    oci: Place
    digest: DigestField | None = Field(default=None, description="of the image's manifest, or of an index above it")
    image: ImageName | None = None


class DockerBase(SpecModel):
    """A base image in a Docker archive (docker save)."""

    docker: Place
    image: ImageName | None = None


class RootfsBase(SpecModel):
    """A base made of a root file system: a folder, or a tar of one."""

    rootfs: Place
    exclude: Annotated[tuple[StrictStr, ...], AfterValidator(check_patterns)] = Field(
        default=(), description="paths below the root that are left out"
    )


class HostBase(SpecModel):
    """A minimal root assembled from this machine's Python and shell with their library closure."""

    host: Literal[True]


class ScratchBase(SpecModel):
    """An empty base."""

    scratch: Literal[True]


def _one_of(names: tuple[str, ...]) -> Callable[[Any], str | None]:
    """A discriminator: the one key among ``names`` that an object has, or ``None``."""

    def kind(value: Any) -> str | None:
        found = [n for n in names if (n in value if isinstance(value, dict) else hasattr(value, n))]
        return found[0] if len(found) == 1 else None

    return kind


_BASES = ("registry", "oci", "docker", "rootfs", "host", "scratch")

Base = Annotated[
    Annotated[RegistryBase, Tag("registry")]
    | Annotated[OciBase, Tag("oci")]
    | Annotated[DockerBase, Tag("docker")]
    | Annotated[RootfsBase, Tag("rootfs")]
    | Annotated[HostBase, Tag("host")]
    | Annotated[ScratchBase, Tag("scratch")],
    Discriminator(
        _one_of(_BASES),
        custom_error_type="base",
        custom_error_message="a base has exactly one of the keys " + ", ".join(_BASES),
    ),
]


# What uv itself listens to (UV_*) belongs to the other fields of a tier.
_BUILDS = "variables for packages that are built from source; {env} is the environment, {site} its site-packages"
BuildEnv = dict[Annotated[str, Field(pattern=r"^[A-TV-Za-z_][A-Za-z0-9_]*$")], StrictStr]


Python = Annotated[StrictStr, Field(pattern=r"^[^-\s]", description="version, path of an interpreter, or host")]
Omitted = dict[StrictStr, Annotated[StrictStr, Field(pattern=r"\S")]]


class PathTier(SpecModel):
    """A tier that stands on disk already."""

    path: Place = Field(description="folder whose tree lands in <prefix>/envs/<tier>")


class RequirementsTier(SpecModel):
    """A tier installed by uv from a list of names, versions and hashes."""

    requirements: Place = Field(description="requirements file with hashes, resolved beforehand")
    python: Python = "host"
    omit: Omitted = Field(default_factory=dict, description="package left out -> reason")
    build_env: BuildEnv = Field(default_factory=dict, description=_BUILDS)


class _Locked(SpecModel):
    """What tiers from a uv.lock have in common."""

    lock: Place | None = Field(default=None, description="a copy of the lock that the project's must equal")
    extras: tuple[StrictStr, ...] = ()
    python: Python = "host"
    omit: Omitted = Field(default_factory=dict)
    build_env: BuildEnv = Field(default_factory=dict, description=_BUILDS)


class LockTier(_Locked):
    """A tier installed by uv from the uv.lock of a checkout."""

    project: Place
    commit: StrictStr | None = Field(default=None, description="the checkout's commit, verified")


class GitTier(_Locked):
    """A tier installed by uv from the uv.lock of a repository, fetched at one commit with its submodules."""

    git: Annotated[StrictStr, AfterValidator(check_git_url)] = Field(
        description="https:// or file:// URL of the repository, without credentials"
    )
    commit: StrictStr = Field(pattern=COMMIT_PATTERN, description="the whole id of the commit")
    folder: Annotated[StrictStr, AfterValidator(check_inside)] = Field(
        default=".", description="where the project lies in the repository"
    )


_TIERS = ("path", "requirements", "project", "git")

Tier = Annotated[
    Annotated[PathTier, Tag("path")]
    | Annotated[RequirementsTier, Tag("requirements")]
    | Annotated[LockTier, Tag("project")]
    | Annotated[GitTier, Tag("git")],
    Discriminator(
        _one_of(_TIERS),
        custom_error_type="tier",
        custom_error_message="a tier has exactly one of the keys " + ", ".join(_TIERS),
    ),
]


class Compression(SpecModel):
    """How our layers are compressed. zstd serves OCI clients only: Docker 20.10 refuses it."""

    codec: Literal["gzip", "zstd"] = "gzip"
    level: StrictInt | None = Field(default=None, ge=0, le=22, description="gzip 0 to 9, zstd 1 to 22")

    @model_validator(mode="after")
    def _in_range(self) -> Compression:
        low, high = (0, 9) if self.codec == "gzip" else (1, 22)
        if self.level is not None and not low <= self.level <= high:
            raise ValueError(f"{self.codec} levels are {low} to {high}")
        return self


class Owner(SpecModel):
    """Numeric owner of everything in our layers."""

    uid: StrictInt = Field(default=0, ge=0, lt=2**32 - 1)
    gid: StrictInt = Field(default=0, ge=0, lt=2**32 - 1)


def _env(value: tuple[str, ...]) -> tuple[str, ...]:
    for item in value:
        if not _ENV.match(item):
            raise ValueError(f"{item!r} is not NAME=value")
        if is_hollow(*item.split("=", 1)):
            raise ValueError(f"{item!r} has an empty path component, which means the current folder")
    names = [item.partition("=")[0] for item in value]
    if len(set(names)) != len(names):
        raise ValueError("a variable is set twice")
    return value


class Spec(SpecModel):
    """One image and its archives. Relative paths are relative to the spec file's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="oci-builder spec")

    schema_: StrictStr | None = Field(
        default=None, alias="$schema", description="where the JSON Schema of this file is"
    )
    name: StrictStr = Field(pattern=NAME_PATTERN, max_length=200, description="repository name, lower case")
    tag: StrictStr = Field(pattern=TAG_PATTERN)
    release: StrictStr | None = Field(default=None, pattern=TAG_PATTERN, description="release id, e.g. v070-r1")
    epoch: StrictInt = Field(default=0, ge=0, lt=2**33, description="newest time in our layers, seconds since 1970")
    platform: Literal["linux/amd64"] = "linux/amd64"
    base: Base
    prefix: Annotated[StrictStr, AfterValidator(check_prefix)] = Field(
        description="where the runtime lives in the image"
    )
    tiers: dict[Annotated[str, Field(pattern=TIER_PATTERN)], Tier] = Field(min_length=1)
    cuda: Cuda | None = Field(default=None, description="CUDA tools and headers for the portable archive")
    compression: Compression = Compression()
    limits: dict[StrictStr, Annotated[StrictInt, Field(gt=0)]] = Field(default_factory=dict)
    owner: Owner = Owner()
    env: Annotated[tuple[StrictStr, ...], AfterValidator(_env)] = ()
    entrypoint: tuple[StrictStr, ...] | None = None
    cmd: tuple[StrictStr, ...] | None = None
    user: Annotated[StrictStr | None, AfterValidator(check_user)] = None
    workdir: StrictStr | None = Field(default=None, pattern=_ABSOLUTE)
    labels: dict[Annotated[StrictStr, Field(pattern=_LABEL)], StrictStr] = Field(default_factory=dict)
    files: Place | None = Field(default=None, description="folder of layer definitions (*.toml) and their files")
    never_share: tuple[StrictStr, ...] = Field(
        default=(), description="path patterns inside a tier that are patched at run time and so never hard-linked"
    )
    pins: dict[StrictStr, StrictStr] = Field(default_factory=dict, description="component -> exact version or commit")
    gates: tuple[dict[StrictStr, Any], ...] = Field(default=(), description="what a release must prove")

    @field_validator("limits")
    @classmethod
    def _limit_names(cls, limits: Any) -> Any:
        unknown = sorted(set(limits) - set(Limits.names()))
        if unknown:
            raise ValueError(f"{show(unknown[0])}: {no_such_key(unknown[0], Limits.names())}")
        return limits

    @property
    def reference(self) -> str:
        """``name:tag``, as ``docker load`` shows it."""
        return f"{self.name}:{self.tag}"

    @property
    def full_reference(self) -> str:
        """The canonical reference, as containerd and podman need it: ``docker.io/library/name:tag``."""
        first = self.name.split("/")[0]
        if "/" in self.name and ("." in first or first == "localhost"):
            return self.reference
        return f"docker.io/{'' if '/' in self.name else 'library/'}{self.reference}"

    @property
    def effective_limits(self) -> Limits:
        """The defaults with this spec's changes."""
        known = {f.name for f in dataclass_fields(Limits)}
        return Limits(**{k: v for k, v in self.limits.items() if k in known})

    def canonical(self) -> bytes:
        """The spec as canonical JSON, for its digest."""
        return dump_json(self.model_dump(mode="json", by_alias=True, exclude_none=True, exclude={"schema_"}))


def parse_spec(data: bytes, where: str = "spec") -> Spec:
    """Parse and check a spec.

    Raises:
        SpecError: ``spec.json`` (not JSON, repeated keys, too large), ``spec.digest`` (a base by tag only, or a
            malformed digest), ``spec.field`` (names the field, the value, and what would be right).
    """
    try:
        value = load_json(data, where)
    except OciBuilderError as error:
        hint = "; a spec is JSON" if where.lower().endswith((".toml", ".yaml", ".yml")) else ""
        raise SpecError("spec.json", error.message + hint, where=where) from None
    if not isinstance(value, dict):
        raise SpecError("spec.field", f"{where}: a spec is a JSON object, got {type(value).__name__}", where=where)
    try:
        return Spec.model_validate(value)
    except ValidationError as error:
        raise spec_error(error, where, _words()) from None


def load_spec(path: Path) -> Spec:
    """Read and parse a spec file.

    Raises:
        SpecError: as ``parse_spec``; ``spec.path`` when the file cannot be read.
    """
    return parse_spec(read_input(path, "spec"), str(path))


def _words() -> Words:
    return Words(_PATTERNS, {"base": (1, _BASES), "tiers": (2, _TIERS)}, json_schema)


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a spec, with the limits' names and reasons."""
    schema = Spec.model_json_schema(by_alias=True)
    schema["$schema"] = "https://json-schema.org/draft/2020-12/schema"
    schema["properties"]["limits"] = {
        "type": "object",
        "description": "overrides of the built-in limits",
        "additionalProperties": False,
        "properties": {
            name: {"type": "integer", "exclusiveMinimum": 0, "default": getattr(Limits(), name), "description": reason}
            for name, reason in Limits.reasons().items()
        },
    }
    return schema
