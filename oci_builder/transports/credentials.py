"""Registry credentials from the usual Docker config: ``auths``, ``credHelpers``, ``credsStore``.

Source: docker/cli config file format; the credential helper protocol of docker/docker-credential-helpers.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import stat
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oci_builder.model.errors import OciBuilderError, SpecError, TransportError, show
from oci_builder.model.jsontext import load_json

_HUB_KEY = "https://index.docker.io/v1/"
_HELPER = re.compile(r"[A-Za-z0-9._-]{1,64}\Z")
_HELPER_SECONDS = 60
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class Credential:
    """How to log in to one registry. Never shown: its repr is empty.

    Attributes:
        username, password: for basic authentication and token services.
        identity_token: an OAuth2 refresh token; used instead of the password.
        registry_token: a bearer token as it is.
    """

    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)

    @property
    def secrets(self) -> tuple[str, ...]:
        """What must not appear in any text."""
        pair = base64.b64encode(f"{self.username}:{self.password}".encode()).decode() if self.password else ""
        return tuple(s for s in (self.password, self.identity_token, self.registry_token, pair) if s)


FindCredential = Callable[[str, str], Credential | None]


def docker_credential(host: str, repository: str) -> Credential | None:
    """What ``docker login`` left for a registry, or None for an anonymous pull.

    Reads ``$DOCKER_CONFIG/config.json``, by default ``~/.docker/config.json``, at each call.

    Args:
        host: registry with its port, ``docker.io`` for Docker Hub.
        repository: an entry for ``host/namespace`` is closer than one for ``host``.

    Raises:
        SpecError: ``spec.credentials`` when the file is malformed; nothing of its content is shown.
        TransportError: ``auth`` when a credential helper fails.
    """
    path = config_path()
    config = _read(path)
    helpers = _object(config, "credHelpers", path)
    helper = next((helpers[key] for key in _keys(host) if key in helpers), None)
    if helper is not None:
        return _ask_helper(helper, host, path)
    auths = {_bare(key): value for key, value in _object(config, "auths", path).items()}
    for key in (*_prefixes(host, repository), *map(_bare, _keys(host))):
        entry = auths.get(key)
        if isinstance(entry, dict) and (found := _from_entry(entry, key, path)) is not None:
            return found
    store = config.get("credsStore")
    return _ask_helper(store, host, path) if store else None


def config_path() -> Path:
    """Where the Docker config is."""
    folder = os.environ.get("DOCKER_CONFIG")
    return Path(folder) / "config.json" if folder else Path(os.path.expanduser("~")) / ".docker" / "config.json"


def _read(path: Path) -> dict[str, Any]:
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _bad(path, "is not a file")  # a pipe would be waited for
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise _bad(path, error.strerror or "cannot be read") from None
    try:
        config = load_json(data, str(path))
    except OciBuilderError as error:
        raise _bad(path, f"is not JSON ({error.code})") from None
    if not isinstance(config, dict):
        raise _bad(path, "is not a JSON object")
    return config


def _object(config: dict[str, Any], key: str, path: Path) -> dict[str, Any]:
    value = config.get(key)
    value = {} if value is None else value
    if not isinstance(value, dict):
        raise _bad(path, f"{key} is not an object")
    return value


def _bad(path: Path, why: str) -> SpecError:
    return SpecError("spec.credentials", f"the Docker config {show(str(path))} {why}; repair it", where=str(path))


def _keys(host: str) -> tuple[str, ...]:
    return (_HUB_KEY, "docker.io", "index.docker.io", "registry-1.docker.io") if host == "docker.io" else (host,)


def _bare(key: str) -> str:
    """An entry's key without scheme and without an old API path."""
    if key == _HUB_KEY:
        return key
    bare = key.split("://", 1)[-1].rstrip("/")
    return re.sub(r"/v[12]\Z", "", bare)


def _prefixes(host: str, repository: str) -> list[str]:
    parts = repository.split("/")
    return [f"{host}/{'/'.join(parts[:n])}" for n in range(len(parts), 0, -1)]


def _from_entry(entry: dict[str, Any], key: str, path: Path) -> Credential | None:
    texts = {k: v for k, v in entry.items() if isinstance(v, str)}
    user, password = texts.get("username", ""), texts.get("password", "")
    if encoded := texts.get("auth", ""):
        try:
            user, colon, password = base64.b64decode(encoded, validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            colon = ""
        if not colon:
            raise _bad(path, f"has an auth for {show(key)} that is not base64 of user:password")
        password = password.rstrip("\0")
    found = Credential(user, password, texts.get("identitytoken", ""), texts.get("registrytoken", ""))
    if any(map(_CONTROL.search, (user, *found.secrets))):
        raise _bad(path, f"has control characters in the entry for {show(key)}")
    return found if found.secrets else None


def _ask_helper(name: object, host: str, path: Path) -> Credential | None:
    if not isinstance(name, str) or not _HELPER.match(name):
        raise _bad(path, "names a credential helper that is not a plain word")
    program = f"docker-credential-{name}"
    question = _HUB_KEY if host == "docker.io" else host
    try:
        done = subprocess.run(
            [program, "get"], input=question.encode(), capture_output=True, timeout=_HELPER_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise _helper_error(program, host, f"gave no answer in {_HELPER_SECONDS} s") from None
    except OSError as error:
        raise _helper_error(program, host, f"cannot be started ({error.strerror})") from None
    if done.returncode:
        # The one sentence that the protocol has for "I know nothing of this registry".
        if b"credentials not found" in done.stdout + done.stderr:
            return None
        raise _helper_error(program, host, f"exit status {done.returncode}")
    try:
        answer = json.loads(done.stdout)
        user, secret = str(answer["Username"]), str(answer["Secret"])
    except (ValueError, KeyError, TypeError):
        raise _helper_error(program, host, "its answer is not the protocol's JSON") from None
    if not secret or _CONTROL.search(user + secret):
        return None
    return Credential(identity_token=secret) if user == "<token>" else Credential(user, secret)


def _helper_error(program: str, host: str, why: str) -> TransportError:
    return TransportError("auth", f"{program}: {why}; log in to {host} again, or remove the helper", where=host)
