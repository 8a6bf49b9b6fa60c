"""HTTP with one registry: the session is oras's; redirects, retries and authentication are decided here.

oras's downloads check neither digest nor size, and follow any redirect; so its session is used, and no more. This is
the only file that knows oras.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from urllib.parse import urljoin

import oras.provider

from oci_builder.model.errors import PolicyError, TransportError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.redact import redact, redact_url
from oci_builder.transports.registry_auth import Authorizer, TokenAnswer
from oci_builder.transports.registry_guard import Origin, check_target, is_loopback
from oci_builder.transports.registry_http import Body, Exchange, Response, is_proxied
from oci_builder.transports.registry_policy import (
    RETRIED_STATUS,
    RegistryOptions,
    pause_of,
    registry_says,
)
from oci_builder.transports.registry_reference import Reference

_PROBE_SECONDS = 4
_HOPS = 5
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_TOKEN_BYTES = 1 << 20
_RETRIED_CODES = frozenset({"http.connect", "http.timeout", "http.read", "http.proxy"})


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
        self._oras = oras.provider.Registry(hostname=reference.api_host, insecure=plain)
        self._emit = emit
        find = self.options.find_credential
        self.auth = Authorizer(
            reference,
            actions,
            lambda: find(reference.host, reference.repository),
            self._ask_token_service,
            self.options.mount_from,
        )
        self._http = Exchange(self._oras.session, self.options.limits.blob_idle_seconds, lambda: self.auth.secrets)

    def close(self) -> None:
        """Close the connections. Idempotent."""
        self._http.close()

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
        host = self.reference.host
        todo = f"; the credentials for {host} are not taken: run `docker login {host}`"
        todo = todo if response.status == 401 and not response.redirected else ""
        text = redact(f"{where}: HTTP status {response.status}{said}{todo}", self.auth.secrets)
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

    def _settle(self, method: str, path: str, headers: dict[str, str], body: Body | None, used: str | None) -> Response:
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
        usual = self._http.connect_seconds
        self._oras.prefix, self._http.connect_seconds = "https", _PROBE_SECONDS
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
            self._http.connect_seconds = usual
        self._settled = True
        return response

    def _follow(self, method: str, path: str, headers: dict[str, str], body: Body | None, auth: str | None) -> Response:
        home = self.home
        url = path if "://" in path else self.url(path)
        if Origin.of(url) != home:
            check_target(url, home, resolve=not is_proxied(url))
        for hop in range(_HOPS + 1):
            sent = dict(headers)
            if auth is not None and Origin.of(url) == home:
                sent["Authorization"] = auth
            response = self._http.send(method, url, sent, body, redirected=hop > 0)
            location = response.headers.get("Location")
            moved = response.status in _REDIRECTS and (method in ("GET", "HEAD") or response.status in (307, 308))
            if not moved:
                return response
            response.close()
            if not location:
                raise TransportError("http.status", f"{redact_url(url)}: a redirect to nowhere", where=redact_url(url))
            url = _joined(url, location)
            check_target(url, home, resolve=not is_proxied(url))
        raise TransportError("http.status", f"{redact_url(url)}: more than {_HOPS} redirects", where=redact_url(url))

    def _ask_token_service(
        self, method: str, url: str, headers: Mapping[str, str], form: Mapping[str, str] | None
    ) -> TokenAnswer:
        check_target(url, self.home, resolve=not is_proxied(url))
        attempt = 0
        while True:
            attempt += 1
            try:
                # Not redirected: a token service that moves would take the credentials along.
                with self._http.send(method, url, headers, form) as response:
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


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError:
        raise PolicyError(
            "http.redirect", f"{redact_url(url)}: sends us to {show(redact_url(location)[:200])}", where=redact_url(url)
        ) from None
