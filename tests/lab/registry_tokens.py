"""Tokens for the lab's registry: a service that gives them, and a time after which they are dead."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from urllib.parse import parse_qs

from tests.lab.registry import Registry, Reply, Request


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def passing(self, seconds: float) -> Callable[[Request, Reply], Reply | None]:
        """A change that leaves the reply as it is: answering takes ``seconds``."""

        def change(_request: Request, _reply: Reply) -> Reply | None:
            self.now += seconds
            return None

        return change


class Tokens:
    """A token service as a fault: without a valid token for the repository, 401 with a challenge.

    Args:
        registry: whose requests need a token.
        lifetime: seconds.
        challenge: its parameters; ``{realm}``, ``{repo}`` are filled in.
        login: user name and password that the service demands.
        clock: seconds, by which tokens die.
    """

    def __init__(
        self, registry: Registry, lifetime: float = 300.0, login: tuple[str, str] | None = None,
        challenge: str = 'Bearer realm="{realm}",service="lab",scope="repository:{repo}:pull"',
        tell_lifetime: bool = True, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.registry, self.lifetime, self.login, self.challenge = registry, lifetime, login, challenge
        self.tell_lifetime, self.clock = tell_lifetime, clock
        self.issued: dict[str, tuple[str, float]] = {}
        self.scopes: list[str] = []

    def __call__(self, request: Request, reply: Reply) -> Reply | None:
        if request.path == "/token":
            return self._issue(request)
        if not self.refuses(request):
            return None
        realm = f"{self.registry.url}/token"
        header = self.challenge.format(realm=realm, repo=request.repo)
        return Reply(401, b'{"errors":[{"code":"UNAUTHORIZED"}]}', {"WWW-Authenticate": header})

    def refuses(self, request: Request) -> bool:
        """Whether the request comes without a token that holds for it; nothing is done for it then."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        scope, until = self.issued.get(token, ("", 0.0))
        holds = scope.startswith(f"repository:{request.repo}:") and self.clock() < until
        return request.path != "/token" and not holds

    def _issue(self, request: Request) -> Reply:
        form = {**request.query, **{k: v[0] for k, v in parse_qs(request.body.decode()).items()}}
        if self.login is not None:
            wanted = "Basic " + base64.b64encode(":".join(self.login).encode()).decode()
            if request.headers.get("authorization") != wanted and form.get("refresh_token") != self.login[1]:
                return Reply(401, b"{}")
        scope = form.get("scope", "")
        with self.registry.lock:
            self.scopes.append(scope)
            token = f"lab-token-{len(self.scopes)}"
            self.issued[token] = (scope, self.clock() + self.lifetime)
        value: dict[str, object] = {"token": token}
        if self.tell_lifetime:
            value["expires_in"] = self.lifetime
        return Reply(200, json.dumps(value).encode())
