"""What must have happened before a stage, looked at by the sender: before a machine is paid for."""

from __future__ import annotations

import os
from pathlib import Path

from oci_builder.engines.run import check_options
from oci_builder.engines.stages import Request, Stage
from oci_builder.engines.stages_options import FILES
from oci_builder.execution.run import load_checks
from oci_builder.model.errors import PolicyError, SpecError, show
from oci_builder.model.gates import parse_gates
from oci_builder.model.spec import load_spec
from oci_builder.qualification import Rules
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.host import utc_now


def before(stage: Stage, request: Request) -> None:
    """Refuse what cannot end well. ``request`` has the sender's own paths. Pure but for reading files.

    Raises:
        SpecError: ``stage.option`` (also a file that is not there), ``spec.*``,
            ``stage.order`` (no gate or no release folder to look into).
        PolicyError: ``stage.first``: nccl8-u24 without a valid receipt of nccl8 for the same archive.
    """
    check_options(stage, request)
    _places(request)
    parse_gates(load_spec(Path(request.spec)).gates)
    if stage.name == "nccl8-u24":
        _first_ubuntu(request)


def _places(request: Request) -> None:
    """What the words name is there: a wrong name is no failure of a disk, which may be tried again."""
    if request.release and os.path.lexists(request.release) and not Path(request.release).is_dir():
        raise SpecError("stage.option", f"{show(request.release)} is no folder", where="--release")
    for name in FILES:
        path = request.options.get(name)
        if not isinstance(path, str) or not path:
            continue
        if name.startswith("root"):
            good = Path(path).exists()
        else:
            good = Path(path).is_file()
        if not good:
            raise SpecError("stage.option", f"{name}: {show(path)} is not there, or no file", where=name)
    if checks := request.options.get("checks"):
        load_checks(Path(str(checks)))


def _first_ubuntu(request: Request) -> None:
    if not request.release:
        raise SpecError("stage.order", "nccl8-u24 looks for the receipt of nccl8 and needs a release folder")
    rules = Rules.load(Path(request.spec), request.path("trust"))
    folder = ReleaseFolder(Path(request.release))
    verdict = folder.evaluate(rules.gates, rules.policy, utc_now(), rules.spec)
    states = [state for state in verdict.gates if state.gate.stage == "nccl8"]
    if not states:
        raise SpecError("stage.order", "the spec has no gate for nccl8, so nothing says what its receipt must show")
    unmet = [state for state in states if state.state != "met"]
    if unmet:
        why = "; ".join(unmet[0].reasons) or unmet[0].state
        raise PolicyError(
            "stage.first", f"{show(str(folder.root))}: {unmet[0].gate.name} is not met for this archive ({why}): run "
            "nccl8, which does both in turn", where=str(folder.root),
        )  # fmt: skip
