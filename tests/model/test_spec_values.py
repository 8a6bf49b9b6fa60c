"""Single values of a spec that would make another image than was meant, or none: refused, with the field named."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oci_builder.model.errors import SpecError
from oci_builder.model.spec import Spec, load_spec, parse_spec

SMALLEST: dict[str, Any] = {
    "name": "bench", "tag": "t1", "base": {"scratch": True}, "prefix": "/opt/rt", "tiers": {"a": {"path": "/x"}},
}  # fmt: skip


def parse(**changes: Any) -> Spec:
    return parse_spec(json.dumps({**SMALLEST, **changes}).encode())


@pytest.mark.parametrize(("changes", "field"), [
    *(({"prefix": prefix}, "prefix") for prefix in ("/proc", "/proc/x", "/sys/fs", "/dev/shm/rt")),
    *(({"user": user}, "user") for user in ("a:b:c", "a b", ":group", "user:", "../x", "a\nb")),
    *(({"base": {"rootfs": "/r", "exclude": [path]}}, "exclude") for path in ("../x", "a/../../b", "/abs", "", "a\0b")),
])  # fmt: skip
def test_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(SpecError) as error:
        parse(**changes)
    assert error.value.code == "spec.field" and field in error.value.message


@pytest.mark.parametrize("changes", [
    *({"prefix": prefix} for prefix in ("/opt/proc", "/processes", "/devel/rt")),
    *({"user": user} for user in ("root", "1000", "1000:1000", "svc-user:video", "")),
    *({"base": {"rootfs": "/r", "exclude": [path]}} for path in ("proc/*", "a..b", "*.pyc", "var/cache")),
])  # fmt: skip
def test_accepted(changes: dict[str, Any]) -> None:
    kept = json.loads(parse(**changes).model_dump_json(by_alias=True))
    assert all(value.items() <= kept[key].items() if isinstance(value, dict) else kept[key] == value
               for key, value in changes.items())  # fmt: skip


PLACES = (
    ("base.rootfs", lambda path: {"base": {"rootfs": path}}), ("base.oci", lambda path: {"base": {"oci": path}}),
    ("base.docker", lambda path: {"base": {"docker": path}}), ("files", lambda path: {"files": path}),
    ("tiers.a.path", lambda path: {"tiers": {"a": {"path": path}}}),
    ("tiers.a.requirements", lambda path: {"tiers": {"a": {"requirements": path}}}),
    ("tiers.a.project", lambda path: {"tiers": {"a": {"project": path}}}),
    ("tiers.a.lock", lambda path: {"tiers": {"a": {"project": "p", "lock": path}}}),
)  # fmt: skip


@pytest.mark.parametrize(("field", "changes"), PLACES, ids=[field for field, _ in PLACES])
@pytest.mark.parametrize("path", ["", "nul\0name", "a/" * 2048, "a" * 256, "ä" * 128])
def test_paths_that_no_kernel_looks_for(field: str, changes: Callable[[str], dict[str, Any]], path: str) -> None:
    """They are the spec's fault, and the field that has them is named as it was written."""
    with pytest.raises(SpecError) as error:
        parse(**changes(path))
    assert error.value.code == "spec.field" and f" {field}: " in error.value.message


@pytest.mark.parametrize("path", ["ä" * 127, "a/" * 2047 + "b", "new\nline", "."])
def test_paths_that_may_be_there(path: str) -> None:
    for field, changes in PLACES:
        found: Any = parse(**changes(path))
        for name in field.split("."):
            found = found[name] if isinstance(found, dict) else getattr(found, name)
        assert str(found) == path


def test_a_spec_that_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(1 << 40)
    for path in ("pipe", "large", ".", "absent", "nul\0name"):
        with pytest.raises(SpecError) as error:
            load_spec(tmp_path / path)
        assert error.value.code == "spec.path"
