"""Progress of whoever reads archives: one task an archive, whose bytes add up, and bars that say nothing untrue."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from oci_builder.difference import diff_archives
from oci_builder.inspection import inspect_archive
from oci_builder.model.events import Emit, Event
from oci_builder.progress import rendering
from oci_builder.verify import VerifyOptions, verify_archives
from tests.conftest import Built

Verb = Callable[[Sequence[Path], Emit], object]
VERBS: dict[str, tuple[Verb, str]] = {
    "verify": (lambda paths, emit: verify_archives(paths, VerifyOptions(emit=emit)), "verify"),
    "inspect": (lambda paths, emit: [inspect_archive(path, emit=emit) for path in paths], "read"),
    "diff": (lambda paths, emit: diff_archives(paths[0], paths[1], emit=emit), "read"),
}


@pytest.mark.parametrize("name", VERBS)
def test_an_archive_is_one_task_from_its_first_byte_to_its_last(quick: Built, name: str) -> None:
    (verb, word), events = VERBS[name], list[Event]()
    verb([quick.oci, quick.docker], events.append)
    for path in (quick.oci, quick.docker):
        own = [event for event in events if event.task == f"{word} {path.name}"]
        assert [event.kind for event in own if event.kind != "advance"] == ["start", "done"]
        assert (own[0].kind, own[-1].kind) == ("start", "done")
        assert own[0].total == path.stat().st_size == sum(event.amount for event in own)
    assert {event.task for event in events} == {f"{word} {quick.oci.name}", f"{word} {quick.docker.name}"}


def test_a_bar_has_the_speed_of_what_is_done_and_none_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    out = io.StringIO()
    with rendering("bars", stream=out) as emit:
        emit(Event("start", "read done", total=5_000_000))
        emit(Event("advance", "read done", 5_000_000))
        emit(Event("done", "read done"))
        emit(Event("start", "read waits", total=5_000_000))
    done, waits = out.getvalue().splitlines()[-2:]
    assert "B/s" in done and "5.0/5.0 MB" in done
    assert "/s" not in waits and "?" not in done + waits
