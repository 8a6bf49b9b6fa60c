"""Shapes of credentials, and names of weights, beyond the first ones (issue 7, item 8). All made up on the spot."""

from __future__ import annotations

import random
import shutil
import string
import subprocess
import tarfile
from pathlib import Path

import pytest

from oci_builder.model.errors import FormatError
from oci_builder.model.redact import redact, secret_values
from oci_builder.model.report import Report
from oci_builder.release.scan import scan_archives, scan_file
from oci_builder.release.secrets import ScanOptions
from oci_builder.release.walk import Walk
from tests.lab.archives import Lab, entry, tar, write

RANDOM = random.Random(11)
PLAIN = tar(entry("bin/tool", b"#!/bin/sh\n"))


def letters(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(RANDOM.choice(alphabet) for _ in range(count))


TOKENS = {
    "Hugging Face token": "hf_aB3" + letters(31),
    "AWS access key": "ASIA" + letters(16, string.ascii_uppercase + "234567"),
    "AWS secret key": "aws_secret_access_key = " + letters(40),
    "OpenAI key": "sk-proj-" + letters(74) + "T3BlbkFJ" + letters(74),
    "Anthropic key": "sk-ant-api03-" + letters(93) + "AA",
    "Stripe key": "sk_live_" + letters(24),
    "SendGrid key": "SG." + letters(22) + "." + letters(43),
    "Slack hook": f"https://hooks.slack.com/services/T{letters(8).upper()}/B{letters(8).upper()}/{letters(24)}",
    "Weights & Biases key": "WANDB_API_KEY=" + letters(40, "0123456789abcdef"),
    "Google refresh token": '"refresh_token": "1//0g' + letters(60) + '"',
    "Azure storage key": "AccountKey=" + letters(86) + "==",
    "npm credentials": "//registry.example/:_authToken=" + letters(36),
    "registry credentials": '"identitytoken": "' + letters(80) + '"',
    "age key": "AGE-SECRET-KEY-1" + letters(58, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"),
}


def kinds(data: bytes, path: bytes = b"opt/rt/a.txt") -> list[str]:
    return [f.message.split(" in ")[0] for f in scan_file(path, len(data), [data])]


@pytest.mark.parametrize("kind", TOKENS)
def test_a_planted_secret_is_found_and_not_shown(kind: str) -> None:
    data = f"x = '{TOKENS[kind]}'\n".encode()
    found = list(scan_file(b"a", len(data), [data]))
    assert kinds(data) == [kind]
    assert TOKENS[kind][-20:] not in repr(found)


@pytest.mark.parametrize(
    "text",
    [
        "sk-your-key-here", "sk-ant-api03-" + "x" * 95, "aws_secret_access_key = wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
        "hf_" + "0123456789abcdef" * 2 + "ab", "https://hooks.slack.com/services/T00000000/B00000000/" + "X" * 24,
        "_authToken=${NPM_TOKEN}", "task-" + letters(40), "AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2U"
        "VErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==", "-----BEGIN PGP PRIVATE KEY BLOCK-----\n...\n-----END PGP PRIVATE KEY BLOCK-----",
    ],
)  # fmt: skip
def test_documentation_about_them_is_no_secret(text: str) -> None:
    assert kinds(text.encode()) == []


@pytest.mark.skipif(not shutil.which("gpg"), reason="needs gpg")
def test_a_pgp_key_is_one(tmp_path: Path) -> None:
    tool = ["gpg", "--homedir", str(tmp_path), "--batch", "--quiet", "--passphrase", ""]
    subprocess.run([*tool, "--quick-gen-key", "a@example.org", "ed25519"], check=True, capture_output=True)
    made = subprocess.run([*tool, "--armor", "--export-secret-keys"], check=True, capture_output=True).stdout
    subprocess.run(["gpgconf", "--homedir", str(tmp_path), "--kill", "all"], check=False)
    assert kinds(made) == ["private key"]
    assert redact("before\n" + made.decode() + "after") == "before\n***\nafter"


@pytest.mark.parametrize("path", [b"etc/pip.conf", b"envs/a/pip.conf", b"x/.git/config", b"root/.npmrc"])
def test_a_password_in_an_address_of_a_settings_file_is_found(path: bytes) -> None:
    line = b"index-url = https://robot:correct-horse@example.org/simple\n"
    assert kinds(line, path) == ["password of an address"]
    assert kinds(line, b"docs/readme.md") == []
    assert kinds(b"index-url = https://${USER}:${PASSWORD}@example.org/simple\n", path) == []


@pytest.mark.parametrize("flag", ["hard", "soft"])
def test_weights_that_only_a_link_names_are_found(tmp_path: Path, flag: str) -> None:
    """A model cache links names to blobs; a tree's equal files are stored once, under the first name."""
    blob = entry("hub/blobs/0a1b", bytes(5000))
    name = "hub/snapshots/r/pytorch_model.bin"
    link = entry(name, type=tarfile.LNKTYPE, linkname="hub/blobs/0a1b")
    if flag == "soft":
        link = entry(name, type=tarfile.SYMTYPE, linkname="../../blobs/0a1b")
    archive = write(tmp_path / "i", Lab([tar(blob, link)]).oci())
    found = scan_archives([archive], ScanOptions(weights_size=1000)).findings
    assert [f.code for f in found] == ["policy.weights"] and "pytorch_model.bin" in found[0].message
    assert scan_archives([archive], ScanOptions(weights_size=9000)).findings == []


@pytest.mark.parametrize(
    "settings",
    [
        {"Env": ["DB_PASS=correct-horse"]}, {"Env": ["SSH_PRIVATE_KEY=correct-horse"]},
        {"Cmd": ["tool", "--password", "correct-horse"]},
    ],
)  # fmt: skip
def test_settings_are_judged_as_this_machine_s_environment_is(tmp_path: Path, settings: object) -> None:
    archive = write(tmp_path / "i", Lab([PLAIN], edit_config=lambda config: {**config, "config": settings}).oci())
    assert [f.code for f in scan_archives([archive], ScanOptions()).findings] == ["policy.secret"]


def test_a_secret_in_an_annotation_is_found(tmp_path: Path) -> None:
    lab = Lab([PLAIN], edit_manifest=lambda m: {**m, "annotations": {"x": "https://robot:correct-horse@example.org/x"}})
    found = scan_archives([write(tmp_path / "i", lab.oci())], ScanOptions()).findings
    assert [f.code for f in found] == ["policy.secret"] and "manifest" in found[0].message


def test_a_search_that_cannot_be_made_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report of what was verified is not lost; two images of a platform are no error of the archive."""
    from oci_builder.cli.publishing import with_secrets

    def refuse(*_: object) -> None:
        raise FormatError("platform.ambiguous", "2 images")

    monkeypatch.setattr("oci_builder.release.scan.scan_archives", refuse)
    report = with_secrets(Report(), [tmp_path / "x"], None, Walk())
    assert [f.code for f in report.findings] == ["platform.ambiguous"] and not report.ok


@pytest.mark.parametrize("value", ["one\ntwo-secret", "p\u00e4ssw\u00f6rd-geheim", 'quo"te\\d-secret', "\udcff\udcfesecretive"])
def test_a_secret_that_is_quoted_is_hidden_too(value: str) -> None:
    secrets = secret_values({"HF_TOKEN": value})
    for shown in (repr(value), repr(f"Bearer {value}".encode("utf-8", "surrogateescape")), value):
        assert "secret" not in redact(f"Illegal header value {shown}", secrets)
        assert "geheim" not in redact(f"Illegal header value {shown}", secrets)
