"""Where a verb may answer otherwise than the catalogue says, and what is not right yet.

``OTHERWISE``: the verb's own code, or None where it accepts, each with the reason. ``OPEN``: faults that are known; a
case that is listed here and behaves turns the tests red, so that the line goes.
"""

from __future__ import annotations

Key = tuple[str, str]

OTHERWISE: dict[Key, tuple[str | None, str]] = {}

# Verb -> cases that it judges otherwise than the catalogue, which is to end.
_OPEN = {
    "verify": """
        C10-04d C2-10
    """,
    "unpack": """
        B013 B031b B031c B032 B063 B063b B194a B194b C10-01b C10-01c C10-01d C10-01e C10-04d C10-10 C2-01
        C2-01b C2-10 C2-12a C2-12b C2-12c C2-12d C2-12e C3-01a C3-01b C3-12a C3-14-gzip-+zstd C3-14-gzip-tar
        C3-14-identity-+gzip C3-14-identity-+zstd C3-14-zstd-+gzip C3-14-zstd-tar C3-17a C7-pad C9-04a C9-04b
        C9-08e C9-08i
    """,
    "inspect": """
        B001 B013 B024 B027 B031b B031c B032 B063 B063b B096b B194a B194b C10-01b C10-01c C10-01e C10-01h
        C10-02e C10-02f C10-02g C10-04a C10-04b C10-04c C10-04d C10-06 C10-10 C2-01 C2-01b C2-02 C2-02b C2-10
        C2-12a C2-12b C2-12c C2-12d C2-12e C3-01a C3-01b C3-04a C3-04b C3-04c C3-05h C3-05i C3-08 C3-08b C3-09b
        C3-10 C3-10b C3-12a C3-13a C3-13b C3-14-gzip-+zstd C3-14-gzip-tar C3-14-identity-+gzip
        C3-14-identity-+zstd C3-14-zstd-+gzip C3-14-zstd-tar C3-17a C3-17b C3-17c C3-17d C3-20 C3-20b C4-01a
        C4-01b C4-02a C4-02b C4-02c C4-05 C4-05a C4-05b C4-05c C4-09 C4-09b C4-10a C4-10b C4-10c C4-10d C4-10e
        C4-10f C4-10g C4-10h C5-11c C6-02c C6-02d C6-02e C6-03 C6-05a C6-05b C6-06 C6-10b C6-10c C6-11a C6-11b
        C6-11d C6-11f C6-11g C7-pad C8-03a C8-03b C8-03d C9-04a C9-04b C9-08a C9-08d C9-08e C9-08f C9-08g
        C9-08i
    """,
    "base": """
        B013 B027 B031b B031c B032 B063 B063b B096b B194a B194b C10-01b C10-01c C10-01d C10-01e C10-10 C2-02b
        C2-10 C2-12a C2-12b C2-12c C2-12d C2-12e C3-01a C3-01b C3-12a C3-14-gzip-+zstd C3-14-gzip-tar
        C3-14-identity-+gzip C3-14-identity-+zstd C3-14-zstd-+gzip C3-14-zstd-tar C3-17a C3-17b C3-17c C3-17d
        C4-01a C4-01b C4-02a C4-02b C4-02c C4-05 C4-05a C4-05b C4-05c C4-09 C4-09b C4-10a C4-10b C4-10c C4-10d
        C4-10e C4-10f C4-10g C4-10h C5-11c C6-02c C6-02d C6-02e C6-03 C6-05a C6-05b C6-06 C6-10b C6-10c C6-11a
        C6-11b C6-11d C6-11f C6-11g C7-pad C8-03a C8-03b C8-03d C9-04a C9-04b C9-05a C9-08d C9-08e C9-08g
        C9-08h C9-08i
    """,
    "pull": """
        B063 B063b C10-10 C2-12d C3-01b C3-14-gzip-+zstd C3-14-gzip-tar C3-14-identity-+gzip
        C3-14-identity-+zstd C3-14-zstd-+gzip C3-14-zstd-tar C3-17a C3-17b C3-17c C3-17d C3-18 C9-04a C9-04b
        C9-08d C9-08e C9-08g C9-08h C9-08i
    """,
}
OPEN: dict[Key, str] = {
    (case, verb): f"{verb} does not yet judge this as the catalogue says"
    for verb, cases in _OPEN.items()
    for case in cases.split()
}
