"""Tokens, challenges, stored credentials: the right one for the right repository, and no word of them in a text."""

from __future__ import annotations

import base64
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from oci_builder.model.digest import Digest
from oci_builder.model.errors import OciBuilderError, SpecError, TransportError
from oci_builder.transports import registry_auth
from oci_builder.transports.credentials import Credential, docker_credential
from oci_builder.transports.registry_challenge import parse_challenges
from tests.lab.images import small_image
from tests.lab.registry import Registry, Reply, Request, on, status
from tests.lab.registry_tokens import Clock, Tokens
from tests.transports.registry_case import held, pull_from

REPO = "team/app"
SECRET = "correct-horse-battery"
LOGIN = ("someone", SECRET)


def login(_host: str, _repo: str) -> Credential:
    return Credential(*LOGIN)


def test_b065_a_token_that_dies_in_mid_pull_is_replaced(tmp_path: Path) -> None:
    image = small_image(3, size=1000)
    with Registry() as registry:
        digest = image.publish(registry, REPO)
        clock = Clock()
        tokens = Tokens(registry, lifetime=25, tell_lifetime=False, clock=clock)
        registry.faults = [tokens, on("GET", "blobs", clock.passing(15))]
        pull_from(registry, digest, tmp_path, parallel=1)
    assert len(tokens.scopes) > 1
    assert {Digest.of(b) for b in image.layers} <= held(tmp_path)


def test_b065_a_token_that_says_its_time_is_replaced_before_it_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(registry_auth, "time", SimpleNamespace(monotonic=clock))
    with Registry() as registry:
        digest = small_image(3).publish(registry, REPO)
        tokens = Tokens(registry, lifetime=40, clock=clock)
        registry.faults = [tokens, on("GET", "blobs", clock.passing(15))]
        pull_from(registry, digest, tmp_path, parallel=1)
        refused = [c for c in registry.log if c.what != "token" and "authorization" not in c.headers]
    assert len(refused) == 1
    assert len(tokens.scopes) > 1


@pytest.mark.parametrize(
    "challenge",
    [
        'Bearer realm="{realm}",scope="repository:{repo}:pull"',
        'Bearer realm="{realm}",service="lab",scope=""',
        'Bearer realm="{realm}",service="lab",scope="repository:user/image:pull"',
        'Bearer realm="{realm}"',
        "bearer realm={realm}",
        'Basic realm="lab", Bearer realm="{realm}",service="lab"',
        'Negotiate, Bearer realm="{realm}" , service="lab" ,, error="invalid_token"',
    ],
)
def test_b067_b068_b069_challenges_of_the_wild(tmp_path: Path, challenge: str) -> None:
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        tokens = Tokens(registry, challenge=challenge)
        registry.faults = [tokens]
        pull_from(registry, digest, tmp_path)
    assert tokens.scopes == [f"repository:{REPO}:pull"]


def test_b071_each_repository_has_a_token_of_its_own(tmp_path: Path) -> None:
    one, two = small_image(seed=1), small_image(seed=2)
    with Registry() as registry:
        digests = one.publish(registry, "team/a"), two.publish(registry, "team/b")
        tokens = Tokens(registry)
        registry.faults = [tokens]
        pull_from(registry, digests[0], tmp_path, repo="team/a")
        pull_from(registry, digests[1], tmp_path, repo="team/b")
    assert tokens.scopes == ["repository:team/a:pull", "repository:team/b:pull"]


def test_four_threads_take_one_token(tmp_path: Path) -> None:
    with Registry() as registry:
        digest = small_image(6).publish(registry, REPO)
        tokens = Tokens(registry)
        registry.faults = [tokens]
        pull_from(registry, digest, tmp_path)
    assert len(tokens.scopes) == 1


@pytest.mark.parametrize(
    "header",
    ["Bearer", 'Bearer realm="unclosed', 'Bearer realm="file:///x"', 'Digest realm="x"', "=", "Bearer realm=;;", ""],
)
def test_c11_06_malformed_challenges_are_auth_errors(tmp_path: Path, header: str) -> None:
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        registry.faults = [on("GET", "manifests", status(401, **({"WWW_Authenticate": header} if header else {})))]
        with pytest.raises(TransportError) as error:
            pull_from(registry, digest, tmp_path)
    assert error.value.code == "auth"


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"token":5}', b'{"token":"a\\nb"}', b'{"token":""}', b"<html>"])
def test_c11_06_answers_without_a_token_are_auth_errors(tmp_path: Path, body: bytes) -> None:
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        registry.faults = [Tokens(registry), on("GET", "token", lambda _q, _r: Reply(200, body))]
        with pytest.raises(TransportError) as error:
            pull_from(registry, digest, tmp_path)
    assert error.value.code == "auth"


def test_c11_06_403_is_final_and_says_what_the_registry_says(tmp_path: Path) -> None:
    denied = json.dumps({"errors": [{"code": "DENIED", "message": "requested access is denied"}]}).encode()
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        registry.faults = [on("GET", "manifests", lambda _q, _r: Reply(403, denied))]
        with pytest.raises(TransportError) as error:
            pull_from(registry, digest, tmp_path)
    assert error.value.code == "auth"
    assert "requested access is denied" in error.value.message


def test_the_token_service_gets_the_password_and_the_registry_only_the_token(tmp_path: Path) -> None:
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        registry.faults = [Tokens(registry, login=LOGIN)]
        pull_from(registry, digest, tmp_path, find_credential=login)
        sent = {c.what: c.headers.get("authorization", "") for c in registry.log}
    assert sent["token"].startswith("Basic ")
    assert sent["manifests"] == sent["blobs"] == "Bearer lab-token-1"


def test_wrong_credentials_end_at_once_and_are_not_shown(tmp_path: Path) -> None:
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        registry.faults = [Tokens(registry, login=("someone", "another"))]
        with pytest.raises(TransportError) as error:
            pull_from(registry, digest, tmp_path, find_credential=login)
        assert len(registry.calls("GET", "token")) == 1
    assert error.value.code == "auth"
    assert SECRET not in f"{error.value!r} {error.value.fields}"


def test_an_identity_token_is_exchanged_by_post(tmp_path: Path) -> None:
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        registry.faults = [Tokens(registry, login=("", SECRET))]
        pull_from(registry, digest, tmp_path, find_credential=lambda _h, _r: Credential(identity_token=SECRET))
        assert [c.method for c in registry.log if c.what == "token"] == ["POST"]
        assert all(SECRET not in c.path + str(c.query) for c in registry.log)


def _demand_basic(request: Request, _reply: Reply) -> Reply | None:
    wanted = "Basic " + base64.b64encode(":".join(LOGIN).encode()).decode()
    if request.headers.get("authorization") == wanted:
        return None
    return Reply(401, b"", {"WWW-Authenticate": 'Basic realm="lab"'})


def test_basic_authentication(tmp_path: Path) -> None:
    with Registry() as registry:
        digest = small_image(3).publish(registry, REPO)
        registry.faults = [_demand_basic]
        pull_from(registry, digest, tmp_path / "a", find_credential=login)
        for wrong in (lambda _h, _r: None, lambda _h, _r: Credential("someone", "wrong-password")):
            with pytest.raises(TransportError) as error:
                pull_from(registry, digest, tmp_path / "b", find_credential=wrong)
            assert error.value.code == "auth"
            assert "run `docker login" in error.value.message
            assert "wrong-password" not in str(error.value)


def test_a_refresh_of_a_broken_token_service_is_retried(tmp_path: Path) -> None:
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        registry.faults = [Tokens(registry), on("GET", "token", status(503), times=2)]
        pull_from(registry, digest, tmp_path)
    assert digest in held(tmp_path)


def test_several_headers_and_quoted_commas() -> None:
    found = parse_challenges(['Negotiate abc==, Basic realm="a, \\"b\\""', 'Bearer realm="https://t/x",scope="a:b:c,d"'])
    assert [c.scheme for c in found] == ["negotiate", "basic", "bearer"]
    assert found[1].parameters == {"realm": 'a, "b"'}
    assert found[2].parameters["scope"] == "a:b:c,d"


# -- the Docker config -------------------------------------------------------------------------------------------------


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "docker").mkdir()
    return tmp_path / "docker" / "config.json"


def auth(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


@pytest.mark.parametrize("key", ["r.test:5000", "https://r.test:5000", "https://r.test:5000/v1/", "r.test:5000/team"])
def test_auths_by_any_form_of_the_host(config: Path, key: str) -> None:
    config.write_text(json.dumps({"auths": {key: {"auth": auth("u", "p:w")}}}))
    assert docker_credential("r.test:5000", "team/app") == Credential("u", "p:w")
    assert docker_credential("r.test", "team/app") is None


def test_docker_hub_is_under_its_old_name(config: Path) -> None:
    config.write_text(json.dumps({"auths": {"https://index.docker.io/v1/": {"auth": auth("u", "p")}}}))
    assert docker_credential("docker.io", "library/x") == Credential("u", "p")


def test_the_closest_entry_wins_and_empty_ones_do_not_count(config: Path) -> None:
    entries = {"r.test": {"auth": auth("far", "x1")}, "r.test/team/app": {"auth": auth("near", "x2")}, "q.test": {}}
    config.write_text(json.dumps({"auths": entries}))
    assert docker_credential("r.test", "team/app") == Credential("near", "x2")
    assert docker_credential("r.test", "team/other") == Credential("far", "x1")
    assert docker_credential("q.test", "team/app") is None


def test_identity_and_registry_tokens(config: Path) -> None:
    config.write_text(json.dumps({"auths": {"a": {"identitytoken": "idt"}, "b": {"registrytoken": "rgt"}}}))
    assert docker_credential("a", "x") == Credential(identity_token="idt")
    assert docker_credential("b", "x") == Credential(registry_token="rgt")


def test_no_config_is_anonymous(config: Path) -> None:
    assert docker_credential("r.test", "x") is None


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"auths":[]}', '{"auths":{"r.test":{"auth":"hunter2-not-base64"}}}', '{"credsStore":"../x"}']
)
def test_a_malformed_config_is_named_and_not_quoted(config: Path, text: str) -> None:
    config.write_text(text)
    with pytest.raises(SpecError) as error:
        docker_credential("r.test", "x")
    assert error.value.code == "spec.credentials"
    assert str(config) in error.value.message
    assert "hunter2" not in error.value.message


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_config_that_is_no_file_is_not_waited_for(config: Path, make: Callable[[Path], None]) -> None:
    make(config)
    with pytest.raises(SpecError) as error:
        docker_credential("r.test", "x")
    assert (error.value.code, str(config) in error.value.message) == ("spec.credentials", True)


def _helper(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "docker-credential-lab"
    program.write_text(f"#!/bin/sh\nread host\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")


@pytest.mark.parametrize("key", [{"credsStore": "lab"}, {"credHelpers": {"r.test": "lab"}}])
def test_helpers_are_asked(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: dict[str, object]
) -> None:
    config.write_text(json.dumps({**key, "auths": {"r.test": {}}}))
    _helper(tmp_path, monkeypatch, 'printf \'{"ServerURL":"%s","Username":"me","Secret":"for-%s"}\' "$host" "$host"')
    assert docker_credential("r.test", "x") == Credential("me", "for-r.test")
    _helper(tmp_path, monkeypatch, 'echo \'{"Username":"<token>","Secret":"refresh"}\'')
    assert docker_credential("r.test", "x") == Credential(identity_token="refresh")
    _helper(tmp_path, monkeypatch, 'echo "credentials not found in native keychain"; exit 1')
    assert docker_credential("r.test", "x") is None


@pytest.mark.parametrize("script", ["exit 3", "echo not-json", "echo '{}'"])
def test_a_helper_that_fails_is_an_auth_error(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    config.write_text('{"credsStore":"lab"}')
    _helper(tmp_path, monkeypatch, script)
    with pytest.raises(OciBuilderError) as error:
        docker_credential("r.test", "x")
    assert error.value.code == "auth"


def test_a_helper_that_is_not_there_is_an_auth_error(config: Path) -> None:
    config.write_text('{"credsStore":"absent"}')
    with pytest.raises(TransportError) as error:
        docker_credential("r.test", "x")
    assert error.value.code == "auth"


def test_a_credential_does_not_show_itself() -> None:
    assert SECRET not in repr(Credential("u", SECRET, SECRET, SECRET))


def test_netrc_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    netrc = tmp_path / "netrc"
    netrc.write_text(f"default login someone password {SECRET}\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        pull_from(registry, digest, tmp_path)
        assert all("authorization" not in call.headers for call in registry.log)
