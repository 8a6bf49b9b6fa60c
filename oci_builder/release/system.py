"""The packages of a base image, from the database that its package manager keeps. Databases are only read, never run.

Sources: deb-control(5) and dpkg's /var/lib/dpkg/status (status.d in images without dpkg); Alpine's apk database.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_STATUS = re.compile(rb"var/lib/dpkg/(?:status|status\.d/[^/]+)")
_APK = b"lib/apk/db/installed"
_OS_RELEASE = (b"etc/os-release", b"usr/lib/os-release")
# RPM keeps a binary database; what is in it is not guessed.
_RPM = re.compile(rb"(?:var/lib|usr/lib/sysimage)/rpm/(?:rpmdb\.sqlite|Packages(?:\.db)?)")


def wants_system(path: bytes) -> bool:
    """Whether a file says something about the system's packages."""
    return path in (_APK, *_OS_RELEASE) or any(p.fullmatch(path) for p in (_STATUS, _RPM))


def system_packages(files: Mapping[bytes, bytes]) -> tuple[list[dict[str, str]], list[str]]:
    """(packages, databases that cannot be read), both sorted.

    Args:
        files: path -> content of what ``wants_system`` takes.
    """
    distro, version = _distro(files)
    found: list[dict[str, str]] = []
    for path, data in sorted(files.items()):
        if _STATUS.fullmatch(path) and not path.endswith(b".md5sums"):
            found += [{**p, "type": "deb"} for p in _deb(data)]
        elif path == _APK:
            found += [{**p, "type": "apk"} for p in _alpine(data)]
    label = f"{distro}-{version}" if distro and version else distro
    packages = [{**p, "vendor": distro, "distro": label} for p in found]
    unique = {(p["type"], p["name"], p["version"], p["arch"]): p for p in packages}
    unread = [path.decode("utf-8", "replace") for path in files if _RPM.fullmatch(path)]
    return [unique[key] for key in sorted(unique)], sorted(unread)


def _distro(files: Mapping[bytes, bytes]) -> tuple[str, str]:
    text = next((files[p].decode("utf-8", "replace") for p in _OS_RELEASE if p in files), "")
    pairs = dict(re.findall(r"^([A-Z_]+)=[\"']?(.*?)[\"']?$", text, re.MULTILINE))
    return pairs.get("ID", ""), pairs.get("VERSION_ID", "")


def _paragraphs(data: bytes) -> Iterator[dict[str, str]]:
    """deb-control(5): fields of paragraphs; continuation lines are left out."""
    for paragraph in re.split(r"\n\s*\n", data.decode("utf-8", "replace")):
        lines = (line.partition(":") for line in paragraph.splitlines() if line[:1] not in (" ", "\t", "#"))
        fields = {name.strip(): value.strip() for name, colon, value in lines if colon}
        if fields:
            yield fields


def _deb(data: bytes) -> Iterator[dict[str, str]]:
    for fields in _paragraphs(data):
        # Removed packages stay in the file, with "config-files" or "not-installed" as their state.
        state = fields.get("Status", "install ok installed").split()
        if fields.get("Package") and fields.get("Version") and state[-1:] == ["installed"]:
            yield {"name": fields["Package"], "version": fields["Version"], "arch": fields.get("Architecture", ""),
                   "licence": ""}  # fmt: skip


def _alpine(data: bytes) -> Iterator[dict[str, str]]:
    for paragraph in re.split(r"\n\s*\n", data.decode("utf-8", "replace")):
        fields = {line[0]: line[2:].strip() for line in paragraph.splitlines() if line[1:2] == ":"}
        if fields.get("P") and fields.get("V"):
            yield {"name": fields["P"], "version": fields["V"], "arch": fields.get("A", ""),
                   "licence": fields.get("L", "")}  # fmt: skip
