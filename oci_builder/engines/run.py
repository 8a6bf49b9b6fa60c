"""The one door into a stage: JSON in, JSON out, the same on this machine, in a container of Modal and in tests.

A stage writes its results beside their place and renames them (a volume is committed also after an exception), so it
may run again on the same request, whole or interrupted. Each run has a receipt of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from oci_builder import __version__
from oci_builder.engines.stages import Outcome, Request, Stage, find_stage
from oci_builder.engines.stages_files import release_id
from oci_builder.execution.staging import discard
from oci_builder.model.errors import (
    CheckFailed,
    ConflictError,
    FormatError,
    OciBuilderError,
    PolicyError,
    SpecError,
    TransportError,
    disk_error,
    show,
)
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.jsontext import dump_json
from oci_builder.model.receipts import Check, Host, Receipt, parse_statement
from oci_builder.model.redact import redact_value, secret_values
from oci_builder.model.spec import load_spec
from oci_builder.payload.tidy import in_use
from oci_builder.qualification import spec_sha256
from oci_builder.release.files import create_exclusively
from oci_builder.release.host import engine_name, new_attempt, stamp, this_host, tool_versions
from oci_builder.release.receipts import make_statement, receipt_name
from oci_builder.release.signing import load_key

SCHEMA = "oci-builder/stage-result/1"
ENGINES = ("local", "modal", "fake")
_KINDS = (CheckFailed, SpecError, FormatError, PolicyError, TransportError, ConflictError)


def run_stage(
    name: str, request: Mapping[str, Any], engine: str, emit: Emit = silent, facts: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Run a stage. Idempotent but for the receipt.

    Args:
        name: of the stage.
        request: ``Request`` as JSON.
        engine: ``local``, ``modal`` or ``fake``; under the control plane stand-in it is ``fake`` whatever is said.
        facts: of the engine, such as the container's image; they stand in the receipt's details.

    Returns:
        ``outcome`` (``pass``, ``fail``: a check said no, ``error``: the stage could not be done), ``exit`` (status for
        the command line), ``error`` (code, message, exit; or null), ``outputs`` (name -> sha256), ``checks``,
        ``notes``, ``details``, ``receipt`` (in-toto statement, or null), ``receipt_path`` (where it was signed and
        written, or empty), ``kept`` (the run's folder, when it failed), and what ran where and when.

    Never raises for what a user or an input can cause.
    """
    base: dict[str, Any] = {
        "schema": SCHEMA, "stage": name, "engine": _engine(engine), "version": __version__, "attempt": new_attempt(),
        "started": stamp(), "outcome": "error", "exit": 1, "error": None, "outputs": {}, "checks": [], "notes": [],
        "details": {}, "receipt": None, "receipt_path": "", "kept": "", "facts": dict(facts or {}),
    }  # fmt: skip
    work: Path | None = None
    try:
        stage, parsed = find_stage(name), Request.parse(request)
        check_version(parsed)
        check_options(stage, parsed)
        with _cache_in_use(Path(parsed.cache)), _cache_in_use(Path(parsed.scratch or parsed.cache)):
            work = _work(stage, parsed)
            outcome = stage.run(replace(parsed, work=str(work)), emit)
        base.update(_result(stage, parsed, outcome, base))
    except OciBuilderError as error:
        base.update(_failure(error))
    except OSError as error:
        base.update(_failure(disk_error(error, f"stage {name}")))
    base["finished"] = stamp()
    _tidy(base, work, emit)
    return _redacted(base)


def _redacted(result: dict[str, Any]) -> dict[str, Any]:
    """The result without this machine's secrets, which the sender could not know; its receipt is without them already
    (the bytes that were signed must not change)."""
    secrets = secret_values(os.environ)
    kept = ("receipt", "outputs")
    return {key: value if key in kept else redact_value(value, secrets) for key, value in result.items()}


def check_version(request: Request) -> None:
    """Sender and receiver are the same oci-builder.

    Raises:
        SpecError: ``stage.version``.
    """
    if request.version and request.version != __version__:
        raise SpecError(
            "stage.version", f"sent by oci-builder {request.version}, and this is {__version__}: make the image anew "
            "from the sender's source", expected=request.version, actual=__version__,
        )  # fmt: skip


def check_options(stage: Stage, request: Request) -> None:
    """Every option is one that the stage knows.

    Raises:
        SpecError: ``stage.option``.
    """
    unknown = sorted(set(request.options) - set(stage.options))
    if unknown:
        known = ", ".join(stage.options) or "none"
        raise SpecError("stage.option", f"{stage.name} has no option {show(unknown[0])}; it has: {known}")


def sign_result(result: Mapping[str, Any], key: Path, receipts: Path) -> Path | None:
    """Sign a result's receipt here and create its file, for engines that no private key is sent to.

    Returns: the file; None where the stage has no receipt of its own, or signed it already.

    Raises:
        FormatError: ``receipt.*``; PolicyError: ``key.mode``; ConflictError: ``release.exists``;
        TransportError: ``io.*``.
    """
    if result["receipt"] is None or result["receipt_path"]:
        return None
    data = dump_json(result["receipt"])
    receipt = parse_statement(data, f"receipt of {result['stage']}").predicate
    return _write(receipt, load_key(key).sign(data), receipts)


def _engine(said: str) -> str:
    if said not in ENGINES:
        raise ValueError(f"engine is one of {ENGINES}, not {said!r}")
    # The stand-in marks the environment, so that nothing made through it can claim to be Modal's.
    return "fake" if engine_name() == "fake" else said


@contextmanager
def _cache_in_use(cache: Path) -> Iterator[None]:
    """Nobody prunes runs and installations of a cache while this is open. A read-only cache is nobody's to prune."""
    with ExitStack() as stack:
        with suppress(OSError):
            stack.enter_context(in_use(cache / "locks"))
        yield


def _work(stage: Stage, request: Request) -> Path:
    """The run's own folder, empty: what an interrupted run of the same request left there goes."""
    place = Path(request.scratch or request.cache).absolute() / "stages" / f"{stage.name}-{request.attempt or 'once'}"
    discard(place)
    place.mkdir(parents=True)
    return place


def _result(stage: Stage, request: Request, outcome: Outcome, base: Mapping[str, Any]) -> dict[str, Any]:
    bad = [c for c in outcome.checks if c["outcome"] not in ("pass", "deferred")]
    found: dict[str, Any] = {
        "outcome": "fail" if bad else "pass", "exit": CheckFailed.exit_status if bad else 0,
        "outputs": dict(outcome.outputs), "checks": [dict(c) for c in outcome.checks], "notes": list(outcome.notes),
        "details": dict(outcome.details),
    }  # fmt: skip
    if bad:
        said = "; ".join(f"{c['name']}: {c['outcome']}: {c['reason']}" for c in bad[:5])
        found["error"] = {"code": "stage.checks", "message": said, "exit": CheckFailed.exit_status}
    if outcome.subjects:
        found.update(_receipt(stage, request, outcome, base))
    return found


def _receipt(stage: Stage, request: Request, outcome: Outcome, base: Mapping[str, Any]) -> dict[str, Any]:
    spec = load_spec(Path(request.spec))
    details = {**outcome.details, **base["facts"], "needs": stage.needs.to_json(), "request": request.attempt}
    receipt = Receipt(
        release=release_id(request, spec.release or spec.reference), stage=stage.name, attempt=base["attempt"],
        engine=base["engine"], spec=spec_sha256(spec), tools=tool_versions("modal"),
        host=this_host() if outcome.host is None else Host.model_validate(outcome.host), started=base["started"],
        finished=stamp(), checks=tuple(Check.model_validate(c) for c in outcome.checks), details=details,
    )  # fmt: skip
    data = make_statement(receipt, outcome.subjects)
    value = parse_statement(data, "receipt").model_dump(mode="json", by_alias=True)
    path = ""
    if request.key and request.release:
        folder = Path(request.release) / "receipts"
        folder.mkdir(parents=True, exist_ok=True)
        path = str(_write(receipt, load_key(Path(request.key)).sign(data), folder))
    return {"receipt": value, "receipt_path": path}


def _write(receipt: Receipt, envelope: bytes, folder: Path) -> Path:
    path = folder / receipt_name(receipt, envelope)
    create_exclusively(path, envelope)
    return path


def _failure(error: OciBuilderError) -> dict[str, Any]:
    told = {"code": error.code, "message": error.message, "exit": error.exit_status}
    return {"outcome": "error", "exit": error.exit_status, "error": told}


def _tidy(result: dict[str, Any], work: Path | None, emit: Emit) -> None:
    """A run that passed leaves nothing in scratch; one that did not keeps it, and says where."""
    if work is None:
        return
    if result["outcome"] == "pass" or not any(work.iterdir()):
        with suppress(OSError, OciBuilderError):
            discard(work)
        return
    result["kept"] = str(work)
    emit(Event("warning", f"stage {result['stage']}", message=f"what it left is kept in {work}"))
