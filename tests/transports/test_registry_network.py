"""TLS with an authority of our own, proxies by environment, and no secret in any text."""

from __future__ import annotations

from pathlib import Path

import pytest

from oci_builder.model.digest import Digest
from oci_builder.model.errors import TransportError
from oci_builder.model.events import Event
from oci_builder.transports.credentials import Credential
from tests.lab.certificates import Certificates, make_certificates, needs_openssl
from tests.lab.images import small_image
from tests.lab.proxy import Proxy
from tests.lab.registry import Registry, on, status, storage
from tests.lab.registry_tokens import Tokens
from tests.transports.registry_case import client_of, held, pull_from

REPO = "team/app"
VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", "SSL_CERT_DIR")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY")

pytestmark = needs_openssl


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*VARIABLES, *PROXIES, *map(str.lower, PROXIES)):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "SSL_CERT_FILE"])
def test_tls_with_an_authority_of_our_own(
    tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, str(certificates.authority))
    with Registry(context=certificates.server_context()) as registry:
        digest = small_image(2).publish(registry, REPO)
        pull_from(registry, digest, tmp_path)
    assert digest in held(tmp_path)


def test_an_unknown_authority_is_refused(tmp_path: Path, certificates: Certificates) -> None:
    with Registry(context=certificates.server_context()) as registry, pytest.raises(TransportError) as error:
        pull_from(registry, small_image().publish(registry, REPO), tmp_path)
    assert error.value.code == "http.tls"
    assert "set SSL_CERT_FILE" in error.value.message
    assert held(tmp_path) == set()


def test_an_authority_behind_another_variable_is_told_which_one_counts(
    tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_certificates(tmp_path).authority
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(other))
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    with Registry(context=certificates.server_context()) as registry, pytest.raises(TransportError) as error:
        pull_from(registry, small_image().publish(registry, REPO), tmp_path)
    assert f"REQUESTS_CA_BUNDLE='{other}'" in error.value.message


def test_a_certificate_for_another_name_is_refused(
    tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    with Registry(context=certificates.server_context()) as registry, Proxy(registry.host) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.host}")
        digest = small_image().publish(registry, REPO)
        registry.host = "other.test"
        with pytest.raises(TransportError) as error:
            pull_from(registry, digest, tmp_path)
    assert error.value.code == "http.tls"


def test_a_missing_file_of_authorities_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "absent.pem"))
    with Registry() as registry, Proxy(registry.host) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.host}")
        registry.host = "registry.test"
        with pytest.raises(TransportError) as error:
            pull_from(registry, Digest.of(b"x"), tmp_path)
    assert error.value.code == "http.tls"


def test_b093_token_manifest_and_blob_go_through_the_tunnel(
    tmp_path: Path, certificates: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.authority))
    image = small_image(2)
    with Registry(context=certificates.server_context()) as registry, Proxy(registry.host) as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://me:pr0xy-pass@{proxy.host}")
        digest = image.publish(registry, REPO)
        registry.faults = [Tokens(registry, challenge='Bearer realm="https://registry.test:4443/token"')]
        registry.host = "registry.test"
        pull_from(registry, digest, tmp_path)
        assert {target for _, target, _ in proxy.log} == {"registry.test:443", "registry.test:4443"}
        assert {call.what for call in registry.log} == {"token", "manifests", "blobs"}
        assert all(sent.startswith("Basic ") for _, _, sent in proxy.log)
    assert {Digest.of(b) for b in image.layers} <= held(tmp_path)


def test_b093_plain_http_goes_through_http_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Registry() as registry, Proxy(registry.host) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.host}")
        digest = small_image(2).publish(registry, REPO)
        registry.faults = [Tokens(registry, challenge='Bearer realm="http://registry.test/token"')]
        registry.host = "registry.test"
        pull_from(registry, digest, tmp_path, plain_http=True)
        assert len(proxy.log) == len(registry.log)
        assert {call.what for call in registry.log} == {"token", "manifests", "blobs"}


@pytest.mark.parametrize("no_proxy", ["10.0.0.0/8,localhost", "junk/99,,*.x,[::1]/8,300.1.1.1/8", "192.168.0.0/33"])
def test_b094_no_proxy_entries_that_mean_nothing_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxy: str
) -> None:
    with Registry() as registry, Proxy(registry.host) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.host}")
        monkeypatch.setenv("NO_PROXY", no_proxy)
        pull_from(registry, small_image().publish(registry, REPO), tmp_path)
        assert proxy.log


@pytest.mark.parametrize("no_proxy", ["127.0.0.0/8", "127.0.0.1", "*", "10.0.0.0/8, 127.0.0.1"])
def test_b094_no_proxy_entries_that_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_proxy: str) -> None:
    with Registry() as registry, Proxy(registry.host) as proxy:
        monkeypatch.setenv("HTTP_PROXY", f"http://{proxy.host}")
        monkeypatch.setenv("NO_PROXY", no_proxy)
        pull_from(registry, small_image().publish(registry, REPO), tmp_path)
        assert proxy.log == []


def test_a_proxy_that_is_not_there_is_an_error_without_its_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://me:pr0xy-pass@127.0.0.1:9")
    with Registry() as registry:
        registry.host = "registry.test"
        notes: list[Event] = []
        with pytest.raises(TransportError) as error:
            pull_from(registry, Digest.of(b"x"), tmp_path, attempts=2, emit=notes.append)
    assert error.value.code == "http.proxy"
    assert "pr0xy-pass" not in f"{error.value} {error.value.fields} {notes}"


def test_a_proxy_that_wants_a_login_is_named_for_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain HTTP has no tunnel that could fail: the proxy's refusal comes as the answer."""
    with Registry() as registry:
        monkeypatch.setenv("HTTP_PROXY", f"http://me:pr0xy-pass@{registry.host}")
        registry.faults = [status(407)]
        registry.host = "registry.test"
        with pytest.raises(TransportError) as error:
            pull_from(registry, Digest.of(b"x"), tmp_path, plain_http=True)
    assert error.value.code == "http.proxy" and "407" in error.value.message
    assert "pr0xy-pass" not in error.value.message


@pytest.mark.parametrize("proxy", ["http://[::1", "http://127.0.0.1:99999"])
def test_a_malformed_proxy_is_no_fault_of_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proxy: str
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with Registry() as registry, pytest.raises(TransportError) as error:
        registry.host = "registry.test"
        pull_from(registry, Digest.of(b"x"), tmp_path)
    assert error.value.code in ("http.url", "http.proxy") and "HTTPS_PROXY" in error.value.message


def test_plain_http_needs_the_flag_elsewhere() -> None:
    with Registry() as registry:
        registry.host = "registry.test"
        assert client_of(registry, None).url("x").startswith("https://")
        assert client_of(registry, None, plain_http=True).url("x").startswith("http://")
        registry.host = "localhost:5000"
        assert client_of(registry, None).url("x").startswith("http://")


def test_no_secret_in_any_message(tmp_path: Path) -> None:
    secret = "tr0ub4dor-and-3"
    notes: list[Event] = []
    with Registry() as registry, storage(registry) as other:
        digest = small_image().publish(registry, REPO)
        registry.faults.append(Tokens(registry, login=("me", secret)))
        other.faults.append(on("GET", "data", status(403)))
        with pytest.raises(TransportError) as error:
            pull_from(
                registry, digest, tmp_path, attempts=2, emit=notes.append,
                find_credential=lambda _h, _r: Credential("me", secret),
            )  # fmt: skip
    text = f"{error.value} {error.value.fields} {notes}"
    assert "403" in text
    assert not [word for word in (secret, "s1gn3d", "lab-token", "bWU6") if word in text]
