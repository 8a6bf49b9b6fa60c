"""Content digests, strictly parsed.

Source: OCI image spec, descriptor.md, "Digests". Only sha256 is accepted: Docker cannot use sha512 layers
(moby/moby#48241), and one algorithm means one comparison.
"""

from __future__ import annotations

import hashlib
import re

from oci_builder.model.errors import FormatError, show

_HEX = re.compile(r"[0-9a-f]{64}\Z")


class Digest(str):
    """``sha256:`` and 64 lower-case hex digits. Equal to the plain string, so it can be a JSON value or a key."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: object, where: str = "digest") -> Digest:
        """Parse ``text``.

        Raises:
            FormatError: ``json.digest``, with the algorithm named when it is the algorithm that is refused.
        """
        if isinstance(text, Digest):
            return text
        if not isinstance(text, str):
            raise FormatError(
                "json.digest", f"{where}: a digest must be a string, got {type(text).__name__}", where=where
            )
        algorithm, colon, value = text.partition(":")
        if not colon or algorithm != "sha256":
            what = f"algorithm {show(algorithm)} is not accepted, only sha256" if colon else "no algorithm"
            if _HEX.match(text):
                what += "; write sha256: before it"
            raise FormatError(
                "json.digest", f"{where}: {what} (got {show(text[:200])})", where=where, actual=text[:200]
            )
        if not _HEX.match(value):
            raise FormatError(
                "json.digest",
                f"{where}: sha256 needs 64 lower-case hex digits, got {show(text[:200])}",
                where=where,
                actual=text[:200],
            )
        return cls(text)

    @classmethod
    def of(cls, data: bytes) -> Digest:
        """The digest of ``data``."""
        return cls("sha256:" + hashlib.sha256(data).hexdigest())

    @classmethod
    def from_hex(cls, value: str) -> Digest:
        """The digest with this hex part; the caller vouches for it (a hexdigest() result)."""
        return cls("sha256:" + value)

    @property
    def hex(self) -> str:
        """The 64 hex digits."""
        return self[7:]

    @property
    def blob_path(self) -> str:
        """Where an OCI layout keeps this blob, e.g. ``blobs/sha256/ab…`` (image-layout.md)."""
        return "blobs/sha256/" + self[7:]
