"""An OCI layout folder that is being filled from a registry: blobs at once, ``index.json`` only when all is there.

Source: image-spec image-layout.md.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from oci_builder.model import media
from oci_builder.model.digest import Digest
from oci_builder.model.documents import Descriptor, Index, Platform, parse_document
from oci_builder.model.errors import ConflictError, OciBuilderError, disk_error, show
from oci_builder.model.jsontext import dump_json, load_json
from oci_builder.model.limits import DEFAULT_LIMITS
from oci_builder.model.specvalues import read_input
from oci_builder.store.blobs import DirStore, layout_marker
from oci_builder.store.removal import remove_folder

REF_NAME = "org.opencontainers.image.ref.name"
_WORK = ".oci-builder-pull"


def _same_machine(found: Any, platform: Platform) -> bool:
    """Whether an entry's platform, which it need not have, may be the same."""
    return not found or (found.get("os"), found.get("architecture")) == (platform.os, platform.architecture)


class LayoutFolder:
    """Use ``with``. ``store`` puts blobs into the layout; partial ones stand in a hidden folder, gone when all is well.

    Several processes may fill the same layout. It holds one image a platform, under as many names as are asked for.

    Raises (entering):
        ConflictError: ``pull.not_layout``: the folder holds something else, which is left alone.
        TransportError: ``io.*``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._work = self.path / _WORK
        self._fd = -1
        self._done = False

    def __enter__(self) -> LayoutFolder:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            # Shared: whoever finishes tidies up only when nobody else is at work here.
            fcntl.flock(self._fd, fcntl.LOCK_SH)
            self._check()
            # First of all: by it the next run knows a folder that holds no more than blobs as one of ours.
            self._work.mkdir(exist_ok=True)
            self.store = DirStore(self.path, self._work)
        except OSError as error:
            self._close()
            if os.path.lexists(self.path) and not self.path.is_dir():
                raise ConflictError(
                    "pull.not_layout", f"{show(str(self.path))} is not a folder; choose another place",
                    where=str(self.path),
                ) from None  # fmt: skip
            raise disk_error(error, "opening the layout") from None
        except OciBuilderError:
            self._close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None
    ) -> None:
        empty = kind is not None and not self.store.digests()
        self.store.close()
        if self._done or empty:
            with contextlib.suppress(OSError):
                self._tidy(empty)
        self._close()

    def _tidy(self, empty: bool) -> None:
        """Remove what only we need; after a failure that brought no blob, all that was made."""
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if any((self._work / "ingest").iterdir()):
            return
        if empty:
            for folder in (self.path / "blobs" / "sha256", self.path / "blobs"):
                folder.rmdir()
        remove_folder(self._work)
        if empty:
            self.path.rmdir()

    def check_room(self, root: Digest, platform: Platform, name: str) -> None:
        """Refuse, before anything is asked for, an image beside another one: no reader would know which is meant.

        Args:
            root: digest that is about to be pulled; what was pulled here before is judged when it gets its name.

        Raises:
            ConflictError: ``pull.other_image``.
        """
        if not self.store.has(root):
            self._check_alone(root, platform, name)

    def _check_alone(self, digest: Digest, platform: Platform, name: str) -> None:
        for entry in self._entries():
            other = (entry.get("annotations") or {}).get(REF_NAME)
            if other == name or entry["digest"] == digest or not _same_machine(entry.get("platform"), platform):
                continue
            self._done = True  # nothing is left to resume
            raise ConflictError(
                "pull.other_image",
                f"{show(str(self.path))} holds another image for {platform.os}/{platform.architecture}, "
                f"{show(str(other or entry['digest']))}; choose another folder",
                where=str(self.path), expected=str(digest), actual=str(entry["digest"]),
            )  # fmt: skip

    def name(self, descriptor: Descriptor, name: str) -> None:
        """Make an image visible under a name, in place of another of that name. Idempotent.

        Raises:
            ConflictError: ``pull.other_image``.
            TransportError: ``io.*``.
        """
        entry = descriptor.to_json()
        entry["annotations"] = {**(entry.get("annotations") or {}), REF_NAME: name}
        try:
            with open(self._work / "index.lock", "wb") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if descriptor.platform is not None:
                    self._check_alone(descriptor.id, descriptor.platform, name)
                others = [e for e in self._entries() if (e.get("annotations") or {}).get(REF_NAME) != name]
                index = {"schemaVersion": 2, "mediaType": media.OCI_INDEX, "manifests": [*others, entry]}
                self._write("oci-layout", layout_marker())
                self._write("index.json", dump_json(index))
        except OSError as error:
            raise disk_error(error, "writing index.json") from None
        self._done = True

    def _check(self) -> None:
        names = set(os.listdir(self.path)) - {_WORK}
        if not names or (names == {"blobs"} and (self.path / _WORK).is_dir()):
            return
        try:
            marker = load_json(read_input(self.path / "oci-layout", "layout's marker"), "oci-layout")
            self._entries()
        except (OSError, OciBuilderError):
            marker = None
        if not isinstance(marker, dict) or marker.get("imageLayoutVersion") != "1.0.0":
            raise ConflictError(
                "pull.not_layout", f"{show(str(self.path))} is not empty and no OCI layout; choose another folder",
                where=str(self.path),
            )  # fmt: skip

    def _entries(self) -> list[dict[str, Any]]:
        if not os.path.lexists(self.path / "index.json"):
            return []
        data = read_input(self.path / "index.json", "layout's index")
        index = parse_document(Index, data, "index.json", DEFAULT_LIMITS)
        return [d.to_json() for d in index.manifests]

    def _write(self, name: str, data: bytes) -> None:
        part = self._work / f"{name}.{os.getpid()}"
        with open(part, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path / name)
        os.fsync(self._fd)

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
