"""Envelopes, keys and the three answers (C12-13, B217, B219, B220, B221)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oci_builder.model.errors import (
    ConflictError,
    FormatError,
    PolicyError,
    SpecError,
    TransportError,
)
from oci_builder.model.gates import parse_trust
from oci_builder.model.receipts import PORTABLE, parse_statement
from oci_builder.release import signing
from oci_builder.release.receipts import Answer, Verdict, judge, write_receipt
from oci_builder.release.signing import SigningKey, load_key, load_public, pae, save_key
from tests.release.helpers import NOW, SUBJECTS, new_key, policy, receipt, signed, trusted

KEY = new_key()
POLICY = policy(trusted(KEY))


def answer(data: bytes, **changes: object) -> Verdict:
    arguments: dict[str, object] = {"policy": POLICY, "now": NOW, "subjects": SUBJECTS, **changes}
    return judge(data, **arguments)  # type: ignore[arg-type]


def payload_of(envelope: bytes) -> bytes:
    return base64.b64decode(json.loads(envelope)["payload"])


def test_a_good_receipt_is_verified() -> None:
    verdict = answer(signed(KEY, receipt()))
    assert (verdict.answer, verdict.signers, verdict.answer.exit_status) == (Answer.VERIFIED, ("bench",), 0)


def test_pae_is_the_one_of_the_specification() -> None:
    """protocol.md gives this very example."""
    assert pae("http://example.com/HelloWorld", b"hello world") == (
        b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    )


def test_signing_is_deterministic() -> None:
    assert signed(KEY, receipt()) == signed(KEY, receipt())


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
def test_another_implementation_verifies_the_stored_bytes_b220(tmp_path: Path) -> None:
    made = receipt(details={"é": 1e-7, "🚀": "ß", "nested": {"π": [1, 2.5, None]}})
    save_key(KEY, tmp_path / "k")
    envelope = json.loads(signed(KEY, made))
    payload = base64.b64decode(envelope["payload"])
    kind = envelope["payloadType"].encode()
    sizes = [str(len(part)).encode() for part in (kind, payload)]
    (tmp_path / "message").write_bytes(b" ".join([b"DSSEv1", sizes[0], kind, sizes[1], payload]))
    (tmp_path / "sig").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    command = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(tmp_path / "k.pub"), "-rawin"]
    done = subprocess.run([*command, "-in", tmp_path / "message", "-sigfile", tmp_path / "sig"], capture_output=True)
    assert done.returncode == 0, done.stderr
    assert parse_statement(payload, "r").predicate.details == made.details


def test_every_changed_byte_of_the_payload_fails_c12_13() -> None:
    envelope = json.loads(signed(KEY, receipt()))
    payload = bytearray(base64.b64decode(envelope["payload"]))
    for at in range(0, len(payload), 17):
        changed = payload.copy()
        changed[at] ^= 1
        data = json.dumps({**envelope, "payload": base64.b64encode(changed).decode()}).encode()
        assert answer(data).answer is Answer.FAILED


@pytest.mark.parametrize("cut", [0, 1, 40, -1, -20])
def test_a_truncated_envelope_fails_c12_13(cut: int) -> None:
    assert answer(signed(KEY, receipt())[:cut]).answer is Answer.FAILED


def test_no_signature_cannot_be_told_c12_13() -> None:
    envelope = json.loads(signed(KEY, receipt()))
    verdict = answer(json.dumps({**envelope, "signatures": []}).encode())
    assert (verdict.answer, verdict.code, verdict.answer.exit_status) == (Answer.CANNOT_TELL, "receipt.key", 1)


def test_an_unknown_key_cannot_be_told() -> None:
    verdict = answer(signed(new_key(), receipt()))
    assert (verdict.answer, verdict.code) == (Answer.CANNOT_TELL, "receipt.key")


def test_another_key_under_a_trusted_key_id_fails_c12_13() -> None:
    envelope = json.loads(signed(new_key(), receipt()))
    envelope["signatures"][0]["keyid"] = KEY.id
    verdict = answer(json.dumps(envelope).encode())
    assert (verdict.answer, verdict.code, verdict.answer.exit_status) == (Answer.FAILED, "receipt.signature", 3)


@pytest.mark.parametrize("place", [0, 1])
def test_an_extra_signature_of_an_unknown_key_does_no_harm_c12_13(place: int) -> None:
    """DSSE: a reader ignores signatures of keys that it does not know."""
    envelope, other = (json.loads(signed(k, receipt())) for k in (KEY, new_key()))
    envelope["signatures"].insert(place, other["signatures"][0])
    assert answer(json.dumps(envelope).encode()).answer is Answer.VERIFIED


def test_the_key_id_is_a_hint_only() -> None:
    envelope = json.loads(signed(KEY, receipt()))
    envelope["signatures"][0]["keyid"] = ""
    assert answer(json.dumps(envelope).encode()).answer is Answer.VERIFIED


def test_another_payload_type_cannot_be_told() -> None:
    data = KEY.sign(payload_of(signed(KEY, receipt())), "application/json")
    assert answer(data).code == "receipt.kind"


def test_a_signature_is_over_the_payload_type_too() -> None:
    envelope = json.loads(KEY.sign(payload_of(signed(KEY, receipt())), "text/plain"))
    envelope["payloadType"] = "application/vnd.in-toto+json"
    assert answer(json.dumps(envelope).encode()).code == "receipt.signature"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"digest":', b'"digest":{"sha256":"' + b"d" * 64 + b'"},"digest":'),
        (b'"digest":', b'"Digest":{"sha256":"' + b"d" * 64 + b'"},"digest":'),
        (b'"sha256":', b'"SHA256":"' + b"d" * 64 + b'","sha256":'),
        (b'"stage":', b'"stage":"x","stage":'),
        (b'"details":{', b'"details":{"a":1,"A":2'),
    ],
)
def test_two_readings_under_one_good_signature_fail_b221(old: bytes, new: bytes) -> None:
    payload = payload_of(signed(KEY, receipt()))
    assert old in payload
    verdict = answer(KEY.sign(payload.replace(old, new, 1)))
    assert verdict.answer is Answer.FAILED
    assert verdict.code in ("json.duplicate", "json.ambiguous")


def test_a_repeated_key_in_the_envelope_fails_b221() -> None:
    data = signed(KEY, receipt())
    verdict = answer(data.replace(b'"payloadType":', b'"payload":"e30=","payloadType":', 1))
    assert (verdict.answer, verdict.code) == (Answer.FAILED, "json.duplicate")


def test_a_receipt_without_hashes_cannot_be_told_b219() -> None:
    assert answer(signed(KEY, receipt(), {})).answer is Answer.CANNOT_TELL
    statement = json.loads(payload_of(signed(KEY, receipt())))
    del statement["subject"]
    assert answer(KEY.sign(json.dumps(statement).encode())).answer is Answer.CANNOT_TELL


def test_a_statement_of_another_kind_cannot_be_told() -> None:
    other = {"_type": "https://in-toto.io/Statement/v1", "subject": [], "predicateType": "x", "predicate": {}}
    assert answer(KEY.sign(json.dumps(other).encode())).answer is Answer.CANNOT_TELL


def test_a_receipt_about_another_archive_fails() -> None:
    verdict = answer(signed(KEY, receipt(), {**SUBJECTS, PORTABLE: "d" * 64}))
    assert (verdict.answer, verdict.code) == (Answer.FAILED, "receipt.subject")


def test_a_receipt_about_none_of_these_archives_cannot_be_told() -> None:
    assert answer(signed(KEY, receipt(), {"other.tar": "d" * 64})).code == "receipt.subject"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"not_after": "2026-04-01T00:00:00Z"}, "valid"),
        ({"not_before": "2026-05-20T00:00:00Z"}, "valid"),
        ({"revoked": "laptop lost"}, "laptop lost"),
        ({"stages": ["single"]}, "stage"),
    ],
)
def test_a_key_counts_only_within_its_bounds(changes: dict[str, object], word: str) -> None:
    verdict = answer(signed(KEY, receipt()), policy=policy(trusted(KEY, **changes)))
    assert (verdict.answer, verdict.code) == (Answer.FAILED, "receipt.key")
    assert word in verdict.reasons[0]


def test_rotation_an_old_receipt_stays_valid_under_its_old_key() -> None:
    young = new_key()
    both = policy(
        trusted(KEY, not_after="2026-05-02T00:00:00Z"),
        trusted(young, name="young", not_before="2026-05-02T00:00:00Z"),
    )
    later = receipt(started="2026-05-03T00:00:00Z", finished="2026-05-03T01:00:00Z")
    answers = [answer(signed(k, r), policy=both).answer for k, r in ((KEY, receipt()), (young, later), (KEY, later))]
    assert answers == [Answer.VERIFIED, Answer.VERIFIED, Answer.FAILED]


def test_a_receipt_from_the_future_fails() -> None:
    assert answer(signed(KEY, receipt()), now=datetime(2026, 4, 1, tzinfo=UTC)).code == "receipt.time"


@pytest.mark.parametrize(
    "changes",
    [
        {"finished": "2026-05-01T09:00:00Z"},
        {"checks": ({"name": "x", "outcome": "pass"}, {"name": "x", "outcome": "pass"})},
        {"checks": ({"name": "x", "outcome": "deferred"},)},
    ],
)
def test_a_receipt_that_contradicts_itself_is_not_written(tmp_path: Path, changes: dict[str, object]) -> None:
    with pytest.raises(FormatError) as caught:
        write_receipt(tmp_path, receipt(**changes), SUBJECTS, KEY)
    assert caught.value.code in ("receipt.time", "receipt.check")
    assert not list(tmp_path.iterdir())


def test_a_receipt_is_never_rewritten_c12_08(tmp_path: Path) -> None:
    path = write_receipt(tmp_path, receipt(), SUBJECTS, KEY)
    before = path.read_bytes()
    with pytest.raises(ConflictError) as caught:
        write_receipt(tmp_path, receipt(), SUBJECTS, KEY)
    assert (caught.value.code, path.read_bytes(), len(list(tmp_path.iterdir()))) == ("release.exists", before, 1)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300) | st.text(max_size=200).map(lambda t: json.dumps({"payload": t}).encode()))
def test_no_bytes_make_the_judge_raise_or_say_yes(data: bytes) -> None:
    assert answer(data).answer is not Answer.VERIFIED


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_mutated_envelope_is_never_verified_as_something_else(data: st.DataObject) -> None:
    good = signed(KEY, receipt())
    at = data.draw(st.integers(0, len(good) - 1))
    changed = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    verdict = answer(changed)
    if verdict.answer is Answer.VERIFIED:  # a key id, an ignored key: not what was signed
        assert payload_of(changed) == payload_of(good)


class TestKeyFiles:
    def test_a_new_key_is_for_its_owner_only(self, tmp_path: Path) -> None:
        os.umask(os.umask(0o022))
        public = save_key(KEY, tmp_path / "k")
        modes = [(p.stat().st_mode & 0o777) for p in (tmp_path / "k", public)]
        assert modes == [0o600, 0o644]
        assert (load_key(tmp_path / "k").id, load_public(public)) == (KEY.id, KEY.public)

    @pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
    def test_an_open_key_is_refused(self, tmp_path: Path, mode: int) -> None:
        save_key(KEY, tmp_path / "k")
        (tmp_path / "k").chmod(mode)
        with pytest.raises(PolicyError) as caught:
            load_key(tmp_path / "k")
        assert caught.value.code == "key.mode"

    def test_a_link_to_a_key_and_a_pipe_are_refused(self, tmp_path: Path) -> None:
        save_key(KEY, tmp_path / "k")
        (tmp_path / "link").symlink_to("k")
        os.mkfifo(tmp_path / "pipe", 0o600)
        for name in ("link", "pipe"):
            with pytest.raises(PolicyError) as caught:
                load_key(tmp_path / name)
            assert caught.value.code == "key.mode"

    @pytest.mark.parametrize("name", ["k", "k.pub"])
    def test_a_key_is_never_overwritten(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).symlink_to("nowhere")
        with pytest.raises(ConflictError) as caught:
            save_key(KEY, tmp_path / "k")
        assert (caught.value.code, [p.name for p in tmp_path.iterdir()]) == ("key.exists", [name])

    @pytest.mark.parametrize("text", ["", "-----BEGIN PRIVATE KEY-----\nplanted-secret\n-----END PRIVATE KEY-----\n"])
    def test_a_broken_key_is_refused_without_quoting_it(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "k").write_text(text)
        (tmp_path / "k").chmod(0o600)
        with pytest.raises(FormatError) as caught:
            load_key(tmp_path / "k")
        assert caught.value.code == "key.format"
        assert "planted-secret" not in f"{caught.value!r} {caught.value.__cause__!r}"

    @pytest.mark.skipif(not shutil.which("openssl"), reason="openssl is not installed")
    @pytest.mark.parametrize(
        ("how", "why"),
        [
            (["-algorithm", "X25519"], "not an Ed25519 key"),
            (["-algorithm", "RSA", "-pkeyopt", "rsa_keygen_bits:1024"], "not an Ed25519 key"),
            (["-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256"], "not an Ed25519 key"),
            (["-algorithm", "ED25519", "-aes256", "-pass", "pass:word"], "encrypted"),
            (["-algorithm", "ED25519", "-outform", "DER"], "not a PEM private key"),
        ],
        ids=["x25519", "rsa", "ec", "encrypted", "der"],
    )
    def test_another_kind_of_key_is_refused_and_told(self, tmp_path: Path, how: list[str], why: str) -> None:
        subprocess.run(["openssl", "genpkey", *how, "-out", tmp_path / "k"], check=True, capture_output=True)
        (tmp_path / "k").chmod(0o600)
        with pytest.raises(FormatError) as caught:
            load_key(tmp_path / "k")
        assert (caught.value.code, why in caught.value.message) == ("key.format", True)

    def test_two_keys_in_a_file_have_two_readings(self, tmp_path: Path) -> None:
        save_key(KEY, tmp_path / "k")
        (tmp_path / "k").write_bytes((tmp_path / "k").read_bytes() * 2)
        with pytest.raises(FormatError) as caught:
            load_key(tmp_path / "k")
        assert caught.value.code == "key.format"

    def test_a_key_does_not_show_itself(self) -> None:
        assert repr(KEY) == f"SigningKey({KEY.id})"
        assert isinstance(KEY, SigningKey)


ENTRY = trusted(KEY).model_dump(mode="json")
LATE = trusted(KEY, not_after="2025-01-01T00:00:00Z").model_dump(mode="json")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "trust.policy"), ("not json", "trust.policy"), ("[]", "trust.policy"), ('{"keys": 3}', "trust.policy"),
        ('{"keys": [], "keys": []}', "trust.policy"), ("\ufeff{}", "trust.policy"), (" " * (5 << 20), "trust.policy"),
        (json.dumps({"keys": [], "Keys": []}), "trust.policy"), ('{"keys": [{"name": "x"}]}', "trust.policy"),
        (json.dumps({"keys": [{**ENTRY, "public": "AAAA"}]}), "trust.policy"),
        (json.dumps({"keys": [{**ENTRY, "not_after": "2026-13-01T00:00:00Z"}]}), "trust.policy"),
        (json.dumps({"keys": [ENTRY] * 2}), "trust.key"), (json.dumps({"keys": [LATE]}), "trust.key"),
    ],
    ids=[
        "empty", "no JSON", "list", "number", "twice", "mark", "large", "case", "fields", "key", "time", "two", "late",
    ],
)  # fmt: skip
def test_a_wrong_trust_policy_is_a_wrong_input(text: str, code: str) -> None:
    """Exit 2: 3 is what a forged receipt gives, and the receipt was not even looked at."""
    with pytest.raises(SpecError) as caught:
        parse_trust(text.encode())
    assert (caught.value.code, caught.value.exit_status) == (code, 2)


def test_a_public_key_file_in_the_policy_is_told_what_belongs_there(tmp_path: Path) -> None:
    pem = save_key(KEY, tmp_path / "k").read_text()
    value = {"keys": [{**trusted(KEY).model_dump(mode="json"), "public": pem}]}
    with pytest.raises(SpecError) as caught:
        parse_trust(json.dumps(value).encode())
    assert caught.value.code == "trust.policy"
    assert f"write its 32 bytes alone: {base64.b64encode(KEY.public).decode()}" in caught.value.message


def test_a_key_without_its_public_half_is_not_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full after the first file."""
    real = signing.create_exclusively

    def full(path: Path, data: bytes, **more: Any) -> None:
        if path.suffix == ".pub":
            raise TransportError("io.space", "full")
        real(path, data, **more)

    monkeypatch.setattr(signing, "create_exclusively", full)
    with pytest.raises(TransportError):
        save_key(new_key(), tmp_path / "k")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    save_key(new_key(), tmp_path / "k")


@pytest.mark.skipif(not shutil.which("openssl"), reason="needs openssl")
@pytest.mark.parametrize("change", ["none", "payload", "key"])
def test_openssl_agrees_by_the_lines_of_the_docs(tmp_path: Path, change: str) -> None:
    """Whoever does not have this program can check a signature all the same."""
    page = (Path(__file__).parents[2] / "docs/evidence.md").read_text()
    lines = page.split("<!-- openssl -->\n```sh\n")[1].split("```")[0]
    key = new_key()
    save_key(key if change != "key" else new_key(), tmp_path / "key")
    envelope = json.loads(signed(key, receipt()))
    if change == "payload":
        envelope["payload"] = base64.b64encode(base64.b64decode(envelope["payload"]).replace(b"container", b"contained")).decode()
    (tmp_path / "receipt.json").write_text(json.dumps(envelope))
    done = subprocess.run(["sh", "-euc", lines], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is (change == "none"), done.stderr
    assert ("Signature Verified Successfully" in done.stdout) is (change == "none")
