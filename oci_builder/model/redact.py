"""Secrets out of text: applied to every message, log line and receipt that may quote a URL, a header or a command.

A secret is replaced, never shortened: the first characters of a token are enough to find it elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from functools import lru_cache
from urllib.parse import unquote

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
# As Docker's configuration keeps it: base64 of user:password.
_AUTH = re.compile(r"(?P<head>\"auth\"\s{0,8}:\s{0,8}\")[A-Za-z0-9+/]{8,8000}={0,2}")
# tiktoken is a package, /etc/passwd is a file, and == compares a version.
_NAMES = r"(?:password|(?<!/)passwd|passphrase|secret|(?<!tik)token|api_?key|access_?key)"
_ASSIGNED = re.compile(
    rf"(?P<head>(?<![A-Za-z0-9])[\"']?[A-Za-z0-9_.-]{{0,64}}{_NAMES}[\"']?\s*[=:](?!=)\s*[\"']?)[^\s\"',;&}}]{{3,}}",
    re.IGNORECASE,
)
_SECRET_KEY = re.compile(rf".*{_NAMES}\Z", re.IGNORECASE | re.DOTALL)
_SHAPE = (
    r"(?:hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}|npm_[A-Za-z0-9]{30,}"
    r"|xox[abeoprs]-[A-Za-z0-9-]{10,}|(?:AKIA|ASIA)[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}|a[ks]-[A-Za-z0-9]{20,}|nvapi-[A-Za-z0-9_-]{20,}"
    r"|AGE-SECRET-KEY-1[A-Z0-9]{20,}|SG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}|hooks\.slack\.com/services/T[A-Za-z0-9/]{20,}"
    r"|AccountKey=[A-Za-z0-9+/=]{20,}|LS0tLS1CRUdJTi[A-Za-z0-9+/=]{20,}"
    r"|pypi-[A-Za-z0-9_-]{40,}|sk_live_[A-Za-z0-9]{20,}|glpat-[A-Za-z0-9_-]{20,}|sk-[A-Za-z0-9_-]{20,}|eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,})"
)
_SHAPES = re.compile(rf"\b{_SHAPE}")
# Behind what is quoted, as in pkg:pypi/name@1.0%2Bhf_...
_QUOTED_SHAPES = re.compile(rf"(?<=%[0-9A-Fa-f]{{2}}){_SHAPE}")
_PEM = re.compile(
    r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\Z)",
    re.DOTALL,
)

# Variables that hold a secret by their name; HF_TOKEN_PATH, *_FILE and the like hold places.
_VARIABLE = re.compile(
    r"(?:\A|_)(?:TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|PASS|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY)"
    r"(?:_(?:KEY|SECRET|VALUE|READ|WRITE|[0-9]+))*\Z",
    re.IGNORECASE,
)
_PLACE = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,30}://([^/?#\s\"'<>]{1,2048})@")
_SHORTEST_NAMED = 6  # of a value that is secret by its variable's name: "test" would go out of every path

# A rule with marks, one of which a text must hold: most texts are paths, and there may be a hundred thousand of them.
_RULES = (
    (("=",), _QUERY), (("=", ":"), _HEADER), ((" ",), _SCHEME), ((":",), _COOKIE), (("=", ":"), _ASSIGNED),
    (('"auth"',), _AUTH),
)  # fmt: skip


def redact(text: str, secrets: Iterable[str] = ()) -> str:
    """``text`` with everything that looks like a credential replaced by ``***``. Idempotent.

    Args:
        text: a message, a log line, a URL, a header.
        secrets: values that are known to be secret, whatever they look like; their URL-quoted forms go too.
    """
    for secret in _all_forms(tuple(secrets)):
        text = text.replace(secret, MASK)
    if "-----BEGIN" in text:
        text = _PEM.sub(MASK, text)
    if "://" in text:
        text = _USERINFO.sub(rf"\g<head>{MASK}@", text)
    for marks, rule in _RULES:
        if any(mark in text for mark in marks):
            text = rule.sub(rf"\g<head>{MASK}", text)
    if "%" in text:
        text = _QUOTED_SHAPES.sub(MASK, text)
    return _SHAPES.sub(MASK, text)


def names_secret(name: str) -> bool:
    """Whether a variable of this name holds a secret: ``HF_TOKEN``, ``DB_PASS``, ``SSH_PRIVATE_KEY``."""
    return _VARIABLE.search(name) is not None


def secret_values(environ: Mapping[str, str]) -> tuple[str, ...]:
    """What an environment holds that must not be shown, whatever it looks like: values of ``HF_TOKEN``,
    ``MODAL_TOKEN_SECRET``, ``*_PASSWORD`` and the like, and the passwords in URLs (of proxies, indexes).
    """
    found: dict[str, None] = {}
    for name, value in environ.items():
        if names_secret(name) and len(value.strip()) >= _SHORTEST_NAMED:
            found[value.strip()] = None
        # Proxies are also written without a scheme.
        text = f"http://{value}" if name.upper().endswith("PROXY") and "://" not in value else value
        for userinfo in _PLACE.findall(text):
            _, colon, password = userinfo.partition(":")
            found.update(dict.fromkeys((password, unquote(password)) if colon else (userinfo,)))
    return tuple(value for value in found if value)


def redact_url(url: str) -> str:
    """A URL that may be shown: without userinfo, and without any query or fragment (signed links are credentials)."""
    head, mark, _ = url.partition("?")
    bare, _, _ = head.partition("#")
    return _USERINFO.sub(rf"\g<head>{MASK}@", bare) + (f"?{MASK}" if mark else "")


def redact_value(value: object, secrets: Iterable[str] = ()) -> object:
    """``redact`` over a JSON-able value: the strings in lists and objects, the keys, and what a key calls a secret."""
    known = tuple(secrets)
    if isinstance(value, str):
        return redact(value, known)
    if isinstance(value, dict):
        return {redact(str(k), known): _under(str(k), v, known) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact_value(item, known) for item in value]
    return value


def _under(key: str, value: object, secrets: tuple[str, ...]) -> object:
    return MASK if isinstance(value, str) and value and _SECRET_KEY.match(key) else redact_value(value, secrets)


@lru_cache(maxsize=64)
def _all_forms(secrets: tuple[str, ...]) -> tuple[str, ...]:
    """Every form of them, long ones first: a secret may be part of another."""
    return tuple(sorted({form for value in secrets for form in _forms(value)}, key=len, reverse=True))


def _forms(secret: str) -> set[str]:
    # Percent-encoding by hand: urllib.parse would do, but quotes "~" differently between versions.
    if len(secret) < 4:
        return set()
    raw = secret.encode("utf-8", "surrogateescape")
    # Characters that need no quoting stay, as letters of other alphabets do in some programs.
    quoted = "".join(c if c.isalnum() or c in "-._~" else _percent(c) for c in secret)
    # As an error quotes it, or bytes: b'Bearer one\\ntwo'.
    shown = {repr(secret)[1:-1], repr(raw)[2:-1], json.dumps(secret)[1:-1]}
    return {secret, quoted, quoted.lower() if quoted != secret else secret, *shown}


def _percent(char: str) -> str:
    return "".join(f"%{byte:02X}" for byte in char.encode("utf-8", "surrogateescape"))
