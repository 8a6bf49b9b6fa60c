"""Small JSON records beside blobs: the stat identity that vouches for them, and what was found out about them."""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

from oci_builder.model.digest import Digest


class Records:
    """One file a blob. A record that cannot be read or written costs a hash, never a failure."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cache: dict[Digest, dict[str, Any]] = {}
        self._lock = threading.Lock()

    def vouch(self, digest: Digest, status: os.stat_result) -> None:
        """The blob with this status is good."""
        self.put(digest, "stat", _identity(status))

    def vouches(self, digest: Digest, status: os.stat_result) -> bool:
        """Whether the blob with this status was found good."""
        return bool(self._load(digest).get("stat") == _identity(status))

    def doubt(self, digest: Digest) -> None:
        """Forget that the blob was found good."""
        self.put(digest, "stat", None)

    def get(self, digest: Digest, key: str) -> Any:
        """A value, or ``None``."""
        return self._load(digest).get(key)

    def put(self, digest: Digest, key: str, value: Any) -> None:
        """Set a value."""
        with self._lock:
            record = {**self._load(digest), key: value}
            self._cache[digest] = record
            path = self._folder / f"{digest.hex}.json"
            temporary = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.tmp")
            with contextlib.suppress(OSError):
                temporary.write_text(json.dumps(record))
                os.replace(temporary, path)

    def touch(self, digest: Digest) -> None:
        """The blob is used now: its record's time says so."""
        with contextlib.suppress(OSError):
            os.utime(self._folder / f"{digest.hex}.json")

    def drop(self, digest: Digest) -> None:
        """Forget all about a blob."""
        with self._lock:
            self._cache.pop(digest, None)
            with contextlib.suppress(OSError):
                (self._folder / f"{digest.hex}.json").unlink()

    def _load(self, digest: Digest) -> dict[str, Any]:
        known = self._cache.get(digest)
        if known is None:
            try:
                known = json.loads((self._folder / f"{digest.hex}.json").read_text())
            except (OSError, ValueError, RecursionError):
                return {}
            if not isinstance(known, dict):
                return {}
            self._cache[digest] = known
        return known


def _identity(status: os.stat_result) -> list[int]:
    return [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
