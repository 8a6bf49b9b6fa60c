"""The scan of whole archives and records before anything leaves (issue 7, item 8)."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from oci_builder.model.errors import IntegrityError, OciBuilderError, PolicyError, SpecError
from oci_builder.model.redact import redact
from oci_builder.release.scan import read_allowed, scan_archives, scan_files
from oci_builder.release.secrets import ScanOptions
from oci_builder.release.signing import new_key, save_key
from oci_builder.release.sweep import Scan
from oci_builder.release.walk import Walk
from tests.lab.archives import Lab, entry, tar, write, write_layout

TOKEN = b"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"
SECRET = tar(entry("etc/app.env", b"TOKEN=" + TOKEN + b"\n"))
PLAIN = tar(entry("bin/tool", b"#!/bin/sh\n"))


def codes(scan: Scan) -> list[str]:
    return [f.code for f in scan.findings]


@pytest.mark.parametrize("form", ["oci", "docker", "legacy", "layout", "gzip", "tree", "tree.gz", "folder"])
def test_a_secret_is_found_whatever_the_form(tmp_path: Path, form: str) -> None:
    lab, place = Lab([PLAIN, SECRET]), tmp_path / "subject"
    if form == "layout":
        write_layout(place, lab.oci())
    elif form == "folder":
        (place / "etc").mkdir(parents=True)
        (place / "etc/app.env").write_bytes(b"TOKEN=" + TOKEN)
    elif form == "legacy":
        place.write_bytes(tar(*lab.legacy()))
    elif form.startswith("tree"):
        place.write_bytes(gzip.compress(SECRET) if form.endswith("gz") else SECRET)
    else:
        write(place, lab.docker() if form == "docker" else lab.oci(), compress=form == "gzip")
    found = scan_archives([place], ScanOptions())
    assert codes(found) == ["policy.secret"]
    assert "app.env" in found.findings[0].message and TOKEN.decode() not in found.findings[0].message


def test_a_secret_that_an_upper_layer_removes_is_still_there(tmp_path: Path) -> None:
    """Every layer is shipped: a whiteout hides a file and keeps its bytes."""
    lab = Lab([SECRET, tar(entry("etc/.wh.app.env"))])
    assert codes(scan_archives([write(tmp_path / "i", lab.oci())], ScanOptions())) == ["policy.secret"]


@pytest.mark.parametrize("place", ["Env", "Labels", "Cmd"])
def test_a_secret_in_the_config_is_found(tmp_path: Path, place: str) -> None:
    text = f"T={TOKEN.decode()}"
    value: object = {"note": text} if place == "Labels" else [text]
    lab = Lab([PLAIN], edit_config=lambda config: {**config, "config": {place: value}})
    found = scan_archives([write(tmp_path / "i", lab.oci())], ScanOptions())
    assert codes(found) == ["policy.secret"] and "image config" in found.findings[0].message


@pytest.mark.parametrize(
    "settings",
    [
        {"Env": ["DB_PASSWORD=correct-horse"]}, {"Labels": {"api_key": "correct-horse"}},
        {"Labels": {"source": "https://u:correct-horse@h/x"}}, {"Cmd": ["curl", "Authorization: Bearer correct-horse-1"]},
    ],
)  # fmt: skip
def test_a_setting_that_is_a_credential_by_its_name_is_found(tmp_path: Path, settings: object) -> None:
    archive = write(tmp_path / "i", Lab([PLAIN], edit_config=lambda config: {**config, "config": settings}).oci())
    found = scan_archives([archive], ScanOptions())
    assert codes(found) == ["policy.secret"]
    assert "correct-horse" not in json.dumps(found.to_json())
    digest = found.findings[0].actual.removeprefix("sha256 ")
    assert codes(scan_archives([archive], ScanOptions(allow={digest: "an example"}))) == []


def test_the_settings_of_the_real_spec_are_no_credentials() -> None:
    spec = json.loads((Path(__file__).parents[2] / "spec.json").read_text())
    lines = [*spec["env"], *(f"{k}={v}" for k, v in spec["labels"].items())]
    assert [line for line in lines if redact(line) != line] == []


def test_a_build_argument_in_the_history_is_found(tmp_path: Path) -> None:
    history = [{"created_by": "RUN |1 TOKEN=correct-horse /bin/sh -c make"}]
    lab = Lab([PLAIN], edit_config=lambda config: {**config, "history": history})
    assert codes(scan_archives([write(tmp_path / "i", lab.oci())], ScanOptions())) == ["policy.secret"]


def test_a_layer_of_two_archives_is_searched_once_and_proved_twice(tmp_path: Path) -> None:
    lab = Lab([SECRET, PLAIN], pack="identity")
    both = [write(tmp_path / "o", lab.oci()), write(tmp_path / "d", lab.docker())]
    assert (scan_archives(both, ScanOptions()).files, scan_archives(both[:1], ScanOptions()).files) == (2, 2)
    other = Lab([SECRET, tar(entry("bin/tool", b"evil"))])
    claimed = lab.docker()
    blobs = {n: (other.layers[1] if d == lab.layers[1] else d) for n, d in claimed.items()}
    with pytest.raises(IntegrityError):
        scan_archives([both[0], write(tmp_path / "x", blobs)], ScanOptions())


def test_what_was_seen_is_only_what_was_proved(tmp_path: Path) -> None:
    """A layer that only claims a known diff_id is never passed over."""
    seen: set[object] = set()
    lab = Lab([PLAIN], pack="identity")
    scan_archives([write(tmp_path / "o", lab.oci())], ScanOptions(), Walk(seen=seen))  # type: ignore[arg-type]
    assert seen == {"sha256:" + hashlib.sha256(PLAIN).hexdigest()}
    swapped = {n: (SECRET if d == PLAIN else d) for n, d in lab.docker().items()}
    with pytest.raises(OciBuilderError):
        scan_archives([write(tmp_path / "x", swapped)], ScanOptions(), Walk(seen=seen))  # type: ignore[arg-type]


def test_require_names_places_and_never_the_secret(tmp_path: Path) -> None:
    with pytest.raises(PolicyError) as caught:
        scan_archives([write(tmp_path / "i", Lab([SECRET]).oci())], ScanOptions()).require()
    assert (caught.value.code, caught.value.exit_status) == ("policy.secret", 4)
    assert TOKEN.decode() not in str(caught.value) + repr(caught.value.fields)


def test_a_private_key_beside_the_records_is_found(tmp_path: Path) -> None:
    save_key(new_key(), tmp_path / "key.json")
    assert codes(scan_files([tmp_path / "key.json"], ScanOptions())) == ["policy.secret"]
    assert codes(scan_files([tmp_path / "key.json.pub"], ScanOptions())) == []


def test_what_is_public_is_allowed_by_digest_or_path_with_a_reason(tmp_path: Path) -> None:
    archive = write(tmp_path / "i", Lab([SECRET]).oci())
    for allowed in (
        {"secrets": {hashlib.sha256(TOKEN).hexdigest(): "a token of the documentation"}},
        {"paths": {r"etc/app\.env": "an example"}},
    ):
        (tmp_path / "allow.json").write_text(json.dumps(allowed))
        assert codes(scan_archives([archive], read_allowed(tmp_path / "allow.json"))) == []
    assert codes(scan_archives([archive], read_allowed(None))) == ["policy.secret"]


def test_cpython_s_own_test_keys_are_known(tmp_path: Path) -> None:
    pem = tmp_path / "k"
    save_key(new_key(), pem)
    names = ("usr/lib/python3.12/test/certdata/keycert.pem", "rt/site-packages/Cryptodome/SelfTest/a/test_RSA.py", "a.pem")
    layer = tar(*(entry(name, pem.read_bytes()) for name in names))
    found = scan_archives([write(tmp_path / "i", Lab([layer]).oci())], read_allowed(None))
    assert ["a.pem" in f.message for f in found.findings] == [True]


@pytest.mark.parametrize(
    "text",
    [
        "[]", '{"other": {}}', '{"secrets": {"x": "y"}}', '{"paths": {"(": "y"}}', '{"paths": {"a": ""}}',
        '{"paths": {"a": 1}}', '{"weights_size": 0}', '{"weights_size": true}', '{"secrets": []}',
    ],
)  # fmt: skip
def test_an_allow_list_that_makes_no_sense_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "allow.json").write_text(text)
    with pytest.raises(SpecError) as caught:
        read_allowed(tmp_path / "allow.json")
    assert caught.value.code == "spec.allow"


def cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = "from oci_builder.cli import main; main()"
    words = [str(a) for a in arguments]
    return subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)


def test_verify_searches_when_it_is_asked_to(tmp_path: Path) -> None:
    archive = write(tmp_path / "i", Lab([SECRET]).oci())
    assert cli("verify", archive).returncode == 0
    asked = cli("verify", archive, "--secrets", "--json", tmp_path / "r.json")
    report = json.loads((tmp_path / "r.json").read_text())
    assert (asked.returncode, report["ok"], [f["code"] for f in report["findings"]]) == (4, False, ["policy.secret"])
    assert TOKEN.decode() not in asked.stdout + asked.stderr + json.dumps(report)
    (tmp_path / "allow.json").write_text(json.dumps({"paths": {"etc/app.env": "an example"}}))
    assert cli("verify", archive, "--secrets", "--allow", tmp_path / "allow.json").returncode == 0
