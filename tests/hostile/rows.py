"""The catalogue's rows: each id with one line, and the tests beside the cases that prove it.

``docs/hostile-cases.md`` shows the same; ``python -m tests.hostile.rows`` writes its tables anew.
"""

from __future__ import annotations

from pathlib import Path

from tests.hostile.cases import CASES

PAGE = Path(__file__).parents[2] / "docs" / "hostile-cases.md"
GROUPS = {
    "C2": "Blobs", "C3": "Documents", "C4": "Whiteouts", "C5": "Names", "C6": "Links", "C7": "Structure of a tar",
    "C8": "Metadata", "C9": "Compression", "C10": "Archives", "C11": "Registries", "C12": "Our own verbs",
}  # fmt: skip

ROWS: dict[str, tuple[str, str]] = {
    "C2-01": ("A blob whose content hashes to something else is refused.", "test_verify_ours wire/test_verified"),
    "C2-02": ("A blob with a byte too many is refused by its size; nobody reads further than that byte.", "wire/test_verified"),
    "C2-04": ("A size below zero is refused before anything is read.", "wire/test_verified"),
    "C2-05": ("Whoever stops in the middle of a blob still has the rest read and judged.", "wire/test_verified"),
    "C2-06": ("What is changed behind the last entry of a layer is found although no entry needs it.", "wire/test_verified test_unpack"),
    "C2-08": ("Digests of other algorithms, lengths, cases or with anything around them are no digests.", ""),
    "C2-09": ("A digest never becomes a path.", ""),
    "C2-10": ("A symbolic link in a layout's folder of blobs is not followed out of it.", ""),
    "C2-12": ("Data embedded in a descriptor is held to its digest and size like any blob.", ""),
    "C2-13": ("A write that fails, or another digest, leaves no blob to be seen.", "store/test_blobs faults/test_faults_calls"),
    "C2-14": ("A blob that rotted in the store is noticed, set aside and fetched anew.", "store/test_blobs transports/test_pull"),
    "C2-16": ("Clearing up takes nothing from a process that is still writing.", "store/test_blobs"),
    "C3-01": ("A manifest where an index is named, and the other way round.", ""),
    "C3-02": ("One document with the fields of two kinds.", ""),
    "C3-04": ("Documents above the limit are refused by their size, unread.", ""),
    "C3-05": ("JSON that is deep, has huge or impossible numbers, doubled keys, or is not quite JSON.", "fuzz/test_fuzz_mutations"),
    "C3-06": ("Fields of other types, missing fields, other spellings, nonsense for media types.", "fuzz/test_fuzz_mutations"),
    "C3-08": ("The config counts other layers than the manifest.", ""),
    "C3-09": ("A config without a root file system, or with one of another type.", ""),
    "C3-10": ("The config names another uncompressed layer than the one that is there.", ""),
    "C3-12": ("A history that tells of other layers; none at all is legal.", ""),
    "C3-13": ("A layer of a media type that nobody knows, or that is none of a layer.", ""),
    "C3-14": ("The media type says one compression, the bytes are another.", ""),
    "C3-16": ("The wanted platform is not there, is there twice, or hides too deep.", ""),
    "C3-17": ("A layout without its marker, or with another version's.", ""),
    "C3-18": ("An index that names a manifest which is not there.", ""),
    "C3-20": ("Layers to be fetched by URL are refused; no URL is ever followed.", ""),
    "C4-01": ("A whiteout of nothing.", ""),
    "C4-02": ("A whiteout of the folder itself or of the one above.", ""),
    "C4-04": ("An opaque mark hides what lies below it, before and after its siblings, and nothing of its own layer.", "rootfs/test_apply_peers"),
    "C4-05": ("Reserved whiteout names.", ""),
    "C4-06": ("A file and its whiteout in one layer: the whiteout speaks of the layers below.", ""),
    "C4-08": ("A whiteout of a link removes the link, and below a link stays inside the root.", ""),
    "C4-09": ("Folders named like whiteouts, with or without content.", ""),
    "C4-10": ("Whiteouts that are anything but empty files.", ""),
    "C4-11": ("Whiteouts of what is not there.", ""),
    "C4-12": ("Upper layers win over lower ones, whatever the types.", "rootfs/test_apply_peers"),
    "C4-13": ("A source file with a whiteout's name cannot be written and is refused.", "rootfs/test_scan"),
    "C4-14": ("Parents come before what they hold; whiteouts we write none.", "hostile/test_hostile_rows"),
    "C5-01": ("Names that lead above the root, in a header, a prefix, a record, a long name.", ""),
    "C5-02": ("Absolute names mean the root of the tree.", ""),
    "C5-03": ("Drive letters and backslashes are plain characters.", ""),
    "C5-04": ("Empty names, dots, doubled and trailing slashes.", ""),
    "C5-05": ("A NUL within a record's name or target.", ""),
    "C5-06": ("A NUL within a long name.", ""),
    "C5-07": ("Names with control characters, at the limits of length and beyond.", ""),
    "C5-08": ("Names that are not UTF-8 stay the bytes they are.", "rootfs/test_layers golden/test_golden_layer"),
    "C5-10": ("Names that begin with dots and are no parents.", ""),
    "C5-11": ("An entry below something that is a file.", ""),
    "C5-12": ("The root as anything but a folder.", ""),
    "C6-01": ("Through links to the top, or above it: everything lands inside the root.", "rootfs/test_resolve"),
    "C6-02": ("Through links to a neighbour of the destination, by every kind of entry: the neighbour stays unharmed.", "rootfs/test_resolve"),
    "C6-03": ("A folder becomes a link and a folder again within one layer.", ""),
    "C6-05": ("Links in circles and in chains beyond the kernel's count.", "rootfs/test_resolve"),
    "C6-06": ("A file written through a link that is replaced afterwards.", ""),
    "C6-07": ("Legal links keep their text.", ""),
    "C6-09": ("A hard link to a symbolic link is one to the link itself.", ""),
    "C6-10": ("Hard links before their targets, and without.", ""),
    "C6-11": ("Hard links to themselves, to folders, to what is hidden.", ""),
    "C6-13": ("Hard links into a lower layer: taken from others, never written.", ""),
    "C6-14": ("Links and folders that carry data, where readers differ.", ""),
    "C6-15": ("Equal inode numbers of two devices are no hard link.", "rootfs/test_scan test_plan"),
    "C7-01": ("Wrong checksums, wherever.", ""),
    "C7-02": ("Cut at every block's boundary, a byte before and behind.", "hostile/test_hostile_catalogue"),
    "C7-03": ("Half an end marker, none, and anything behind it.", ""),
    "C7-05": ("A file and a folder of one name.", ""),
    "C7-06": ("Children before their parents, or without.", ""),
    "C7-07": ("Sizes below zero, beyond reason, and that are no numbers.", ""),
    "C7-09": ("Entries above 8 GiB, in both spellings of their size.", "hostile/test_hostile_rows"),
    "C7-10": ("Two sizes for one entry: the record's counts, for everybody.", "wire/test_tar_arbiters"),
    "C7-11": ("Records whose lengths lie.", ""),
    "C7-13": ("Ten thousand headers before a file; global headers that change files.", ""),
    "C7-14": ("A key twice; two names for one entry.", ""),
    "C7-15": ("A header for an entry that never comes.", ""),
    "C7-16": ("Headers of headers beyond the limit, there or only claimed.", ""),
    "C7-17": ("Types that nobody knows.", ""),
    "C7-18": ("Tars of older days, and junk where those had none.", ""),
    "C7-19": ("Very many entries, very deep folders.", "hostile/test_hostile_rows"),
    "C7-20": ("Sparse files: expanded within the limits, refused where their map is wrong.", ""),
    "C7-21": ("Padding that is not zeros.", "fuzz/test_fuzz_bit_flips"),
    "C8-01": ("Owners that no kernel has.", ""),
    "C8-02": ("Device numbers that no kernel has.", ""),
    "C8-03": ("Devices and pipes: few are made, none is opened.", "rootfs/test_apply"),
    "C8-05": ("Set-user-ID survives the change of owner; ours never have it.", "rootfs/test_apply rootfs/test_scan"),
    "C8-06": ("Modes with bits of other kinds, and without any.", ""),
    "C8-07": ("Times that are none.", ""),
    "C8-09": ("Attributes: kept, left out, refused.", "rootfs/test_apply"),
    "C8-10": ("Attributes of links, and where a disk has none: said once.", "rootfs/test_apply"),
    "C8-11": ("No name and no number of the building machine gets into a layer.", "rootfs/test_scan test_plan"),
    "C8-13": ("A file that changes while it is read.", "rootfs/test_layers rootfs/test_scan_content faults/test_faults_world"),
    "C8-14": ("Links of a source tree are stored as links.", "rootfs/test_scan"),
    "C9-01": ("Bombs stop at a limit, before the disk is full.", "test_verify_hostile test_unpack wire/test_compress_decode"),
    "C9-03": ("Checksums, lengths, headers and bits of compressed bytes.", "fuzz/test_fuzz_bit_flips fuzz/test_fuzz_mutations"),
    "C9-04": ("More members or frames, with more behind the end.", ""),
    "C9-05": ("Zeros and junk behind compressed bytes.", ""),
    "C9-07": ("Windows beyond the limit, dictionaries, skippable frames.", ""),
    "C9-08": ("Nothing, one byte, a magic number.", ""),
    "C9-09": ("The same bytes with any number of threads and however they come.", "wire/test_compress_encode"),
    "C9-11": ("No helper program is used that could be missing.", "hostile/test_hostile_rows"),
    "C10-01": ("manifest.json is missing, empty, of another shape, or of two images.", ""),
    "C10-02": ("Members that are links, devices, or lead out.", ""),
    "C10-04": ("Members of one name.", ""),
    "C10-05": ("Members that nothing refers to: an error in ours, a warning in others.", "test_verify_hostile"),
    "C10-06": ("A config whose name is not its digest.", ""),
    "C10-08": ("Two archives that differ in a layer, a variable or the order.", "test_verify_ours"),
    "C10-09": ("Cut at a member's boundary, or outside in the gzip.", "test_verify_hostile"),
    "C10-10": ("JSON members above their limits.", ""),
    "C10-12": ("A layer used twice is stored once.", "hostile/test_hostile_rows"),
    "C11-01": ("Right headers, wrong body: the body counts.", "transports/test_registry_documents"),
    "C11-02": ("A connection that breaks is taken up where it broke, and the whole is verified.", "transports/test_registry_resume"),
    "C11-04": ("A server that ignores the range: nothing is spliced.", "transports/test_registry_resume"),
    "C11-05": ("The partial file of another blob, or a longer one.", "transports/test_registry_resume store/test_blobs"),
    "C11-06": ("Challenges: right, expired, forbidden, malformed.", "transports/test_registry_auth"),
    "C11-08": ("Redirects to where we must not go; credentials stay at home.", "transports/test_registry_guard"),
    "C11-09": ("Content encodings of a body.", "transports/test_registry_resume"),
    "C11-10": ("Bodies without end, or that never come.", "transports/test_registry_resume"),
    "C11-12": ("Two processes and one blob.", "transports/test_registry_resume transports/test_pull store/test_blobs"),
    "C12-01": ("The same inputs give the same bytes, whatever the surroundings.", "test_build rootfs/test_layers"),
    "C12-02": ("A tree survives the way into layers and back.", "rootfs/test_layers interop/test_debian_clients"),
    "C12-04": ("A sandbox's devices are right, and not what the image put in their place.", "chroot/test_hostile chroot/test_sandbox"),
    "C12-05": ("Images whose folders lead out of them.", "chroot/test_hostile"),
    "C12-06": ("Checks that hang, multiply, flood or die.", "chroot/test_process"),
    "C12-08": ("A receipt is never written twice and speaks of one archive.", "release/test_release_gates release/test_release_signing"),
    "C12-09": ("The Dockerfile says what the spec says.", "test_dockerfile"),
    "C12-10": ("No import against the direction.", "test_imports"),
    "C12-12": ("Mutated inputs of all kinds: only our errors, in bounds.", "fuzz/test_fuzz_mutations fuzz/test_fuzz_atheris"),
    "C12-13": ("Signatures: changed, truncated, foreign, more than one.", "release/test_release_signing"),
}  # fmt: skip


def cases_of(row: str) -> int:
    """How many cases of the table are this row's."""
    return sum(case.row == row for case in CASES)


def places(row: str) -> list[str]:
    """Test files beside the table that prove the row, relative to ``tests``."""
    return [f"{name}.py" for name in ROWS[row][1].split()]


def table(group: str) -> str:
    """The table of a group, in Markdown."""
    lines = ["| id | what | cases | tests |", "| --- | --- | --- | --- |"]
    for row, (line, _) in ROWS.items():
        if row.startswith(f"{group}-"):
            named = ", ".join(f"`{name}`" for name in places(row))
            lines.append(f"| {row} | {line} | {cases_of(row) or ''} | {named} |".replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def others() -> str:
    """Cases that come from reports of the field or are honest inputs, by themselves."""
    named: dict[str, str] = {case.id: case.title for case in CASES if case.row not in ROWS}
    return "\n".join(["| id | what |", "| --- | --- |", *(f"| {row} | {named[row]} |" for row in sorted(named))])


def tables() -> str:
    """All of them, each under its heading."""
    parts = [f"## {group}: {title}\n\n{table(group)}" for group, title in GROUPS.items()]
    return "\n\n".join([*parts, f"## Reports from the field, and what must be accepted\n\n{others()}"])


def main() -> None:
    head = PAGE.read_text().partition("## C2: ")[0]
    PAGE.write_text(head + tables() + "\n")


if __name__ == "__main__":
    main()
