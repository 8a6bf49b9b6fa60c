"""The only code that goes online for a publication, as a program of its own: ``python -m oci_builder.release.hub``.

The only importer of ``huggingface_hub``. A job comes in as JSON on stdin, progress and the result go out as JSON lines
on stdout; the token comes in the environment (``HF_TOKEN``) and goes nowhere else. Everything is checked by hash, for
the client compares sizes only (huggingface_hub#1403).
"""

from __future__ import annotations

import hashlib
import importlib
import io
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

from oci_builder.model.errors import ConflictError, IntegrityError, OciBuilderError, TransportError, show
from oci_builder.model.redact import redact, redact_value
from oci_builder.release.files import io_error

_ATTEMPTS = 5
_TIMEOUT = 300.0
_BLOCK = 1 << 20
_REPORT = 64 << 20


class _Range(io.RawIOBase):
    """A range of a file as a file: a part is uploaded without being copied."""

    def __init__(self, path: str, offset: int, size: int) -> None:
        self._file = open(path, "rb", buffering=0)
        self._offset, self._size, self._at = offset, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = max(0, base + at)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        want = max(0, min(len(buffer), self._size - self._at))
        data = os.pread(self._file.fileno(), want, self._offset + self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class Hub:
    """One dataset repository on the Hub.

    Args:
        repo: ``owner/name``.
        revision: branch.
    """

    def __init__(self, repo: str, revision: str = "main") -> None:
        from huggingface_hub import HfApi

        self.repo, self.revision = repo, revision
        self.api = HfApi(token=os.environ.get("HF_TOKEN") or None)

    def head(self) -> str:
        """The commit that the branch points to."""
        return str(self.api.repo_info(self.repo, repo_type="dataset", revision=self.revision).sha)

    def create(self, private: bool) -> None:
        """Make the repository; idempotent."""
        self.api.create_repo(self.repo, repo_type="dataset", private=private, exist_ok=True)

    def commit(self, files: list[dict[str, Any]], message: str) -> str:
        """Upload what is missing, then commit on top of the head that was checked for conflicts.

        Files that are on the Hub already are not sent again. When somebody else commits in between, the check is
        repeated on the new head; nothing of theirs is lost.

        Returns: the commit.

        Raises:
            ConflictError: ``release.exists``: another content has one of the names; ``hub.conflict``: the head moved
                every time.
        """
        operations = [self._upload(file) for file in files]
        for attempt in range(_ATTEMPTS):
            head = self.head()
            self._refuse_changes(files, head)
            try:
                info = self.api.create_commit(
                    self.repo, operations, commit_message=message, repo_type="dataset", revision=self.revision,
                    parent_commit=head,
                )  # fmt: skip
            except Exception as error:
                if _status(error) not in (409, 412):
                    raise
                report({"event": "note", "message": f"somebody else committed; trying again ({attempt + 1})"})
                time.sleep(0.1 * 2**attempt)
                continue
            return str(info.oid)
        raise ConflictError("hub.conflict", f"{self.repo}: the branch moved {_ATTEMPTS} times", where=self.repo)

    def _upload(self, file: dict[str, Any]) -> Any:
        from huggingface_hub import CommitOperationAdd

        source: Any = file["path"]
        os.stat(source)  # the client makes a ValueError of a file that is not there
        if not file["whole"]:
            source = io.BufferedReader(_Range(file["path"], file["offset"], file["size"]), _BLOCK)
        operation = CommitOperationAdd(file["name"], source)
        if operation.upload_info.size != file["size"]:
            raise IntegrityError("blob.size", f"{show(file['name'])} changed on disk", where=file["name"])
        if file["whole"]:
            operation.upload_info.sha256 = bytes.fromhex(file["sha256"])
        elif operation.upload_info.sha256.hex() != file["sha256"]:
            raise IntegrityError("blob.digest", f"{show(file['name'])} changed on disk", where=file["name"])
        report({"event": "start", "task": f"upload {file['name']}", "total": file["size"]})
        self.api.preupload_lfs_files(
            self.repo, [operation], repo_type="dataset", revision=self.revision, free_memory=False
        )
        report({"event": "advance", "task": f"upload {file['name']}", "amount": file["size"]})
        return operation

    def _refuse_changes(self, files: list[dict[str, Any]], head: str) -> None:
        fixed = {f["name"]: f for f in files if not f["replace"]}
        if not fixed:
            return
        for entry in self.api.get_paths_info(self.repo, sorted(fixed), revision=head, repo_type="dataset"):
            file = fixed.get(entry.path)
            if file is None:
                continue
            lfs, blob_id = getattr(entry, "lfs", None), getattr(entry, "blob_id", None)
            same = lfs.sha256 == file["sha256"] if lfs else blob_id == _git_blob(file)
            if not same:
                raise ConflictError(
                    "release.exists", f"{self.repo} has another {show(entry.path)}; a release is never rewritten",
                    where=entry.path, expected=file["sha256"],
                )  # fmt: skip

    def verify(self, file: dict[str, Any], commit: str, dest: Path | None = None) -> None:
        """Download a file at a commit and compare its hash; with ``dest``, keep it there.

        Raises:
            IntegrityError: ``blob.size``, ``blob.digest``; nothing is kept then.
        """
        task = f"verify {file['name']}"
        report({"event": "start", "task": task, "total": file["size"]})
        own, got, reported = hashlib.sha256(), 0, 0
        part = None if dest is None else dest.with_name(dest.name + ".partial")
        with open(part or os.devnull, "wb") as out:
            for data in self._download(file, commit):
                own.update(data)
                got += len(data)
                out.write(data)
                if got - reported >= _REPORT or got == file["size"]:
                    report({"event": "advance", "task": task, "amount": got - reported})
                    reported = got
        try:
            _compare(file, got, own.hexdigest(), f"{self.repo}@{commit}")
        except IntegrityError:
            if part:
                part.unlink()
            raise
        if part and dest:
            part.replace(dest)

    def _download(self, file: dict[str, Any], commit: str) -> Iterator[bytes]:
        """The bytes as they arrive, resumed where a connection breaks; at most one block more than the size."""
        url = f"{self.api.endpoint}/datasets/{self.repo}/resolve/{commit}/{quote(file['name'])}"
        at, failures = 0, 0
        while True:
            before = at
            try:
                for data in self._get(url, at):
                    at += len(data)
                    yield data
                    if at > file["size"]:
                        return
                if at >= file["size"]:
                    return
                raise TransportError("http.short", f"{file['name']}: the body ended at {at}", where=file["name"])
            except Exception as error:
                # Many breaks are no failure as long as each attempt brings something.
                failures = 1 if at > before else failures + 1
                if failures >= _ATTEMPTS or _status(error) in (401, 403, 404):
                    raise
                time.sleep(0.1 * 2**failures)

    def _get(self, url: str, at: int) -> Iterator[bytes]:
        utils: Any = importlib.import_module("huggingface_hub.utils")
        headers = {**utils.build_hf_headers(token=self.api.token), "Accept-Encoding": "identity"}
        if at:
            headers["Range"] = f"bytes={at}-"
        with utils.get_session().stream("GET", url, headers=headers) as response:
            utils.hf_raise_for_status(response)
            skip = at if response.status_code == 200 else 0
            if response.status_code == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {at}-"):
                raise TransportError("http.range", "the server sent another range than asked for", where=url)
            # As they arrive: a chunk size would hold back, and lose, what came before a break.
            for data in response.iter_raw():
                if skip >= len(data):
                    skip -= len(data)
                    continue
                yield data[skip:]
                skip = 0


def _compare(file: dict[str, Any], size: int, sha256: str, where: str) -> None:
    place = f"{where}: {file['name']}"
    if size != file["size"]:
        raise IntegrityError(
            "blob.size", f"{place}: {size} bytes came back, {file['size']} were sent", where=place,
            expected=file["size"], actual=size,
        )  # fmt: skip
    if sha256 != file["sha256"]:
        raise IntegrityError(
            "blob.digest", f"{place}: other bytes came back than were sent", where=place, expected=file["sha256"],
            actual=sha256,
        )  # fmt: skip


def _git_blob(file: dict[str, Any]) -> str:
    """Git's id of a small file, by which the Hub names files that are not in LFS."""
    with open(file["path"], "rb") as source:
        source.seek(file["offset"])
        data = source.read(file["size"])
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()


def _status(error: BaseException) -> int:
    return int(getattr(getattr(error, "response", None), "status_code", 0) or 0)


def run(job: dict[str, Any]) -> dict[str, Any]:
    """Do one job: ``publish`` (commit files, read them back) or ``fetch`` (download files at a commit).

    Raises:
        OciBuilderError: ``release.exists``, ``hub.conflict``, ``blob.*``; whatever the client raises.
    """
    hub = Hub(job["repo"], job["revision"])
    if job["kind"] == "fetch":
        for file in job["files"]:
            hub.verify(file, job["commit"], Path(job["dest"]) / Path(file["name"]).name)
        return {"commit": job["commit"]}
    if job["create"]:
        hub.create(job["private"])
    commit = hub.commit(job["files"], job["message"])
    for file in job["files"]:
        hub.verify(file, commit)
    return {"commit": commit, "endpoint": str(hub.api.endpoint)}


def as_ours(error: BaseException) -> OciBuilderError:
    """Any failure of the client as one of our errors, with what to do next."""
    if isinstance(error, OciBuilderError):
        return error
    if isinstance(error, ImportError):
        return TransportError("hub.missing", "huggingface_hub is not installed; install oci-builder[hub]")
    # The client wraps what went wrong with a file in a RuntimeError.
    cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
    if isinstance(cause, OSError) and cause.filename is not None:
        return io_error(cause, str(cause.filename))  # a file of ours, not the network
    status = _status(cause)
    if status in (401, 403):
        return TransportError("auth", f"the Hub refused the token ({status}); set HF_TOKEN to one that may write")
    said = " ".join(dict.fromkeys((str(error), str(cause))))
    if status:
        return TransportError("http.status", f"the Hub answered {status}: {said}", actual=status)
    return TransportError("http.connect", f"{type(cause).__name__}: {said}")


def report(value: dict[str, Any]) -> None:
    """One JSON line to whoever started this program, without the token."""
    token = os.environ.get("HF_TOKEN", "")
    line = json.dumps(redact_value(value, [token] if token else ()))
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _bound_waiting() -> None:
    """The client waits for ever by default; a dead connection must end."""
    _http: Any = importlib.import_module("huggingface_hub.utils._http")
    make = getattr(_http, "default_client_factory", None)
    if make is None:
        return

    def bounded() -> Any:
        client = make()
        client.timeout = _TIMEOUT
        return client

    _http.set_client_factory(bounded)


def main() -> int:
    """Read a job from stdin, do it, and write the result or the error as the last line."""
    token = os.environ.get("HF_TOKEN", "")
    try:
        job = json.load(sys.stdin)
        _bound_waiting()
        report({"result": run(job)})
    except Exception as error:  # the boundary of the process: everything becomes a line that the parent can read
        ours = as_ours(error)
        message = redact(ours.message, [token] if token else ())
        report({"error": {"kind": type(ours).__name__, "code": ours.code, "message": message, "fields": ours.fields}})
        return ours.exit_status
    return 0


if __name__ == "__main__":
    sys.exit(main())
