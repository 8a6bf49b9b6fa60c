"""Rules for single values of a spec, and the reading of its file."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from oci_builder.model.errors import SpecError, show

_COMPONENT = 255
# PATH_MAX of limits.h, its final NUL not counted.
_PLACE = 4095
_KERNELS = ("proc", "sys", "dev")
# Ray starts workers through ``bash -c`` without quoting, and uv's launchers do not survive every character.
_PREFIX = re.compile(r"/[A-Za-z0-9._+@=-]+(/[A-Za-z0-9._+@=-]+)*\Z")
# passwd(5) and group(5): names or numbers, one colon between user and group (image-spec config.md, "User").
_ONE = r"[A-Za-z0-9_][A-Za-z0-9_.@$-]*"
_USER = re.compile(rf"(?:{_ONE}(?::{_ONE})?)?\Z")
_GIT = re.compile(
    r"(?:https://(?P<host>[^/?#\s]+)|file://|http://(?:127\.0\.0\.1|localhost|\[::1\])(?::\d+)?)(?P<path>/[^?#\s]+)\Z"
)
# A spec is written by hand; what is larger is something else.
_MOST = 16 << 20


class SpecModel(BaseModel):
    """Base of all spec objects: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def check_prefix(value: str) -> str:
    """An absolute path in the image that a runtime can live at."""
    if not _PREFIX.match(value) or any(part in (".", "..") for part in value.split("/")):
        raise ValueError("must be absolute, without . or .., of the characters [A-Za-z0-9._/+@=-], without a final /")
    if any(part.startswith(".wh.") for part in value.split("/")):
        raise ValueError("a part that begins with .wh. would delete files when the image is unpacked")
    if any(len(part) > _COMPONENT for part in value.split("/")):
        raise ValueError(f"a part is longer than {_COMPONENT} bytes, which no file system holds")
    if value.split("/")[1] in _KERNELS:
        raise ValueError("the kernel's own file systems are mounted over /proc, /sys and /dev when an image runs")
    return value


def check_place(value: str) -> str:
    """A path of this machine that a kernel can look for."""
    size = len(value.encode("utf-8", "surrogateescape"))
    if "\0" in value:
        raise ValueError("a path holds no NUL character")
    if size > _PLACE:
        raise ValueError(f"a path of {size} bytes, the kernel takes {_PLACE}")
    if any(len(part.encode("utf-8", "surrogateescape")) > _COMPONENT for part in value.split("/")):
        raise ValueError(f"a part is longer than {_COMPONENT} bytes, which no file system holds")
    return value


def check_git_url(value: str) -> str:
    """A repository that git can fetch without a key of this machine's, named so that the name may be published."""
    match = _GIT.match(value)
    if match is None or not value.isprintable() or " " in value or "\\" in value:
        raise ValueError("must be an https:// or file:// URL (http:// for this machine only; ssh is not supported)")
    if "@" in (match["host"] or ""):
        raise ValueError("holds credentials, and a spec is published: let a credential helper of git's know them")
    if any(part in ("..", "") for part in match["path"].rstrip("/").split("/")[1:]):
        raise ValueError("has an empty part or .. in its path")
    return value


def check_inside(value: str) -> str:
    """A relative path that stays below where it starts."""
    if value.startswith("/") or "\0" in value or ".." in value.split("/") or not value:
        raise ValueError("must be relative, without ..")
    return check_place(value)


def check_user(value: str | None) -> str | None:
    """``user``, ``user:group``, by name or number."""
    if value is not None and not _USER.match(value):
        raise ValueError("must be user or user:group, names or numbers")
    return value


def check_patterns(value: tuple[str, ...]) -> tuple[str, ...]:
    """Patterns of paths below a root."""
    for pattern in value:
        parts = pattern.split("/")
        if not pattern.strip("/") or pattern.startswith("/") or "\0" in pattern or ".." in parts:
            raise ValueError(f"{pattern!r} is no path below the root: relative, without ..")
    return value


def read_input(path: Path, what: str) -> bytes:
    """The bytes of a file that the user names. A pipe or device is refused and not waited for.

    Raises:
        SpecError: ``spec.path``.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise SpecError("spec.path", f"the {what} {show(str(path))} is not a file", where=str(path))
            if info.st_size > _MOST:
                raise SpecError(
                    "spec.path", f"the {what} {show(str(path))} has {info.st_size} bytes: that is no {what}",
                    where=str(path), expected=f"<= {_MOST}", actual=info.st_size,
                )  # fmt: skip
            with open(fd, "rb", closefd=False) as file:
                return file.read(_MOST + 1)
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError("spec.path", f"cannot read the {what} {show(str(path))}: {reason}", where=str(path)) from None
