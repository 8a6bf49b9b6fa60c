"""The search's short cuts against the simple way: each rule applied to every byte of a text as a whole."""

from __future__ import annotations

import base64
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]

import pytest

from oci_builder.release.search import LONG, SHORT, WINDOW, Hit, Search, _apply
from oci_builder.release.shapes import LONGEST, RULES, URL, WORD, Rule
from oci_builder.release.signing import new_key, save_key
from tests.release.test_release_secrets import TOKENS as FIRST
from tests.release.test_release_shapes import TOKENS as FURTHER

PLANTS = sorted({*FIRST.values(), *FURTHER.values()})
SIZE = 3 * WINDOW + 12_345


def searched(data: bytes, seed: int, own: tuple[bytes, ...] = ()) -> list[tuple[str, bytes]]:
    """As a stream in pieces of all sizes."""
    hits: list[Hit] = []
    chance, at = random.Random(seed), 0
    search = Search(hits.append, own)
    search.begin("it")
    while at < len(data):
        size = chance.choice((1, 700, 70_001, WINDOW - 1, WINDOW, 1 << 20))
        search.feed(memoryview(data)[at : at + size])
        at += size
    search.end()
    return sorted((hit.kind, hit.secret) for hit in hits)


def simply(data: bytes) -> list[tuple[str, bytes]]:
    found = {(rule.kind, at, secret) for rule in RULES for _, at, secret in _apply(rule, data)}
    # Within a word, where a length byte happens to fit, is no place to look for one.
    return sorted((kind, secret) for kind, at, secret in found if at == 0 or data[at - 1] not in WORD)


def corpus() -> Iterator[bytes]:
    """Source text, machine code, and bytes without any order."""
    library = Path(sysconfig.get_path("stdlib"))
    yield b"\n".join(path.read_bytes() for path in sorted(library.glob("*.py")))[:SIZE]
    code = b"".join(path.read_bytes() for path in sorted(library.glob("lib-dynload/*.so")))
    yield (code or Path(sys.executable).resolve().read_bytes()).ljust(SIZE, b"\0")[:SIZE]
    yield random.Random(7).randbytes(SIZE)


def planted(data: bytes, chance: random.Random, form: str = "ascii") -> bytes:
    """With secrets on and around the borders of windows, and anywhere."""
    text = bytearray(data)
    for _ in range(40):
        plant = f" {chance.choice(PLANTS)} ".encode(form)
        border = WINDOW * chance.randrange(1, 4)
        near = border + chance.randrange(-len(plant) - SHORT, SHORT)
        at = min(near if chance.random() < 0.8 else chance.randrange(len(text)), len(text) - len(plant))
        text[at : at + len(plant)] = plant
    return bytes(text)


@pytest.mark.parametrize("number", range(3), ids=["source", "program", "noise"])
def test_all_is_found_that_the_simple_way_finds(number: int) -> None:
    data = list(corpus())[number]
    for seed in range(6):
        text = planted(data, random.Random(seed))
        every = simply(text)
        assert len(every) > 10
        assert searched(text, seed) == every


@pytest.mark.parametrize("form", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_wide_text_is_found_at_every_border(form: str, tmp_path: Path) -> None:
    """Also a key, which is long: between noise, one begins a little before each end of a window."""
    save_key(new_key(), tmp_path / "k")
    for plant in (FIRST["Hugging Face token"], (tmp_path / "k").read_text()):
        wide = f" {plant} ".encode(form)
        for before in (1, 3, len(wide) // 2, len(wide) - 1, len(wide) + SHORT):
            chance = random.Random(before)
            data = chance.randbytes(WINDOW - before) + wide + chance.randbytes(WINDOW - len(wide)) + wide
            assert len(searched(data, before)) == 2, before


@pytest.mark.parametrize("form", ["ascii", "utf-16-le", "utf-32-be"])
def test_a_long_key_is_found_at_every_border(form: str) -> None:
    """Of 11,000 characters; the texts before it have ended, and hold a beginning of their own."""
    body = base64.b64encode(b"\x30\x82\x1f\x00" + random.Random(5).randbytes(0x1F00)).decode()
    lines = "\n".join(body[i : i + 64] for i in range(0, len(body), 64))
    key = f" -----BEGIN RSA PRIVATE KEY-----\n{lines}\n-----END RSA PRIVATE KEY-----\n".encode(form)
    for before in (50, 9_000, len(key) - 10):
        hits: list[Hit] = []
        search = Search(hits.append)
        search.begin("first")
        search.feed(b"-----BEGIN " * 5 + b"." * (WINDOW - before - 1000))
        search.begin("second")
        search.feed(b"." * 944 + key)
        search.feed(b"." * WINDOW)
        search.end()
        assert [(hit.kind, hit.label, hit.secret[-5:]) for hit in hits] == [("private key", "second", b"--END")], before


def test_a_secret_of_the_environment_is_found_however_long_it_is() -> None:
    own = random.Random(3).randbytes(100_000).hex().encode()
    for before in (0, 1, WINDOW - 1, WINDOW + 5, 8 * WINDOW - 10):
        assert searched(bytes(before) + own + b" ", 1, (own,)) == [("a secret of this machine's environment", own)]


@pytest.mark.parametrize("rule", [*RULES, URL], ids=lambda rule: str(rule.literal))
def test_no_pattern_is_longer_than_the_search_takes_it_for(rule: Rule) -> None:
    most = _parser.parse(rule.pattern.pattern).getwidth()[1]
    assert most <= (LONGEST if rule.literal in LONG else SHORT)
