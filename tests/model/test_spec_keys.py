"""Unknown keys of a spec: a misspelt one is told with the key that it was meant to be, where it stands."""

from __future__ import annotations

import json
from typing import Any

import pytest

from oci_builder.model.errors import SpecError
from oci_builder.model.spec import parse_spec

SPEC: dict[str, Any] = {
    "name": "x", "tag": "t", "base": {"scratch": True}, "prefix": "/p", "tiers": {"path": {"path": "a"}}
}  # fmt: skip
DIGEST = "sha256:" + "a" * 64


def refusal(data: bytes, where: str = "spec.json") -> SpecError:
    with pytest.raises(SpecError) as caught:
        parse_spec(data, where)
    return caught.value


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"epohc": 0}, "epohc: no such key; did you mean 'epoch'?"),
        ({"PREFIX": "/q"}, "PREFIX: no such key; did you mean 'prefix'?"),
        ({"base": {"registry": "x:y", "digest": DIGEST, "plainhttp": True}}, "base.plainhttp: no such key; did you mean 'plain_http'?"),
        ({"base": {"scratch": True, "plain_http": True}}, "base.plain_http: no such key; there are scratch"),
        ({"tiers": {"path": {"project": "a", "extra": []}}}, "tiers.path.extra: no such key; did you mean 'extras'?"),
        ({"tiers": {"git": {"path": "a", "extras": []}}}, "tiers.git.extras: no such key; there are path"),
        ({"compression": {"codec": "gzip", "lvl": 1}}, "compression.lvl: no such key; did you mean 'level'?"),
        ({"limits": {"layersize": 1}}, "limits: 'layersize': no such key; did you mean 'layer_size'?"),
    ],
)  # fmt: skip
def test_an_unknown_key_is_told_with_those_that_there_are(changes: dict[str, Any], said: str) -> None:
    error = refusal(json.dumps({**SPEC, **changes}).encode())
    assert error.code == "spec.field" and said in error.message


def test_what_is_like_nothing_is_told_with_all_keys() -> None:
    said = refusal(json.dumps({**SPEC, "zzz": 0}).encode()).message
    assert "no such key; there are $schema, base, cmd, compression" in said


@pytest.mark.parametrize(
    ("data", "where", "said"),
    [
        (b"\xef\xbb\xbf{}", "spec.json", "byte order mark"),
        (b'name = "x"\n', "spec.toml", "a spec is JSON"),
        (b"name: x\n", "Spec.YAML", "a spec is JSON"),
    ],
)
def test_another_kind_of_text_is_told_with_what_a_spec_is(data: bytes, where: str, said: str) -> None:
    error = refusal(data, where)
    assert error.code == "spec.json" and said in error.message
