"""ensure_runtime.sh downloads: through the proxy alone, from the hub and its store alone, continued, never trusted."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.shell.ensure import fetch
from tests.shell.hub import CDN, ELSEWHERE, Hub


def test_a_download_goes_through_the_proxy_to_the_hub_and_its_store(hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path / "in/rt", HTTPS_PROXY="http://127.0.0.1:9", NO_PROXY="*", HF_TOKEN="hf_lab")
    assert done.returncode == 0, done.stderr
    assert {c.partition(":")[0] for c in hub.connects} == {"huggingface.co", CDN}
    assert {(host, auth) for host, _, _, _, auth in hub.requests} == {("huggingface.co", "Bearer hf_lab"), (CDN, "")}
    assert [p.name for p in (tmp_path / "in").iterdir()] == ["rt"]


def test_drops_are_continued(hub: Hub, tmp_path: Path) -> None:
    hub.faults.drop_at, hub.faults.drops = len(hub.data) // 4, 3
    done = fetch(hub, tmp_path / "in/rt")
    assert done.returncode == 0, done.stderr
    ranges = [r for host, method, _, r, _ in hub.requests if method == "GET" and r]
    assert len(ranges) == 3 and len(set(ranges)) == 3


def test_a_part_of_an_earlier_start_is_continued_and_a_wrong_one_is_not_trusted(hub: Hub, tmp_path: Path) -> None:
    """B079: what lies there is bound to the digest by the digest alone."""
    digest = hashlib.sha256(hub.data).hexdigest()
    (tmp_path / "in").mkdir()
    part = tmp_path / f"in/.rt.download-{digest[:16]}"
    part.write_bytes(hub.data[:1000])
    assert fetch(hub, tmp_path / "in/rt").returncode == 0
    assert any(r == "bytes=1000-" for *_, r, _ in hub.requests)
    part2 = tmp_path / f"in/.two.download-{digest[:16]}"
    part2.write_bytes(b"another file's beginning" * 30)
    assert fetch(hub, tmp_path / "in/two").returncode == 0


@pytest.mark.parametrize("fault", ["ignore_range", "early"])
def test_servers_that_do_not_continue_where_asked(hub: Hub, tmp_path: Path, fault: str) -> None:
    """B076, B077."""
    hub.faults.drop_at, hub.faults.drops = len(hub.data) // 3, 1
    setattr(hub.faults, fault, 100 if fault == "early" else True)
    done = fetch(hub, tmp_path / "in/rt")
    assert done.returncode == 0, done.stderr


def test_an_expired_link_is_asked_for_again(hub: Hub, tmp_path: Path) -> None:
    """B074."""
    hub.faults.expired = 2
    assert fetch(hub, tmp_path / "in/rt").returncode == 0
    assert sum(host == "huggingface.co" for host, *_ in hub.requests) == 3


@pytest.mark.parametrize("when", ["hub", "store"])
def test_redirects_to_other_hosts_are_refused(hub: Hub, tmp_path: Path, when: str) -> None:
    if when == "hub":
        hub.faults.redirect = ELSEWHERE
    else:
        hub.faults.second = f"https://{ELSEWHERE}/x"
    done = fetch(hub, tmp_path / "in/rt")
    assert done.returncode == 4 and "install.host_refused" in done.stderr
    assert ELSEWHERE not in "".join(hub.connects)


def test_a_redirect_inside_the_store_is_followed(hub: Hub, tmp_path: Path) -> None:
    hub.faults.second = "https://cdn-lfs.hf.co/other"
    done = fetch(hub, tmp_path / "in/rt")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "url",
    ["https://huggingface.co.example.net/x", "http://huggingface.co/x", "https://u@huggingface.co/x",
     "https://example.net/huggingface.co", "https://huggingface.co@example.net/", "ftp://huggingface.co/x",
     "https://huggingface.co:8443/x"],
)  # fmt: skip
def test_other_addresses_are_refused_without_a_request(hub: Hub, tmp_path: Path, url: str) -> None:
    assert fetch(hub, tmp_path / "in/rt", url).returncode == 4
    assert hub.connects == []


def test_no_proxy_no_download(hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path / "in/rt", PROXY="", HTTPS_PROXY=hub.proxy)
    assert done.returncode == 2 and "install.proxy" in done.stderr
    assert hub.connects == []


def test_wrong_bytes_are_never_unpacked(hub: Hub, tmp_path: Path) -> None:
    body = bytearray(hub.data)
    body[len(body) // 2] ^= 1
    hub.faults.body = bytes(body)
    done = fetch(hub, tmp_path / "in/rt")
    assert done.returncode == 3 and "blob.digest" in done.stderr
    assert not (tmp_path / "in/rt").exists()


def test_an_unknown_authority_is_not_believed(hub: Hub, tmp_path: Path) -> None:
    done = fetch(hub, tmp_path / "in/rt", CURL_CA_BUNDLE="/etc/ssl/certs/ca-certificates.crt", NRL_RETRIES="1")
    assert done.returncode == 5 and hub.requests == []


def test_absent_files_end_at_once(hub: Hub, tmp_path: Path) -> None:
    hub.faults.status = 404
    done = fetch(hub, tmp_path / "in/rt")
    assert done.returncode == 5 and len(hub.requests) == 1
