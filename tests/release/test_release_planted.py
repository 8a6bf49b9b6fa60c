"""Secrets are planted wherever a user may put one; then everything that was said and written is searched (issue 7, 8)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from oci_builder.cli import main
from oci_builder.release.scan import read_allowed, scan_archives
from oci_builder.release.signing import save_key
from oci_builder.transports import registry
from tests.release.built import KEY, make_release, make_spec

pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")

ROOT = Path(__file__).resolve().parents[2]
# None has a shape that is known: they are found out by the name of the variable that holds them.
ENVIRONMENT = {
    "HF_TOKEN": "plain-hub-words", "MODAL_TOKEN_SECRET": "plain-modal-words", "REGISTRY_PASSWORD": "plain/registry words",
    "HTTPS_PROXY": "http://someone:plain-proxy-words@127.0.0.1:9", "UV_INDEX_URL": "https://plain-index-words@127.0.0.1:9",
}  # fmt: skip
SHAPED = "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"
IN_URL = "user:url-words-77"
PLANTED = ("plain-hub-words", "plain-modal-words", "plain/registry words", "plain-proxy-words", "plain-index-words", SHAPED,
           "url-words-77", "query-words-77", "docker-words-77", "ZG9ja2VyOmRvY2tlci13b3Jkcy03Nw==")  # fmt: skip


def holding(text: str | bytes) -> list[str]:
    data = text.encode() if isinstance(text, str) else text
    return [secret for secret in PLANTED if secret.encode() in data]


def leaks(folder: Path) -> list[str]:
    """Files below a folder that hold a planted secret, or have one in their name."""
    files = [p for p in folder.rglob("*") if p.is_file()]
    return [str(p) for p in files if holding(p.read_bytes()) or holding(str(p.relative_to(folder)))]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    make_release(place)
    save_key(KEY, place / "key")
    return place


@dataclass
class Ended:
    status: int
    said: str


@pytest.fixture
def run(made: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., Ended]:
    """The command, in this process, with the secrets in its environment and in docker's settings."""
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    auths = {"127.0.0.1:9": {"auth": "ZG9ja2VyOmRvY2tlci13b3Jkcy03Nw=="}}
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": auths}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setenv("HF_ENDPOINT", f"http://{IN_URL}@127.0.0.1:9")
    monkeypatch.setattr(registry, "pause_of", lambda *_: 0.0)
    monkeypatch.chdir(made)

    def go(*words: str) -> Ended:
        monkeypatch.setattr(sys, "argv", ["oci-builder", *words])
        with pytest.raises(SystemExit) as end:
            main()
        found = capfd.readouterr()
        return Ended(int(end.value.code or 0), found.out + found.err)

    return go


URL = f"https://{IN_URL}@127.0.0.1:9/x?token=query-words-77"
REF = "127.0.0.1:9/x@sha256:" + "a" * 64
BY_RELEASE = ("--trust", "trust.json", "--key", "key", "--helper", "ensure_runtime.sh", "--archives", "dist")
WORDS = [
    ("exec", "--env", "plain-hub-words", ".", "--", "true"),
    ("exec", "--env", "unknown words 99", ".", "--", "true"),
    ("exec", "--bind", URL, ".", "--", "true"),
    ("exec", "--gpu", SHAPED, ".", "--", "true"),
    ("exec", "--user", SHAPED, ".", "--", "true"),
    *[(verb, word) for verb in ("build", "inspect", "verify", "sbom", "readiness") for word in (SHAPED, URL, "plain-hub-words")],
    ("diff", "plain-hub-words", URL),
    ("verify", "dist/runtime.oci.tar", "--spec", "plain-hub-words"),
    ("verify", "dist/runtime.oci.tar", "--json", "plain-hub-words/x/y"),
    ("pull", URL, "out"),
    ("pull", f"{IN_URL}@127.0.0.1:9/x@sha256:{'a' * 64}", "out"),
    ("pull", REF, "out"),
    ("push", "dist/runtime.oci.tar", URL),
    ("push", "dist/runtime.oci.tar", "127.0.0.1:9/x:t"),
    ("unpack", URL, "plain-hub-words"),
    ("publish", "releases/v1-r1", *BY_RELEASE, "--repo", URL),
    ("publish", "releases/v1-r1", *BY_RELEASE, "--repo", "a/b", "--endpoint", URL),
    ("publish", "releases/v1-r1", *BY_RELEASE, "--to-registry", URL),
    ("publish", "releases/v1-r1", *BY_RELEASE, "--to-registry", "127.0.0.1:9/x:t"),
    ("publish", "releases/v1-r1", *BY_RELEASE, SHAPED),
    ("record", "dist", "releases/plain-hub-words", "--trust", "trust.json", "--key", "key"),
    ("qualification", "plain-hub-words"),
    ("report", "releases/v1-r1", "plain-hub-words/page.html", "--trust", "trust.json"),
    ("receipt", "verify", URL),
    ("receipt", "verify", "releases/v1-r1/portable.json", "--trust", "plain-hub-words"),
    ("key", "new", "plain-hub-words/key"),
    ("stage", "package", "-o", f"jobs={SHAPED}"),
    ("stage", "package", "-o", SHAPED),
    ("stage", SHAPED),
    ("stage", "publish", "--release", "releases/v1-r1", "--trust", "trust.json", "--key", "key", "--cache", "cache",
     "--out", "dist", "-o", "helper=ensure_runtime.sh", "-o", f"registry={URL}"),
    (SHAPED,),
    (f"--{SHAPED}",),
]  # fmt: skip


@pytest.mark.parametrize("words", WORDS, ids=lambda words: "-".join(words)[:40])
def test_no_message_shows_a_secret(words: tuple[str, ...], run: Callable[..., Ended], made: Path) -> None:
    done = run("-v", "--progress", "json", *words)
    assert done.status != 0
    assert holding(done.said) == [] and "unknown words 99" not in done.said, done.said
    assert leaks(made) == []


def test_a_fault_that_nobody_expected_shows_none() -> None:
    code = (
        "import oci_builder.inspection as m, sys\n"
        "def boom(*a, **k): raise RuntimeError('in plain-hub-words of ' + sys.argv[2])\n"
        "m.inspect_archive = boom\n"
        "from oci_builder.cli import main; main()"
    )
    env = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, "inspect", URL], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "RuntimeError: in *** of" in done.stderr
    assert holding(done.stderr + done.stdout) == []


@pytest.mark.parametrize("setting", [{"env": ["A=plain-hub-words"]}, {"labels": {"note": f"x {SHAPED}"}}, {"env": ["DB_PASSWORD=hunter"]}])
def test_a_spec_that_holds_one_is_warned_of_and_not_recorded(
    setting: dict[str, object], run: Callable[..., Ended], tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    make_spec(place, **setting)
    save_key(KEY, place / "key")
    built = run("build", str(place / "spec.json"), "--out", str(place / "dist"), "--cache", str(place / "cache"))
    assert (built.status, holding(built.said)) == (0, [])
    assert "looks like a credential" in built.said
    more = ("--spec", str(place / "spec.json"), "--trust", str(place / "trust.json"), "--key", str(place / "key"))
    done = run("record", str(place / "dist"), str(place / "releases/v1-r1"), *more)
    assert (done.status, "error[policy.secret]" in done.said, holding(done.said)) == (4, True, []), done.said
    assert not (place / "releases").exists()


@pytest.mark.parametrize("data", [b"x = 'plain-hub-words'\n", b"\x7fELF\0\0" + b"\0" * 9000 + b"plain-hub-words\0"])
def test_this_machine_s_own_secrets_are_found_in_any_file(
    data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A build that ran with a token in its environment may have written it anywhere, in any form."""
    monkeypatch.setenv("HF_TOKEN", "plain-hub-words")
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/settings.bin").write_bytes(data)
    found = scan_archives([tmp_path / "tree"], read_allowed(None)).findings
    assert [f.code for f in found] == ["policy.secret"]
    assert "plain-hub-words" not in str(found)


def test_receipts_and_pages_hold_none(made: Path, run: Callable[..., Ended], tmp_path: Path) -> None:
    """Reasons and details come from checks and libraries, which quote what they like."""
    shutil.copytree(made, tmp_path / "r")
    check = {"name": "ok", "outcome": "fail", "reason": f"GET {URL}: plain-hub-words", "details": {"argv": [SHAPED]}}
    said = {
        "release": "v1-r1", "stage": "single", "attempt": "a1", "engine": "local", "tools": {"oci-builder": "0.1.0"},
        "started": "2026-05-01T10:00:00Z", "finished": "2026-05-01T10:05:00Z", "checks": [check],
        "details": {"password": "plain/registry words", "seen": [{"HF_TOKEN": "plain-hub-words"}]},
    }  # fmt: skip
    source, release = tmp_path / "said.json", tmp_path / "r/releases/v1-r1"
    source.write_text(json.dumps(said))
    words = ("receipt", "sign", str(source), str(release / "receipts"), "--key", "key")
    assert run(*words, "--archive", "dist/runtime.tar.gz").status == 0
    source.unlink()
    path = next(release.glob("receipts/single-*.json"))
    for more in (
        ("receipt", "show", str(path), "--trust", "trust.json"),
        ("receipt", "verify", str(path), "--trust", "trust.json", "--json"),
        ("qualification", str(release), "--trust", "trust.json", "--update", "--json"),
        ("report", str(release), str(tmp_path / "page.html"), "--trust", "trust.json", "--json"),
    ):
        done = run(*more)
        assert (done.status, holding(done.said)) == (0, []), done.said
    assert holding(base64.b64decode(json.loads(path.read_bytes())["payload"])) == []
    assert leaks(tmp_path / "r") == [] and holding((tmp_path / "page.html").read_bytes()) == []
