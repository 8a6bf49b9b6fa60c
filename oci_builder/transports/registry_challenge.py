"""``WWW-Authenticate`` headers: which scheme, which token service (RFC 9110 section 11.6.1)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from oci_builder.model.errors import TransportError, show

_SPACE = re.compile(r"[ \t,]*")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_PARAMETER = re.compile(
    r"[ \t]*(?P<key>[!#$%&'*+.^_`|~0-9A-Za-z-]+)[ \t]*=[ \t]*"
    r'(?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<plain>[^\s,"]*))[ \t]*(?:,|\Z)'
)
_TOKEN68 = re.compile(r"[ \t]+[A-Za-z0-9._~+/-]+=*[ \t]*(?:,|\Z)")
_MAX_HEADER = 16 << 10


@dataclass(frozen=True, slots=True)
class Challenge:
    """One challenge: scheme and parameter names in lower case."""

    scheme: str
    parameters: dict[str, str] = field(default_factory=dict)


def parse_challenges(headers: Iterable[str]) -> tuple[Challenge, ...]:
    """All challenges of all ``WWW-Authenticate`` headers, in order.

    Raises:
        TransportError: ``auth`` when a header is malformed.
    """
    return tuple(challenge for header in headers for challenge in _parse(header))


def _parse(header: str) -> Iterator[Challenge]:
    if len(header) > _MAX_HEADER:
        raise TransportError("auth", f"a challenge of {len(header)} bytes", where="WWW-Authenticate")
    at = _skip(header, 0)
    while at < len(header):
        scheme = _TOKEN.match(header, at)
        if scheme is None:
            raise _malformed(header)
        at = scheme.end()
        parameters: dict[str, str] = {}
        blob = _TOKEN68.match(header, at)
        if blob and not _PARAMETER.match(header, at):
            at = blob.end()
        else:
            at = _parameters(header, at, parameters)
        yield Challenge(scheme.group().lower(), parameters)
        at = _skip(header, at)


def _parameters(header: str, at: int, into: dict[str, str]) -> int:
    if at < len(header) and header[at] not in " \t,":
        raise _malformed(header)
    while True:
        start = _skip(header, at)
        found = _PARAMETER.match(header, start)
        if found is None:
            # The next challenge begins here, or nothing does; else it is neither.
            word = _TOKEN.match(header, start)
            after = header[word.end() : word.end() + 1] if word else ""
            if start < len(header) and (word is None or after not in ("", " ", "\t", ",")):
                raise _malformed(header)
            return start
        quoted = found["quoted"]
        value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else found["plain"]
        into.setdefault(found["key"].lower(), value)
        at = found.end()


def _skip(header: str, at: int) -> int:
    found = _SPACE.match(header, at)
    return found.end() if found else at


def _malformed(header: str) -> TransportError:
    return TransportError(
        "auth", f"the registry's challenge cannot be read: {show(header[:200])}", where="WWW-Authenticate"
    )
