"""One layer's bytes: decoded, hashed and held to the rules of a layer tar, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from oci_builder.judge.hashing import Hashers, SideHash
from oci_builder.judge.options import JudgeOptions, OnEntry
from oci_builder.model.digest import Digest
from oci_builder.model.errors import FormatError, OciBuilderError, PolicyError, show
from oci_builder.rootfs.apply_nodes import STANDARD_NODES
from oci_builder.rootfs.tree_log import LayerTree, TreeLog
from oci_builder.rootfs.whiteout import hidden_by
from oci_builder.wire.compress import Compression, MemberSeen, Options, decode_chunks, sniff
from oci_builder.wire.compress.gzipframe import is_our_member
from oci_builder.wire.compress.pull import Pull
from oci_builder.wire.tar import Kind, NameLedger, TarEntry, TarReader

# Findings, warnings and open hard links that are kept of one layer.
_MOST_KEPT = 10_000
_END_MARKER = 1024
_OF_THE_STREAM = ("gzip.", "zstd.", "limit.layer", "limit.ratio", "io.")


@dataclass(slots=True)
class LayerFacts:
    """What a blob is, read as a layer.

    Attributes:
        compression: what its bytes show.
        diff_id, tar_size: of the uncompressed bytes; None where they could not be read to the end.
        problems, warnings: of the compression and the tar, for whoever finds that this blob is a layer.
        rule_breaks: what our own layers may not have (devices, setuid), judged only when it is ours.
        tree: its names, for the tree that all layers make.
        open_links: the first hard links to names that were not in it before them, as (name, target).
        newest: the newest time in it, nanoseconds since 1970.
        ours: True when its first gzip member is one of ours.
    """

    compression: Compression = "identity"
    diff_id: Digest | None = None
    tar_size: int = 0
    problems: list[OciBuilderError] = field(default_factory=list)
    warnings: list[tuple[str, str]] = field(default_factory=list)
    rule_breaks: list[OciBuilderError] = field(default_factory=list)
    tree: LayerTree = field(default_factory=LayerTree)
    open_links: list[tuple[bytes, bytes]] = field(default_factory=list)
    newest: int = 0
    ours: bool = False

    @property
    def names(self) -> NameLedger:
        """Every name in it."""
        return self.tree.names

    @property
    def log(self) -> TreeLog:
        """Its names in order."""
        return self.tree.log

    def warn(self, code: str, message: str) -> None:
        """Keep a warning, while there are not too many."""
        if len(self.warnings) < _MOST_KEPT:
            self.warnings.append((code, message))

    @property
    def weight(self) -> int:
        """What it takes to judge it once more, in names."""
        return self.names.size + 16 * (len(self.problems) + len(self.warnings) + len(self.open_links))

    @property
    def padded(self) -> bool:
        """Whether NULs follow the last gzip member: part of the blob, but of no gzip stream."""
        return any(code == "gzip.trailing" for code, _ in self.warnings)


def read_layer(
    chunks: Iterable[bytes | memoryview], where: str, options: JudgeOptions, hashers: Hashers, blob_hash: SideHash,
    name: str = "",
) -> LayerFacts:  # fmt: skip
    """Read a blob as a layer. Never raises for what its bytes hold; all of ``chunks`` is consumed.

    Args:
        name: of the member, for ``options.entries``.
        blob_hash: takes the blob's bytes; where they are not compressed, its digest is the diff_id too.
    """
    pull = Pull(blob_hash.tee(chunks))
    head = pull.peek(64)
    facts = LayerFacts(compression=sniff(head), ours=is_our_member(head), tree=LayerTree.within(options.limits))
    last: list[MemberSeen] = []

    def seen(member: MemberSeen) -> None:
        last[:] = [member]

    strict = options.strict and facts.ours
    how = Options(options.limits, where, options.workers, strict, facts.warn, seen)
    packed = facts.compression != "identity"
    tar_hash = hashers.new("tar") if packed else blob_hash
    decoded = decode_chunks(_rest(pull), facts.compression, how)
    try:
        stream = tar_hash.tee(decoded) if packed else decoded
        tar = TarReader(stream, limits=options.limits, where=where, strict=strict, warn=facts.warn)
        end = _walk(tar, where, facts, options.entries, name)
        for chunk in decoded:
            if packed:
                tar_hash.update(chunk)
        facts.diff_id, facts.tar_size = tar_hash.digest(), tar_hash.size
        _name_trailing_member(facts, end, last, where)
    except OciBuilderError as error:
        facts.problems.append(error)
    finally:
        decoded.close()
    for _ in _rest(pull):
        pass
    return facts


def _rest(pull: Pull) -> Iterator[memoryview]:
    while chunk := pull.some(1 << 20):
        yield chunk


def _walk(tar: TarReader, where: str, facts: LayerFacts, told: OnEntry | None, name: str) -> int:
    """Check the tar; a fault of it is kept and the walk ends, while its bytes go on to be hashed.

    Returns where the end marker of a well-formed tar would end.
    """
    end = 0
    try:
        for entry in tar:
            end = tar.tar_size + entry.size + (-entry.size % 512)
            _check_entry(entry, where, facts)
            if told is not None:
                told(name, entry, tar)
    except OciBuilderError as error:
        if error.code.startswith(_OF_THE_STREAM):
            raise
        facts.problems.append(error)
    return end + _END_MARKER


def _name_trailing_member(facts: LayerFacts, end: int, last: list[MemberSeen], where: str) -> None:
    """What follows the tar in a member of its own was appended: say so, it is no slip of a tar writer."""
    for at, problem in enumerate(facts.problems):
        if problem.code == "tar.trailing" and last and last[0].offset and last[0].data_offset >= end:
            facts.problems[at] = FormatError(
                "layer.trailing",
                f"{where}: a further member at byte {last[0].offset} holds data after the end of the tar",
                where=where, offset=last[0].offset,
            )  # fmt: skip


def _check_entry(entry: TarEntry, where: str, facts: LayerFacts) -> None:
    if len(facts.problems) + len(facts.rule_breaks) > _MOST_KEPT:
        return
    if entry.mtime_ns > facts.newest:
        facts.newest = entry.mtime_ns
    code = facts.tree.note(entry)
    if code == "entry.duplicate":
        facts.problems.append(
            PolicyError(code, f"{where}: {show(entry.name)} stands twice", where=f"{where}: {show(entry.name)}")
        )
    elif code == "entry.link_target" and len(facts.open_links) < _MOST_KEPT:
        facts.open_links.append((entry.name, entry.link))
    try:
        hidden_by(entry, where)
    except PolicyError as error:
        facts.problems.append(error)
    if entry.kind is Kind.BLOCK or (entry.kind is Kind.CHAR and (entry.major, entry.minor) not in STANDARD_NODES):
        what = f"device {entry.major}:{entry.minor} is not one of the standard ones"
        facts.problems.append(_breaks("entry.device", what, entry, where))
    elif entry.kind in (Kind.CHAR, Kind.FIFO):
        facts.rule_breaks.append(_breaks("entry.device", f"a {entry.kind} entry", entry, where))
    elif entry.mode & 0o6000 and entry.kind is Kind.FILE:
        facts.rule_breaks.append(_breaks("entry.mode", "a setuid or setgid file", entry, where))


def _breaks(code: str, what: str, entry: TarEntry, where: str) -> PolicyError:
    place = f"{where}: {show(entry.name)}"
    return PolicyError(code, f"{place}: {what}", where=place, actual=what)
