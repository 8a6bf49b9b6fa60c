"""nrl-run-record, run as a program with nothing installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.shell.ensure import archive_of, member, script, sha
from tests.shell.test_check_runtime import FILES, PYTHON


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """An installation without a list of its files."""
    root = tmp_path / "rt"
    (root / ".nrl-install").mkdir(parents=True)
    (root / ".nrl-install/installed.json").write_text(json.dumps({"sha256": "ab" * 32, "prefix": str(root)}))
    (root / "nrl-run-record").write_bytes((FILES / "nrl-run-record").read_bytes())
    return root


def record(prefix: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": os.environ["PATH"], **env}
    return subprocess.run([PYTHON, prefix / "nrl-run-record", *argv], env=given, capture_output=True, text=True)


def test_run_record(prefix: Path, tmp_path: Path) -> None:
    (prefix / "source").mkdir()
    (prefix / "source/SOURCE.json").write_text(json.dumps({"commit": "81aa43d", "overlay": "x"}))
    config, out = tmp_path / "grpo.yaml", tmp_path / "run.json"
    config.write_text("a: é\n")
    argv = ("--out", str(out), "--run-id", "r7", "--config", str(config), "--data", "gsm8k=0123abc", "--model", "m=89d0abc")
    assert record(prefix, *argv).returncode == 0
    found = json.loads(out.read_text())
    assert found["source"]["commit"] == "81aa43d" and found["runtime"]["archive_sha256"] == "ab" * 32
    assert (found["config"]["text"], found["data"], found["models"]) == ("a: é\n", {"gsm8k": "0123abc"}, {"m": "89d0abc"})
    before = out.read_bytes()
    assert record(prefix, *argv).returncode == 6 and out.read_bytes() == before


@pytest.mark.parametrize(
    "wrong",
    [
        ["--model", "m=main"], ["--model", "m=develop"], ["--model", "m=89d"], ["--data", "d=refs/heads/main"],
        ["--data", "d=v1.0"], ["--data", "x"], ["--image", "sha256:1"], ["--config", "/no"],
    ],
)  # fmt: skip
def test_run_record_refuses_what_is_not_known(prefix: Path, tmp_path: Path, wrong: list[str]) -> None:
    (prefix / "source").mkdir()
    (prefix / "source/SOURCE.json").write_text('{"commit": "81aa43d"}')
    assert record(prefix, "--out", str(tmp_path / "o"), "--run-id", "r", *wrong).returncode == 2
    assert not (tmp_path / "o").exists()


def test_run_record_of_a_changed_checkout(prefix: Path, tmp_path: Path) -> None:
    tree = tmp_path / "mine"
    (tree / "nemo_rl").mkdir(parents=True)
    (tree / "nemo_rl/a.py").write_text("1")
    git = ["git", "-C", str(tree), "-c", "user.name=lab", "-c", "user.email=lab@example.net"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    argv = ("--run-id", "r")
    assert record(prefix, "--out", str(tmp_path / "1"), *argv, NEMO_RL_SOURCE_ROOT=str(tree)).returncode == 0
    (tree / "nemo_rl/a.py").write_text("2")
    assert record(prefix, "--out", str(tmp_path / "2"), *argv, NEMO_RL_SOURCE_ROOT=str(tree)).returncode == 0
    clean, changed = (json.loads((tmp_path / n).read_text())["source"] for n in "12")
    assert (clean["changed"], changed["changed"], changed["commit"]) == (False, True, clean["commit"])


def test_a_run_record_leaves_credentials_out(prefix: Path, tmp_path: Path) -> None:
    """Issue 7, item 8: a record is passed on, and a run's configuration has keys for loggers and downloads."""
    config, out = tmp_path / "grpo.yaml", tmp_path / "run.json"
    text = (
        "wandb_api_key: plain-words-1\nhf_token: 'plain words 2' # mine\nlogger: {password: plain-words-3, x: 1}\n"
        "url: https://me:plain-words-4@host/x\nnote: 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\n"
    )
    kept = 'pad_token: "<pad>"\nmax_new_tokens: 128\ntokenizer: {name: llama}\napi_key: ${oc.env:KEY}\nsecret: null\n'
    config.write_text(text + kept)
    (prefix / "source").mkdir()
    (prefix / "source/SOURCE.json").write_text(json.dumps({"commit": "81aa43d", "overlay": "x"}))
    assert record(prefix, "--out", str(out), "--run-id", "r", "--config", str(config)).returncode == 0
    found = json.loads(out.read_text())["config"]
    assert "plain" not in found["text"] and "hf_q" not in found["text"]
    assert found["text"].endswith(kept) and "# mine" in found["text"] and ", x: 1}" in found["text"]
    assert (found["hidden"], found["sha256"]) == (5, sha(config))


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A real installation, with its list."""
    about = json.dumps({"commit": "81" * 20, "changed": "a lie", "root": "another"}).encode()
    program = (FILES / "nrl-run-record").read_bytes()
    archive = archive_of(
        tmp_path, member("opt/rt/envs/x", data=b"x"), member("opt/rt/bin/nrl-run-record", data=program),
        member("opt/rt/source/SOURCE.json", data=about), member("opt/rt/source/nemo_rl/__init__.py", data=b"1"),
    )  # fmt: skip
    root = tmp_path / "in/rt"
    assert script(archive, sha(archive), root).returncode == 0
    return root


def about_source(root: Path, out: Path, **env: str) -> dict[str, object]:
    argv = [PYTHON, root / "bin/nrl-run-record", "--out", out, "--run-id", "r"]
    done = subprocess.run(argv, env={"PATH": os.environ["PATH"], **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(out.read_text())["source"]
    return found


@pytest.mark.parametrize("how", ["not", "edited", "added", "removed", "replaced by a link", "bytecode"])
def test_a_shipped_source_is_looked_at(installed: Path, tmp_path: Path, how: str) -> None:
    pristine = about_source(installed, tmp_path / "1")
    module = installed / "source/nemo_rl/__init__.py"
    match how:
        case "edited":
            module.write_text("2")
        case "added":
            module.with_name("more.py").write_text("")
        case "removed":
            module.unlink()
        case "replaced by a link":
            module.rename(tmp_path / "elsewhere")
            module.symlink_to(tmp_path / "elsewhere")
        case "bytecode":
            module.with_name("__pycache__").mkdir()
            (module.parent / "__pycache__/x.pyc").write_text("")
    found = about_source(installed, tmp_path / "2")
    assert (pristine["changed"], pristine["changed_files"], pristine["root"]) == (False, [], str(installed / "source"))
    changed = how not in ("not", "bytecode")
    assert found["changed"] is changed and (found["tree_sha256"] != pristine["tree_sha256"]) is changed


def test_what_cannot_be_compared_is_not_called_unchanged(installed: Path, tmp_path: Path) -> None:
    """A copy elsewhere, and a list that is not the installation's."""
    copy = tmp_path / "copy"
    (installed / "source").rename(copy)
    assert about_source(installed, tmp_path / "1", NEMO_RL_SOURCE_ROOT=str(copy))["changed"] is None
    copy.rename(installed / "source")
    (installed / ".nrl-install/files.json.gz").write_bytes(b"x")
    assert about_source(installed, tmp_path / "2")["changed"] is None


@pytest.mark.parametrize("text", ["[1", "[1]", "{}", '{"commit": 7}', ""])
def test_a_damaged_record_of_the_source_is_said(prefix: Path, tmp_path: Path, text: str) -> None:
    (prefix / "source").mkdir()
    (prefix / "source/SOURCE.json").write_text(text)
    done = record(prefix, "--out", str(tmp_path / "o"), "--run-id", "r")
    assert done.returncode == 2 and "SOURCE.json is damaged" in done.stderr and "Traceback" not in done.stderr
