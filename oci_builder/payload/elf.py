"""What the dynamic loader and a GPU driver would read of an ELF file. The only file that imports pyelftools.

Counts in a header are checked against the bytes that the file has before anything iterates over them, so a hostile
file costs no more than its size.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any, cast

from elftools.common.exceptions import DWARFError, ELFError
from elftools.construct import ConstructError
from elftools.elf.dynamic import Dynamic
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerDefSection, GNUVerNeedSection

from oci_builder.payload.fatbin import MemorySource, Source

MAGIC = b"\x7fELF"
EM_CUDA = 190
FATBIN_SECTIONS = (".nv_fatbin", "__nv_relfatbin")
_DF_TEXTREL = 4
_PF_X = 1
_VER_WEAK = 2
_ISA_NEEDED = "GNU_PROPERTY_X86_ISA_1_NEEDED"
_TEXT_LIMIT = 4096


class BadElf(ValueError):
    """An ELF file whose headers make no sense."""


@dataclass(frozen=True, slots=True)
class ElfFacts:
    """The facts of one ELF file.

    Attributes:
        machine: ``x64``, ``AArch64``, … as pyelftools names it.
        kind: ``exec`` (has an interpreter), ``dyn`` (a library), ``rel`` (an object file).
        soname: DT_SONAME, or empty.
        needed: DT_NEEDED in order.
        rpath, runpath: directories of DT_RPATH and DT_RUNPATH in order, verbatim.
        requires: (library, its symbol versions needed) from .gnu.version_r; weak ones left out.
        defines: symbol versions that it offers (.gnu.version_d).
        exec_stack: asks for an executable stack.
        textrel: has relocations in its code.
        isa: highest x86-64 level that a property note says it needs: 0 (not said) to 4.
        fatbins: (section, offset, size) of its CUDA fat binary sections.
    """

    machine: str
    kind: str
    soname: str = ""
    needed: tuple[str, ...] = ()
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    requires: tuple[tuple[str, tuple[str, ...]], ...] = ()
    defines: frozenset[str] = frozenset()
    exec_stack: bool = False
    textrel: bool = False
    isa: int = 0
    fatbins: tuple[tuple[str, int, int], ...] = ()


@dataclass(slots=True)
class _Dynamic:
    soname: str = ""
    needed: list[str] = field(default_factory=list)
    rpath: tuple[str, ...] = ()
    runpath: tuple[str, ...] = ()
    textrel: bool = False


def read_elf(source: Source) -> ElfFacts:
    """Read the facts of an ELF file.

    Raises:
        BadElf: the headers are cut off or contradict the file's size.
    """
    try:
        # pyelftools' objects refer to each other; closing frees the bytes without waiting for the cycle collector.
        with _stream(source) as stream:
            return _read(ELFFile(cast("IO[bytes]", stream)), source.size)
    except BadElf:
        raise
    except (
        ELFError, DWARFError, ConstructError, ValueError, LookupError, TypeError, AttributeError, OverflowError,
        AssertionError, RecursionError, MemoryError, io.UnsupportedOperation,
    ) as error:  # fmt: skip
        # pyelftools does not promise its exceptions: whatever it meets in a hostile header means the same to us.
        raise BadElf(f"{type(error).__name__}: {error}"[:200]) from None


def _read(elf: Any, size: int) -> ElfFacts:
    header = elf.header
    _expect(header["e_shoff"] + header["e_shnum"] * header["e_shentsize"] <= size, "section headers lie past the end")
    _expect(header["e_phoff"] + header["e_phnum"] * header["e_phentsize"] <= size, "program headers lie past the end")
    _expect(elf.num_sections() * 40 <= size, "more section headers than bytes")
    sections = [(section.name[:_TEXT_LIMIT], section) for section in elf.iter_sections()]
    segments = list(elf.iter_segments())
    dynamic = _dynamic(sections, segments, size)
    kind = "rel" if header["e_type"] == "ET_REL" else "dyn"
    if any(s["p_type"] == "PT_INTERP" for s in segments):
        kind = "exec"
    return ElfFacts(
        machine=elf.get_machine_arch(),
        kind=kind,
        soname=dynamic.soname,
        needed=tuple(dynamic.needed),
        rpath=dynamic.rpath,
        runpath=dynamic.runpath,
        requires=tuple(_requires(sections, size)),
        defines=frozenset(_defines(sections, size)),
        exec_stack=kind != "rel" and any(s["p_type"] == "PT_GNU_STACK" and s["p_flags"] & _PF_X for s in segments),
        textrel=dynamic.textrel,
        isa=_isa(sections, size),
        fatbins=tuple(_fatbins(sections, size)),
    )


def _text(value: str | None) -> str:
    return (value or "")[:_TEXT_LIMIT]


def _expect(good: bool, message: str) -> None:
    if not good:
        raise BadElf(message)


def _dynamic(sections: list[tuple[str, Any]], segments: list[Any], size: int) -> _Dynamic:
    # The loader goes by the segment; separate debug files keep a section without content.
    tables: list[Any] = [s for s in segments if isinstance(s, Dynamic)]
    tables += [s for _, s in sections if s["sh_type"] != "SHT_NOBITS" and isinstance(s, Dynamic)]
    out = _Dynamic()
    for tag in itertools.islice(tables[0].iter_tags() if tables else (), size // 8):
        name = tag.entry.d_tag
        if name == "DT_NEEDED":
            out.needed.append(_text(tag.needed))
        elif name == "DT_SONAME":
            out.soname = _text(tag.soname)
        elif name == "DT_RPATH":
            out.rpath = tuple(_text(tag.rpath).split(":"))
        elif name == "DT_RUNPATH":
            out.runpath = tuple(_text(tag.runpath).split(":"))
        elif name == "DT_TEXTREL" or (name == "DT_FLAGS" and tag.entry.d_val & _DF_TEXTREL):
            out.textrel = True
    return out


def _requires(sections: list[tuple[str, Any]], size: int) -> Iterator[tuple[str, tuple[str, ...]]]:
    for _, section in sections:
        if isinstance(section, GNUVerNeedSection):
            for library, versions in itertools.islice(section.iter_versions(), size // 16):
                strong = (v.name for v in itertools.islice(versions, size // 16) if not v["vna_flags"] & _VER_WEAK)
                yield _text(library.name), tuple(sorted(map(_text, strong)))


def _defines(sections: list[tuple[str, Any]], size: int) -> Iterator[str]:
    for _, section in sections:
        if isinstance(section, GNUVerDefSection):
            for _, names in itertools.islice(section.iter_versions(), size // 20):
                yield from (_text(name.name) for name in itertools.islice(names, 1))


def _isa(sections: list[tuple[str, Any]], size: int) -> int:
    for name, section in sections:
        if name != ".note.gnu.property" or section["sh_type"] != "SHT_NOTE" or section["sh_size"] > 4096:
            continue
        for note in itertools.islice(section.iter_notes(), 64):
            for item in note["n_desc"] if isinstance(note["n_desc"], list) else ():
                if item["pr_type"] in (_ISA_NEEDED, 0xC0008002) and isinstance(item["pr_data"], int):
                    return int(item["pr_data"]).bit_length() & 7
    return 0


def _fatbins(sections: list[tuple[str, Any]], size: int) -> Iterator[tuple[str, int, int]]:
    for name, section in sections:
        if name in FATBIN_SECTIONS and section["sh_type"] != "SHT_NOBITS":
            _expect(section["sh_offset"] + section["sh_size"] <= size, f"{name} lies past the end")
            yield name, section["sh_offset"], section["sh_size"]


def _stream(source: Source) -> io.BufferedIOBase:
    if isinstance(source, MemorySource):
        return io.BytesIO(source.data)
    return io.BufferedReader(_SourceIO(source), 16 << 10)


class _SourceIO(io.RawIOBase):
    """A ``Source`` as a seekable file object."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._source.size}[whence]
        self._at = max(0, start + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        data = self._source.pread(len(buffer), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)
