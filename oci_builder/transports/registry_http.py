"""One HTTP request and its answer: nothing is followed, tried again or decided here, and no error is another's.

The only file that knows requests, and urllib3 below it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import requests
import urllib3

from oci_builder.model.errors import TransportError, show
from oci_builder.model.redact import redact, redact_url
from oci_builder.transports.registry_policy import authorities_hint, trusted_authorities

_CONNECT_SECONDS = 20
_READ = 1 << 20

_NOISE = re.compile(r"(?: with)? url: \S+|\bHTTPS?Connection(?:Pool)?\([^)]*\): ")

# Bytes, or an iterable of them with a length (else it would be sent in HTTP chunks).
Body = Callable[[], bytes | Iterable[bytes]]


class Response:
    """One answer. Read it or close it.

    Attributes:
        status: HTTP status.
        headers: without regard to case.
        url: where it came from in the end; may hold a signature, never show it.
        redirected: whether another host than the registry answered, or another path.
    """

    def __init__(self, raw: requests.Response, redirected: bool, where: str, secrets: tuple[str, ...]) -> None:
        self._raw, self._where, self._secrets = raw, where, secrets
        self.status: int = raw.status_code
        self.headers: Mapping[str, str] = raw.headers
        self.url: str = raw.url or ""
        self.redirected = redirected
        self._peeked = b""

    def peek(self, size: int) -> bytes:
        """Up to ``size`` bytes of the body, which ``chunks`` gives again.

        Raises:
            TransportError: as ``chunks``.
        """
        self._peeked = self.read(size)
        return self._peeked

    def chunks(self) -> Iterator[bytes]:
        """The body as it was sent, never decoded, as it comes.

        Raises:
            TransportError: ``http.read``, ``http.timeout``.
        """
        if self._peeked:
            data, self._peeked = self._peeked, b""
            yield data
        try:
            while data := self._raw.raw.read1(_READ, decode_content=False):
                yield data
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise _error_of(error, self._where, self._secrets) from None

    def read(self, limit: int) -> bytes:
        """The body up to ``limit`` bytes, and one more if there is one.

        Raises:
            TransportError: as ``chunks``.
        """
        parts, size = [], 0
        for data in self.chunks():
            parts.append(data)
            size += len(data)
            if size > limit:
                break
        return b"".join(parts)[: limit + 1]

    def challenges(self) -> list[str]:
        """All ``WWW-Authenticate`` headers."""
        return list(self._raw.raw.headers.getlist("WWW-Authenticate"))

    def interrupt(self) -> None:
        """Make a read that waits in another thread end now."""
        with suppress(Exception):
            self._raw.raw.shutdown()

    def close(self) -> None:
        """Done with it. Idempotent. A body that was not read costs the connection, not the time to read it."""
        self._raw.close()

    def __enter__(self) -> Response:
        return self

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self.close()


class Exchange:
    """Requests on one session, each sent once and not redirected. Safe for threads.

    Args:
        session: a ``requests.Session``, which becomes ours.
        idle_seconds: how long an answer may be silent.
        secrets: what no message may show; asked when there is one.

    Attributes:
        connect_seconds: how long a connection may take to be made.
    """

    def __init__(self, session: requests.Session, idle_seconds: float, secrets: Callable[[], tuple[str, ...]]) -> None:
        self._session, self._idle_seconds, self._secrets = session, idle_seconds, secrets
        # Else requests reads a redirect's body, however long, and prepares the next request even when told not to.
        session.get_redirect_target = lambda resp: None  # type: ignore[method-assign]
        self.connect_seconds: float = _CONNECT_SECONDS

    def send(
        self, method: str, url: str, headers: Mapping[str, str], body: Body | Mapping[str, str] | None = None,
        *, redirected: bool = False,
    ) -> Response:  # fmt: skip
        """Send one request.

        Args:
            body: a maker of the bytes, or a form.
            redirected: for the answer: whether another one led here.

        Raises:
            TransportError: ``http.connect``, ``http.timeout``, ``http.read``, ``http.tls``, ``http.proxy``,
                ``http.url``.
        """
        data: Any = body() if callable(body) else body
        try:
            raw = self._session.request(
                method, url, headers={"Accept-Encoding": "identity", "User-Agent": "oci-builder", **headers}, data=data,
                stream=True, allow_redirects=False, verify=trusted_authorities(), auth=_no_netrc,
                timeout=(self.connect_seconds, self._idle_seconds),
            )  # fmt: skip
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise _error_of(error, redact_url(url), self._secrets()) from None
        return Response(raw, redirected, redact_url(url), self._secrets())

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._session.close()


def is_proxied(url: str) -> bool:
    """Whether the environment's proxy would be asked for a URL."""
    try:
        return bool(requests.utils.select_proxy(url, requests.utils.get_environ_proxies(url)))
    except (ValueError, OSError):
        return False


def _no_netrc(request: requests.PreparedRequest) -> requests.PreparedRequest:
    """Keeps requests from replacing our ``Authorization`` by a ~/.netrc entry or by a URL's user name."""
    return request


def _error_of(error: Exception, where: str, secrets: tuple[str, ...]) -> TransportError:
    """Our error for one of requests' or urllib3's; the most telling cause, without addresses of objects."""
    # The text quotes the path, whose query may be a signature under any name.
    text = redact(_NOISE.sub("", str(_innermost(error))), secrets)
    match error:
        case requests.exceptions.ProxyError() | urllib3.exceptions.ProxyError():
            code, why = "http.proxy", "the proxy cannot be used; see HTTPS_PROXY, HTTP_PROXY and NO_PROXY"
        case requests.exceptions.SSLError() | urllib3.exceptions.SSLError():
            code, why = "http.tls", f"no trusted TLS connection; {authorities_hint()}"
        case requests.exceptions.Timeout() | urllib3.exceptions.TimeoutError() | TimeoutError():
            code, why = "http.timeout", "no answer in time"
        case requests.exceptions.ConnectionError() | urllib3.exceptions.NewConnectionError():
            timed_out = "Read timed out" in text
            code, why = ("http.timeout", "no answer in time") if timed_out else ("http.connect", "no connection")
        case requests.exceptions.InvalidURL() | requests.exceptions.InvalidSchema():
            code, why = "http.url", "not an address that can be asked, or the proxy's is none (HTTPS_PROXY, HTTP_PROXY)"
        case OSError() if "CA certificate bundle" in text:
            code, why = "http.tls", f"the file of certificate authorities is missing; {authorities_hint()}"
        case _:
            code, why = "http.read", "the connection broke"
    host = urlsplit(where).netloc.rpartition("@")[2] or where
    return TransportError(code, f"{host}: {why} ({show(text[:300])})", where=where, actual=type(error).__name__)


def _innermost(error: BaseException) -> BaseException:
    """What requests and urllib3 have wrapped."""
    while True:
        inner = getattr(error, "reason", None) or next(iter(error.args), None)
        if not isinstance(inner, BaseException):
            return error
        error = inner
