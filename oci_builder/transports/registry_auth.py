"""Who we are to one registry: basic credentials, or a token for exactly the repository and actions wanted.

Source: distribution's token and OAuth2 documents. oras's own token backend keeps one token for everything, asks for the
scope that the challenge names and never takes a second token, which field reports B065, B068 and B071 rule out; so what
is ours is the decision which token to ask for, and oras's session still carries the request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from oci_builder.model.errors import OciBuilderError, TransportError, show
from oci_builder.model.jsontext import load_json
from oci_builder.model.redact import redact, redact_url
from oci_builder.transports.credentials import Credential
from oci_builder.transports.registry_challenge import Challenge, parse_challenges
from oci_builder.transports.registry_reference import Reference

CLIENT_ID = "oci-builder"
# The distribution documents' default where the answer names no time.
_LIFETIME_SECONDS = 60
_MARGIN_SECONDS = 5
_MAX_TOKEN = 1 << 16


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """What a token service said: HTTP status and body."""

    status: int
    body: bytes


# (method, url, headers, form) -> answer. A form is sent as application/x-www-form-urlencoded.
Ask = Callable[[str, str, Mapping[str, str], Mapping[str, str] | None], TokenAnswer]


class Authorizer:
    """The ``Authorization`` header for one repository. Safe for threads.

    Args:
        reference: whose repository.
        actions: ``pull`` or ``pull,push``.
        find: called when a challenge comes, once; gives the credential or None.
        ask: sends a request to the token service.
        reading: another repository that the same token must let us pull from; empty for none.
    """

    def __init__(
        self, reference: Reference, actions: str, find: Callable[[], Credential | None], ask: Ask, reading: str = ""
    ) -> None:
        self._where = reference.host
        self._scopes = [f"repository:{reference.repository}:{actions}"]
        self._scopes += [f"repository:{reading}:pull"] if reading else []
        self._find, self._ask = find, ask
        self._lock = threading.Lock()
        self._header: str | None = None
        self._expires = float("inf")
        self._challenge: Challenge | None = None
        self._credential: Credential | None = None
        self._looked = False

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not appear in any message."""
        known = self._credential.secrets if self._credential else ()
        return (*known, *((self._header.partition(" ")[2],) if self._header else ()))

    def header(self) -> str | None:
        """The header to send, or None before the first challenge. A token about to expire is replaced first.

        Raises:
            TransportError: ``auth``.
        """
        with self._lock:
            if self._challenge is not None and time.monotonic() >= self._expires:
                self._obtain(self._challenge)
            return self._header

    def renew(self, challenges: Iterable[str], used: str | None) -> bool:
        """Answer a 401 or 403: get a header other than ``used``. False when that would change nothing.

        Args:
            challenges: what came with it; without any, the earlier ones hold.
            used: the header that was refused.

        Raises:
            TransportError: ``auth``: a malformed challenge, no scheme that we speak, credentials refused.
        """
        with self._lock:
            if self._header is not None and self._header != used:
                return True  # Another thread has been here.
            said = parse_challenges(challenges)
            if not said and self._challenge is None:
                return False
            self._challenge = self._choose(said) if said else self._challenge
            assert self._challenge is not None
            self._obtain(self._challenge)
            return self._header is not None and self._header != used

    def _choose(self, challenges: tuple[Challenge, ...]) -> Challenge:
        for scheme in ("bearer", "basic"):
            for challenge in challenges:
                if challenge.scheme == scheme:
                    return challenge
        names = ", ".join(show(c.scheme) for c in challenges) or "no challenge"
        raise self._error(f"the registry wants authentication, with {names}; only Bearer and Basic are known")

    def _obtain(self, challenge: Challenge) -> None:
        if not self._looked:
            self._credential, self._looked = self._find(), True
        if challenge.scheme == "basic":
            self._header = self._basic()
            self._expires = float("inf")
            if self._header is None:
                raise self._error("the registry wants a user name and a password; run `docker login`")
        elif self._credential and self._credential.registry_token:
            self._header, self._expires = f"Bearer {self._credential.registry_token}", float("inf")
        else:
            # Until the answer is here there is none: a failed renewal must not leave the dead token in use.
            self._header = None
            self._header, self._expires = self._token(challenge)

    def _basic(self) -> str | None:
        secrets = self._credential.secrets if self._credential and self._credential.password else ()
        return f"Basic {secrets[-1]}" if secrets else None

    def _token(self, challenge: Challenge) -> tuple[str, float]:
        realm = challenge.parameters.get("realm", "")
        if urlsplit(realm).scheme not in ("http", "https"):
            raise self._error(f"the challenge names no token service (realm {show(redact_url(realm)[:200])})")
        service = challenge.parameters.get("service", "")
        identity = self._credential.identity_token if self._credential else ""
        asked = time.monotonic()
        answer = self._ask_oauth(realm, service, identity) if identity else self._ask_token(realm, service)
        if answer.status in (401, 403):
            known = "the stored credentials are refused" if self._credential else "anonymous pulls are refused"
            raise self._error(f"the token service answers {answer.status}: {known}; run `docker login {self._where}`")
        if answer.status != 200:
            raise self._error(f"the token service answers {answer.status}", answer.status)
        token, lifetime = self._read_token(answer.body)
        return f"Bearer {token}", asked + max(lifetime - _MARGIN_SECONDS, lifetime / 2)

    def _ask_token(self, realm: str, service: str) -> TokenAnswer:
        query = {"service": service, "client_id": CLIENT_ID}
        basic = self._basic()
        if basic and self._credential:
            query["account"] = self._credential.username
        headers = {"Authorization": basic} if basic else {}
        joint = "&" if urlsplit(realm).query else "?"
        scopes = urlencode([("scope", scope) for scope in self._scopes])
        given = urlencode({k: v for k, v in query.items() if v})
        return self._ask("GET", f"{realm}{joint}{scopes}&{given}", headers, None)

    def _ask_oauth(self, realm: str, service: str, identity: str) -> TokenAnswer:
        form = {
            "grant_type": "refresh_token", "refresh_token": identity, "service": service,
            "scope": " ".join(self._scopes),
            "client_id": CLIENT_ID,
        }  # fmt: skip
        return self._ask("POST", realm, {}, {k: v for k, v in form.items() if v})

    def _read_token(self, body: bytes) -> tuple[str, float]:
        try:
            value = load_json(body, "token answer")
        except OciBuilderError as error:
            raise self._error(f"the token service's answer is not JSON ({error.code})") from None
        found = value if isinstance(value, dict) else {}
        token = found.get("token") or found.get("access_token")
        if not isinstance(token, str) or not token.isascii() or not token.isprintable() or len(token) > _MAX_TOKEN:
            raise self._error("the token service's answer holds no token")
        lifetime = found.get("expires_in")
        plain = isinstance(lifetime, int | float) and not isinstance(lifetime, bool) and lifetime > 0
        return token, float(lifetime) if plain and lifetime is not None else float(_LIFETIME_SECONDS)

    def _error(self, why: str, status: int = 401) -> TransportError:
        return TransportError("auth", redact(f"{self._where}: {why}", self.secrets), where=self._where, actual=status)
