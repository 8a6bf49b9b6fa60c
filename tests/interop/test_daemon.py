"""The docker SDK's way into a real engine: the image ID is what ``container.json`` foretold (B025)."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from oci_builder.model.errors import CheckFailed, SpecError, TransportError
from oci_builder.model.events import Event
from oci_builder.transports.daemon import load_into_engine
from tests.conftest import Built
from tests.interop.lab import Docker

pytestmark = pytest.mark.interop


@pytest.fixture
def url(engine: Docker) -> str:
    return f"unix://{engine.socket}"


@pytest.mark.parametrize("archive", ["docker", "oci"])
def test_the_engine_has_the_foretold_image(engine: Docker, url: str, runnable: Built, archive: str) -> None:
    engine.forget()
    events: list[Event] = []
    path: Path = getattr(runnable, archive)
    loaded = load_into_engine(path, runnable.container, url=url, emit=events.append)
    assert (loaded.store, loaded.image_id) == ("classic", runnable.container["image_ids"]["classic"])
    assert sum(e.amount for e in events if e.kind == "advance") == path.stat().st_size


def test_another_image_by_the_name_is_told(url: str, runnable: Built) -> None:
    """What a stale record or a daemon that rewrites configs would look like."""
    other = copy.deepcopy(runnable.container)
    other["image_ids"] = {"classic": "sha256:" + "0" * 64, "containerd": {runnable.oci.name: "sha256:" + "1" * 64}}
    with pytest.raises(CheckFailed) as error:
        load_into_engine(runnable.oci, other, url=url)
    assert error.value.code == "check.image_id"
    assert error.value.fields["actual"] == runnable.container["image_ids"]["classic"]


def test_a_record_of_another_archive_is_refused_before_anything_is_sent(runnable: Built) -> None:
    with pytest.raises(SpecError) as error:
        load_into_engine(runnable.portable, runnable.container, url="unix:///nonexistent/socket")
    assert error.value.code == "spec.container"


def test_an_engine_that_refuses_is_a_transport_error(url: str, runnable: Built, tmp_path: Path) -> None:
    broken = tmp_path / runnable.oci.name
    broken.write_bytes(b"this is no archive" * 1000)
    with pytest.raises(TransportError) as error:
        load_into_engine(broken, runnable.container, url=url)
    assert error.value.code.startswith("daemon.")


def test_no_engine_and_no_file_are_transport_errors(url: str, runnable: Built, tmp_path: Path) -> None:
    with pytest.raises(TransportError) as error:
        load_into_engine(runnable.oci, runnable.container, url=f"unix://{tmp_path}/absent")
    assert error.value.code == "daemon.connect"
    with pytest.raises(TransportError) as error:
        load_into_engine(tmp_path / runnable.oci.name, runnable.container, url=url)
    assert error.value.code == "io.error"
