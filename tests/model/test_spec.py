"""The spec: the smallest one, the real one, its schema, and errors that say what would be right."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from oci_builder.model.errors import SpecError
from oci_builder.model.limits import Limits
from oci_builder.model.spec import RegistryBase, json_schema, load_spec, parse_spec

ROOT = Path(__file__).parents[2]
SMALLEST: dict[str, Any] = {
    "name": "bench", "tag": "t1", "epoch": 0, "base": {"scratch": True}, "prefix": "/opt/rt",
    "tiers": {"base": {"path": "/abs/path/envs/base"}, "vllm": {"path": "/abs/path/envs/vllm"}},
}  # fmt: skip


def parse(**changes: Any) -> Any:
    return parse_spec(json.dumps({**SMALLEST, **changes}).encode())


def test_the_contract_of_section_12() -> None:
    spec = parse()
    assert (spec.reference, spec.full_reference) == ("bench:t1", "docker.io/library/bench:t1")
    jsonschema.validate(SMALLEST, json_schema())


def test_the_real_spec_has_the_pins() -> None:
    spec = load_spec(ROOT / "spec.json")
    assert isinstance(spec.base, RegistryBase)
    assert spec.base.digest == "sha256:1c517d4fb96528c8999e14e6e6b16d7e2ff9ae8d194fd788d60fdc88e693e982"
    assert spec.base.manifest == "sha256:6b6617592b94e7dcc6ffbe6d00720eed27bc6e3b4f06b26b93b4070c31f57391"
    assert spec.base.config == "sha256:ec9a1a479ad110600f15a0959a7b4c5bc9ddaed8b34a2d020abb7aea8b5b1707"
    assert (spec.reference, spec.release, spec.prefix) == ("nemo-rl-v070-b200:r1", "v070-r1", "/opt/nrl-runtime")
    assert set(spec.tiers) == {"base", "automodel", "vllm"}


def test_the_projects_spec_names_what_the_cuda_extensions_are_built_with() -> None:
    """Builds see nothing of the base image's environment: DeepEP links libcuda's stub, TE includes the wheel's cuDNN."""
    tiers = load_spec(ROOT / "spec.json").tiers
    for name in ("automodel", "vllm"):
        said = tiers[name].build_env  # type: ignore[union-attr]
        assert said["LIBRARY_PATH"].endswith("/stubs") and said["CPLUS_INCLUDE_PATH"].endswith("/include/cccl")
        assert said["CUDA_HOME"] == "/usr/local/cuda" and said["TORCH_CUDA_ARCH_LIST"] == "10.0"
    said = tiers["automodel"].build_env  # type: ignore[union-attr]
    assert said["CUDNN_HOME"] == said["CUDNN_PATH"] == "{site}/nvidia/cudnn"


def test_the_image_sets_what_activate_sets() -> None:
    """But for caches, which a container chooses, and what is the shell's own."""
    text = (ROOT / "layers/files/activate.sh").read_text()
    names = set(re.findall(r"_nrl_set ([A-Z_]+) ", text)) - set(re.findall(r'_nrl_set ([A-Z_]+) "[^"]*\$1/', text))
    own = {"NRL_RUNTIME_ROOT", "NRL_CACHE", "VIRTUAL_ENV", "NEMO_RL_SOURCE_ROOT", "RAY_TMPDIR"}
    cuda = {"CPLUS_INCLUDE_PATH", "NVTE_CUDA_INCLUDE_DIR"}
    said = dict(entry.partition("=")[::2] for entry in load_spec(ROOT / "spec.json").env)
    assert (names | cuda) - own <= set(said)
    assert "/opt/nrl-runtime/bin" in said["PATH"].split(":")


def test_the_published_schema_is_the_models() -> None:
    published = json.loads((ROOT / "docs/spec.schema.json").read_text())
    assert published == json.loads(json.dumps(json_schema()))
    jsonschema.validate(json.loads((ROOT / "spec.json").read_text()), published)


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"base": {"registry": "docker.io/nvidia/cuda:13"}}, "spec.digest", "base.digest"),
        ({"base": {"registry": "x", "digest": "sha512:" + "0" * 128}}, "spec.digest", "base.digest"),
        ({"base": {"registry": "x", "oci": "y"}}, "spec.field", "base"),
        ({"base": {}}, "spec.field", "base"),
        ({"base": {"host": False}}, "spec.field", "base.host"),
        ({"prefix": "/a/../b"}, "spec.field", "prefix"),
        ({"prefix": "relative"}, "spec.field", "prefix"),
        ({"prefix": "/opt/.wh.x"}, "spec.field", "prefix"),
        ({"prefix": "/" + "a" * 256}, "spec.field", "prefix"),
        ({"prefix": "/with space"}, "spec.field", "prefix"),
        ({"name": "Upper"}, "spec.field", "name"),
        ({"tag": "a b"}, "spec.field", "tag"),
        ({"epoch": -1}, "spec.field", "epoch"),
        ({"epoch": "0"}, "spec.field", "epoch"),
        ({"tiers": {}}, "spec.field", "tiers"),
        ({"tiers": {"../x": {"path": "/"}}}, "spec.field", "tiers"),
        ({"tiers": {"a": {"path": "/", "requirements": "r"}}}, "spec.field", "tiers.a"),
        ({"compression": {"codec": "zstd", "level": 0}}, "spec.field", "compression"),
        ({"compression": {"codec": "lzma"}}, "spec.field", "compression.codec"),
        ({"limits": {"entrys": 1}}, "spec.field", "entrys"),
        ({"limits": {"entries": 0}}, "spec.field", "limits.entries"),
        ({"env": ["NOT A PAIR"]}, "spec.field", "env"),
        ({"env": ["A=1", "A=2"]}, "spec.field", "env"),
        ({"surplus": 1}, "spec.field", "surplus"),
        ({"labels": {"": "x"}}, "spec.field", "labels"),
        ({"labels": {"a\nb": "x"}}, "spec.field", "labels"),
        ({"workdir": "/a\nb"}, "spec.field", "workdir"),
        ({"workdir": "/a\x7f"}, "spec.field", "workdir"),
        ({"workdir": "a"}, "spec.field", "workdir"),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], code: str, field: str) -> None:
    with pytest.raises(SpecError) as error:
        parse(**changes)
    assert error.value.code == code
    assert field in error.value.message
    assert error.value.message.count("(got ") <= 1
    assert error.value.exit_status == 2


@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"name": "a", "name": "b"}', b"\xff", b'{"epoch": NaN}', b"[" * 9999,
                                  b'{"cmd": ["\\ud800"]}', b'{"labels": {"\\udfff": ""}}'])  # fmt: skip
def test_what_is_no_spec_is_our_input_being_wrong(data: bytes) -> None:
    with pytest.raises(SpecError) as error:
        parse_spec(data)
    assert error.value.exit_status == 2


def test_every_limit_can_be_set_and_has_a_reason() -> None:
    spec = parse(limits=dict.fromkeys(Limits.names(), 7))
    assert all(getattr(spec.effective_limits, name) == 7 for name in Limits.names())
    assert all(len(reason) > 10 for reason in Limits.reasons().values())


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("a", "docker.io/library/a:t1"),
        ("org/a", "docker.io/org/a:t1"),
        ("ghcr.io/org/a", "ghcr.io/org/a:t1"),
        ("localhost/a", "localhost/a:t1"),
    ],
)
def test_b032_the_full_reference_is_the_one_that_clients_resolve(name: str, full: str) -> None:
    assert parse(name=name).full_reference == full


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "Upper"}, "name: must be lower-case words of a-z and 0-9"),
        ({"tag": "a\x1b"}, "(got 'a\\x1b')"),
        ({"tiers": {"A": {"path": "x"}}}, "tiers.A.(its name): must be 1 to 63 of a-z"),
        ({"tiers": {"a\n": {"path": "x"}}}, "tiers.'a\\n'.(its name): must be"),
        ({"epoch": None}, "(got null)"),
        ({"env": "A=b"}, "a JSON list (got 'A=b')"),
    ],
)
def test_errors_say_what_would_be_right_in_words(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        parse(**changes)
    message = caught.value.message
    assert says in message and "pattern" not in message and message.isprintable()
