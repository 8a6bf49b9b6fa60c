"""Redirects, and the hosts that a registry may send us to (C11-08, B072)."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from oci_builder.model.digest import Digest
from oci_builder.model.errors import OciBuilderError, PolicyError, SpecError
from oci_builder.transports.registry_guard import Origin, check_target, is_loopback
from oci_builder.transports.registry_reference import parse_reference, pinned_reference
from tests.lab.images import small_image
from tests.lab.registry import Registry, Reply, Request, on, storage
from tests.lab.registry_tokens import Tokens
from tests.transports.registry_case import held, pull_from

REPO = "team/app"
PUBLIC = Origin("https", "203.0.113.7", 443)


def own_address() -> str:
    """An address of this machine that is not loopback, as a public registry's would be."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            address = str(probe.getsockname()[0])
        except OSError:
            pytest.skip("this machine has only loopback")
    if is_loopback(address):
        pytest.skip("this machine has only loopback")
    return address


def test_b072_c11_08_authorization_stays_with_the_registry(tmp_path: Path) -> None:
    image = small_image(3)
    with Registry() as registry, storage(registry) as other:
        digest = image.publish(registry, REPO)
        registry.faults.append(Tokens(registry))
        pull_from(registry, digest, tmp_path)
        assert len(other.log) == 4
        assert all("authorization" not in call.headers for call in other.log)
    assert {Digest.of(b) for b in image.layers} <= held(tmp_path)


def redirecting(target: str, address: str, root: Path) -> OciBuilderError:
    image = small_image()
    with Registry(address) as registry:
        digest = image.publish(registry, REPO)
        registry.faults = [on("GET", "blobs", lambda _q, _r: Reply(307, b"", {"Location": target}))]
        with pytest.raises(OciBuilderError) as error:
            pull_from(registry, digest, root, plain_http=True)
    return error.value


def test_c11_08_a_registry_elsewhere_cannot_reach_loopback(tmp_path: Path) -> None:
    with Registry() as victim:
        error = redirecting(f"{victim.url}/admin?token=s3cr3t", own_address(), tmp_path)
        assert victim.log == []
    assert (error.code, type(error)) == ("http.redirect", PolicyError)
    assert "s3cr3t" not in str(error)


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data", "http://[fe80::1]/", "http://[::ffff:169.254.169.254]/",
        "http://[fd00:ec2::254]/", "http://2852039166/", "ftp://example.test/x", "file:///etc/passwd", "gopher://x/",
        "http://[::1", "http://a:99999/",
    ],
)  # fmt: skip
def test_c11_08_not_even_a_registry_on_loopback_reaches_the_cloud_metadata(tmp_path: Path, url: str) -> None:
    assert redirecting(url, "127.0.0.1", tmp_path).code == "http.redirect"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.9.9.9", "localhost", "a.localhost", "[::1]", "0.0.0.0", "2130706433", "0x7f.1", "127.1", "[::]",
     "[::ffff:127.0.0.1]", "localhost."],
)  # fmt: skip
def test_c11_08_loopback_in_all_its_forms(host: str) -> None:
    with pytest.raises(PolicyError) as error:
        check_target(f"https://{host}/x", PUBLIC)
    assert error.value.code == "http.redirect"
    check_target(f"https://{host}/x", Origin("http", "127.0.0.1", 5000))


def test_c11_08_a_name_that_resolves_to_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_a, **_k: answer)
    with pytest.raises(PolicyError):
        check_target("https://innocent.test/", PUBLIC)
    check_target("https://innocent.test/", PUBLIC, resolve=False)


def test_tls_is_not_given_up() -> None:
    with pytest.raises(PolicyError):
        check_target("http://203.0.113.8/", PUBLIC)
    check_target("https://203.0.113.8/", Origin("http", "203.0.113.7", 80))


def test_c11_08_the_token_service_is_guarded_too(tmp_path: Path) -> None:
    image = small_image()
    with Registry(own_address()) as registry, Registry() as victim:
        digest = image.publish(registry, REPO)
        registry.faults = [Tokens(registry, challenge=f'Bearer realm="{victim.url}/token"')]
        with pytest.raises(PolicyError) as error:
            pull_from(registry, digest, tmp_path, plain_http=True)
        assert victim.log == []
    assert error.value.code == "http.redirect"


def test_a_redirect_that_never_ends(tmp_path: Path) -> None:
    with Registry() as registry:
        digest = small_image().publish(registry, REPO)
        registry.faults = [on("GET", "blobs", lambda q, _r: Reply(302, b"", {"Location": q.path}))]
        with pytest.raises(OciBuilderError) as error:
            pull_from(registry, digest, tmp_path)
        assert len(registry.calls("GET", "blobs")) == 6
    assert error.value.code == "http.status"


def test_an_endless_body_of_a_redirect_is_not_read(tmp_path: Path) -> None:
    image = small_image()
    with Registry() as registry, storage(registry):
        digest = image.publish(registry, REPO)
        registry.faults.append(on("GET", "blobs", lambda _q, r: replace(r, endless=True)))
        pull_from(registry, digest, tmp_path)
    assert {Digest.of(b) for b in image.layers} <= held(tmp_path)


def test_a_relative_redirect_on_the_registry_keeps_its_authorization(tmp_path: Path) -> None:
    image = small_image()
    with Registry() as registry:
        digest = image.publish(registry, REPO)

        def move(request: Request, _reply: Reply) -> Reply | None:
            return None if request.query else Reply(308, b"", {"Location": f"{request.path}?moved=1"})

        registry.faults = [on("GET", "blobs", move), Tokens(registry)]
        pull_from(registry, digest, tmp_path)
    assert {Digest.of(b) for b in image.layers} <= held(tmp_path)


def test_a_user_name_in_a_location_is_not_sent(tmp_path: Path) -> None:
    with Registry() as registry, Registry() as other:
        image = small_image()
        digest = image.publish(registry, REPO)
        other.blobs = registry.blobs
        to = f"http://user:pass@{other.host}"
        registry.faults = [on("GET", "blobs", lambda q, _r: Reply(307, b"", {"Location": to + q.path}))]
        pull_from(registry, digest, tmp_path)
        assert other.log
        assert all("authorization" not in call.headers for call in other.log)


# -- references --------------------------------------------------------------------------------------------------------

DIGEST = Digest.of(b"")


@pytest.mark.parametrize(
    ("text", "host", "repository", "tag"),
    [
        ("ubuntu", "docker.io", "library/ubuntu", None),
        ("nvidia/cuda:13.0", "docker.io", "nvidia/cuda", "13.0"),
        ("docker.io/nvidia/cuda:13.0", "docker.io", "nvidia/cuda", "13.0"),
        ("index.docker.io/ubuntu", "docker.io", "library/ubuntu", None),
        ("localhost/x", "localhost", "x", None),
        ("localhost:5000/a/b:c", "localhost:5000", "a/b", "c"),
        ("[::1]:5000/a", "[::1]:5000", "a", None),
        ("Reg.Test/a", "reg.test", "a", None),
    ],
)
def test_references(text: str, host: str, repository: str, tag: str | None) -> None:
    found = parse_reference(f"{text}@{DIGEST}")
    assert (found.host, found.repository, found.tag, found.digest) == (host, repository, tag, DIGEST)
    assert parse_reference(found.canonical) == found


@pytest.mark.parametrize(
    "text",
    ["", "UPPER", "a:b:c", "a/../b", "a//b", "/a", "a/", "r.test:99999/a", "r.test:0/a", "https://r.test/a", "a b",
     "r.test/a:-", "-.test/a", "user:pw@r.test/a", "a\nb", "a\n", "a:b\n", "l" * 64 + ".test/a", "r.test/" + "a" * 300],
)  # fmt: skip
def test_references_that_are_none(text: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_reference(text)
    assert error.value.code == "spec.reference"
    assert "pw" not in error.value.message


@pytest.mark.parametrize(
    "digest",
    ["", "sha256:", "sha256:" + "A" * 64, "sha256:" + "a" * 63, "md5:" + "a" * 32, "sha256:sha256:" + "a" * 64],
)
def test_c2_08_malformed_digests(digest: str) -> None:
    with pytest.raises(SpecError) as error:
        parse_reference(f"a@{digest}")
    assert error.value.code == "spec.digest"


def test_a_tag_alone_and_two_digests_are_refused() -> None:
    for text, digest in (("a:b", None), (f"a@{DIGEST}", Digest.of(b"x"))):
        with pytest.raises(SpecError) as error:
            pinned_reference(text, digest)
        assert error.value.code == "spec.digest"
    assert pinned_reference("a:b", DIGEST).digest == DIGEST
