"""Files that a command line names and that are not there are wrong inputs; folders that nothing protects say so."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oci_builder.cli import main
from oci_builder.release.signing import save_key
from tests.release.built import KEY, make_build, make_spec, recorded_by_hand

pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")
ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Everything that the commands ask for, but for the build."""
    made = tmp_path_factory.mktemp("made")
    make_spec(made, files="layers")
    (made / "layers").mkdir()
    save_key(KEY, made / "key")
    (made / "releases/v1-r1").mkdir(parents=True)
    (made / "dist").mkdir()
    return made


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], place: Path) -> Run:
    monkeypatch.chdir(place)

    def go(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["oci-builder", *words])
        status = 0
        try:
            main()
        except SystemExit as end:
            status = int(end.code or 0)
        return status, *capfd.readouterr()

    return go


GOOD = {"--trust": "trust.json", "--key": "key", "--spec": "spec.json"}
VERBS = {
    "record": (("record", "dist", "releases/v1-r1"), ("--trust", "--key", "--spec")),
    "publish": (("publish", "releases/v1-r1", "--repo", "a/b", "--helper", "ensure_runtime.sh"), ("--trust", "--key", "--spec")),
    "repack": (("repack", "dist", "releases/v1-r1"), ("--trust", "--key", "--spec")),
    "qualification": (("qualification", "releases/v1-r1"), ("--trust", "--spec")),
    "report": (("report", "releases/v1-r1", "page.html"), ("--trust", "--spec")),
    "receipt-verify": (("receipt", "verify", "spec.json"), ("--trust",)),
    "receipt-sign": (("receipt", "sign", "spec.json", "dist", "--archive", "spec.json"), ("--key",)),
}
WRONG = [
    (verb, option, value) for verb, (_, options) in VERBS.items() for option in options for value in ("gone", "dist", "key/x")
]  # fmt: skip


@pytest.mark.parametrize(("verb", "option", "value"), WRONG, ids=lambda v: str(v).strip("-").replace("/", "-"))
def test_a_wrong_name_is_a_wrong_input(verb: str, option: str, value: str, run: Run) -> None:
    words, options = VERBS[verb]
    given = [word for name in options for word in (name, value if name == option else GOOD[name])]
    status, _, err = run(*words, *given)
    if verb == "receipt-sign":  # what is to be signed is read first, and is no receipt
        assert status in (2, 3)
    elif option == "--key" and value == "dist":
        assert (status, "error[key.mode]" in err) == (4, True), err
    else:
        assert status == 2, err
    assert "Traceback" not in err


@pytest.mark.parametrize("words", [("receipt", "verify", "gone"), ("receipt", "show", "gone"), ("qualification", "gone"),
                                   ("sbom", "gone"), ("receipt", "sign", "gone", "dist", "--archive", "gone", "--key", "key"),
                                   ("receipt", "sign", "spec.json", "gone", "--archive", "spec.json", "--key", "key")])  # fmt: skip
def test_a_subject_that_is_not_there_is_a_wrong_input(words: tuple[str, ...], run: Run) -> None:
    status, _, err = run(*words)
    assert (status, err.startswith("error[")) == (2, True), err


def test_a_receipt_is_shown_where_no_policy_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    receipt = next((ROOT / "releases/supporting").rglob("*.receipt.json"))
    monkeypatch.chdir(tmp_path)
    status, out, _ = run("receipt", "show", str(receipt))
    assert (status, json.loads(out)["answer"]) == (1, "cannot tell")
    for words in (("show", "--trust", "releases/trust.json"), ("verify",)):
        status, _, err = run("receipt", *words, str(receipt))
        assert (status, "--trust" in err) == (2, True), err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--name", "a\udcffb"), "spec.name"),
        (("--version", "1\n2"), "spec.name"),
        (("--out", "spec.json"), "spec.path"),
        (("--out", "spec.json/below"), "spec.path"),
        (("--tier", "none"), "spec.tier"),
    ],
)
def test_what_sbom_cannot_use_is_a_wrong_input(words: tuple[str, ...], code: str, run: Run) -> None:
    status, _, err = run("sbom", "envs", *words)
    assert (status, f"error[{code}]" in err) == (2, True), err


def test_an_epoch_beyond_time_is_a_wrong_input(run: Run) -> None:
    assert run("sbom", "envs", "--epoch", "9" * 20)[0] == 2


def test_records_that_nobody_signed_are_said_to_be_unprotected(tmp_path: Path, run: Run) -> None:
    make_build(tmp_path)
    release = str(recorded_by_hand(tmp_path).folder.root)
    rules = ("--spec", str(tmp_path / "spec.json"), "--trust", str(tmp_path / "trust.json"))
    for more in (("--update",), ()):
        status, out, err = run("qualification", release, *rules, *more)
        assert (status, "warning: nothing protects the files" in err) == (0, True), out + err
