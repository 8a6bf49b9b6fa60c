"""Credentials and model weights in the files of an image: shapes that are known, found in one pass.

Text is searched for every shape, binary data (a NUL in the first 8 KiB) for PEM private keys only: a token inside
machine code is noise. Both are searched for the values that this machine's own environment keeps secret. Files inside
compressed files are not opened. A hit must also hold as what it seems to be (a checksum, a DER structure, enough
variety), for a runtime image holds much documentation *about* tokens.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from oci_builder.model.errors import PolicyError, show
from oci_builder.model.report import Finding
from oci_builder.release.shapes import CONFIG, END, PGP, SHAPES, URL, pgp_holds

_WINDOW = 4 << 20
_OVERLAP = 16 << 10
_HEAD = 8 << 10
WEIGHTS_SIZE = 16 << 20


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """What is let through.

    Attributes:
        weights_size: bytes from which a file with a weight file's name or magic counts as weights.
        allow: sha256 hex of a secret's exact bytes -> reason (published test keys).
        allow_paths: path pattern (regular expression over the whole path) -> reason.
        own: secrets of this machine, looked for in every file, whatever they look like.
    """

    weights_size: int = WEIGHTS_SIZE
    allow: Mapping[str, str] = field(default_factory=dict)
    allow_paths: Mapping[str, str] = field(default_factory=dict)
    own: tuple[bytes, ...] = field(default=(), repr=False)

    def checked(self) -> ScanOptions:
        """Itself, when every pattern is one.

        Raises:
            ValueError: a pattern is no regular expression, or a digest is none.
        """
        for pattern in self.allow_paths:
            try:
                re.compile(pattern.encode())
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        for digest in self.allow:
            if not re.fullmatch("[0-9a-f]{64}", digest):
                raise ValueError(f"{digest[:80]!r} is no sha256 in hex")
        return self

    def lets(self, path: bytes, secret: bytes = b"") -> bool:
        """Whether a hit in this file, or this secret, is let through."""
        if secret and hashlib.sha256(secret).hexdigest() in self.allow:
            return True
        return any(re.fullmatch(p.encode(), path) for p in self.allow_paths)


@dataclass(frozen=True, slots=True)
class _Rule:
    """A shape: a literal that must be there, the whole pattern, and a test of what was found.

    A pattern begins with its literal, so that the regular expression engine can look for that; a look-behind in front
    of it costs thirty times as much, so what stands before a word is compared afterwards.
    """

    kind: str
    literal: bytes
    pattern: re.Pattern[bytes]
    holds: Callable[[bytes], bool]
    word: bool


def _varied(text: bytes) -> bool:
    """Whether the secret part looks random: ``hf_xxxxxxxx`` and ``sk-your-key-here`` do not."""
    return _random(re.split(rb"[_-]", text, maxsplit=1)[-1]) and b"EXAMPLE" not in text.upper()


def _random(tail: bytes, least: float = 3.3) -> bool:
    total = len(tail)
    entropy = -sum(n / total * math.log2(n / total) for n in Counter(tail).values()) if total else 0.0
    return entropy > least


def _random_end(count: int) -> Callable[[bytes], bool]:
    """Whether the last ``count`` bytes look random; 16 hexadecimal digits of 20 have less than 3.3 bits each."""
    return lambda text: not count or (_random(text[-count:], 3.0) and b"EXAMPLE" not in text.upper())


def _hugging_face(text: bytes) -> bool:
    """Of letters as a rule; where digits are among them it must be as mixed as a random one."""
    return _varied(text) if text[3:].isalpha() else _mixed(text)


def _mixed(text: bytes) -> bool:
    """Varied, of small and capital letters and digits: so short a mark also stands before words and hashes."""
    kinds = (rb"[a-z]", rb"[A-Z]", rb"[0-9]")
    return _varied(text) and all(re.search(kind, text[3:]) for kind in kinds)


def _github(text: bytes) -> bool:
    """Classic GitHub and npm tokens end in the base62 CRC32 of their random part."""
    body, check = text.split(b"_", 1)[1][:-6], text[-6:]
    digits = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
    value, out = zlib.crc32(body), b""
    while value:
        value, rest = divmod(value, 62)
        out = digits[rest : rest + 1] + out
    return out.rjust(6, b"0") == check


def _private_key(text: bytes) -> bool:
    """PEM whose body decodes to a key structure: DER, or OpenSSH's own. PKCS #1 with encryption headers too."""
    body = text.replace(b"\\n", b"\n").split(b"-----")[2]
    lines = [line.strip() for line in body.splitlines() if b":" not in line]
    try:
        data = base64.b64decode(b"".join(lines), validate=True)
    except (binascii.Error, ValueError):
        return False
    encrypted = b"ENCRYPTED" in body
    return len(data) >= 32 and (encrypted or _whole_der(data) or data.startswith(b"openssh-key-v1\0"))


def _whole_der(data: bytes) -> bool:
    """One DER SEQUENCE that is exactly as long as it says (X.690, 8.1.3)."""
    length, header = data[1], 2
    if length & 0x80:
        header += length & 0x7F
        length = int.from_bytes(data[2:header], "big")
    return data[0] == 0x30 and header + length == len(data)


def _docker_auth(text: bytes) -> bool:
    """``"auth": "…"`` whose value is base64 of user:password."""
    value = text.rsplit(b'"', 2)[1]
    try:
        user, colon, password = base64.b64decode(value, validate=True).partition(b":")
    except (binascii.Error, ValueError):
        return False
    both = user + password
    return bool(user and colon and password) and both.isascii() and both.decode().isprintable()


def _rule(kind: str, literal: bytes, pattern: bytes, holds: Callable[[bytes], bool] = _varied) -> _Rule:
    return _Rule(kind, literal, re.compile(pattern, re.DOTALL), holds, word=literal[:1].isalpha())


_WORD = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_")
_PEM = _rule(
    "private key",
    b"-----BEGIN ",
    rb"-----BEGIN (?:RSA |EC |DSA |OPENSSH |ENCRYPTED )?PRIVATE KEY-----(?:(?!-----).){40,12000}-----END",
    _private_key,
)
_RULES = (
    _PEM,
    _rule("AWS access key", b"AKIA", rb"AKIA[A-Z2-7]{16}" + END),
    _rule("GitHub token", b"gh", rb"gh[pousr]_[A-Za-z0-9]{36}" + END, _github),
    _rule("GitHub token", b"github_pat_", rb"github_pat_[A-Za-z0-9]{22}_[A-Za-z0-9]{59}"),
    _rule("Hugging Face token", b"hf_", rb"hf_[A-Za-z0-9]{34}" + END, _hugging_face),
    _rule("Slack token", b"xox", rb"xox[abeoprs]-(?:[0-9]+-){1,3}[A-Za-z0-9]{20,}"),
    _rule("npm token", b"npm_", rb"npm_[A-Za-z0-9]{36}" + END, _github),
    _rule("GitLab token", b"glpat-", rb"glpat-[A-Za-z0-9_-]{20}" + END),
    _rule("NVIDIA API key", b"nvapi-", rb"nvapi-[A-Za-z0-9_-]{60,}"),
    _rule("PyPI token", b"pypi-AgE", rb"pypi-AgE[A-Za-z0-9_-]{50,}"),
    _rule("Google API key", b"AIza", rb"AIza[A-Za-z0-9_-]{35}(?![A-Za-z0-9_-])"),
    _rule("Modal token", b"ak-", rb"ak-[A-Za-z0-9]{22}" + END, _mixed),
    _rule("Modal token", b"as-", rb"as-[A-Za-z0-9]{22}" + END, _mixed),
    _rule("Docker credentials", b'"auth"', rb'"auth"\s{0,8}:\s{0,8}"[A-Za-z0-9+/]{8,4000}={0,2}"', _docker_auth),
    _rule("private key", b"-----BEGIN PGP", PGP, pgp_holds),
    *(_rule(kind, literal, pattern, _random_end(count)) for kind, literal, pattern, count in SHAPES),
)
_IN_CONFIG = (*_RULES, _rule("password of an address", b"://", URL, lambda text: True))
_CONFIG = re.compile(CONFIG)

# Files that hold nothing but credentials, whatever they look like.
_PATHS = re.compile(
    rb"(?:.*/)?(?:\.netrc|\.pypirc|\.git-credentials|\.aws/credentials|\.ssh/id_[a-z0-9]+|\.dockerconfigjson"
    rb"|\.config/gh/hosts\.yml|\.pgpass|\.boto|\.s3cfg|\.vault-token|\.kaggle/kaggle\.json|\.cargo/credentials(?:\.toml)?"
    rb"|\.config/gcloud/application_default_credentials\.json|\.gnupg/private-keys-v1\.d/[^/]+\.key"
    rb"|\.huggingface/token|\.cache/huggingface/(?:token|stored_tokens)|\.kube/config)"
)
_WEIGHT_NAMES = re.compile(
    rb".*\.(?:safetensors|gguf|ggml|ckpt|nemo|distcp|pth|pt|onnx|tflite|engine|plan)"
    rb"|(?:.*/)?(?:pytorch_)?model[^/]*\.bin|(?:.*/)?consolidated[^/]*\.bin"
    rb"|(?:.*/)?(?:flax_model[^/]*\.msgpack|tf_model[^/]*\.h5)", re.IGNORECASE,
)


class FileScan:
    """Searches one file that is fed to it in pieces of any size; the findings do not depend on how it was cut."""

    __slots__ = ("_binary", "_buffer", "_hits", "_options", "_path", "_seen", "_size", "_where")

    def __init__(self, path: bytes, size: int, where: str = "", options: ScanOptions | None = None) -> None:
        self._path, self._size, self._where = path, size, where
        self._options = options or ScanOptions()
        self._buffer = bytearray()
        self._binary: bool | None = None
        self._hits: dict[bytes, str] = {}
        self._seen = 0

    def feed(self, data: bytes | memoryview) -> None:
        """The next piece of the file."""
        self._buffer += data
        if self._binary is None and len(self._buffer) >= _HEAD:
            self._binary = self._buffer.find(0, 0, _HEAD) >= 0
        if len(self._buffer) >= _WINDOW:
            self._search(final=False)

    def finish(self) -> tuple[Finding, ...]:
        """All findings of this file, secrets in the order in which they were found."""
        if self._binary is None:
            self._binary = 0 in self._buffer
        self._search(final=True)
        if self._options.lets(self._path):
            return ()
        found = [self._finding("policy.secret", kind, secret) for secret, kind in self._hits.items()]
        if self._size and _PATHS.fullmatch(self._path):
            found.append(self._finding("policy.secret", "credentials file"))
        return tuple(found)

    def _search(self, *, final: bool) -> None:
        window = self._buffer
        text = _IN_CONFIG if _CONFIG.fullmatch(self._path) else _RULES
        for rule in (_PEM,) if self._binary else text:
            if rule.literal in window:
                self._keep(rule, window)
        for secret in self._options.own:
            if secret in window and not self._options.lets(b"", secret):
                self._hits.setdefault(secret, "a secret of this machine's environment")
        del self._buffer[: len(window) if final else max(0, len(window) - _OVERLAP)]

    def _keep(self, rule: _Rule, window: bytearray) -> None:
        for match in rule.pattern.finditer(window):
            secret = match.group()
            if rule.word and match.start() and window[match.start() - 1] in _WORD:
                continue
            if rule.holds(secret) and not self._options.lets(b"", secret):
                self._hits.setdefault(secret, rule.kind)

    def _finding(self, code: str, kind: str, secret: bytes = b"") -> Finding:
        place = f"{self._where}: {show(self._path)}" if self._where else show(self._path)
        # The digest lets a person allow this very secret; the secret itself is never shown.
        actual = f"sha256 {hashlib.sha256(secret).hexdigest()}" if secret else ""
        return Finding(code, "error", place, "", actual, f"{kind} in {place}", PolicyError.exit_status)


def scan_file(
    path: bytes, size: int, chunks: Iterable[bytes | memoryview], where: str = "", options: ScanOptions | None = None
) -> Iterator[Finding]:
    """Findings of one file: ``policy.weights`` and ``policy.secret``. Reads all of ``chunks``.

    Args:
        path: its path in the image.
        size: bytes.
        chunks: its content.
        where: archive and layer, for people.
        options: limits and what is let through.
    """
    opts = options or ScanOptions()
    scan = FileScan(path, size, where, opts)
    head = b""
    for chunk in chunks:
        if len(head) < 16:
            head += bytes(chunk[:16])
        scan.feed(chunk)
    weights = weights_finding(path, size, head, where, opts)
    if weights is not None:
        yield weights
    yield from scan.finish()


def weights_finding(path: bytes, size: int, head: bytes, where: str, options: ScanOptions) -> Finding | None:
    """``policy.weights`` for a file that has the name, or the first bytes, of model weights, and their size."""
    if size < options.weights_size or options.lets(path):
        return None
    if not (names_weights(path) or head.startswith(b"GGUF") or _safetensors(head, size)):
        return None
    place = f"{where}: {show(path)}" if where else show(path)
    return Finding(
        "policy.weights", "error", place, f"< {options.weights_size}", str(size),
        f"{place} looks like model weights; the runtime carries none", PolicyError.exit_status,
    )  # fmt: skip


def names_weights(path: bytes) -> bool:
    """Whether a path is called as model weights are."""
    return _WEIGHT_NAMES.fullmatch(path) is not None


def _safetensors(head: bytes, size: int) -> bool:
    # 8 bytes of little-endian header length, then a JSON object.
    return len(head) >= 10 and head[8:10] in (b'{"', b"{ ") and 2 <= int.from_bytes(head[:8], "little") < size
