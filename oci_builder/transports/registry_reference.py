"""References to images in registries: ``[host/]repository[:tag][@digest]`` (distribution/reference)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from oci_builder.model.digest import Digest
from oci_builder.model.errors import FormatError, SpecError, show
from oci_builder.model.spec import NAME_PATTERN, TAG_PATTERN

DOCKER_HUB = "docker.io"
_HUB_API = "registry-1.docker.io"
_HUB_NAMES = frozenset({DOCKER_HUB, "index.docker.io", _HUB_API})
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"(?:{_LABEL}(?:\.{_LABEL})*|\[[0-9A-Fa-f:.]{{2,45}}\])(?::[0-9]{{1,5}})?\Z")
_REPOSITORY = re.compile(NAME_PATTERN)
_TAG = re.compile(TAG_PATTERN)
_MAX_NAME = 255


@dataclass(frozen=True, slots=True)
class Reference:
    """One image, or one repository.

    Attributes:
        host: registry as people name it, with its port; ``docker.io`` for Docker Hub.
        repository: path within the registry, e.g. ``library/ubuntu``.
        tag: or None.
        digest: or None.
    """

    host: str
    repository: str
    tag: str | None = None
    digest: Digest | None = None

    @property
    def api_host(self) -> str:
        """The host that speaks the registry API."""
        return _HUB_API if self.host == DOCKER_HUB else self.host

    @property
    def name(self) -> str:
        """The reference without its digest."""
        return f"{self.host}/{self.repository}" + (f":{self.tag}" if self.tag else "")

    @property
    def canonical(self) -> str:
        """Everything that is known."""
        return self.name + (f"@{self.digest}" if self.digest else "")

    def __str__(self) -> str:
        return self.canonical


def parse_reference(text: str) -> Reference:
    """Parse a reference.

    Raises:
        SpecError: ``spec.reference``; ``spec.digest`` for a malformed digest.
    """
    name, at, digest_text = text.partition("@")
    if at and ("/" in digest_text or "@" in digest_text):
        # Not quoted: what stands before the @ may be a password.
        raise _bad("(not shown)", "a user name has no place in it; log in with `docker login`")
    digest = _digest(digest_text, name) if at else None
    if "://" in name:
        raise _bad(name.partition("://")[0] + "://…", "write it without a scheme")
    host, name = _split_host(name)
    repository, colon, tag = name.partition(":")
    if not _REPOSITORY.fullmatch(repository) or len(repository) + len(host) > _MAX_NAME:
        raise _bad(name, "a repository is lower-case words with / . _ - between them")
    if colon and not _TAG.fullmatch(tag):
        raise _bad(name, "a tag is at most 128 of A-Z a-z 0-9 . _ -")
    if host == DOCKER_HUB and "/" not in repository:
        repository = f"library/{repository}"
    return Reference(host, repository, tag or None, digest)


def pinned_reference(text: str, digest: Digest | None = None) -> Reference:
    """A reference with a digest, its own or the one given beside it.

    Raises:
        SpecError: ``spec.reference``; ``spec.digest`` when there is none, or two that differ.
    """
    reference = parse_reference(text)
    if digest is not None and reference.digest is not None and digest != reference.digest:
        raise SpecError(
            "spec.digest", f"{reference.name}: two digests, {reference.digest} and {digest}", where=reference.name,
            expected=digest, actual=reference.digest,
        )  # fmt: skip
    pinned = reference.digest or digest
    if pinned is None:
        raise SpecError(
            "spec.digest",
            f"{reference.name}: a tag without a digest is refused, for a tag can move; write {reference.name}@sha256:…"
            " with the digest that it has today (skopeo inspect shows it)",
            where=reference.name,
        )
    return replace(reference, digest=pinned)


def _split_host(name: str) -> tuple[str, str]:
    first, slash, rest = name.partition("/")
    if not slash or not ("." in first or ":" in first or first == "localhost" or first.lower() != first):
        return DOCKER_HUB, name
    port = first.rpartition(":")[2] if not first.endswith("]") and ":" in first else "443"
    if not _HOST.match(first) or not 0 < int(port) < 1 << 16:
        raise _bad(name, f"{show(first)} is not a host name")
    host = first.lower()
    return (DOCKER_HUB if host in _HUB_NAMES else host), rest


def _digest(text: str, name: str) -> Digest:
    try:
        return Digest.parse(text, name)
    except FormatError as error:
        raise SpecError("spec.digest", error.message, where=name, actual=text[:200]) from None


def _bad(text: str, why: str) -> SpecError:
    shown = show(text[:300])
    return SpecError("spec.reference", f"{shown} is not a reference: {why}", where="reference", actual=shown)
