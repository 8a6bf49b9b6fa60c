"""Requirements lists: what a list may say, and the list without what is left out.

A list is an input with its own bytes in the key of the environment. What it names by path would be another input, which
nobody looks at, so that a list is whole or refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from oci_builder.model.errors import SpecError, show
from oci_builder.payload.names import normalize

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_ENTRY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*\s*(?:\[[^]]*\])?\s*(?:@\s*(?P<url>\S+)|[=<>!~])")
_HASHES = re.compile(r"--hash[= ]\s*([a-z0-9_]+):")
_STRONG = frozenset({"sha256", "sha384", "sha512"})
_CONTINUED = re.compile(r"\\\r?\n")
_COMMENT = re.compile(r"(?:^|\s)#.*")
_ABSOLUTE = re.compile(r"[a-z+]+://|/", re.IGNORECASE)
# Where packages come from and in which form: their hashes say whether they are the right ones.
_OPTIONS = frozenset({
    "-i", "--index-url", "--extra-index-url", "--no-index", "--no-binary", "--only-binary", "--require-hashes",
})  # fmt: skip
_OTHERS = frozenset({"-r", "--requirement", "-c", "--constraint", "-e", "--editable"})
_FOLDERS = frozenset({"-f", "--find-links"})


def keep_packages(text: str, omit: Mapping[str, str], where: str) -> Iterator[str]:
    """The lines of a requirements list without the packages that are left out.

    Raises:
        SpecError: ``payload.omit`` when one of those is not in the list: the reason would be about nothing.
    """
    omitted = {normalize(package) for package in omit}
    left, keep = set(omitted), True
    for line in text.splitlines(keepends=True):
        if not line[:1].isspace():
            match = _NAME.match(line)
            package = normalize(match.group()) if match else ""
            keep = package not in omitted
            left.discard(package)
        if keep:
            yield line
    all_there(left, "list", where)


def all_there(missing: set[str], source: str, where: str) -> None:
    """Refuse reasons about packages that a list or a lock does not have.

    Raises:
        SpecError: ``payload.omit``.
    """
    if missing:
        raise SpecError(
            "payload.omit", f"{where}.omit: the {source} has no package {min(missing)!r}", where=f"{where}.omit"
        )


def check_list(text: str, where: str) -> None:
    """Refuse a list that is not whole: one that takes in other files, or packages that lie at a relative path.

    Raises:
        SpecError: ``payload.list`` with the line and the remedy.
    """
    for line in _CONTINUED.sub(" ", text).splitlines():
        entry = _COMMENT.sub("", line).strip()
        wrong = _fault(entry) if entry else ""
        if wrong:
            raise SpecError("payload.list", f"{where}: {show(entry[:120])} {wrong}", where=where)


def weakly_pinned(text: str) -> list[str]:
    """Packages of a list whose hashes are all of a kind that can be forged (MD5, which uv takes)."""
    entries = [_COMMENT.sub("", line).strip() for line in _CONTINUED.sub(" ", text).splitlines()]
    weak = [entry for entry in entries if (found := _HASHES.findall(entry)) and not set(found) & _STRONG]
    return sorted({normalize(match[0]) for entry in weak if (match := _NAME.match(entry))})


def _fault(entry: str) -> str:
    if entry.startswith("-"):
        option, _, value = re.sub(r"[\s=]+", " ", entry, count=1).partition(" ")
        if option in _OPTIONS or (option in _FOLDERS and _ABSOLUTE.match(value)):
            return ""
        if option in _OTHERS or (option[:2] in _OTHERS and not option.startswith("--")):
            return "takes in another file, whose content is not pinned: write the packages and their hashes here"
        return "is no option that a list may have here (a place of packages is a URL or an absolute path)"
    match = _ENTRY.match(entry)
    if match is None:
        return "is no NAME==VERSION or NAME @ URL with hashes"
    url = match["url"]
    if url is not None and not _ABSOLUTE.match(url) and not url.startswith("file:/"):
        return "names a package by a relative path: give a URL or an absolute path, and its hash"
    return ""
