"""How patient we are with a registry, and what it says when it says no."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from oci_builder.model.errors import show
from oci_builder.model.limits import DEFAULT_LIMITS, Limits
from oci_builder.transports.credentials import FindCredential, docker_credential

RETRIED_STATUS = frozenset({408, 429, 500, 502, 503, 504})
_LONGEST_RETRY_AFTER = 120.0
# Where Go's crypto/x509 looks; certifi's list, requests' default, lacks what an administrator added.
_SYSTEM_TRUST = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


@dataclass(frozen=True, slots=True)
class RegistryOptions:
    """How to talk to a registry.

    Attributes:
        plain_http: speak HTTP to a registry that is not on loopback.
        limits: document sizes, idle time.
        attempts: tries without any progress before an error is final.
        first_pause, longest_pause: seconds between tries; each pause is twice the one before.
        parallel: layers at a time.
        find_credential: (host, repository) -> credential or None.
        sleep: pauses; tests make it short.
        mount_from: another repository of the same registry, whose blobs a push asks for before it sends its own.
    """

    plain_http: bool = False
    limits: Limits = DEFAULT_LIMITS
    attempts: int = 6
    first_pause: float = 0.5
    longest_pause: float = 15.0
    parallel: int = 4
    find_credential: FindCredential = field(default=docker_credential)
    sleep: Callable[[float], None] = field(default=time.sleep)
    mount_from: str = ""


def pause_of(attempt: int, retry_after: str | None, options: RegistryOptions) -> float:
    """Seconds before the next try: what ``Retry-After`` asks for within reason, else doubling (RFC 9110, 10.2.3)."""
    asked = _retry_after(retry_after)
    if asked is not None:
        return min(asked, _LONGEST_RETRY_AFTER)
    return min(options.first_pause * 2.0 ** (attempt - 1), options.longest_pause)


def _retry_after(text: str | None) -> float | None:
    if not text:
        return None
    if text.strip().isascii() and text.strip().isdigit():
        return float(text.strip()[:9])
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - datetime.now(UTC)).total_seconds())


def registry_says(body: bytes) -> str:
    """The first error of a registry's error document, for a message; empty when there is none (distribution-spec)."""
    try:
        first = json.loads(body)["errors"][0]
        code, message = str(first.get("code", "")), str(first.get("message", ""))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return ""
    return f" ({show(code[:60])}: {show(message[:200])})" if code or message else ""


# The first that is set wins.
_AUTHORITIES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")


def trusted_authorities() -> str | bool:
    """The certificate authorities: the user's choice, the system's, or certifi's (``True``)."""
    for variable in _AUTHORITIES:
        if chosen := os.environ.get(variable):
            return chosen
    return next((path for path in _SYSTEM_TRUST if Path(path).is_file()), True)


def authorities_hint() -> str:
    """Where to name an authority of one's own: a variable that is set already hides those behind it."""
    for variable in _AUTHORITIES:
        if chosen := os.environ.get(variable):
            return f"authorities are those of {variable}={show(chosen)}: put yours there"
    return "for an authority of your own set SSL_CERT_FILE"
