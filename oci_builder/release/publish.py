"""What is published on the Hub and in which order; the going online happens in a subprocess (``release.hub``)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oci_builder.model import errors
from oci_builder.model.errors import OciBuilderError, SpecError, TransportError, show
from oci_builder.model.events import Emit, Event, silent
from oci_builder.model.receipts import DOCKER, OCI, PORTABLE
from oci_builder.model.redact import redact
from oci_builder.release.parts import Part

_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?")
_ROOT = Path(__file__).resolve().parents[2]
_CLASSES = {
    name: kind for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, OciBuilderError)
}


@dataclass(frozen=True, slots=True)
class HubTarget:
    """Where a publication goes.

    Attributes:
        repo: ``owner/name`` of a dataset.
        revision: branch.
        create: make the repository when there is none.
        private: visibility of a repository that is made.
        endpoint: another Hub; empty: the client's default.
        xet: use the chunk-deduplicating transfer where the client has it.
        env: further environment of the subprocess (a proxy, a CA bundle, HF_TOKEN).
    """

    repo: str
    revision: str = "main"
    create: bool = True
    private: bool = True
    endpoint: str = ""
    xet: bool = True
    env: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        """Refuse a name that the Hub would refuse, before any work.

        Raises:
            SpecError: ``spec.repo``.
        """
        if not _REPO.fullmatch(self.repo) or "--" in self.repo or ".." in self.repo:
            raise SpecError("spec.repo", f"{show(self.repo)} is no dataset: OWNER/NAME is wanted", where=self.repo)

    def environment(self) -> dict[str, str]:
        """The subprocess's environment: this process's, online, with the settings above.

        Raises:
            SpecError: ``spec.token``: HF_TOKEN is no token.
        """
        env = {k: v for k, v in os.environ.items() if k not in _OFFLINE}
        env |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONUNBUFFERED": "1"}
        # The subprocess must find this very package, also where it is not installed.
        env["PYTHONPATH"] = os.pathsep.join(p for p in (str(_ROOT), env.get("PYTHONPATH", "")) if p)
        if self.endpoint:
            env["HF_ENDPOINT"] = self.endpoint
        if not self.xet:
            env["HF_HUB_DISABLE_XET"] = "1"
        env |= dict(self.env or {})
        if "HF_TOKEN" in env:
            # A token that was mounted as a file ends in a newline.
            env["HF_TOKEN"] = env["HF_TOKEN"].strip()
            if not re.fullmatch(r"[!-~]*", env["HF_TOKEN"]):
                raise SpecError("spec.token", "HF_TOKEN is no token: it holds blanks, lines or other letters")
        return env


def commit_files(target: HubTarget, parts: Sequence[Part], message: str, emit: Emit = silent) -> dict[str, Any]:
    """Upload what is missing, commit, and read every file back by hash. Idempotent: the same files, the same commit.

    Returns: ``{"commit": ..., "endpoint": ...}``.

    Raises:
        ConflictError: ``release.exists``, ``hub.conflict``.
        IntegrityError: ``blob.digest``, ``blob.size``.
        TransportError: ``auth``, ``http.*``, ``hub.*``, ``io.*``.
    """
    job = {
        "kind": "publish", "repo": target.repo, "revision": target.revision, "create": target.create,
        "private": target.private, "message": message, "files": [_file(p) for p in parts],
    }  # fmt: skip
    return run_job(job, target.environment(), emit)


def fetch_files(
    target: HubTarget, parts: Sequence[Part], commit: str, dest: Path, emit: Emit = silent
) -> dict[str, Any]:
    """Download files at a commit into ``dest``; only files with the right hash ever have their name there.

    Raises:
        IntegrityError: ``blob.digest``, ``blob.size``.
        TransportError: ``auth``, ``http.*``, ``hub.*``, ``io.*``.
    """
    job = {
        "kind": "fetch", "repo": target.repo, "revision": target.revision, "commit": commit, "dest": str(dest),
        "files": [_file(p) for p in parts],
    }  # fmt: skip
    return run_job(job, target.environment(), emit)


def _file(part: Part) -> dict[str, Any]:
    whole = part.offset == 0 and (not part.source.exists() or part.source.stat().st_size == part.size)
    return {
        "name": part.name, "path": str(part.source), "offset": part.offset, "size": part.size, "whole": whole,
        "sha256": part.sha256, "replace": part.replace,
    }  # fmt: skip


def run_job(job: Mapping[str, Any], env: Mapping[str, str], emit: Emit) -> dict[str, Any]:
    """Run one job in its own process; its events are passed on, its error is raised here, its words are redacted."""
    secrets = [v for k, v in env.items() if k in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN") and v]
    with tempfile.TemporaryFile() as complaints:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "oci_builder.release.hub"], env=dict(env), stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=complaints,
        )  # fmt: skip
        try:
            last = _converse(process, json.dumps(job).encode(), emit)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        complaints.seek(0)
        tail = redact(complaints.read()[-2000:].decode("utf-8", "replace"), secrets).strip()
    if "result" in last:
        return dict(last["result"])
    raise _raised(last.get("error"), tail, process.returncode)


def _converse(process: subprocess.Popen[bytes], job: bytes, emit: Emit) -> dict[str, Any]:
    assert process.stdin and process.stdout
    try:
        process.stdin.write(job)
        process.stdin.close()
    except BrokenPipeError:  # it died at once; its complaint says why
        pass
    last: dict[str, Any] = {}
    for value in _lines(process.stdout):
        if "event" in value:
            emit(
                Event(
                    str(value["event"]), str(value.get("task", "hub")), int(value.get("amount", 0)),
                    int(value.get("total", 0)), message=str(value.get("message", "")),
                )
            )  # fmt: skip
        else:
            last = value
    process.wait()
    return last


def _lines(stream: Any) -> Iterator[dict[str, Any]]:
    for line in stream:
        try:
            value = json.loads(line)
        except ValueError:  # a library that prints to stdout
            continue
        if isinstance(value, dict):
            yield value


def _raised(error: Any, tail: str, status: int) -> OciBuilderError:
    if not isinstance(error, dict):
        return TransportError("hub.died", f"the upload process ended with status {status}: {tail[-500:]}")
    kind = _CLASSES.get(str(error.get("kind")), TransportError)
    return kind(str(error.get("code")), str(error.get("message")), **(error.get("fields") or {}))


@dataclass(frozen=True, slots=True)
class Card:
    """What a dataset card says.

    Attributes:
        commit: where the files are.
        wholes: archive -> sha256 of the whole.
        notes: what was not tested.
        state, gates: the verdict; an empty state means that none was recorded.
    """

    release: str
    commit: str
    wholes: Mapping[str, str]
    notes: Sequence[str] = ()
    state: str = ""
    gates: Mapping[str, str] = field(default_factory=dict)


def readme(card: Card, parts: Sequence[Part]) -> bytes:
    """The dataset card: what there is, how far it was proved, its digests, and how to join and check it."""
    rows = "\n".join(f"| `{p.name}` | {p.size:,} | `{p.sha256}` |" for p in parts)
    names = {PORTABLE: "portable archive", OCI: "OCI image archive", DOCKER: "docker load archive"}
    listed = "\n".join(f"- `{n}`: {names.get(n, 'file')}, sha256 `{s}`" for n, s in card.wholes.items())
    text = f"""---
license: other
tags:
- container
---

# {card.release}

{_proved(card)}

{listed}

All of it is at commit `{card.commit}`. Download at that commit, not at a branch, and compare the digests before use.

| file | bytes | sha256 |
| --- | ---: | --- |
{rows}
"""
    joined = [n for n in card.wholes if f"{card.release}/{n}" not in {p.name for p in parts}]
    if joined:
        joins = "\n".join(f"cat {n}.part* > {n} && echo '{card.wholes[n]}  {n}' | sha256sum --check" for n in joined)
        text += f"\nLarge archives are split; join them with:\n\n```sh\n{joins}\n```\n"
    if card.notes:
        text += "\nNot tested:\n\n" + "\n".join(f"- {n}" for n in card.notes) + "\n"
    return text.encode()


def _proved(card: Card) -> str:
    if not card.state:
        return "Not judged: no verdict was recorded when this was published."
    met = [name for name, state in card.gates.items() if state == "met"]
    text = f"State when published: **{card.state}**. {len(met)} of {len(card.gates)} gates met"
    rest = [f"`{name}` is {state}" for name, state in card.gates.items() if state != "met"]
    return text + (": " + ", ".join(rest) if rest else "") + "."
