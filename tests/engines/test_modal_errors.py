"""The client's own exceptions become ours, each with a next step that fits; an interrupted call ends as one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("modal", reason="needs the extra 'modal'")

from modal import exception as failed

from oci_builder.engines import modal_app
from oci_builder.engines.modal_app import run_on_modal, translated
from oci_builder.engines.stages import STAGES, Request


@pytest.mark.parametrize(
    ("error", "code", "status", "step"),
    [
        (failed.NotFoundError("Secret 'huggingface' not found"), "modal.missing", 2, "modal secret create"),
        (failed.NotFoundError("function call not found"), "modal.missing", 2, "run it again"),
        (failed.UnimplementedError("upgrade your client"), "modal.version", 2, "pip install"),
        (failed.PermissionDeniedError("members only"), "modal.auth", 5, "owner"),
        (failed.AuthError("token unknown"), "modal.auth", 5, "modal token new"),
        (failed.InternalError("it broke"), "modal.service", 5, "try again"),
    ],
    ids=["secret", "call", "old-client", "no-right", "no-token", "service"],
)
def test_an_error_has_the_step_that_helps(error: Exception, code: str, status: int, step: str) -> None:
    told = translated(error, STAGES["build"])
    assert (told.code, told.exit_status) == (code, status)
    assert step in told.message
    assert ("modal secret create" in told.message) == ("Secret" in str(error))


def test_an_interrupted_call_is_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client's ``app.run()`` ends the App on Ctrl-C and swallows the exception."""

    @contextmanager
    def run() -> Iterator[None]:
        with suppress(KeyboardInterrupt):
            yield

    def remote(*_: Any) -> None:
        raise KeyboardInterrupt

    (tmp_path / "spec.json").write_text(
        json.dumps({"name": "x", "tag": "t", "base": {"scratch": True}, "prefix": "/p", "tiers": {"a": {"path": "/vol/a"}}})
    )
    monkeypatch.setattr(modal_app.modal, "App", lambda *_a, **_k: SimpleNamespace(run=run, name="x"))
    monkeypatch.setattr(modal_app, "bind", lambda *_a: SimpleNamespace(remote=remote))
    monkeypatch.setattr(modal_app, "image_of", lambda *_a: None)
    monkeypatch.setattr(modal_app, "_output", nullcontext)
    with pytest.raises(KeyboardInterrupt):
        run_on_modal("build", Request(str(tmp_path / "spec.json"), "out", "cache"))
