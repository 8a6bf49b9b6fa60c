"""The secret and weights scan, and the redaction of text. Every token here is made up on the spot."""

from __future__ import annotations

import base64
import hashlib
import random
import string
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oci_builder.model.redact import redact, redact_url, redact_value, secret_values
from oci_builder.release.scan import scan_file
from oci_builder.release.secrets import ScanOptions
from oci_builder.release.signing import new_key, save_key
from tests.lab.oracle import within

RANDOM = random.Random(7)
BASE62 = string.digits + string.ascii_uppercase + string.ascii_lowercase


def letters(count: int, alphabet: str = string.ascii_letters + string.digits) -> str:
    return "".join(RANDOM.choice(alphabet) for _ in range(count))


def with_crc(prefix: str, body: str) -> str:
    value, out = zlib.crc32(body.encode()), ""
    while value:
        value, rest = divmod(value, 62)
        out = BASE62[rest] + out
    return prefix + body + out.rjust(6, "0")


def pem() -> str:
    body = base64.b64encode(b"\x30\x2e" + RANDOM.randbytes(46)).decode()
    return f"-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n"


TOKENS = {
    "private key": pem(),
    "AWS access key": "AKIA" + letters(16, string.ascii_uppercase + "234567"),
    "GitHub token": with_crc("ghp_", letters(30)),
    "Hugging Face token": "hf_" + letters(34, string.ascii_letters),
    "Slack token": f"xoxb-{letters(12, string.digits)}-{letters(24)}",
    "npm token": with_crc("npm_", letters(30)),
    "GitLab token": "glpat-" + letters(20),
    "NVIDIA API key": "nvapi-" + letters(64),
    "PyPI token": "pypi-AgE" + letters(80),
    "Google API key": "AIza" + letters(35),
    "Modal token": "as-" + letters(19) + "aB3",
    "Docker credentials": '"auth": "' + base64.b64encode(b"robot:" + letters(12).encode()).decode() + '"',
}


BARE = (
    "AGE-SECRET-KEY-1" + letters(58, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"), f"SG.{letters(22)}.{letters(43)}",
    base64.b64encode(pem().encode()).decode(),
)  # fmt: skip


def kinds(data: bytes, path: bytes = b"opt/rt/a.txt", options: ScanOptions | None = None, cut: int = 1000) -> list[str]:
    chunks = [data[i : i + cut] for i in range(0, len(data), cut)]
    return [f.message.split(" in ")[0] for f in scan_file(path, len(data), chunks, options=options)]


@pytest.mark.parametrize("kind", TOKENS)
@pytest.mark.parametrize("around", [("", ""), ("x = '", "'\n"), ("\n" * 5_000_000, "\nend")])
def test_a_planted_secret_is_found(kind: str, around: tuple[str, str]) -> None:
    assert kinds((around[0] + TOKENS[kind] + around[1]).encode(), cut=1 << 20) == [kind]


@pytest.mark.parametrize("kind", TOKENS)
def test_no_finding_shows_the_secret(kind: str) -> None:
    secret = TOKENS[kind]
    found = next(iter(scan_file(b"a", len(secret), [secret.encode()])))
    assert secret[:40].strip() not in repr(found)
    assert (found.code, found.exit_status) == ("policy.secret", 4)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(sorted(TOKENS)), st.integers(1, 300), st.integers(0, 400))
def test_cuts_between_reads_change_nothing(kind: str, cut: int, before: int) -> None:
    assert kinds(b"-" * before + TOKENS[kind].encode() + b"\n", cut=cut) == [kind]


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "x" * 34,
        "AKIAIOSFODNN7EXAMPLE",
        "ghp_" + letters(36),
        "npm_" + letters(36),
        "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----",
        "-----BEGIN PRIVATE KEY-----\n" + letters(64) + "\n-----END PRIVATE KEY-----",
        '"auth": "c29tZXRoaW5nZWxzZQ=="',
        "prefix_" + TOKENS["Hugging Face token"],
        TOKENS["Hugging Face token"] + "more",
        "sk_hf_xox-gh_AKIA",
        "known as-" + letters(22, "0123456789abcdef"),
        "as-" + letters(19) + "aB3d",
    ],
)
def test_documentation_about_tokens_is_no_secret(text: str) -> None:
    assert kinds(text.encode()) == []


@pytest.mark.parametrize("kind", TOKENS)
def test_binary_data_is_searched_as_text_is(kind: str) -> None:
    noise = RANDOM.randbytes(9000)
    assert kinds(noise + b"\0" + TOKENS[kind].encode() + b"\0" + noise) == [kind]


def test_a_real_key_of_ours_is_found(tmp_path: object) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    save_key(new_key(), folder / "k")
    assert kinds((folder / "k").read_bytes()) == ["private key"]
    assert kinds((folder / "k.pub").read_bytes()) == []


@pytest.mark.parametrize(
    ("path", "hit"),
    [
        (b"root/.netrc", True),
        (b"root/.cache/huggingface/token", True),
        (b"root/.ssh/id_ed25519", True),
        (b"root/.ssh/id_ed25519.pub", False),
        (b"lib/python3/netrc.py", False),
        (b"opt/tokens/token", False),
    ],
)
def test_files_that_hold_credentials_by_their_name(path: bytes, hit: bool) -> None:
    assert kinds(b"anything", path) == (["credentials file"] if hit else [])
    assert kinds(b"", path) == []


def test_a_published_test_key_can_be_allowed_by_digest_or_by_path() -> None:
    secret = TOKENS["private key"].strip().removesuffix("-----END PRIVATE KEY-----").encode() + b"-----END"
    by_digest = ScanOptions(allow={hashlib.sha256(secret).hexdigest(): "published test key"})
    by_path = ScanOptions(allow_paths={r"usr/lib/python3/test/.*\.pem": "CPython's tests"})
    data = TOKENS["private key"].encode()
    assert kinds(data, options=by_digest) == []
    assert kinds(data, b"usr/lib/python3/test/a/key.pem", by_path) == []
    assert kinds(data, b"root/usr/lib/python3/test/key.pem", by_path) == ["private key"]


class TestWeights:
    small = ScanOptions(weights_size=1000)

    def codes(self, path: bytes, data: bytes) -> list[str]:
        return [f.code for f in scan_file(path, len(data), [data], options=self.small)]

    @pytest.mark.parametrize("name", [b"a.safetensors", b"m/x.gguf", b"pytorch_model-1.bin", b"model.ckpt", b"x.nemo"])
    def test_by_name_and_size(self, name: bytes) -> None:
        assert self.codes(name, bytes(1000)) == ["policy.weights"]
        assert self.codes(name, bytes(999)) == []

    def test_by_content_under_another_name(self) -> None:
        assert self.codes(b"data.dat", b"GGUF" + bytes(2000)) == ["policy.weights"]
        header = b'{"w":{}}'
        data = len(header).to_bytes(8, "little") + header + bytes(2000)
        assert self.codes(b"data.dat", data) == ["policy.weights"]

    def test_code_is_no_weights(self) -> None:
        assert self.codes(b"lib/libtorch.so", b"\x7fELF" + bytes(2000)) == []
        assert self.codes(b"optimodel.binary", bytes(2000)) == []


def test_hostile_text_does_not_slow_the_scan() -> None:
    """Nearly-matches, back to back: the time stays proportional to the size."""
    for piece in (b"-----BEGIN PRIVATE KEY-----", b'"auth" : ', b"xoxb-1-2-", b"hf_", b"-----BEGIN "):
        data = piece * (1_000_000 // len(piece))
        with within(30):
            kinds(data, cut=1 << 16)


class TestRedaction:
    @pytest.mark.parametrize(
        ("text", "secret"),
        [
            ("GET https://user:s3cret@proxy.example:8080/x failed", "s3cret"),
            ("http://tok3n@host/", "tok3n"),
            ("https://u:p@ss@host/", "p@ss"),
            ("https://cdn.example/f?X-Amz-Signature=abcdef0123&x=1", "abcdef0123"),
            ("https://cdn.example/f?Expires=1&Signature=zzz9&Key-Pair-Id=K1", "zzz9"),
            ("https://acc.blob.example/c?sv=1&sig=q%2Bw", "q%2Bw"),
            ("Authorization: Bearer abc.def.ghi", "abc.def.ghi"),
            ("{'authorization': 'Basic dXNlcjpwYXNz'}", "dXNlcjpwYXNz"),
            ("Proxy-Authorization: Basic dXNlcjpwYXNz", "dXNlcjpwYXNz"),
            ("Set-Cookie: session=qwertz; Path=/", "qwertz"),
            ("HF_TOKEN=plainvalue123 cmd", "plainvalue123"),
            ('{"password": "open-sesame"}', "open-sesame"),
            ("accessToken: abcdef", "abcdef"),
            ('{"auth": "cm9ib3Q6czNjcmV0"}', "cm9ib3Q6czNjcmV0"),
            ("to https://hooks.slack.com/services/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", "q1W2e3R4"),
            ("DefaultEndpointsProtocol=https;AccountKey=q1W2e3R4t5Y6u7I8o9P0/SdF+x==", "q1W2e3R4"),
            *((f"see {t}", t) for t in TOKENS.values() if not t.startswith(('"auth"', "pypi"))),
            *((f"see {t}", t) for t in BARE),
        ],
    )
    def test_a_secret_is_gone(self, text: str, secret: str) -> None:
        out = redact(text)
        assert secret not in out
        assert redact(out) == out

    def test_known_secrets_go_whatever_they_look_like(self) -> None:
        assert redact("a pass/word b pass%2Fword", ["pass/word"]) == "a *** b ***"
        assert redact_value({"k": ["xyz-1234", 1, None]}, ["xyz-1234"]) == {"k": ["***", 1, None]}
        assert redact_value({"hf_token": "any", "tiktoken": "0.9", "n_token": 5}) == {
            "hf_token": "***", "tiktoken": "0.9", "n_token": 5,
        }  # fmt: skip

    def test_what_an_environment_holds_is_known(self) -> None:
        env = {
            "HF_TOKEN": "plain-words", "HF_TOKEN_PATH": "/home/u/token", "TOKENIZERS_PARALLELISM": "false",
            "MODAL_TOKEN_ID": "ak-public", "MODAL_TOKEN_SECRET": "as-secret", "AWS_SECRET_ACCESS_KEY": "wJal/r",
            "https_proxy": "u:pw%40x@host:1", "PIP_INDEX_URL": "https://tok@host/simple", "CI_PASSWORD": " padded\n",
            "GPG_KEY": "7169605F62C751356D054A26A821E680E5FA6305", "A_PASS": "short", "PATH": "/bin",
        }  # fmt: skip
        assert set(secret_values(env)) == {
            "plain-words", "as-secret", "wJal/r", "pw%40x", "pw@x", "tok", "padded",
        }  # fmt: skip

    @pytest.mark.parametrize(
        "text",
        [
            "https://registry.example/v2/a/blobs/sha256:" + "a" * 64,
            "runtime.oci.tar: 5 layers, expected 6",
            "token count 5 and a basic example",
            "warning: 'etc/passwd': mode 100644, and /etc/passwd: neither",
            "tiktoken==0.9.0 and tiktoken: 0.9.0 and some-token==1.2.3",
        ],
    )
    def test_other_text_stays(self, text: str) -> None:
        assert redact(text) == text

    def test_a_url_loses_its_query(self) -> None:
        assert redact_url("https://u:p@h/p/a?token=1#frag") == "https://***@h/p/a?***"

    @settings(max_examples=100, deadline=None)
    @given(st.text(max_size=300))
    def test_it_is_idempotent(self, text: str) -> None:
        assert redact(redact(text)) == redact(text)

    def test_it_is_fast_on_hostile_text(self) -> None:
        for piece in ("a://", "token", "?sig=", "://" + "a" * 60, "authorization: "):
            with within(30):
                redact(piece * (200_000 // len(piece)))
