"""Tells of what Python programs of a build fetch: copied as their ``sitecustomize``, standard library only.

A build script may take files from anywhere, as flash-attn's takes a finished wheel from GitHub: nothing pins what
comes. Python's own connections are seen, and curl and wget by their names; what other programs do is not.
"""

from __future__ import annotations

import os
import sys

# Nothing else is imported before somebody connects: every Python of a build starts with this.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FETCHERS = ("curl", "wget", "aria2c")
_PACKAGE = r"/sdists-v\d+/[^/]+/(?:[0-9a-f]{16}/)?([A-Za-z0-9._-]+)/([^/]+)/"
_LOCAL = r"localhost\Z|127\.|::1\Z|::ffff:127\.|0\.0\.0\.0\Z"


def watch(own: str, notes: str) -> None:
    """Add the notice to this process, and let a ``sitecustomize`` that ours hides have its turn.

    Args:
        own: the folder on the module path that this came from; it leaves the path.
        notes: a file that gets a line for each place.
    """
    last = {"host": "", "url": ""}

    def see(event: str, arguments: Any) -> None:
        # Whatever is raised here would end what the program does.
        try:
            if event == "urllib.Request":
                last["url"] = str(arguments[0])
            elif event == "socket.getaddrinfo":
                last["host"] = _text(arguments[0])
            elif event == "socket.connect" and isinstance(arguments[1], tuple):
                _tell(notes, _connected(arguments[1], last))
            elif event == "subprocess.Popen":
                name = os.path.basename(_text(arguments[0]) or _text((arguments[1] or [""])[0]))
                _tell(notes, f"somewhere with {name}" if name in _FETCHERS else "")
        except Exception:
            return

    if hasattr(sys, "addaudithook"):
        sys.addaudithook(see)
    _next(own)


def _connected(address: Any, last: dict[str, str]) -> str:
    """Where a connection leads, by its URL if there is one (a proxy has another address); empty for this machine."""
    import re
    from urllib.parse import urlsplit

    host, parts = str(address[0]), urlsplit(last["url"])
    last["url"] = ""
    if parts.hostname:
        # Neither who asks nor with what token.
        return "" if re.match(_LOCAL, parts.hostname) else f"{parts.scheme}://{parts.hostname}{parts.path}"
    return "" if re.match(_LOCAL, host) else f"{last['host'] or host}:{address[1]}"


def _tell(notes: str, what: str) -> None:
    import re

    if what:
        package = re.search(_PACKAGE, os.getcwd() + "/")
        whose = f"the build of {package[1]} {package[2]}" if package else "a build"
        # As bytes in one write: many processes may have something to tell.
        with open(notes, "ab", buffering=0) as file:
            file.write(f"{whose} fetched from {what}, and nothing pins what came\n".encode("utf-8", "replace"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else os.fsdecode(value) if isinstance(value, (bytes, os.PathLike)) else ""


def _next(own: str) -> None:
    sys.path[:] = [place for place in sys.path if place != own]
    mine = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ImportError as error:
        if mine is not None:
            sys.modules["sitecustomize"] = mine
        if error.name != "sitecustomize":
            raise
