"""The machine that a stage runs on, as a receipt names it. Reads, never runs anything."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from uuid import uuid4

import oci_builder
from oci_builder.model.receipts import Gpu, Host, format_time


def this_host(root: Path = Path("/"), gpus: tuple[Gpu, ...] = (), sandbox: str = "") -> Host:
    """This machine.

    Args:
        root: the root file system whose system and driver are named.
        gpus: what the checks saw; nothing is looked for here.
        sandbox: gvisor, chroot, ...; found for gVisor.
    """
    name = platform.uname()
    return Host(
        name=name.node, os=os_name(root), kernel=name.release, machine=name.machine,
        sandbox=sandbox or _sandbox(root), driver=driver_version(root), gpus=gpus,
    )  # fmt: skip


def os_name(root: Path) -> str:
    """ID and VERSION_ID of os-release(5), such as ``ubuntu 22.04``; empty where there is none."""
    for place in ("etc/os-release", "usr/lib/os-release"):
        try:
            text = (root / place).read_text("utf-8", "replace")
        except OSError:
            continue
        pairs = dict(re.findall(r"^([A-Z_]+)=[\"']?(.*?)[\"']?$", text, re.MULTILINE))
        return " ".join(p for p in (pairs.get("ID", ""), pairs.get("VERSION_ID", "")) if p)
    return ""


def driver_version(root: Path) -> str:
    """The NVIDIA kernel driver's version; empty where there is none."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text("utf-8", "replace")
    except OSError:
        return ""
    match = re.search(r"Kernel Module[^\n]*?(\d+(?:\.\d+)+)", text)
    return match[1] if match else ""


def _sandbox(root: Path) -> str:
    try:
        # gVisor's sentry answers with a version line of its own.
        return "gvisor" if "gvisor" in (root / "proc/version").read_text("utf-8", "replace").lower() else ""
    except OSError:
        return ""


def tool_versions(*packages: str) -> dict[str, str]:
    """Versions of oci-builder, Python and the given packages (absent ones are left out)."""
    found = {"oci-builder": oci_builder.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def utc_now() -> datetime:
    """Now, UTC. The one clock of the release code; pure functions get the time as an argument."""
    return datetime.now(UTC)


def stamp(at: datetime | None = None) -> str:
    """A receipt's time."""
    return format_time(at or utc_now())


def new_attempt() -> str:
    """A name that no other run has."""
    return uuid4().hex


def engine_name(env: Mapping[str, str] | None = None) -> str:
    """``fake`` under the control plane stand-in, ``modal`` on Modal, else ``local``.

    The stand-in sets ``FAKEPLANE_ROOTFS``; it wins, whatever else is set.
    """
    known = os.environ if env is None else env
    if known.get("FAKEPLANE_ROOTFS"):
        return "fake"
    return "modal" if known.get("MODAL_TASK_ID") or known.get("MODAL_IMAGE_ID") else "local"
