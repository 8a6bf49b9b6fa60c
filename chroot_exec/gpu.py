"""Which GPUs, nodes and driver files go into a sandbox: decided on the host, before anything is mounted.

Everything here reads below ``Host.root`` only and changes nothing, so a folder can stand for a machine.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from chroot_exec import cdi, drivers
from chroot_exec.devices import Node
from chroot_exec.drivers import DriverFiles
from chroot_exec.errors import RunnerError
from chroot_exec.host import Host
from chroot_exec.protocol import Gpu

# Name -> (names of its major in /proc/devices, minor). A name with another minor each has None.
_CONTROL = ("nvidia-frontend", "nvidia", "nvidiactl")
_KNOWN: dict[str, tuple[tuple[str, ...], int | None]] = {
    "nvidiactl": (_CONTROL, 255),
    "nvidia-modeset": (_CONTROL, 254),
    "nvidia-uvm": (("nvidia-uvm",), 0),
    "nvidia-uvm-tools": (("nvidia-uvm",), 1),
    "nvidia-nvswitchctl": (("nvidia-nvswitch",), 255),
    "nvidia-nvlink": (("nvidia-nvlink",), 0),
}
_REQUIRED = ("nvidiactl", "nvidia-uvm")
_OPTIONAL = ("nvidia-uvm-tools", "nvidia-modeset", "nvidia-nvswitchctl", "nvidia-nvlink")
_OPTIONAL_FOLDERS = {"nvidia-caps": "nvidia-caps", "nvidia-caps-imex-channels": "nvidia-caps-imex-channels"}


@dataclass(frozen=True)
class GpuInfo:
    """One GPU as the kernel module shows it; ``index`` counts in PCI bus order. Unknown texts are empty."""

    index: int
    minor: int
    uuid: str = ""
    name: str = ""
    bus: str = ""


@dataclass(frozen=True)
class Injection:
    """Everything that a sandbox gets of the host's GPUs.

    Attributes:
        libraries, tools: real paths of files that go to /usr/local/nvidia/lib64 and bin.
        files: (real path, path in the sandbox) of files that have a place of their own.
        links: (path, target) of symbolic links.
        folders: more folders for the loader's cache.
    """

    source: str
    driver: str
    gpus: tuple[GpuInfo, ...]
    nodes: tuple[Node, ...]
    libraries: tuple[str, ...] = ()
    tools: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    links: tuple[tuple[str, str], ...] = ()
    folders: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    compat: bool = False
    probe_timeout: float = 60.0

    @property
    def partitioned(self) -> bool:
        """Whether a CDI spec gave parts of GPUs (MIG): only those have capabilities of their own there."""
        return self.source.startswith("cdi ") and any(n.path.startswith("/dev/nvidia-caps/") for n in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """The receipt's form."""
        names = sorted({os.path.basename(p) for p in self.libraries} | {os.path.basename(t) for _, t in self.files})
        return {
            "source": self.source,
            "driver": self.driver,
            "gpus": [asdict(g) for g in self.gpus],
            "nodes": [{"path": n.path, "major": n.major, "minor": n.minor} for n in self.nodes],
            "injected": names + [os.path.basename(t) for t in self.tools],
            "env": dict(self.env),
            "notes": list(self.notes),
        }


def discover(asked: Gpu) -> Injection:
    """Decide what is injected.

    Raises:
        RunnerError: ``gpu.none`` (no GPU where one was asked for), ``gpu.device`` (not the one asked for),
            ``gpu.libraries``, ``gpu.cdi``, ``gpu.source``, ``device.type``.
    """
    host = Host(asked.host)
    if not asked.devices or asked.devices == ("",):
        raise RunnerError("gpu.none", "a GPU run with an empty selection: zero GPUs is a failure")
    version = drivers.driver_version(host)
    edits = cdi.find(host, asked.devices, lambda d: _minor(host, d)) if asked.source in ("auto", "cdi") else None
    if edits is not None:
        return _from_cdi(host, asked, edits, version)
    if asked.source == "cdi":
        raise RunnerError("gpu.source", f"no CDI spec of kind {cdi.KIND} in {', '.join(cdi.FOLDERS)}")
    gpus, hidden = enumerate_gpus(host)
    chosen = select(gpus, asked.devices)
    files, source = _driver_files(host, asked.source, version)
    nodes, notes = gpu_nodes(host, chosen)
    if hidden:
        notes.append(f"{hidden} GPUs of this machine have no node in /dev, as in a container: left out")
    env = _without_caps(nodes, notes)
    return Injection(
        source, version or _file_version(files), chosen, nodes,
        tuple(host.path(p) for p in files.libraries), tuple(host.path(p) for p in files.tools),
        tuple((host.path(p), p) for p in files.others), env=env, notes=tuple(notes),
        compat=asked.compat, probe_timeout=asked.probe_timeout,
    )  # fmt: skip


def _driver_files(host: Host, source: str, version: str) -> tuple[DriverFiles, str]:
    if source in ("auto", "cli"):
        files = drivers.ask_container_cli(host, version)
        if files:
            return files, "nvidia-container-cli"
        if source == "cli":
            raise RunnerError("gpu.source", "nvidia-container-cli is absent, fails, or lists no libcuda")
    return drivers.scan(host, version), "loader cache"


def _file_version(files: DriverFiles) -> str:
    names = [os.path.basename(p) for p in files.libraries]
    return next((n.removeprefix("libcuda.so.") for n in names if n.startswith("libcuda.so.")), "")


def enumerate_gpus(host: Host) -> tuple[tuple[GpuInfo, ...], int]:
    """All GPUs, by the kernel module's own list, else by the nodes that are there; and how many of the list are hidden.

    A container sees the list of its whole machine and the nodes of its own GPUs. Where nobody has made a node yet, all
    of the list count.
    """
    out: list[GpuInfo] = []
    for bus in host.names("/proc/driver/nvidia/gpus"):
        rows = host.read(f"/proc/driver/nvidia/gpus/{bus}/information").split("\n")
        facts = {k.strip(): v.strip() for k, _, v in (row.partition(":") for row in rows)}
        if facts.get("Device Minor", "").isdigit():
            minor = int(facts["Device Minor"])
            out.append(GpuInfo(len(out), minor, facts.get("GPU UUID", ""), facts.get("Model", ""), bus))
    if out:
        here = [g for g in out if host.exists(f"/dev/nvidia{g.minor}")] or out
        return tuple(replace(g, index=i) for i, g in enumerate(here)), len(out) - len(here)
    minors = sorted(int(m.group(1)) for m in map(cdi.GPU_NODE.match, host.glob("/dev/nvidia[0-9]*")) if m)
    return tuple(GpuInfo(index, minor) for index, minor in enumerate(minors)), 0


def select(gpus: tuple[GpuInfo, ...], devices: tuple[str, ...]) -> tuple[GpuInfo, ...]:
    """The GPUs that ``devices`` names, in that order, each once.

    Raises:
        RunnerError: ``gpu.none``, ``gpu.device``.
    """
    if not gpus:
        raise RunnerError("gpu.none", "no NVIDIA GPU: /proc/driver/nvidia/gpus and /dev/nvidia0 are both absent")
    if "all" in devices:
        return gpus
    out: dict[int, GpuInfo] = {}
    for device in devices:
        found = [g for g in gpus if _is(g, device)]
        if len(found) != 1:
            there = ", ".join(f"{g.index} ({g.uuid or 'UUID unknown'})" for g in gpus)
            what = f"{len(found)} GPUs are {device!r}" if found else f"no GPU {device!r}"
            raise RunnerError("gpu.device", f"{what}; there are {there}. A MIG device needs a CDI spec")
        out.setdefault(found[0].index, found[0])
    return tuple(out.values())


def _minor(host: Host, device: str) -> int | None:
    found = [gpu.minor for gpu in enumerate_gpus(host)[0] if _is(gpu, device)]
    return found[0] if len(found) == 1 else None


def _is(gpu: GpuInfo, device: str) -> bool:
    return device == str(gpu.index) or is_named(gpu.uuid, device)


def is_named(uuid: str, device: str) -> bool:
    """Whether a device is meant by its UUID: whole, without its first word, or only begun, as CUDA lets it be."""
    return bool(uuid) and (device == uuid[4:] or (device.startswith(("GPU-", "MIG-")) and uuid.startswith(device)))


def device_majors(host: Host) -> dict[str, int]:
    """Character device majors by driver name, from /proc/devices."""
    text = host.read("/proc/devices").partition("Block devices:")[0]
    rows = [line.split() for line in text.split("\n")]
    return {row[1]: int(row[0]) for row in rows if len(row) == 2 and row[0].isdigit()}


def gpu_nodes(host: Host, gpus: Iterable[GpuInfo]) -> tuple[tuple[Node, ...], list[str]]:
    """The nodes for these GPUs and the control nodes, by the numbers that the running kernel has given out.

    uvm's and caps' majors differ from boot to boot (nvidia-container-toolkit #1934).

    Raises:
        RunnerError: ``gpu.none`` (a required node is missing), ``device.type``.
    """
    majors = device_majors(host)
    notes: list[str] = []
    nodes: list[Node] = []
    for name in [*_REQUIRED, *(f"nvidia{g.minor}" for g in gpus)]:
        node = _node(host, name, majors, notes)
        if node is None:
            raise RunnerError("gpu.none", f"/dev/{name} is missing and /proc/devices has no number for it")
        nodes.append(node)
    for name in (*_OPTIONAL, *(os.path.basename(p) for p in host.glob("/dev/nvidia-nvswitch[0-9]*"))):
        node = _node(host, name, majors, notes) if host.exists(f"/dev/{name}") else None
        if node is None:
            notes.append(f"optional node /dev/{name} is absent")
        else:
            nodes.append(node)
    for folder in _OPTIONAL_FOLDERS:
        found = (_node(host, f"{folder}/{name}", majors, notes) for name in host.names(f"/dev/{folder}"))
        nodes += [n for n in found if n]
    return tuple(nodes), notes


def _node(host: Host, name: str, majors: Mapping[str, int], notes: list[str]) -> Node | None:
    path = f"/dev/{name}"
    drivers_names, minor = _KNOWN.get(name, (_CONTROL, None))
    if name.startswith("nvidia") and name[6:].isdigit():
        minor = int(name[6:])
    if "/" in name:
        drivers_names = (_OPTIONAL_FOLDERS[name.split("/")[0]],)
    major = next((majors[n] for n in drivers_names if n in majors), None)
    try:
        info = os.stat(host.path(path))
    except OSError:
        return Node(path, host.path(path), major, minor) if major is not None and minor is not None else None
    if not stat.S_ISCHR(info.st_mode):
        raise RunnerError("device.type", f"{host.path(path)} on the host is not a character device; remove it")
    actual = (os.major(info.st_rdev), os.minor(info.st_rdev))
    if major is None or major == actual[0]:
        return Node(path, host.path(path), *actual)
    notes.append(f"{path} on the host has major {actual[0]}, the driver's is {major} by /proc/devices: that is used")
    return Node(path, host.path(path), major, actual[1] if minor is None else minor)


def _without_caps(nodes: Iterable[Node], notes: list[str]) -> dict[str, str]:
    """NCCL fails at init instead of falling back where the caps nodes are missing (pie #500)."""
    if any(n.path.startswith("/dev/nvidia-caps") for n in nodes):
        return {}
    notes.append("no /dev/nvidia-caps on the host: NCCL_NVLS_ENABLE=0 is set")
    return {"NCCL_NVLS_ENABLE": "0"}


def _from_cdi(host: Host, asked: Gpu, edits: cdi.Edits, version: str) -> Injection:
    nodes, minors = [], []
    notes = list(edits.notes)
    for path, source in edits.nodes:
        try:
            info = os.stat(host.path(source))
        except OSError:
            raise RunnerError("gpu.cdi", f"{edits.source} names {source}, which this host does not have") from None
        if not stat.S_ISCHR(info.st_mode):
            raise RunnerError("device.type", f"{source} on the host is not a character device")
        nodes.append(Node(path, host.path(source), os.major(info.st_rdev), os.minor(info.st_rdev)))
        match = cdi.GPU_NODE.match(source)
        minors += [int(match.group(1))] if match else []
    if not minors:
        raise RunnerError("gpu.none", f"{edits.source} gives no /dev/nvidia0 or the like: zero GPUs is a failure")
    known = {g.minor: g for g in enumerate_gpus(host)[0]}
    gpus = tuple(known.get(m, GpuInfo(i, m)) for i, m in enumerate(dict.fromkeys(minors)))
    missing = [s for s, _ in edits.mounts if not host.exists(s)]
    if missing:
        raise RunnerError("gpu.cdi", f"{edits.source} names {missing[0]}, which this host does not have; regenerate it")
    if not any(os.path.basename(t).startswith("libcuda.so") for _, t in edits.mounts):
        raise RunnerError("gpu.libraries", f"{edits.source} injects no libcuda")
    env = {**edits.env, **_without_caps(nodes, notes)}
    folders = edits.folders or sorted({os.path.dirname(t) for _, t in edits.mounts if ".so" in os.path.basename(t)})
    return Injection(
        "cdi " + edits.source, version, gpus, tuple(nodes), files=tuple((host.path(s), t) for s, t in edits.mounts),
        links=tuple(edits.links), folders=tuple(folders), env=env, notes=tuple(notes),
        compat=asked.compat, probe_timeout=asked.probe_timeout,
    )  # fmt: skip
