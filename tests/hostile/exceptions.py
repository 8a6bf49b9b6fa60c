"""Where a verb may answer otherwise than the catalogue says, and what is not right yet.

``OTHERWISE``: the verb's own codes, or none where it accepts, with the reason. ``OPEN``: faults that are known; a case
that is listed there and behaves turns the tests red, so that the line goes.
"""

from __future__ import annotations

Key = tuple[str, str]
Codes = frozenset[str]

_SOONER = "the same fault, met at another place: this verb stops at the first"
_NO_LAYOUT = "a registry serves neither oci-layout nor manifest.json"
_PULL = {
    _NO_LAYOUT: {"C3-17a": "", "C3-17b": "", "C3-17c": "", "C3-17d": "", "C10-10": ""},
    "the registry has no such manifest, and says so": {"C3-18": "http.status"},
    _SOONER: {
        "C2-12d": "blob.size", "B063b": "platform.missing",
        "C9-04a": "layer.diff_id", "C9-04b": "layer.diff_id", "C9-08d": "layer.diff_id", "C9-08e": "media.mismatch",
        "C9-08g": "layer.diff_id", "C9-08h": "layer.diff_id",
    },
}  # fmt: skip
_STREAMING = {
    _SOONER: {
        "C9-08e": "media.mismatch tar.truncated", "B013": "layer.diff_id archive.views", "C2-01": "blob.size blob.digest",
        "C9-04a": "layer.trailing tar.trailing", "C9-04b": "layer.trailing tar.trailing",
    },
    "what is above the limit is not hashed either": {"C3-04b": "limit.document archive.config_name"},
    "verify judges every image of an archive, the others must know which is meant": {"C10-01d": "platform.ambiguous"},
}  # fmt: skip
_NO_MEDIA_TYPE = {"a Docker archive does not say what its layers are": {"C9-08i": "media.mismatch tar.checksum"}}

OTHERWISE: dict[Key, tuple[Codes, str]] = {
    (case, verb): (frozenset(codes.split()), reason)
    for table, verbs in (
        (_PULL, ("pull",)), (_STREAMING, ("unpack", "inspect", "base")), (_NO_MEDIA_TYPE, ("verify", "unpack")),
    )
    for reason, cases in table.items()
    for case, codes in cases.items()
    for verb in verbs
}

OPEN: dict[Key, str] = {}
