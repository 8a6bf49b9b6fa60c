"""Container Device Interface specs: what to inject, as the host's administrator or nvidia-ctk wrote it.

Source: cncf-tags/container-device-interface, SPEC.md. Hooks are not executed: the two that nvidia-ctk writes are read
for what they would do (links, and folders for the loader's cache), others are named in a note.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from chroot_exec import yamlsubset
from chroot_exec.errors import RunnerError
from chroot_exec.host import Host

_VENDOR = "nvidia.com"
KIND = f"{_VENDOR}/gpu"
# Later folders win.
FOLDERS = ("/etc/cdi", "/var/run/cdi")
GPU_NODE = re.compile(r"/dev/nvidia(\d+)\Z")
_HARMLESS = ("enable-cuda-compat", "disable-device-node-modification", "chmod")


@dataclass
class Edits:
    """Merged container edits. ``mounts`` are (host path, container path); ``links`` are (link, target)."""

    source: str = ""
    nodes: list[tuple[str, str]] = field(default_factory=list)
    mounts: list[tuple[str, str]] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def find(
    host: Host, devices: tuple[str, ...], minor_of: Callable[[str], int | None] = lambda _device: None
) -> Edits | None:
    """The edits for ``devices`` (``all``, indices or UUIDs); None without a spec of our kind.

    Args:
        minor_of: the minor number of the one GPU of this host that has such an index or UUID. nvidia-ctk names devices
            by either (``--device-name-strategy``), and a GPU is found under the name that was not written by its node.

    Raises:
        RunnerError: ``gpu.cdi`` (a spec that cannot be read), ``gpu.device`` (no spec has the device).
    """
    found = _specs(host)
    if not found:
        return None
    known = _devices(found)
    notes: list[str] = []
    names = _choose(devices, known, minor_of, notes)
    edits = Edits(", ".join(dict.fromkeys(known[n][0] for n in names)), notes=notes)
    seen: list[int] = []
    for name in names:
        path, spec, device = known[name]
        if id(spec) not in seen:
            seen.append(id(spec))
            _merge(edits, _object(spec, "containerEdits", path), path)
        _merge(edits, _object(device, "containerEdits", path), path)
    return edits


_Known = dict[str, tuple[str, dict[str, Any], dict[str, Any]]]


def _devices(found: list[tuple[str, dict[str, Any]]]) -> _Known:
    """Name -> path, spec and device. Of two folders the later wins; two specs of one folder must not differ."""
    known: _Known = {}
    for path, spec in found:
        for device in _list(spec, "devices", path):
            name = str(device.get("name"))
            before = known.get(name)
            if before and before[0].rpartition("/")[0] == path.rpartition("/")[0] and before[2] != device:
                raise RunnerError("gpu.cdi", f"{before[0]} and {path} both define {KIND}={name}; remove one of them")
            known[name] = (path, spec, device)
    return known


def _choose(
    devices: tuple[str, ...], known: _Known, minor_of: Callable[[str], int | None], notes: list[str]
) -> list[str]:
    if "all" in devices:
        return ["all"] if "all" in known else sorted(known)
    return list(dict.fromkeys(_known_name(name, known, minor_of, notes) for name in devices))


def _known_name(name: str, known: _Known, minor_of: Callable[[str], int | None], notes: list[str]) -> str:
    # A UUID may be given by its begin, as CUDA lets it be.
    found = [k for k in known if k.startswith(name)] if name.startswith(("GPU-", "MIG-")) else []
    if name in known or len(found) == 1:
        return name if name in known else found[0]
    minor = None if found else minor_of(name)
    same = sorted(k for k in known if minor is not None and _whole_gpu(known[k]) == minor)
    if same:
        notes.append(f"no CDI spec has {KIND}={name}: {same[0]} is taken, which has its node /dev/nvidia{minor}")
        return same[0]
    what = f"{len(found)} devices of CDI specs are {name!r}" if found else f"no CDI spec has {KIND}={name}"
    raise RunnerError("gpu.device", f"{what}; there are {', '.join(sorted(known))}")


def _whole_gpu(entry: tuple[str, dict[str, Any], dict[str, Any]]) -> int | None:
    """Minor number of the GPU that a device is; None for several GPUs, and for a part of one (MIG)."""
    path, _, device = entry
    nodes = [str(node.get("hostPath") or node.get("path"))
             for node in _list(_object(device, "containerEdits", path), "deviceNodes", path)]  # fmt: skip
    minors = {int(match[1]) for match in map(GPU_NODE.match, nodes) if match}
    part = any(node.startswith("/dev/nvidia-caps/") for node in nodes)
    return minors.pop() if len(minors) == 1 and not part else None


def _specs(host: Host) -> list[tuple[str, dict[str, Any]]]:
    out = []
    for folder in FOLDERS:
        for name in host.names(folder):
            path = f"{folder}/{name}"
            if name.endswith((".json", ".yaml", ".yml")):
                text = host.read(path)
                # Another vendor's may be written in more of YAML than is read here.
                if text and _VENDOR not in text:
                    continue
                spec = _load(text, path)
                if spec.get("kind") == KIND:
                    out.append((path, spec))
    return out


def _load(text: str, path: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if path.endswith(".json") else yamlsubset.parse(text)
    except (ValueError, RecursionError) as error:
        raise RunnerError("gpu.cdi", f"{path}: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("cdiVersion"), str):
        raise RunnerError("gpu.cdi", f"{path}: not a CDI spec: no cdiVersion")
    return value


def _object(value: dict[str, Any], key: str, path: str) -> dict[str, Any]:
    item = value.get(key)
    if item is not None and not isinstance(item, dict):
        raise RunnerError("gpu.cdi", f"{path}: {key} is not an object")
    return item or {}


def _words(value: dict[str, Any], key: str, path: str) -> list[str]:
    items = value.get(key)
    if items is not None and not (isinstance(items, list) and all(isinstance(i, (str, int)) for i in items)):
        raise RunnerError("gpu.cdi", f"{path}: {key} is not a list of strings")
    return [str(item) for item in items or []]


def _list(value: dict[str, Any], key: str, path: str) -> list[dict[str, Any]]:
    items = value.get(key) or []
    if not isinstance(items, list) or not all(isinstance(i, dict) for i in items):
        raise RunnerError("gpu.cdi", f"{path}: {key} is not a list of objects")
    return items


def _absolute(value: Any, path: str, what: str) -> str:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise RunnerError("gpu.cdi", f"{path}: {what} is not an absolute path: {value!r}")
    return value


def _merge(edits: Edits, more: dict[str, Any], path: str) -> None:
    for node in _list(more, "deviceNodes", path):
        inside = _absolute(node.get("path"), path, "a device node's path")
        pair = (inside, _absolute(node.get("hostPath") or inside, path, "hostPath"))
        if pair not in edits.nodes:
            edits.nodes.append(pair)
    for mount in _list(more, "mounts", path):
        source = _absolute(mount.get("hostPath"), path, "a mount's hostPath")
        pair = (source, _absolute(mount.get("containerPath"), path, "containerPath"))
        if pair not in edits.mounts:
            edits.mounts.append(pair)
    for item in _words(more, "env", path):
        name, equals, value = item.partition("=")
        if not name or not equals or "\0" in item:
            raise RunnerError("gpu.cdi", f"{path}: env {item!r} is not NAME=value")
        edits.env[name] = value
    for hook in _list(more, "hooks", path):
        _hook(edits, hook, path)


def _hook(edits: Edits, hook: dict[str, Any], path: str) -> None:
    words = _words(hook, "args", path)
    if "create-symlinks" in words:
        for value in _options(words, "--link"):
            target, separator, link = value.partition("::")
            if separator:
                edits.links.append((_absolute(link, path, "a link"), target))
    elif "update-ldcache" in words:
        edits.folders += [f for f in _options(words, "--folder") if f.startswith("/") and f not in edits.folders]
    elif not any(w in words for w in _HARMLESS):
        edits.notes.append(f"{path}: the hook {hook.get('path')!r} was not run")


def _options(words: list[str], name: str) -> Iterable[str]:
    for i, word in enumerate(words):
        if word == name and i + 1 < len(words):
            yield words[i + 1]
        elif word.startswith(name + "="):
            yield word[len(name) + 1 :]
