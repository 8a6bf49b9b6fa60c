"""Release folders and builds whose documents were written by somebody else: errors of ours, never anything else."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oci_builder.model.errors import OciBuilderError
from oci_builder.publish import _card, _records
from oci_builder.publish_registry import _recorded
from oci_builder.qualification import Rules, check_release, summary, update_release
from oci_builder.record import record
from oci_builder.release.attach import artifacts
from oci_builder.release.host import utc_now
from oci_builder.release.page import render
from oci_builder.release.publish import readme
from oci_builder.report import report_data
from tests.release.built import make_release, publication, request

pytest.importorskip("cyclonedx", reason="needs cyclonedx: pip install oci-builder[payload]")
SCALARS = st.sampled_from(
    [None, True, 0, -1, 1e300, "", "x", "sha256:", "\ud800", [], {}, [[]], [None], {"a": 1}, "a" * 64]
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("made")
    make_release(place)
    rules = Rules.load(place / "spec.json", place / "trust.json")
    update_release(place / "releases/v1-r1", rules, utc_now())
    rows = [{"severity": "error", "code": "c", "where": "w", "message": "m"}]
    (place / "releases/v1-r1/readiness.json").write_text(json.dumps({"ok": True, "target": "sm_100", "rows": rows}))
    return place


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a document."""
    out = [at]
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            out += paths(value[key], (*at, key))
    return out


def changed(value: Any, at: tuple[Any, ...], new: Any) -> Any:
    if not at:
        return new
    out = copy.deepcopy(value)
    place = out
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = new
    return out


def ours_only(work: Callable[[], object]) -> None:
    try:
        work()
    except OciBuilderError as error:
        assert error.message


NAMES = ["container.json", "portable.json", "qualification.json", "inventory-a.json", "readiness.json", "a.cdx.json"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_release_folder_with_any_document(made: Path, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    name = data.draw(st.sampled_from(NAMES))
    folder = made / "releases/v1-r1"
    value = json.loads((folder / name).read_text())
    new = changed(value, data.draw(st.sampled_from(paths(value))), data.draw(SCALARS))
    place = tmp_path_factory.mktemp("odd")
    shutil.copytree(folder, place / "releases/v1-r1")
    (place / "releases/v1-r1" / name).write_text(json.dumps(new))
    what = replace(publication(made), folder=type(publication(made).folder)(place / "releases/v1-r1"))
    rules = Rules.load(made / "spec.json", made / "trust.json")
    ours_only(lambda: summary(check_release(what.folder.root, rules)))
    ours_only(lambda: render(report_data(what.folder.root, rules.gates, rules.policy, utc_now(), rules.spec)))
    ours_only(lambda: readme(_card(what, "c", what.folder.subjects()), _records(what)))
    ours_only(lambda: _recorded(what))
    ours_only(lambda: artifacts(what.folder))
    ours_only(lambda: update_release(what.folder.root, rules, utc_now()))
    shutil.rmtree(place)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_a_build_with_any_record(made: Path, tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    name = data.draw(st.sampled_from(["container.json", "portable.json"]))
    place = tmp_path_factory.mktemp("odd")
    shutil.copytree(made / "dist", place / "dist")
    for file in ("spec.json", "trust.json"):
        shutil.copy(made / file, place)
    value = json.loads((place / "dist" / name).read_text())
    new = changed(value, data.draw(st.sampled_from(paths(value))), data.draw(SCALARS))
    (place / "dist" / name).write_text(json.dumps(new))
    ours_only(lambda: record(request(place)))
    shutil.rmtree(place)
