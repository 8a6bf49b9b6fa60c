"""Further shapes of credentials, each a literal that begins it, a pattern, and where its random part begins.

Documentation shows such tokens with words, repetitions or ``EXAMPLE`` in the random part; ``secrets`` compares that.
"""

from __future__ import annotations

import base64
import binascii

END = rb"(?![A-Za-z0-9_])"
_SET = rb"[\"']?\s{0,4}[=:]\s{0,4}[\"']?"
_AWS = _SET + rb"[A-Za-z0-9/+]{40}(?![\w/+=])"
# (kind, literal, pattern, bytes of the random part at the end; 0: the pattern alone decides)
SHAPES: tuple[tuple[str, bytes, bytes, int], ...] = (
    ("AWS access key", b"ASIA", rb"ASIA[A-Z2-7]{16}" + END, 16),
    ("AWS secret key", b"aws_secret_access_key", rb"aws_secret_access_key" + _AWS, 40),
    ("AWS secret key", b"AWS_SECRET_ACCESS_KEY", rb"AWS_SECRET_ACCESS_KEY" + _AWS, 40),
    ("OpenAI key", b"sk-", rb"sk-[A-Za-z0-9_-]{20,100}T3BlbkFJ[A-Za-z0-9_-]{20,100}", 20),
    ("Anthropic key", b"sk-ant-", rb"sk-ant-[a-z]{2,8}[0-9]{2}-[A-Za-z0-9_-]{80,120}", 80),
    ("Stripe key", b"sk_live_", rb"sk_live_[A-Za-z0-9]{24,120}" + END, 24),
    ("SendGrid key", b"SG.", rb"SG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])", 43),
    (
        "Slack hook", b"https://hooks.slack.com/services/T",
        rb"https://hooks\.slack\.com/services/T[A-Z0-9]{6,14}/B[A-Z0-9]{6,14}/[A-Za-z0-9]{24}" + END, 24,
    ),
    ("GitLab token", b"glpat-", rb"glpat-[A-Za-z0-9_-]{27,300}\.[0-9a-z]{2}\.[0-9a-z]{9}" + END, 0),
    ("Weights & Biases key", b"WANDB_API_KEY", rb"WANDB_API_KEY" + _SET + rb"[0-9a-f]{40}(?![\w])", 40),
    ("Google refresh token", b'"refresh_token"', rb'"refresh_token"\s{0,8}:\s{0,8}"1//[A-Za-z0-9_-]{30,300}', 30),
    ("Azure storage key", b"AccountKey=", rb"AccountKey=(?!Eby8vdM02xNOcqFl)[A-Za-z0-9+/]{86}==", 86),
    ("npm credentials", b"_authToken=", rb"_authToken=[A-Za-z0-9_/+=-]{20,300}", 20),
    ("registry credentials", b'"identitytoken"', rb'"identitytoken"\s{0,8}:\s{0,8}"[A-Za-z0-9_.=/+-]{20,8000}', 20),
    ("age key", b"AGE-SECRET-KEY-1", rb"AGE-SECRET-KEY-1[QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L]{58}" + END, 58),
    (
        "private key", b"PuTTY-User-Key-File-",
        rb"PuTTY-User-Key-File-[23]: [^\n]{3,60}\n(?:(?!Private-MAC).){20,12000}Private-MAC: [0-9a-f]{40,64}", 0,
    ),
)  # fmt: skip
PGP = rb"-----BEGIN PGP PRIVATE KEY BLOCK-----(?:(?!-----).){40,12000}-----END"

# What holds addresses, for machines: a password in one is meant. Documentation is full of https://user:password@host.
CONFIG = (
    rb"(?:.*/)?(?:pip\.conf|\.?pypirc|uv\.toml|\.condarc|\.gitconfig|\.git/config|\.npmrc|\.yarnrc(?:\.yml)?"
    rb"|direct_url\.json|etc/apt/sources\.list(?:\.d/[^/]+)?|etc/environment|\.docker/config\.json)"
)
URL = rb"://[^\s/@:\"'<>${}]{0,200}:[^\s/@\"'<>${}]{1,400}@"


def pgp_holds(text: bytes) -> bool:
    """Armour whose lines decode to OpenPGP packets (RFC 9580: the first bit of a packet is set)."""
    body = text.replace(b"\\n", b"\n").split(b"-----")[2]
    lines = [line.strip() for line in body.splitlines() if b":" not in line and not line.startswith(b"=")]
    try:
        data = base64.b64decode(b"".join(lines), validate=True)
    except (binascii.Error, ValueError):
        return False
    return len(data) >= 64 and data[0] & 0x80 != 0
