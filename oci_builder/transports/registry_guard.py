"""Which hosts a server may send us to, and where our credentials may go.

A registry chooses the hosts of redirects, upload locations and token services. Followed blindly, it reaches services of
this machine and of its cloud (metadata at 169.254.169.254) through us, or collects our credentials elsewhere.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from oci_builder.model.errors import PolicyError, show
from oci_builder.model.redact import redact_url

_PORTS = {"http": 80, "https": 443}
_METADATA = frozenset({ipaddress.ip_address("fd00:ec2::254"), ipaddress.ip_address("100.100.100.200")})

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True, slots=True)
class Origin:
    """Scheme, host and port: credentials belong to exactly one."""

    scheme: str
    host: str
    port: int

    @classmethod
    def of(cls, url: str) -> Origin:
        """The origin of an http(s) URL.

        Raises:
            PolicyError: ``http.redirect`` when it has none.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            parts, port = urlsplit(""), None
        scheme = parts.scheme.lower()
        if scheme not in _PORTS or not parts.hostname:
            raise PolicyError("http.redirect", f"{show(redact_url(url)[:200])} is not an http(s) address")
        return cls(scheme, parts.hostname.lower().rstrip("."), port or _PORTS[scheme])


def is_loopback(host: str) -> bool:
    """Whether a host name means this machine by itself, without asking a resolver."""
    host = host.lower().rstrip(".")
    literal = _literal(host)
    return host == "localhost" or host.endswith(".localhost") or (literal is not None and literal.is_loopback)


def check_target(url: str, home: Origin, *, resolve: bool = True) -> None:
    """Refuse a URL that a server sent us to when it points into this machine or its cloud, or gives up TLS.

    What the registry itself is, a target may be: a registry on loopback may redirect to loopback. The name is resolved
    here and once more when the connection is made, so a name server that changes its mind in between is not caught.

    Args:
        home: origin of the registry.
        resolve: false behind a proxy, where this machine's resolver says nothing.

    Raises:
        PolicyError: ``http.redirect``.
    """
    target = Origin.of(url)
    if home.scheme == "https" and target.scheme != "https":
        raise _refused(url, home, "from https to http")
    kinds = _kinds(target.host, resolve) - {"public"}
    if kinds and not kinds <= _kinds(home.host, resolve):
        raise _refused(url, home, f"to a {sorted(kinds)[0]} address")


def _refused(url: str, home: Origin, why: str) -> PolicyError:
    return PolicyError(
        "http.redirect", f"{home.host}:{home.port} sends us {why} ({show(redact_url(url)[:200])}); refused",
        where=home.host, actual=redact_url(url)[:200],
    )  # fmt: skip


def _kinds(host: str, resolve: bool) -> set[str]:
    literal = _literal(host)
    if literal is not None:
        return {_kind(literal)}
    if is_loopback(host):
        return {"loopback"}
    if not resolve:
        return {"public"}
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return {"public"}  # The connection will say so itself.
    return {_kind(ipaddress.ip_address(str(item[4][0]).partition("%")[0])) for item in found} or {"public"}


def _literal(host: str) -> Address | None:
    """The address that a host is written as, the old short and hexadecimal IPv4 forms included."""
    try:
        return ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return None


def _kind(address: Address) -> str:
    inner = getattr(address, "ipv4_mapped", None) or address
    if inner.is_loopback or inner.is_unspecified:
        return "loopback"
    if inner.is_link_local or inner in _METADATA:
        return "link-local"
    return "multicast" if inner.is_multicast else "public"
