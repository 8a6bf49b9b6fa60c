"""Shapes of credentials: a literal that begins each, a pattern, and a test of what was found.

Documentation shows such tokens with words, repetitions or ``EXAMPLE`` in the random part: whatever can be computed of a
hit (a checksum, a DER structure, enough variety) must hold.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

Holds = Callable[[bytes], bool]

_WORD = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_"
WORD = frozenset(_WORD)
DASHED = frozenset(_WORD + b"-")
OPEN: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Rule:
    """A shape.

    Attributes:
        kind: what it is, for people.
        literal: what the pattern begins with; the regular expression engine can look for that (a look-behind in front
            of it costs thirty times as much).
        pattern, holds: what it must match, and what must be true of the match.
        before, after: bytes that may not stand on either side: those would make it part of something longer.
        mark: what a run of its random part shows of it (``search``): its literal, or empty where it may not show.
    """

    kind: str
    literal: bytes
    pattern: re.Pattern[bytes]
    holds: Holds
    before: frozenset[int] = OPEN
    after: frozenset[int] = OPEN
    mark: bytes = b""


def varied(text: bytes) -> bool:
    """Whether the secret part looks random: ``hf_xxxxxxxx`` and ``sk-your-key-here`` do not."""
    return _random(re.split(rb"[_-]", text, maxsplit=1)[-1]) and b"EXAMPLE" not in text.upper()


def _random(tail: bytes, least: float = 3.3) -> bool:
    total = len(tail)
    entropy = -sum(n / total * math.log2(n / total) for n in Counter(tail).values()) if total else 0.0
    return entropy > least


def _random_end(count: int) -> Holds:
    """Whether the last ``count`` bytes look random; 16 hexadecimal digits of 20 have less than 3.3 bits each."""
    return lambda text: not count or (_random(text[-count:], 3.0) and b"EXAMPLE" not in text.upper())


def _hugging_face(text: bytes) -> bool:
    """Of letters as a rule, capital and small; where digits are among them it must be as mixed as a random one."""
    letters = text[3:]
    return varied(text) and not letters.islower() and not letters.isupper() if letters.isalpha() else _mixed(text)


def _mixed(text: bytes) -> bool:
    """Varied, of small and capital letters and digits: so short a mark also stands before words and hashes."""
    kinds = (rb"[a-z]", rb"[A-Z]", rb"[0-9]")
    return varied(text) and all(re.search(kind, text[3:]) for kind in kinds)


def _github(text: bytes) -> bool:
    """Classic GitHub and npm tokens end in the base62 CRC32 of their random part."""
    body, check = text.split(b"_", 1)[1][:-6], text[-6:]
    digits = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    value, out = zlib.crc32(body), b""
    while value:
        value, rest = divmod(value, 62)
        out = digits[rest : rest + 1] + out
    return out.rjust(6, b"0") == check


def _decoded(text: bytes, *ends: bytes) -> bytes:
    """The base64 of an armoured text, without its header lines; empty where it is none."""
    body = text.replace(b"\\r", b"").replace(b"\\n", b"\n").split(b"-----")[2]
    # A program's source has the lines in quotes.
    lines = [line.strip(b" \t\"',;\\") for line in body.splitlines() if b":" not in line and not line.startswith(ends)]
    return _base64(b"".join(lines))


def _base64(text: bytes) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return b""


def _private_key(text: bytes) -> bool:
    """PEM whose body decodes to a key structure: DER, or OpenSSH's own. PKCS #1 with encryption headers too."""
    data = _decoded(text)
    encrypted = b"ENCRYPTED" in text.split(b"-----")[2]
    return len(data) >= 32 and (encrypted or _whole_der(data) or data.startswith(b"openssh-key-v1\0"))


def _whole_der(data: bytes) -> bool:
    """One DER SEQUENCE that is exactly as long as it says (X.690, 8.1.3)."""
    length, header = data[1], 2
    if length & 0x80:
        header += length & 0x7F
        length = int.from_bytes(data[2:header], "big")
    return data[0] == 0x30 and header + length == len(data)


def _pgp(text: bytes) -> bool:
    """Armour whose lines decode to OpenPGP packets (RFC 9580: the first bit of a packet is set)."""
    data = _decoded(text, b"=")
    return len(data) >= 64 and data[0] & 0x80 != 0


def _key_in_base64(text: bytes) -> bool:
    """A PEM private key that was encoded once more, as in a kubeconfig or a Kubernetes secret."""
    data = _base64(text + b"=" * (-len(text) % 4))
    found = _PEM.search(data)
    return found is not None and _private_key(found.group())


def _docker_auth(text: bytes) -> bool:
    """``"auth": "…"`` whose value is base64 of user:password."""
    user, colon, password = _base64(text.rsplit(b'"', 2)[1]).partition(b":")
    both = user + password
    return bool(user and colon and password) and both.isascii() and both.decode().isprintable()


def _rule(
    kind: str, literal: bytes, rest: bytes, holds: Holds | int = varied, after: frozenset[int] = OPEN, *,
    mark: bytes | None = None, word: bool = True,
) -> Rule:  # fmt: skip
    """A rule from its literal and the rest of its pattern. ``holds`` as a number: so many random bytes at the end."""
    test = _random_end(holds) if isinstance(holds, int) else holds
    before = WORD if word and literal[0] in WORD else OPEN
    pattern = re.compile(re.escape(literal) + rest, re.DOTALL)
    return Rule(kind, literal, pattern, test, before, after, literal if mark is None else mark)


_PEM = re.compile(
    rb"-----BEGIN (?:RSA |EC |DSA |OPENSSH |ENCRYPTED )?PRIVATE KEY-----(?:(?!-----).){40,12000}-----END", re.DOTALL
)
_SET = rb"[\"']?\s{0,4}[=:]\s{0,4}[\"']?"
_AWS = _SET + rb"[A-Za-z0-9/+]{40}(?![\w/+=])"
RULES = (
    Rule("private key", b"-----BEGIN ", _PEM, _private_key),
    _rule(
        "private key", b"-----BEGIN PGP", rb" PRIVATE KEY BLOCK-----(?:(?!-----).){40,12000}-----END", _pgp, mark=b""
    ),
    _rule("private key", b"LS0tLS1CRUdJTi", rb"[A-Za-z0-9+/]{60,16000}", _key_in_base64),
    # Of a PuTTY key file: what says that it has a private part, and signs it.
    _rule("private key", b"Private-MAC: ", rb"[0-9a-f]{40}(?:[0-9a-f]{24})?", 40, WORD),
    _rule("age key", b"AGE-SECRET-KEY-1", rb"[QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L]{58}", 58, WORD),
    _rule("AWS access key", b"AKIA", rb"[A-Z2-7]{16}", after=WORD),
    _rule("AWS access key", b"ASIA", rb"[A-Z2-7]{16}", 16, WORD),
    _rule("AWS secret key", b"aws_secret_access_key", _AWS, 40, word=False),
    _rule("AWS secret key", b"AWS_SECRET_ACCESS_KEY", _AWS, 40, word=False),
    *(_rule("GitHub token", b"gh%c_" % c, rb"[A-Za-z0-9]{36}", _github) for c in b"pousr"),
    _rule("GitHub token", b"github_pat_", rb"[A-Za-z0-9]{22}_[A-Za-z0-9]{59}"),
    _rule("Hugging Face token", b"hf_", rb"[A-Za-z0-9]{34}", _hugging_face, WORD),
    _rule("Slack token", b"xox", rb"[abeoprs]-(?:[0-9]{1,40}-){1,3}[A-Za-z0-9]{20,300}"),
    _rule(
        "Slack hook", b"https://hooks.slack.com/services/T",
        rb"[A-Z0-9]{6,14}/B[A-Z0-9]{6,14}/[A-Za-z0-9]{24}", 24, WORD,
        mark=b"com/services/T",
    ),
    _rule("npm token", b"npm_", rb"[A-Za-z0-9]{36}", _github),
    _rule("npm credentials", b"_authToken=", rb"[A-Za-z0-9_/+=-]{20,300}", 20, word=False),
    _rule("GitLab token", b"glpat-", rb"[A-Za-z0-9_-]{20}", after=WORD),
    _rule("GitLab token", b"glpat-", rb"[A-Za-z0-9_-]{27,300}\.[0-9a-z]{2}\.[0-9a-z]{9}", 0, WORD),
    _rule("NVIDIA API key", b"nvapi-", rb"[A-Za-z0-9_-]{60,300}"),
    _rule("PyPI token", b"pypi-AgE", rb"[A-Za-z0-9_-]{50,1500}"),
    _rule("Google API key", b"AIza", rb"[A-Za-z0-9_-]{35}", after=DASHED),
    _rule("Google refresh token", b'"refresh_token"', rb"\s{0,8}:\s{0,8}\"1//[A-Za-z0-9_-]{30,300}", 30, mark=b"1//"),
    _rule("Modal token", b"ak-", rb"[A-Za-z0-9]{22}", _mixed, WORD),
    _rule("Modal token", b"as-", rb"[A-Za-z0-9]{22}", _mixed, WORD),
    _rule("OpenAI key", b"sk-", rb"[A-Za-z0-9_-]{20,100}T3BlbkFJ[A-Za-z0-9_-]{20,100}", 20),
    _rule("Anthropic key", b"sk-ant-", rb"[a-z]{2,8}[0-9]{2}-[A-Za-z0-9_-]{80,120}", 80),
    _rule("Stripe key", b"sk_live_", rb"[A-Za-z0-9]{24,120}", 24, WORD),
    _rule("SendGrid key", b"SG.", rb"[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}", 43, DASHED),
    _rule("Weights & Biases key", b"WANDB_API_KEY", _SET + rb"[0-9a-f]{40}", 40, WORD, word=False),
    _rule("Azure storage key", b"AccountKey=", rb"(?!Eby8vdM02xNOcqFl)[A-Za-z0-9+/]{86}==", 86),
    _rule("Docker credentials", b'"auth"', rb'\s{0,8}:\s{0,8}"[A-Za-z0-9+/]{8,4000}={0,2}"', _docker_auth, mark=b""),
    _rule("registry credentials", b'"identitytoken"', rb'\s{0,8}:\s{0,8}"[A-Za-z0-9_.=/+-]{20,8000}', 20, mark=b""),
)  # fmt: skip
# No pattern matches more bytes than this (and few more than two thousand, see ``search``).
LONGEST = 16 << 10

# What holds addresses, for machines: a password in one is meant. Documentation is full of https://user:password@host.
CONFIG = re.compile(
    rb"(?:.*[/!])?(?:pip\.conf|\.?pypirc|uv\.toml|\.condarc|\.gitconfig|\.git/config|\.npmrc|\.yarnrc(?:\.yml)?"
    rb"|direct_url\.json|etc/apt/sources\.list(?:\.d/[^/]+)?|etc/environment|\.docker/config\.json)", re.DOTALL,
)  # fmt: skip
URL = Rule(
    "password of an address", b"://", re.compile(rb"://[^\s/@:\"'<>${}]{0,200}:[^\s/@\"'<>${}]{1,400}@"),
    lambda text: True,
)  # fmt: skip
