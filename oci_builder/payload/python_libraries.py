"""The libraries that an interpreter was linked to on this machine, carried with it: a bare host need not have them.

A standalone Python needs the C library only. A distribution's or a self-compiled one needs the machine's OpenSSL,
libffi, SQLite and so on. The C library stays the host's, and so does the compiler's run time: libgcc_s and libstdc++
must be as new as the newest code in the process (PEP 600 expects them of a machine), and a carried older one would
shadow the host's.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from oci_builder.model.events import Emit, Event
from oci_builder.payload.elf import MAGIC, ElfFacts
from oci_builder.payload.relocate import read_facts, set_search_path, walk
from oci_builder.payload.relocate_rules import relative
from oci_builder.rootfs.host_elf import configured_folders

_HOSTS = re.compile(
    r"(?:ld-linux.*|lib(?:c|m|mvec|dl|pthread|rt|util|resolv|anl|nss_.*|thread_db|BrokenLocale"
    r"|gcc_s|stdc\+\+|cuda|nvcuvid|nvidia-.*)\.so(?:\..*)?|libnsl\.so\.1)\Z"
)
# What asks for these is a part of glibc, whatever its name: it works with the very glibc it was built with.
_PRIVATE = "GLIBC_PRIVATE"
_DEFAULT_FOLDERS = ("/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
_COMMON = re.compile(rb"/usr/share/common-licenses/([A-Za-z0-9.-]+)")
_ORIGIN = re.compile(r"\$(?:ORIGIN|\{ORIGIN\})(?=/|\Z)")


@dataclass(frozen=True, slots=True)
class _Object:
    """An ELF file.

    Attributes:
        place: where it stands.
        facts: what the loader would read of it.
        origins: folders that ``$ORIGIN`` means: its own, and the one that its original has.
    """

    place: Path
    facts: ElfFacts
    origins: tuple[Path, ...]


def carry_libraries(root: Path, emit: Emit, prefix: Path | None = None) -> dict[str, Path]:
    """Copy the libraries that the programs and modules of a Python need into its ``lib``, and let them be found there.

    Their terms go to ``share/licences/<name>.txt``; that file is empty where this machine does not say them.

    Idempotent: what is in the tree is not carried again.

    Args:
        root: a copied Python with ``bin`` and ``lib``.
        prefix: where it was copied from; its own libraries may lie there.

    Returns:
        Name of each carried library -> the file that it is a copy of, sorted.

    Raises:
        SpecError, TransportError: ``payload.patchelf``.
        OSError: the disk.
    """
    search = _Search(root, configured_folders())
    own = list(_objects(root, prefix))
    for one in own:
        search.follow(one)
    carried = {name: found.place for name, found in sorted(search.carried.items())}
    _copy(root, carried)
    for path, facts in sorted(
        [(one.place, one.facts) for one in own]
        + [(root / "lib" / name, found.facts) for name, found in search.carried.items()]
    ):
        if not carried.keys().isdisjoint(facts.needed):
            _look_beside(root, path, facts)
    for name, asker in sorted(search.missing.items()):
        emit(Event("note", "python", message=f"{asker} needs {name}, which this machine has not; it will not load"))
    if carried:
        emit(Event("note", "python", message=f"{len(carried)} libraries carried: {' '.join(carried)}"))
    return carried


@dataclass(slots=True)
class _Search:
    """Follows what ELF files need through this machine."""

    root: Path
    folders: list[Path]
    carried: dict[str, _Object] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def follow(self, asker: _Object) -> None:
        """Find everything that a file needs, and what that needs in turn."""
        pending = [asker]
        while pending:
            one = pending.pop()
            for name in one.facts.needed:
                if name in self.carried or _HOSTS.match(name) or (self.root / "lib" / name).exists():
                    continue
                found = self._find(name, one)
                if found is None:
                    self.missing.setdefault(name, one.place.name)
                elif not found.place.is_relative_to(self.root) and not _is_glibc(found.facts):
                    self.carried[name] = found
                    pending.append(found)

    def _find(self, name: str, asker: _Object) -> _Object | None:
        if "/" in name:
            return None
        own = [
            Path(os.path.normpath(entry.replace("${ORIGIN}", str(origin)).replace("$ORIGIN", str(origin))))
            for entry in asker.facts.runpath or asker.facts.rpath
            if entry
            for origin in asker.origins
        ]
        for folder in (*own, *self.folders, *map(Path, _DEFAULT_FOLDERS)):
            facts = _facts(folder / name) if (folder / name).is_file() else None
            if facts is not None and facts.machine == "x64":
                return _Object(folder / name, facts, (folder,))
        return None


def _objects(root: Path, prefix: Path | None) -> Iterator[_Object]:
    for path, _ in walk(os.fsencode(root)):
        place = root / os.fsdecode(path)
        if not place.is_symlink() and (b".so" in path or path.startswith(b"bin/")):
            facts = _facts(place)
            if facts is not None:
                former = () if prefix is None else (prefix / os.fsdecode(os.path.dirname(path)),)
                yield _Object(place, facts, (place.parent, *former))


def _facts(place: Path) -> ElfFacts | None:
    with place.open("rb") as file:
        if file.read(4) != MAGIC:
            return None
        return read_facts(file.fileno(), os.fstat(file.fileno()).st_size)


def _copy(root: Path, places: Mapping[str, Path]) -> None:
    for name, place in sorted(places.items()):
        shutil.copyfile(place, root / "lib" / name)
    texts = {f"{name}.txt": text for name, text in _terms(places).items()}
    # Debian's copyright files leave out the long texts that every Debian has.
    for word in sorted({found for text in texts.values() for found in _COMMON.findall(text)}):
        common = Path("/usr/share/common-licenses", word.decode().rstrip("."))
        if common.is_file():
            texts[f"common/{common.name}.txt"] = common.read_bytes()
    for name, text in sorted(texts.items()):
        place = root / "share/licences" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(text)


def _terms(places: Mapping[str, Path]) -> dict[str, bytes]:
    """The copyright file of each library's Debian package; empty where there is none to be found."""
    out = dict.fromkeys(places, b"")
    program = shutil.which("dpkg-query")
    if program is None or not places:
        return out
    # With a merged /usr, the package's list may name either side of it.
    names: dict[str, str] = {}
    for name, place in places.items():
        real = str(place.resolve())
        names |= dict.fromkeys((str(place), real, real.removeprefix("/usr"), str(place).removeprefix("/usr")), name)
    done = subprocess.run([program, "-S", *sorted(names)], capture_output=True, text=True, check=False)
    for line in sorted(done.stdout.splitlines()):
        package, _, path = line.partition(": ")
        text = Path("/usr/share/doc", package.partition(":")[0], "copyright")
        if path in names and "," not in package and text.is_file():
            out[names[path]] = text.read_bytes()
    return out


def _is_glibc(facts: ElfFacts) -> bool:
    return any(_PRIVATE in versions for _, versions in facts.requires)


def _look_beside(root: Path, place: Path, facts: ElfFacts) -> None:
    """Search in the tree's ``lib`` first; relative places stay, absolute ones are of this machine."""
    below = os.fsencode(place.relative_to(root))
    beside = f"$ORIGIN/{os.fsdecode(relative(below, b'lib'))}".removesuffix("/.")
    kept = [entry for entry in facts.runpath or facts.rpath if _ORIGIN.match(entry) and entry != beside]
    set_search_path(os.fsencode(place), ":".join((beside, *kept)))
