"""What counts as a credential or as model weights in the files of an image, what is let through, and how it is told."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from oci_builder.model.errors import PolicyError, show
from oci_builder.model.redact import MASK, redact
from oci_builder.model.report import Finding

WEIGHTS_SIZE = 16 << 20
OPENED = 4 << 30


@dataclass(frozen=True, slots=True)
class ScanOptions:
    """What is let through.

    Attributes:
        weights_size: bytes from which a file with a weight file's name or magic counts as weights.
        allow: sha256 hex of a secret's exact bytes -> reason (published test keys).
        allow_paths: path pattern (regular expression over the whole path) -> reason.
        own: secrets of this machine, looked for in every file, whatever they look like.
        opened: bytes that compressed files may hold together, and eight times what was searched besides.
    """

    weights_size: int = WEIGHTS_SIZE
    allow: Mapping[str, str] = field(default_factory=dict)
    allow_paths: Mapping[str, str] = field(default_factory=dict)
    own: tuple[bytes, ...] = field(default=(), repr=False)
    opened: int = OPENED

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


# Files that hold nothing but credentials, whatever they look like.
_PATHS = re.compile(
    rb"(?:.*[/!])?(?:\.netrc|\.pypirc|\.git-credentials|\.aws/credentials|\.ssh/id_[a-z0-9]+|\.dockerconfigjson"
    rb"|\.config/gh/hosts\.yml|\.pgpass|\.boto|\.s3cfg|\.vault-token|\.kaggle/kaggle\.json|\.cargo/credentials(?:\.toml)?"
    rb"|\.config/gcloud/application_default_credentials\.json|\.gnupg/private-keys-v1\.d/[^/]+\.key"
    rb"|\.huggingface/token|\.cache/huggingface/(?:token|stored_tokens)|\.kube/config)", re.DOTALL,
)  # fmt: skip
# What a file in a file was packed by: etc/pip.conf.gz! holds what is called etc/pip.conf.
_PACKED = re.compile(rb"(?:\.(?:gz|bz2|xz|zst))?!\Z")
_WEIGHT_NAMES = re.compile(
    rb".*\.(?:safetensors|gguf|ggml|ckpt|nemo|distcp|pth|pt|onnx|tflite|engine|plan)"
    rb"|(?:.*/)?(?:pytorch_)?model[^/]*\.bin|(?:.*/)?consolidated[^/]*\.bin"
    rb"|(?:.*/)?(?:flax_model[^/]*\.msgpack|tf_model[^/]*\.h5)",
    re.IGNORECASE | re.DOTALL,
)


def place_of(where: str, path: bytes, secret: bytes = b"") -> str:
    """A path in an archive and layer, as it may be shown: names hold credentials too."""
    shown = show(path)
    if secret:
        shown = shown.replace(show(secret)[1:-1], MASK)
    return redact(f"{where}: {shown}" if where else shown)


def secret_finding(kind: str, where: str, path: bytes, secret: bytes = b"") -> Finding:
    """``policy.secret``. The digest lets a person allow this very secret; the secret itself is never shown."""
    place = place_of(where, path, secret)
    actual = f"sha256 {hashlib.sha256(secret).hexdigest()}" if secret else ""
    return Finding("policy.secret", "error", place, "", actual, f"{kind} in {place}", PolicyError.exit_status)


def holds_credentials(path: bytes) -> bool:
    """Whether a file of this name holds nothing but credentials, whatever they look like."""
    return _PATHS.fullmatch(judged_by(path)) is not None


def judged_by(path: bytes) -> bytes:
    """The name that a file, or what a compressed one holds, is judged by."""
    return _PACKED.sub(b"", path) if path.endswith(b"!") else path


def weights_finding(path: bytes, size: int, head: bytes, where: str, options: ScanOptions) -> Finding | None:
    """``policy.weights`` for a file that has the name, or the first bytes, of model weights, and their size."""
    if size < options.weights_size or options.lets(path):
        return None
    if not (names_weights(path) or head.startswith(b"GGUF") or _safetensors(head, size)):
        return None
    place = place_of(where, path)
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
