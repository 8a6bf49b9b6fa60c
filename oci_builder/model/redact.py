"""Secrets out of text: applied to every message, log line and receipt that may quote a URL, a header or a command.

A secret is replaced, never shortened: the first characters of a token are enough to find it elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

MASK = "***"

# Anchored on the scheme, and bounded: this runs over text that an attacker may have written.
_USERINFO = re.compile(r"(?P<head>\b[A-Za-z][A-Za-z0-9+.-]{0,30}://)[^/?#\s\"'<>]{1,2048}@")
_QUERY = re.compile(
    r"(?P<head>[?&;](?:[A-Za-z0-9._%-]{0,64}(?:signature|credential|token|secret|password|passwd|api[_-]?key|access[_-]?key"
    r"|policy|auth|session)[A-Za-z0-9._%-]{0,32}|sig|se|sp|key|code|Key-Pair-Id)=)[^&#\s\"'<>]+",
    re.IGNORECASE,
)
_HEADER = re.compile(
    r"(?P<head>\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token|negotiate|digest)\s+)?)"
    r"[^\s\"',;]+",
    re.IGNORECASE,
)
_SCHEME = re.compile(r"(?P<head>\b(?:bearer|basic)\s+)(?=[^\s]*[0-9+/=_.-])[A-Za-z0-9+/=_.~-]{16,}", re.IGNORECASE)
_COOKIE = re.compile(r"(?P<head>\b(?:set-)?cookie[\"']?\s*:\s*)[^\r\n]+", re.IGNORECASE)
_ASSIGNED = re.compile(
    r"(?P<head>(?<![A-Za-z0-9])[\"']?[A-Za-z0-9_.-]{0,64}(?:password|passwd|secret|token|api_?key|access_?key|identitytoken)"
    r"[\"']?\s*[=:]\s*[\"']?)[^\s\"',;&}]{3,}",
    re.IGNORECASE,
)
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|npm_[A-Za-z0-9]{30,}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|a[ks]-[A-Za-z0-9]{20,}|nvapi-[A-Za-z0-9_-]{20,}"
    r"|glpat-[A-Za-z0-9_-]{20,}|sk-[A-Za-z0-9_-]{20,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})"
)
_PEM = re.compile(r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY-----|\Z)", re.DOTALL)

_RULES = (_USERINFO, _QUERY, _HEADER, _SCHEME, _COOKIE, _ASSIGNED)


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` with everything that looks like a credential replaced by ``***``. Idempotent.

    Args:
        text: a message, a log line, a URL, a header.
        secrets: values that are known to be secret, whatever they look like; their URL-quoted forms go too.
    """
    for secret in sorted({form for value in secrets for form in _forms(value)}, key=len, reverse=True):
        text = text.replace(secret, MASK)
    text = _PEM.sub(MASK, text)
    text = _USERINFO.sub(rf"\g<head>{MASK}@", text)
    for rule in _RULES[1:]:
        text = rule.sub(rf"\g<head>{MASK}", text)
    return _SHAPES.sub(MASK, text)


def redact_url(url: str) -> str:
    """A URL that may be shown: without userinfo, and without any query or fragment (signed links are credentials)."""
    head, mark, _ = url.partition("?")
    bare, _, _ = head.partition("#")
    return _USERINFO.sub(rf"\g<head>{MASK}@", bare) + (f"?{MASK}" if mark else "")


def redact_value(value: object, secrets: Iterable[str] = ()) -> object:
    """``redact`` over a JSON-able value: strings, and the strings inside lists and objects (keys too)."""
    known = tuple(secrets)
    if isinstance(value, str):
        return redact(value, known)
    if isinstance(value, dict):
        return {redact(str(k), known): redact_value(v, known) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(item, known) for item in value]
    return value


def _forms(secret: str) -> set[str]:
    # Percent-encoding by hand: urllib.parse would do, but quotes "~" differently between versions.
    if len(secret) < 4:
        return set()
    quoted = "".join(c if c.isalnum() or c in "-._~" else "".join(f"%{b:02X}" for b in c.encode()) for c in secret)
    return {secret, quoted, quoted.lower() if quoted != secret else secret}
