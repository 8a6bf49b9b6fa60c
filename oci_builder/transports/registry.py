"""HTTP with one registry: the session is oras's; redirects, retries, authentication and errors are decided here.

oras's downloads check neither digest nor size, and follow any redirect; so its session is used, and no more. This is
the only file that knows oras, and requests and urllib3 below it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any
from urllib.parse import urljoin, urlsplit

import oras.provider
import requests
import urllib3

from oci_builder.model.errors import PolicyError, TransportError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.redact import redact, redact_url
from oci_builder.transports.registry_auth import Authorizer, TokenAnswer
from oci_builder.transports.registry_guard import Origin, check_target, is_loopback
from oci_builder.transports.registry_policy import (
    RETRIED_STATUS,
    RegistryOptions,
    pause_of,
    registry_says,
    trusted_authorities,
)
from oci_builder.transports.registry_reference import Reference

_CONNECT_SECONDS = 20
_PROBE_SECONDS = 4
_HOPS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_READ = 1 << 20
_TOKEN_BYTES = 1 << 20
_RETRIED_CODES = frozenset({"http.connect", "http.timeout", "http.read", "http.proxy"})

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


class RegistryClient:
    """Requests to one repository of one registry. Safe for threads.

    Plain HTTP is spoken to loopback (TLS, when plain HTTP is not answered there) and with ``options.plain_http``.
    Proxies and certificate authorities come from the usual variables (``HTTPS_PROXY``, ``NO_PROXY``,
    ``REQUESTS_CA_BUNDLE``, ``SSL_CERT_FILE``), else from the system's certificate store.

    Args:
        reference: the repository.
        actions: ``pull`` or ``pull,push``.
    """

    def __init__(
        self, reference: Reference, options: RegistryOptions | None = None, actions: str = "pull", emit: Emit = silent
    ) -> None:
        self.reference = reference
        self.options = options or RegistryOptions()
        self._loopback = is_loopback(Origin.of(f"https://{reference.api_host}").host)
        plain = self.options.plain_http or self._loopback
        self._settled = self.options.plain_http or not self._loopback
        self._settling = threading.Lock()
        self._connect_seconds = _CONNECT_SECONDS
        self._oras = oras.provider.Registry(hostname=reference.api_host, insecure=plain)
        self._session: requests.Session = self._oras.session
        # Else requests reads a redirect's body, however long, and prepares the next request even when told not to.
        self._session.get_redirect_target = lambda _response: None
        self._emit = emit
        find = self.options.find_credential
        self.auth = Authorizer(
            reference, actions, lambda: find(reference.host, reference.repository), self._ask_token_service,
            self.options.mount_from,
        )

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._session.close()

    def __enter__(self) -> RegistryClient:
        return self

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self.close()

    @property
    def home(self) -> Origin:
        """Scheme, host and port of the registry."""
        return Origin.of(self.url(""))

    def url(self, path: str) -> str:
        """Absolute URL of ``path`` below the repository's API, e.g. ``manifests/latest``."""
        return f"{self._oras.prefix}://{self.reference.api_host}/v2/{self.reference.repository}/{path}"

    def open(
        self, method: str, path: str, headers: Mapping[str, str] | None = None, body: Body | None = None,
        *, retry: bool = True,
    ) -> Response:  # fmt: skip
        """Send a request until there is an answer that another try would not change.

        Args:
            path: below the repository's API, or an absolute URL that the registry gave.
            body: makes the body's chunks, anew for each try.
            retry: also try again where the answer is 429 or 5xx, or there is none.

        Raises:
            TransportError: ``http.connect``, ``http.timeout``, ``http.read``, ``http.tls``, ``http.proxy``, ``auth``.
            PolicyError: ``http.redirect``.
        """
        tries = self.options.attempts if retry else 1
        for attempt in range(1, tries + 1):
            try:
                response = self._authorized(method, path, dict(headers or {}), body)
            except TransportError as error:
                if error.code not in _RETRIED_CODES or attempt == tries:
                    raise
                self.wait(attempt, error.message)
                continue
            # What a storage host refuses may be a signed link that has expired: the registry gives a new one (B074).
            stale = response.redirected and response.status in (400, 401, 403)
            if (response.status not in RETRIED_STATUS and not stale) or attempt == tries:
                return response
            with response:
                self.wait(attempt, f"HTTP status {response.status}", response.headers.get("Retry-After"))
        raise AssertionError("unreachable")

    def expect(self, response: Response, *statuses: int) -> Response:
        """The response, when its status is one of those; else it is closed and an error says what the registry said.

        Raises:
            TransportError: ``auth`` for 401 and 403, else ``http.status``.
        """
        if response.status in statuses:
            return response
        with response:
            said = ""
            with suppress(TransportError):
                said = registry_says(response.read(1 << 16))
        where = redact_url(response.url)
        text = redact(f"{where}: HTTP status {response.status}{said}", self.auth.secrets)
        code = {401: "auth", 403: "auth", 407: "http.proxy"}.get(response.status, "http.status")
        raise TransportError(code, text, where=where, expected=list(statuses), actual=response.status)

    def wait(self, attempt: int, why: str, retry_after: str | None = None) -> None:
        """Pause before the next try, and say so."""
        seconds = pause_of(attempt, retry_after, self.options)
        self._emit(Event("note", str(self.reference.host), message=f"{why}; again in {seconds:.1f} s"))
        self.options.sleep(seconds)

    def _authorized(self, method: str, path: str, headers: dict[str, str], body: Body | None) -> Response:
        """One request with whatever the registry's challenges ask for, at most two renewals of that."""
        for renewals in range(3):
            used = self.auth.header()
            response = self._settle(method, path, headers, body, used)
            if response.redirected or response.status not in (401, 403) or renewals == 2:
                return response
            try:
                renewed = self.auth.renew(response.challenges(), used)
            except BaseException:
                response.close()
                raise
            if not renewed:
                return response
            response.close()
        raise AssertionError("unreachable")

    def _settle(
        self, method: str, path: str, headers: dict[str, str], body: Body | None, used: str | None
    ) -> Response:
        """Send; the first request of all to a loopback registry finds out whether it speaks TLS."""
        if not self._settled:
            with self._settling:
                if not self._settled:
                    return self._first(method, path, headers, body)
        return self._follow(method, path, headers, body, used)

    def _first(self, method: str, path: str, headers: dict[str, str], body: Body | None) -> Response:
        # Without credentials: nobody has asked for them yet.
        failed: TransportError | None = None
        try:
            response = self._follow(method, path, headers, body, None)
            # What Go's net/http answers to plain HTTP on a TLS port; it says so, but not to a HEAD.
            if response.status != 400 or (method != "HEAD" and b"HTTPS server" not in response.peek(1024)):
                self._settled = True
                return response
            response.close()
        except TransportError as error:
            if error.code == "http.timeout" or "refused" in error.message:
                raise
            failed = error
        self._oras.prefix, self._connect_seconds = "https", _PROBE_SECONDS
        try:
            response = self._follow(method, path, headers, body, None)
        except TransportError as error:
            if "CERTIFICATE_VERIFY_FAILED" in error.message:
                raise  # It does speak TLS.
            self._oras.prefix = "http"
            if method == "HEAD" and failed is None:
                return self._follow(method, path, headers, body, None)
            raise failed or error from None
        finally:
            self._connect_seconds = _CONNECT_SECONDS
        self._settled = True
        return response

    def _follow(
        self, method: str, path: str, headers: dict[str, str], body: Body | None, auth: str | None
    ) -> Response:
        home = self.home
        url = path if "://" in path else self.url(path)
        if Origin.of(url) != home:
            check_target(url, home, resolve=not self._proxied(url))
        for hop in range(_HOPS + 1):
            sent = dict(headers)
            if auth is not None and Origin.of(url) == home:
                sent["Authorization"] = auth
            raw = self._send(method, url, sent, body)
            response = Response(raw, hop > 0, redact_url(url), self.auth.secrets)
            location = raw.headers.get("Location")
            moved = response.status in _REDIRECTS and (method in ("GET", "HEAD") or response.status in (307, 308))
            if not moved:
                return response
            response.close()
            if not location:
                raise TransportError("http.status", f"{redact_url(url)}: a redirect to nowhere", where=redact_url(url))
            url = _joined(url, location)
            check_target(url, home, resolve=not self._proxied(url))
        raise TransportError("http.status", f"{redact_url(url)}: more than {_HOPS} redirects", where=redact_url(url))

    def _send(
        self, method: str, url: str, headers: Mapping[str, str], body: Body | Mapping[str, str] | None
    ) -> requests.Response:
        data: Any = body() if callable(body) else body
        try:
            return self._session.request(
                method, url, headers={"Accept-Encoding": "identity", "User-Agent": "oci-builder", **headers}, data=data,
                stream=True, allow_redirects=False, verify=trusted_authorities(), auth=_no_netrc,
                timeout=(self._connect_seconds, self.options.limits.blob_idle_seconds),
            )  # fmt: skip
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            raise _error_of(error, redact_url(url), self.auth.secrets) from None

    def _ask_token_service(
        self, method: str, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None
    ) -> TokenAnswer:
        check_target(url, self.home, resolve=not self._proxied(url))
        attempt = 0
        while True:
            attempt += 1
            try:
                # Not redirected: a token service that moves would take the credentials along.
                with Response(self._send(method, url, headers, form), False, redact_url(url), ()) as response:
                    answer = TokenAnswer(response.status, response.read(_TOKEN_BYTES))
                    after = response.headers.get("Retry-After")
            except TransportError as error:
                if error.code not in _RETRIED_CODES or attempt >= self.options.attempts:
                    raise
                self.wait(attempt, error.message)
                continue
            if answer.status not in RETRIED_STATUS or attempt >= self.options.attempts:
                return answer
            self.wait(attempt, f"token service: HTTP status {answer.status}", after)

    def _proxied(self, url: str) -> bool:
        try:
            return bool(requests.utils.select_proxy(url, requests.utils.get_environ_proxies(url)))
        except (ValueError, OSError):
            return False


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise PolicyError(
            "http.redirect", f"{redact_url(url)}: sends us to {show(redact_url(location)[:200])}", where=redact_url(url)
        ) from None


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
            code, why = "http.tls", "no trusted TLS connection; for an authority of your own set SSL_CERT_FILE"
        case requests.exceptions.Timeout() | urllib3.exceptions.TimeoutError() | TimeoutError():
            code, why = "http.timeout", "no answer in time"
        case requests.exceptions.ConnectionError() | urllib3.exceptions.NewConnectionError():
            timed_out = "Read timed out" in text
            code, why = ("http.timeout", "no answer in time") if timed_out else ("http.connect", "no connection")
        case requests.exceptions.InvalidURL() | requests.exceptions.InvalidSchema():
            code, why = "http.url", "not an address that can be asked, or the proxy's is none (HTTPS_PROXY, HTTP_PROXY)"
        case OSError() if "CA certificate bundle" in text:
            code, why = "http.tls", "the file of certificate authorities is missing"
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
