"""What readiness wants to know of one file: read once, while its bytes are at hand, and then forgotten."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from oci_builder.payload.elf import EM_CUDA, MAGIC, BadElf, ElfFacts, read_elf
from oci_builder.payload.fatbin import MAGIC as FATBIN
from oci_builder.payload.fatbin import Arch, BadFatbin, Code, Source, embedded_containers, section_containers

AR_MAGIC = b"!<arch>\n"
_TOOLS = frozenset({"nvcc", "ptxas", "ptxas-blackwell", "cicc", "fatbinary", "nvlink", "cuobjdump", "nvdisasm"})
_TOOL_VERSION = re.compile(rb"release [0-9]+\.[0-9]+, V([0-9]+\.[0-9]+\.[0-9]+)")
_ARCH_NOTE = re.compile(rb"-arch[ =](sm_[0-9]{2,3}[af]?)[ \0]")
_PTX_VERSION = re.compile(rb"^[ \t]*\.version[ \t]+([0-9]{1,3})\.([0-9]{1,3})\b", re.M)
_PTX_TARGET = re.compile(rb"^[ \t]*\.target[ \t]+(sm_[0-9]{2,3}[af]?)\b", re.M)
_ACCELERATED = 0x8

Entries = tuple[Code, ...]


@dataclass(frozen=True, slots=True)
class GpuCode:
    """The GPU code of one file, as (entries of a container, how many such containers).

    Attributes:
        modules: what the CUDA runtime registers: ``.nv_fatbin``, or the file itself (a cubin, PTX, a fat binary).
        relocatable: ``__nv_relfatbin``: input of a device link, loadable only where nothing was linked from it.
        embedded: containers in ordinary data, which the library loads by itself (cuFFT, cuBLASLt).
        bad: why a part could not be read; empty when all of it was.
    """

    modules: tuple[tuple[Entries, int], ...] = ()
    relocatable: tuple[tuple[Entries, int], ...] = ()
    embedded: tuple[tuple[Entries, int], ...] = ()
    bad: str = ""

    def entries(self) -> Counter[tuple[str, Arch]]:
        """How many entries of each kind and architecture a listing of the registered modules shows."""
        shown = self.modules or self.relocatable
        return Counter((code.kind, code.arch) for entries, times in shown for code in entries * times)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Facts of one file.

    Attributes:
        elf: of a host ELF file.
        gpu: its GPU code, where it has any.
        tool: the CUDA release that a CUDA tool says it is, e.g. ``13.0.88``.
        text: the lines that matter of a text file that readiness reads.
        loose: the file is GPU code itself: a cubin, PTX or fat binary.
        bad: why an ELF file could not be read.
    """

    elf: ElfFacts | None = None
    gpu: GpuCode | None = None
    tool: str = ""
    text: str = ""
    loose: bool = False
    bad: str = ""


def wanted(path: bytes, head: bytes) -> Callable[[bytes, Source], FileFacts] | None:
    """The reader for a file with this path and these first bytes (at least 8 if it has them); None: of no interest."""
    if head.startswith(MAGIC):
        return _read_elf
    if head.startswith(AR_MAGIC):
        return _read_archive
    if head.startswith(FATBIN):
        return _read_fatbin
    if path.endswith(b".ptx"):
        return _read_ptx
    return _read_text if _text_filter(path) else None


def wants_path(path: bytes) -> bool:
    """Whether the path alone makes a file interesting, whatever its first bytes are."""
    return path.endswith(b".ptx") or _text_filter(path) is not None


def _read_elf(path: bytes, source: Source) -> FileFacts:
    head = source.pread(64, 0)
    if len(head) == 64 and struct.unpack_from("<H", head, 18)[0] == EM_CUDA:
        return FileFacts(gpu=GpuCode(modules=(((_cubin(head, source),), 1),)), loose=True)
    try:
        elf = read_elf(source)
    except BadElf as error:
        return FileFacts(bad=str(error))
    gpu = _elf_code(elf, source)
    return FileFacts(elf=elf, gpu=gpu, tool=_tool(path, source))


def _elf_code(elf: ElfFacts, source: Source) -> GpuCode | None:
    groups: dict[str, Counter[Entries]] = {".nv_fatbin": Counter(), "__nv_relfatbin": Counter()}
    bad = ""
    for name, offset, size in elf.fatbins:
        try:
            groups[name].update(c.entries for c in section_containers(source, offset, size))
        except BadFatbin as error:
            bad = f"{name}: {error}"
    known = tuple((offset, offset + size) for _, offset, size in elf.fatbins)
    embedded = Counter(c.entries for c in embedded_containers(source, known))
    modules, relocatable = (_frozen(groups[n]) for n in (".nv_fatbin", "__nv_relfatbin"))
    if not (modules or relocatable or embedded or bad):
        return None
    return GpuCode(modules, relocatable, _frozen(embedded), bad)


def _cubin(head: bytes, source: Source) -> Code:
    (flags,) = struct.unpack_from("<I", head, 48)
    # ABI 8 (CUDA 13) moved the architecture up by a byte; the compiler's note names the suffix, which the flags of
    # code that uses no special instruction leave out.
    number = (flags >> 8) & 0xFF if head[8] >= 8 else flags & 0xFF
    note = _ARCH_NOTE.search(source.pread(min(source.size, 16 << 20), 0))
    arch = Arch.parse(note[1].decode()) if note else None
    return Code("sass", arch or Arch(number, "a" if head[8] >= 8 and flags & _ACCELERATED else ""))


def _read_fatbin(_path: bytes, source: Source) -> FileFacts:
    try:
        found = Counter(c.entries for c in section_containers(source, 0, source.size))
    except BadFatbin as error:
        return FileFacts(gpu=GpuCode(bad=str(error)), loose=True)
    return FileFacts(gpu=GpuCode(modules=_frozen(found)), loose=True)


def _read_ptx(_path: bytes, source: Source) -> FileFacts:
    text = source.pread(64 << 10, 0)
    version, target = _PTX_VERSION.search(text), _PTX_TARGET.search(text)
    arch = Arch.parse(target[1].decode()) if target else None
    if not version or not arch:
        return FileFacts()
    code = Code("ptx", arch, (int(version[1]), int(version[2])))
    return FileFacts(gpu=GpuCode(modules=(((code,), 1),)), loose=True)


def _read_archive(_path: bytes, source: Source) -> FileFacts:
    """A static library: the fat binaries of its members, which are found by their magic."""
    if not _any_fatbin(source):
        return FileFacts()
    modules: Counter[Entries] = Counter()
    relocatable: Counter[Entries] = Counter()
    for at, size in _members(source):
        member = _Slice(source, at, size)
        if not member.pread(4, 0).startswith(MAGIC):
            continue
        try:
            elf = read_elf(member)
            for name, offset, length in elf.fatbins:
                into = modules if name == ".nv_fatbin" else relocatable
                into.update(c.entries for c in section_containers(member, offset, length))
        except (BadElf, BadFatbin) as error:
            return FileFacts(gpu=GpuCode(_frozen(modules), _frozen(relocatable), bad=f"member at {at}: {error}"))
    if not modules and not relocatable:
        return FileFacts()
    return FileFacts(gpu=GpuCode(_frozen(modules), _frozen(relocatable)))


def _any_fatbin(source: Source) -> bool:
    # Most static libraries hold thousands of object files and no GPU code: one search settles it.
    return any(FATBIN in source.pread((1 << 20) + len(FATBIN), at) for at in range(0, source.size, 1 << 20))


def _members(source: Source) -> Iterator[tuple[int, int]]:
    """(offset, size) of each member of an ``ar`` archive; ends where the headers stop to make sense."""
    at = 8
    while True:
        header = source.pread(60, at)
        if len(header) < 60 or header[58:] != b"`\n" or not header[48:58].strip().isdigit():
            return
        size = int(header[48:58])
        yield at + 60, min(size, max(0, source.size - at - 60))
        at += 60 + size + size % 2


@dataclass(frozen=True, slots=True)
class _Slice:
    source: Source
    start: int
    size: int

    def pread(self, n: int, at: int) -> bytes:
        return self.source.pread(max(0, min(n, self.size - at)), self.start + at)


def _tool(path: bytes, source: Source) -> str:
    if path.rpartition(b"/")[2].decode("utf-8", "replace") not in _TOOLS:
        return ""
    for at in range(0, source.size, 1 << 20):
        match = _TOOL_VERSION.search(source.pread((1 << 20) + 64, at))
        if match:
            return match[1].decode()
    return ""


_TEXTS: tuple[tuple[re.Pattern[bytes], re.Pattern[bytes] | None], ...] = (
    # (path, lines to keep); None keeps all. A RECORD may have 30,000 lines, of which programs and libraries matter.
    (re.compile(rb"\.dist-info/METADATA\Z"), re.compile(rb"^(?:Name|Version): .*|^Requires-Dist: .*==.*", re.M)),
    (re.compile(rb"\.dist-info/RECORD\Z"), re.compile(rb"^[^\n,]*(?:\.so\b|\.cubin|\.ptx|\.a,|/bin/)[^\n]*", re.M)),
    (re.compile(rb"\Aetc/ld\.so\.conf(?:\.d/[^/]+\.conf)?\Z"), None),
    (re.compile(rb"\binclude/cuda\.h\Z"), re.compile(rb"^#define CUDA_VERSION [0-9]{1,9}\b", re.M)),
    (re.compile(rb"/flashinfer_cubin/cubins/.*/checksums\.txt\Z"), None),
)
_TEXT_SIZE = 32 << 20


def _text_filter(path: bytes) -> tuple[re.Pattern[bytes], re.Pattern[bytes] | None] | None:
    return next((t for t in _TEXTS if t[0].search(path)), None)


def _read_text(path: bytes, source: Source) -> FileFacts:
    found = _text_filter(path)
    data = source.pread(min(source.size, _TEXT_SIZE), 0)
    if found and found[1]:
        if path.endswith(b"METADATA"):
            data = data.partition(b"\n\n")[0]
        data = b"\n".join(found[1].findall(data))
    return FileFacts(text=data.decode("utf-8", "replace"))


def _frozen(counter: Counter[Entries]) -> tuple[tuple[Entries, int], ...]:
    return tuple(sorted(counter.items()))
