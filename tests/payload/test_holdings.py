"""What a cache holds of payloads, made by the real uv: old environments go, what young ones are made of stays."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from oci_builder.build import FILES, BuildOptions, build
from oci_builder.cache import DAY, Pruned, PruneOptions, prune_cache, show_cache
from oci_builder.payload.tidy import forget_uses, last_uses, note_use
from oci_builder.store.cache import BuildCache
from oci_builder.store.upkeep import changed_at
from tests.lab.uv import require_uv
from tests.payload.test_environments import wheel

require_uv()


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two specs: ``a`` has the packages one and two, ``b`` has two and three."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    sums = {name: wheel(wheels, name, "1.0", "def main():\n    print(1)\n") for name in ("one", "two", "three")}
    for spec, packages in (("a", ("one", "two")), ("b", ("two", "three"))):
        lines = "".join(f"{name}==1.0 --hash=sha256:{sums[name]}\n" for name in packages)
        (tmp_path / f"{spec}.txt").write_text(lines)
        value = {"name": spec, "tag": "t", "epoch": 0, "base": {"host": True}, "prefix": "/opt/rt",
                 "tiers": {"base": {"requirements": f"{spec}.txt"}}}  # fmt: skip
        (tmp_path / f"{spec}.json").write_text(json.dumps(value))
    monkeypatch.setenv("UV_FIND_LINKS", str(wheels))
    monkeypatch.setenv("UV_NO_INDEX", "1")
    monkeypatch.delenv("UV_CACHE_DIR", raising=False)
    return tmp_path


def built(place: Path, spec: str) -> dict[str, bytes]:
    build(place / f"{spec}.json", place / f"out-{spec}", BuildOptions(place / "cache", 1))
    return {name: (place / f"out-{spec}" / name).read_bytes() for name in FILES}


def later(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    now = time.time() + days * DAY
    monkeypatch.setattr(time, "time", lambda: now)


def removed(done: Pruned) -> list[str]:
    return sorted(one.kind for one in done.removed if one.kind not in ("blob", "record"))


def packages(place: Path) -> list[str]:
    """The unpacked wheels of uv's cache."""
    found = (place / "cache/tiers/uv-cache").glob("archive-v*/*/*.dist-info")
    return sorted(path.name.partition("-")[0] for path in found)


def test_what_only_an_old_spec_used_goes_and_the_young_one_is_as_quick_and_the_same(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = built(place, "a"), built(place, "b")
    assert packages(place) == ["one", "three", "two"]
    later(monkeypatch, 40)
    monkeypatch.setattr(BuildCache, "note_use", lambda cache: os.utime(cache.path, (time.time(),) * 2))
    assert build(place / "b.json", place / "out-b", BuildOptions(place / "cache", 1)).unchanged
    done = prune_cache(place / "cache", PruneOptions(keep_days=30))
    assert removed(done) == ["environment", "runtime", "wheel"] and done.before.foreign == []
    assert packages(place) == ["three", "two"]
    assert build(place / "b.json", place / "out-b", BuildOptions(place / "cache", 1)).unchanged
    assert built(place, "a") == first and built(place, "b") == second
    assert packages(place) == ["one", "three", "two"]


def test_everything_goes_and_comes_again(place: Path) -> None:
    first = built(place, "a")
    done = prune_cache(place / "cache", PruneOptions(keep_days=0))
    assert {"environment", "runtime", "wheel", "bytecode"} <= set(removed(done)) and not done.failed
    assert show_cache(place / "cache").size == 0 and packages(place) == []
    assert [p for p in (place / "cache/tiers/uv-cache").rglob("*") if p.is_symlink() and not p.exists()] == []
    for name in FILES:
        (place / "out-a" / name).unlink()
    assert built(place, "a") == first


def test_a_cache_of_uv_that_somebody_else_named_is_theirs(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_CACHE_DIR", str(place / "theirs"))
    built(place, "a")
    before = sorted((place / "theirs").rglob("*"))
    assert "wheel" not in removed(prune_cache(place / "cache", PruneOptions(keep_days=0)))
    assert sorted((place / "theirs").rglob("*")) == before


def test_an_interpreter_stays_while_an_environment_runs_off_it(tmp_path: Path) -> None:
    work, name = tmp_path / "cache/tiers", f"base-{'1' * 20}"
    for python in ("cpython-3.13.1-linux", "cpython-3.12.9-linux"):
        (work / "uv-cache/python" / python / "bin").mkdir(parents=True)
        (work / "uv-cache/python" / python / "bin/python3").touch()
    (work / "uv-cache/python/cpython-3.12-linux").symlink_to("cpython-3.12.9-linux")
    (work / name / "base/bin").mkdir(parents=True)
    (work / name / "base/bin/python").symlink_to(work / "uv-cache/python/cpython-3.13.1-linux/bin/python3")
    (work / "uses.json").write_text(json.dumps({"uses": {"s": [[name]]}, "when": {"s": int(time.time()) + 10**6}}))
    made = max(changed_at(p) for p in (work / "uv-cache/python").iterdir())
    while time.time() < made + 1:
        time.sleep(0.05)
    assert removed(prune_cache(tmp_path / "cache", PruneOptions(keep_days=0))) == ["interpreter"]
    assert [p.name for p in (work / "uv-cache/python").iterdir()] == ["cpython-3.13.1-linux"]


def test_a_repository_stays_while_a_checkout_borrows_of_it(tmp_path: Path) -> None:
    sources = tmp_path / "cache/tiers/sources"
    for name in ("main-" + "a" * 16, "sub-" + "b" * 16, "other-" + "c" * 16):
        (sources / f"{name}.git/objects").mkdir(parents=True)
    checkout = sources / f"main-{'1' * 12}-{'2' * 16}"
    for folder, bare in ((checkout, "main-" + "a" * 16), (checkout / "third/sub", "sub-" + "b" * 16)):
        (folder / ".git/objects/info").mkdir(parents=True)
        (folder / ".git/objects/info/alternates").write_text(f"{sources}/{bare}.git/objects\n")
    note_use(sources.parent, "spec", [f"sources/{checkout.name}"])
    uses = json.loads((sources.parent / "uses.json").read_text())
    (sources.parent / "uses.json").write_text(json.dumps({**uses, "when": {"spec": int(time.time()) + 10**6}}))
    done = prune_cache(tmp_path / "cache", PruneOptions(keep_days=0))
    assert [one.place.name for one in done.removed] == [f"other-{'c' * 16}.git"] and done.before.foreign == []


def test_a_build_says_when_it_was_and_what_is_gone_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_use(tmp_path, "spec", ["a", "b"])
    note_use(tmp_path, "other", ["b"])
    first = last_uses(tmp_path)
    later(monkeypatch, 2)
    note_use(tmp_path, "spec", ["a", "b"])
    second = last_uses(tmp_path)
    assert second["a"] == second["b"] > first["a"] + DAY
    forget_uses(tmp_path, ["a"])
    assert last_uses(tmp_path) == {"b": second["b"]}
    forget_uses(tmp_path, ["b"])
    assert json.loads((tmp_path / "uses.json").read_text()) == {"uses": {}, "known": [], "when": {}}
