"""Ed25519 signatures in DSSE envelopes, and the files that keys live in. The only importer of ``cryptography``.

Source: secure-systems-lab/dsse protocol.md (v1.0): what is signed is PAE(payloadType, payload) over the payload bytes
as they are stored, so that two ways of writing JSON never matter.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from oci_builder.model.errors import ConflictError, FormatError, OciBuilderError, PolicyError, show
from oci_builder.model.gates import TrustedKey, TrustPolicy, key_id
from oci_builder.model.jsontext import dump_json
from oci_builder.model.receipts import PAYLOAD_TYPE, Envelope
from oci_builder.release.files import create_exclusively, input_error, open_file

_RAW = serialization.Encoding.Raw
_MAX_KEY_FILE = 16 << 10


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding: the bytes that are signed."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key in memory. Its ``repr`` shows the id only."""

    _key: Ed25519PrivateKey

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes(_RAW, serialization.PublicFormat.Raw)

    @property
    def id(self) -> str:
        """``sha256:`` of the public key."""
        return key_id(self.public)

    def __repr__(self) -> str:
        return f"SigningKey({self.id})"

    def sign(self, payload: bytes, payload_type: str = PAYLOAD_TYPE) -> bytes:
        """A DSSE envelope around ``payload``, as JSON bytes. The same key and payload give the same bytes."""
        signature = base64.b64encode(self._key.sign(pae(payload_type, payload))).decode()
        value = {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": payload_type,
            "signatures": [{"keyid": self.id, "sig": signature}],
        }
        return dump_json(value)


def new_key() -> SigningKey:
    """A fresh key from the system's random source."""
    return SigningKey(Ed25519PrivateKey.generate())


def save_key(key: SigningKey, path: Path) -> Path:
    """Write the private key (PKCS #8 PEM, mode 0600) and beside it ``<path>.pub`` (PEM, 0644).

    Returns: the path of the public key.

    Raises:
        ConflictError: ``key.exists``: neither file is ever overwritten.
        TransportError: ``io.*``.
    """
    public = path.with_name(path.name + ".pub")
    for file in (path, public):
        if os.path.lexists(file):
            raise ConflictError("key.exists", f"{show(str(file))} exists; a key is never overwritten", where=str(file))
    private_pem = key._key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public_pem = key._key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    create_exclusively(path, private_pem, mode=0o600, code="key.exists")
    try:
        create_exclusively(public, public_pem, mode=0o644, code="key.exists")
    except OciBuilderError:
        path.unlink(missing_ok=True)  # alone it would stand in the way of the next try
        raise
    return public


def load_key(path: Path) -> SigningKey:
    """Read a private key that only its owner can read.

    Raises:
        PolicyError: ``key.mode``: group or others may touch the file, it is not a regular file (a link included), or
            it belongs to somebody else.
        FormatError: ``key.format``: not an unencrypted Ed25519 key in PEM.
        SpecError: ``spec.path``: it is not there. TransportError: ``io.*``.
    """
    data = _read_private(path)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except TypeError:
        raise _no_key(path, "it is encrypted, and keys here have no passphrase") from None
    except (ValueError, UnsupportedAlgorithm):
        # The parser's message may quote the file, so it is not passed on.
        raise _no_key(path, "not a PEM private key (PKCS #8)") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise _no_key(path, "not an Ed25519 key")
    if data.count(b"-----BEGIN ") != 1:
        raise _no_key(path, "more than one key")
    return SigningKey(key)


def _no_key(path: Path, why: str) -> FormatError:
    return FormatError("key.format", f"{show(str(path))}: {why}; oci-builder key new makes one", where=str(path))


def _read_private(path: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise PolicyError("key.mode", f"{show(str(path))}: a key file is not a link", where=str(path)) from None
        raise input_error(error, path) from None
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077 or info.st_uid not in (0, os.geteuid()):
            raise PolicyError(
                "key.mode",
                f"{show(str(path))}: a private key is a regular file of yours with mode 0600; run chmod 600 on it",
                where=str(path), expected="0600", actual=f"{stat.S_IMODE(info.st_mode):04o}",
            )  # fmt: skip
        return os.read(fd, _MAX_KEY_FILE)  # a file of so few bytes is read at once
    finally:
        os.close(fd)


def load_public(path: Path) -> bytes:
    """The 32 bytes of a public key file (PEM).

    Raises:
        FormatError: ``key.format``.
        TransportError: ``io.*``.
    """
    try:
        with open_file(path) as file:
            data = file.read(_MAX_KEY_FILE)
    except OSError as error:
        raise input_error(error, path) from None
    try:
        key = serialization.load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm):
        raise FormatError("key.format", f"{show(str(path))}: not a PEM public key", where=str(path)) from None
    if not isinstance(key, Ed25519PublicKey):
        raise FormatError("key.format", f"{show(str(path))}: not an Ed25519 key", where=str(path))
    return key.public_bytes(_RAW, serialization.PublicFormat.Raw)


@dataclass(frozen=True, slots=True)
class SignatureCheck:
    """What the signatures of an envelope say.

    Attributes:
        valid: trusted keys with a good signature.
        broken: trusted keys that are named by a signature which is not theirs over these bytes.
        unknown: key ids (or ``-``) of signatures that no trusted key made.
    """

    valid: tuple[TrustedKey, ...] = ()
    broken: tuple[TrustedKey, ...] = ()
    unknown: tuple[str, ...] = ()


def decode64(text: str, where: str) -> bytes:
    """Strict base64: one spelling for one value.

    Raises:
        FormatError: ``receipt.base64``.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        data = b""
    if base64.b64encode(data).decode() != text:
        raise FormatError("receipt.base64", f"{where}: not canonical base64", where=where)
    return data


def check_signatures(envelope: Envelope, payload: bytes, policy: TrustPolicy, where: str) -> SignatureCheck:
    """Try every signature against the trusted keys. ``keyid`` chooses which key to blame, never which to believe.

    Raises:
        FormatError: ``receipt.base64``.
    """
    message = pae(envelope.payload_type, payload)
    trusted = policy.by_id()
    valid: dict[str, TrustedKey] = {}
    broken: dict[str, TrustedKey] = {}
    unknown: list[str] = []
    for signature in envelope.signatures:
        raw = decode64(signature.sig, f"{where}: signature")
        maker = next((key for key in _likely(trusted, signature.keyid) if _verifies(key, raw, message)), None)
        if maker is not None:
            valid[maker.id] = maker
        elif signature.keyid in trusted:
            broken[signature.keyid] = trusted[signature.keyid]
        else:
            unknown.append(signature.keyid or "-")
    return SignatureCheck(tuple(valid.values()), tuple(broken.values()), tuple(unknown))


def _likely(trusted: dict[str, TrustedKey], keyid: str) -> Iterable[TrustedKey]:
    return sorted(trusted.values(), key=lambda key: key.id != keyid)


def _verifies(key: TrustedKey, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key.raw).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
