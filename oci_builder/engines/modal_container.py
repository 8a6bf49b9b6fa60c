"""The far side: what a container of Modal does around a stage. Imports nothing of Modal.

Inputs are unpacked anew for every run, so a preempted run starts from the same state. Local disk goes with the
container: what a failed stage left there is moved to the volume, as far as it is small.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oci_builder.engines.local_limits import ELSEWHERE, find_gpus, require_gpus
from oci_builder.engines.modal_inputs import unpack
from oci_builder.engines.modal_project import arrived, folder_state, folder_text, left_text
from oci_builder.engines.needs import Needs
from oci_builder.engines.run import run_stage
from oci_builder.engines.stages import KEY_SECRET, find_stage
from oci_builder.model.errors import (
    ConflictError,
    OciBuilderError,
    PolicyError,
    SpecError,
    TransportError,
    disk_error,
    show,
)
from oci_builder.model.events import Emit, Event
from oci_builder.model.jsontext import load_json
from oci_builder.model.receipts import PORTABLE, Host
from oci_builder.model.redact import redact, secret_values
from oci_builder.model.spec import Spec, load_spec
from oci_builder.release.folder import ReleaseFolder
from oci_builder.release.host import engine_name, this_host, tool_versions
from oci_builder.store.removal import clear_folder
from oci_builder.store.writeback import sync

_WRITERS = ("package", "repack")
# Where the sender's inputs and the runtime are in every container.
ARCHIVE = "/oci-builder/inputs.tar"
RUNTIME = "/opt/oci-builder/runtime"
# The image that repack starts from: set by the user there, and passed on to the container.
REPACK_VARIABLE = "NRL_REPACK_IMAGE_ID"
# Variable of the secret ``oci-builder-key``: the text of the private key's file.
KEY_VARIABLE = "OCI_BUILDER_KEY"
# A kept file is for diagnosis; archives are on the volume already.
KEPT_FILE = 64 << 20
# Modal's messages hold 2 MiB; what is larger is uploaded, for which there is no network.
LARGEST_ANSWER = 1_900_000
_FAR = (("1.1.1.1", 443), ("8.8.8.8", 53))


def answer(name: str, sent: Mapping[str, Any]) -> dict[str, Any]:
    """Run one stage here, as ``modal_project.pack`` sent it.

    Returns: what ``run_stage`` returns, with ``facts.modal``: what this container is, and what it found out about its
        network; ``release``: the release folder as it is now, empty when nothing changed; ``left``: what a failed stage
        without a volume left, by ``left_text``; and ``inputs``: where the sender's files lay here, for those who read
        its paths.
    """
    local = Path(tempfile.gettempdir()) / "oci-builder"
    host = this_host()
    facts = _facts(name, host, fresh=not local.exists())
    emit = log_lines()
    try:
        needs = find_stage(name).needs
        if not needs.network:
            facts["network"] = _prove_apart(facts["fresh"])
        _require_gpus(needs, host, emit)
        _require_key(needs, sent)
        volume = next(iter(needs.volumes), "")
        request = _request(sent, local, volume)
        refuse_other_image(Path(request["out"]), load_spec(Path(request["spec"])))
        if name == "repack":
            undo_repack(Path(request["out"]), Path(request["release"]))
        before = _release_state(request)
    except (OciBuilderError, OSError) as error:
        return {**_refused(name, error), "release": "", "facts": {"modal": facts}}
    result = run_stage(name, request, engine_name(), emit, {"modal": facts})
    where = [f"archives: {request['out']} on the volume {needs.volumes[volume]}"] if name in _WRITERS and volume else []
    result["notes"] = [*result["notes"], *where, f"image {facts['image']}"]
    result["inputs"] = str(local / "inputs")
    result.update(_kept(result["kept"], request["cache"], local, bool(volume)))
    try:
        commit(volume)
        after = _release_state(request)
    except OciBuilderError as error:
        return {**result, **_told(error), "release": ""}
    text = folder_text(after) if after != before else ""
    if text and len(text) + len(json.dumps(result)) > LARGEST_ANSWER:
        return {**result, **_too_large(text, Path(request["cache"], "answers", f"{name}-{sent['attempt']}"))}
    return {**result, "release": text}


def _facts(name: str, host: Host, fresh: bool) -> dict[str, Any]:
    """What this container is."""
    frozen = {"frozen": os.environ.get(REPACK_VARIABLE, "")} if name == "repack" else {}
    return {
        "image": os.environ.get("MODAL_IMAGE_ID", ""), "task": os.environ.get("MODAL_TASK_ID", ""),
        "tools": tool_versions("modal"), "machine": host.machine, "os": host.os, "kernel": host.kernel,
        "sandbox": host.sandbox, "driver": host.driver, "fresh": fresh, **frozen,
    }  # fmt: skip


def _prove_apart(fresh: bool) -> dict[str, str]:
    """As ``prove_no_network``, in a container that is new."""
    if not fresh:
        raise PolicyError("modal.fresh", "this container served a run before; stages without network get new ones")
    return prove_no_network()


def _too_large(text: str, place: Path) -> dict[str, Any]:
    """An answer that Modal would have to store elsewhere, which a container without network cannot do."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    except OSError as error:
        return {**_told(disk_error(error, "keeping the release folder")), "release": ""}
    large = TransportError(
        "modal.result", f"the release folder is too large to be returned; it lies on the volume in {place} "
        "(a tar.xz in base64)", where=str(place),
    )  # fmt: skip
    return {**_told(large), "release": ""}


def commit(volume: str) -> None:
    """Write the volume's changes to its service before the answer leaves: Modal commits once more at the container's
    end, but nobody hears when that fails. A container without Modal's API can do it this way only (``sync MOUNT``).

    Raises:
        TransportError: ``io.*``.
    """
    if not volume:
        return
    try:
        sync(Path(volume))
    except OSError as error:
        raise disk_error(error, "committing the volume") from None


def _release_state(request: Mapping[str, Any]) -> dict[str, bytes]:
    return folder_state(Path(request["release"])) if request["release"] else {}


def _require_key(needs: Needs, sent: Mapping[str, Any]) -> None:
    """A stage that signs a release has the key of its secret: without, hours of work would be recorded nowhere.

    Raises:
        SpecError: ``modal.missing``.
    """
    if KEY_SECRET in needs.secrets and sent["release"] and not os.environ.get(KEY_VARIABLE):
        raise SpecError(
            "modal.missing", f"the secret {KEY_SECRET} has no variable {KEY_VARIABLE}: modal secret create --force "
            f'{KEY_SECRET} {KEY_VARIABLE}="$(cat KEYFILE)"', where=KEY_SECRET,
        )  # fmt: skip


def _require_gpus(needs: Needs, host: Host, emit: Emit) -> None:
    """As ``require_gpus``; a refusal names driver and sandbox, which decide whether a GPU is seen at all."""
    try:
        require_gpus(needs, find_gpus() if needs.gpu else (), False, emit)
    except PolicyError as error:
        said = error.message.removesuffix(ELSEWHERE)
        text = f"{said} (driver {host.driver or 'unknown'}, sandbox {host.sandbox or 'none seen'})"
        raise PolicyError(error.code, text, **error.fields) from None


def refuse_other_image(dist: Path, spec: Spec) -> None:
    """The build's folder on the volume has the release folder's last name alone, which two projects may share.

    Raises:
        ConflictError: ``release.exists``: another image lies there; TransportError: ``io.*``.
    """
    try:
        record = load_json((dist / "container.json").read_bytes(), "container.json")
    except (FileNotFoundError, OciBuilderError):
        return  # what is damaged, or no record at all, is nobody's build
    except OSError as error:
        raise disk_error(error, "reading container.json") from None
    found = record.get("reference") if isinstance(record, dict) else None
    if found not in (None, spec.reference):
        raise ConflictError(
            "release.exists", f"{dist} on the volume holds the image {show(str(found))}, and this spec is for "
            f"{show(spec.reference)}: give its release folder another name, or remove that build "
            f"(modal volume rm -r VOLUME dist/{dist.name})", where=str(dist), expected=spec.reference, actual=found,
        )  # fmt: skip


def undo_repack(dist: Path, release: Path) -> None:
    """Put a candidate back that an earlier run replaced, when its release folder never heard of it.

    The volume keeps what a run did that was preempted or whose answer got lost; the release folder is the sender's.
    Idempotent: the new build stays under its own digest, and the same repack makes the same bytes again.

    Raises:
        TransportError: ``io.*``; FormatError: ``release.subject``, ``json.*``.
    """
    recorded, now = _built(release), _built(dist)
    kept = dist.with_name(f"{dist.name}.{recorded[:12]}")
    try:
        if not recorded or now == recorded or _built(kept) != recorded:
            return
        if now:
            aside = dist.with_name(f"{dist.name}.{now[:12]}.unheard")
            clear_folder(aside)
            dist.rename(aside)
        kept.rename(dist)
    except OSError as error:
        raise disk_error(error, "putting the candidate back") from None


def _built(folder: Path) -> str:
    """SHA-256 of the portable archive that a folder records; empty for none."""
    return ReleaseFolder(folder).subjects()[PORTABLE] if (folder / "portable.json").is_file() else ""


def prove_no_network(timeout: float = 3) -> dict[str, str]:
    """What two well-known addresses answer: nothing, or this is not the machine that the stage needs.

    Raises:
        PolicyError: ``modal.network``.
    """
    found = {}
    for host, port in _FAR:
        try:
            socket.create_connection((host, port), timeout).close()
        except OSError as error:
            found[f"{host}:{port}"] = str(error)
            continue
        raise PolicyError("modal.network", f"the stage runs without network, and {host}:{port} answers", where=host)
    return found


def log_lines() -> Emit:
    """Progress as lines on standard error, which Modal shows on the sender's terminal: starts, ends, notes, and every
    half minute how far a long task is."""
    totals: dict[str, tuple[int, int]] = {}
    last = [time.monotonic()]

    secrets = secret_values(os.environ)

    def say(text: str) -> None:
        line = "".join(c if c.isprintable() else repr(c)[1:-1] for c in redact(text, secrets))
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
        last[0] = time.monotonic()

    def emit(event: Event) -> None:
        if event.kind == "advance":
            done, total = totals.get(event.task, (0, 0))
            totals[event.task] = (done + event.amount, total)
            if time.monotonic() - last[0] > 30:
                say(f"{event.task}: {done + event.amount} of {total or '?'} {event.unit}")
            return
        if event.kind == "start":
            totals[event.task] = (0, event.total)
        mark = {"start": "…", "done": "✓", "warning": "!"}.get(event.kind, "")
        say(" ".join(word for word in (mark, event.task, event.message) if word))

    return emit


def _request(sent: Mapping[str, Any], local: Path, volume: str) -> dict[str, Any]:
    """The request with this container's paths; archives and cache are on the volume where there is one."""
    project, scratch = local / "inputs", local / "scratch"
    unpack(Path(ARCHIVE), project)
    scratch.mkdir(parents=True, exist_ok=True)
    home = Path(volume) if volume else local
    request = arrived(sent, project)
    if request["release"]:
        Path(request["release"], "receipts").mkdir(parents=True, exist_ok=True)
    return {
        **request, "out": str(home / "dist" / sent["out"]), "cache": str(home / "cache"), "scratch": str(scratch),
        "key": _key(scratch),
    }  # fmt: skip


def _key(scratch: Path) -> str:
    """The secret's key as the file that stages take; empty where the container has no such secret."""
    text = os.environ.pop(KEY_VARIABLE, "")
    if not text:
        return ""
    path = scratch / "key"
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return str(path)


def _kept(kept: str, cache: str, local: Path, volume: bool) -> dict[str, str]:
    """Where a failed stage's folder lies from now on, and its small files where that goes with the container."""
    left = left_text(Path(kept), LARGEST_ANSWER // 4) if kept and not volume else ""
    return {"kept": _keep(kept, cache, local), "left": left}


def _keep(kept: str, cache: str, local: Path) -> str:
    """Copy what a failed stage left on local disk to the cache's disk; its new place."""
    if not kept or Path(cache).is_relative_to(local):
        return kept
    source, target = Path(kept), Path(cache) / "failed" / Path(kept).name

    def large(folder: str, names: list[str]) -> list[str]:
        return [n for n in names if (path := Path(folder, n)).is_file() and path.stat().st_size > KEPT_FILE]

    try:
        clear_folder(target)
        shutil.copytree(source, target, symlinks=True, ignore=large)
    except (OSError, shutil.Error):
        return kept
    sys.stderr.write(f"! what the stage left is kept on the volume in {target}\n")
    return str(target)


def _refused(name: str, error: Exception) -> dict[str, Any]:
    told = error if isinstance(error, OciBuilderError) else disk_error(error, f"stage {name}")  # type: ignore[arg-type]
    return {
        "stage": name, "engine": engine_name(), "outputs": {}, "checks": [], "notes": [], "details": {},
        "receipt": None, "receipt_path": "", "kept": "", **_told(told),
    }  # fmt: skip


def _told(error: OciBuilderError) -> dict[str, Any]:
    message = redact(error.message, secret_values(os.environ))
    told = {"code": error.code, "message": message, "exit": error.exit_status}
    return {"outcome": "error", "exit": error.exit_status, "error": told}
