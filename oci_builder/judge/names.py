"""Image names, in the one form in which two spellings of a name are equal."""

from __future__ import annotations

import re

from oci_builder.model.documents import Descriptor

CONTAINERD_NAME = "io.containerd.image.name"
REF_NAME = "org.opencontainers.image.ref.name"

_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9a-fA-F:]+\])(?::[0-9]+)?"
_REPO_TAG = re.compile(rf"(?:{_HOST}/)?{_PART}(?:/{_PART})*:{_TAG}\Z")


def is_repo_tag(text: str) -> bool:
    """Whether ``text`` is a name with a tag, as docker load takes it (distribution/reference)."""
    return len(text) <= 384 and bool(_REPO_TAG.match(text))


def image_name(text: str) -> str:
    """``docker.io/library/x:1``, ``docker.io/x:1`` and ``x:1`` are one name; so is a bare tag one of its own."""
    for prefix in ("docker.io/library/", "index.docker.io/library/", "docker.io/", "localhost/"):
        if text.startswith(prefix):
            return text[len(prefix) :]
    return text


def descriptor_names(descriptor: Descriptor) -> set[str]:
    """What an index calls an image; containerd's annotation has the full name, the other often only the tag."""
    notes = descriptor.annotations or {}
    found = notes.get(CONTAINERD_NAME) or notes.get(REF_NAME)
    return {image_name(found)} if found else set()


def agree(oci: set[str], docker: set[str]) -> bool:
    """Whether two views call an image the same; a bare tag agrees with a name that has it."""
    if not oci or not docker:
        return True
    return all(any(one == other or other.endswith(f":{one}") for other in docker) for one in oci)
