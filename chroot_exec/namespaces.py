"""Namespaces: which, who makes them, and how ids map in a user namespace."""

from __future__ import annotations

import errno
import fcntl
import os
import pwd
import shutil
import socket
import struct
import subprocess

from chroot_exec import syscalls
from chroot_exec.errors import RunnerError

_SYS_ADMIN = 21
_SETUID = 7
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_FLAGS = {
    "mount": syscalls.CLONE_NEWNS,
    "pid": syscalls.CLONE_NEWPID,
    "ipc": syscalls.CLONE_NEWIPC,
    "uts": syscalls.CLONE_NEWUTS,
    "network": syscalls.CLONE_NEWNET,
}


def has_capability(bit: int) -> bool:
    """Whether this process has the capability in effect."""
    with open("/proc/self/status", "rb") as file:
        line = next(line for line in file if line.startswith(b"CapEff:"))
    return bool(int(line.split()[1], 16) >> bit & 1)


def choose_isolation(asked: str) -> str:
    """``root`` or ``rootless``.

    Raises:
        RunnerError: ``sandbox.privilege`` when root was asked for and the process may not.
    """
    able = os.geteuid() == 0 and has_capability(_SYS_ADMIN)
    if asked == "root" and not able:
        raise RunnerError("sandbox.privilege", "isolation root needs uid 0 with CAP_SYS_ADMIN; ask for rootless")
    return asked if asked != "auto" else "root" if able else "rootless"


def names(network: str, rootless: bool) -> list[str]:
    """The namespaces that a run gets of its own."""
    return [*(["user"] if rootless else []), *(n for n in _FLAGS if n != "network" or network == "none")]


def enter_user_namespace() -> None:
    """Make a user namespace; the ids are mapped by the parent (``map_ids``).

    Raises:
        RunnerError: ``sandbox.userns`` with what to look at.
    """
    try:
        syscalls.unshare(syscalls.CLONE_NEWUSER)
    except OSError as error:
        raise RunnerError("sandbox.userns", f"no user namespace: {error}; {_userns_hint()}") from None


def enter_namespaces(network: str, rootless: bool) -> None:
    """Make all namespaces but the user's. The PID namespace begins with the next fork.

    Raises:
        RunnerError: ``sandbox.namespace``.
    """
    flags = 0
    for name in names(network, False):
        flags |= _FLAGS[name]
    try:
        syscalls.unshare(flags)
    except OSError as error:
        hint = _userns_hint() if rootless else "a container without CAP_SYS_ADMIN, or a security module, forbids it"
        # The setting is the outer user namespace's, which cannot be read from here.
        hint = "the limit of a sysctl user.max_*_namespaces is reached" if error.errno == errno.ENOSPC else hint
        raise RunnerError("sandbox.namespace", f"{error}; {hint}") from None


def _userns_hint() -> str:
    for name, bad in (
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
        ("kernel/unprivileged_userns_clone", "0"),
        ("user/max_user_namespaces", "0"),
    ):
        try:
            with open(f"/proc/sys/{name}") as file:
                if file.read().strip() == bad:
                    return f"sysctl {name.replace('/', '.')} is {bad}"
        except OSError:
            continue
    return "a security module or a container's filter may forbid it"


def map_ids(pid: int) -> str:
    """Map ids in the user namespace of ``pid``, as much as this process may.

    Returns:
        ``identity`` (this process's own ids), ``subordinate`` (by newuidmap and /etc/subuid) or ``single``.

    Raises:
        RunnerError: ``sandbox.userns``.
    """
    try:
        if os.geteuid() == 0 and has_capability(_SETUID):
            for kind in ("uid", "gid"):
                _write_map(pid, f"{kind}_map", _own_ranges(f"/proc/self/{kind}_map"))
            return "identity"
        if _subordinate(pid):
            return "subordinate"
        _write_map(pid, "setgroups", "deny")
        _write_map(pid, "uid_map", f"0 {os.geteuid()} 1\n")
        _write_map(pid, "gid_map", f"0 {os.getegid()} 1\n")
        return "single"
    except OSError as error:
        raise RunnerError("sandbox.userns", f"ids cannot be mapped: {error}; {_userns_hint()}") from None


def _write_map(pid: int, name: str, text: str) -> None:
    # One write(2): the kernel takes a map only whole.
    with open(f"/proc/{pid}/{name}", "wb", buffering=0) as file:
        file.write(text.encode())


def _own_ranges(path: str) -> str:
    with open(path) as file:
        rows = [line.split() for line in file]
    return "".join(f"{first} {first} {count}\n" for first, _, count in rows)


def _subordinate(pid: int) -> bool:
    """Whether the tools mapped both kinds of ids; when False, none is mapped.

    Raises:
        RunnerError: ``sandbox.userns``: the users are mapped, for good, and the groups cannot be.
    """
    commands = []
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        tool, ranges = shutil.which(f"new{kind}map"), _subordinate_range(kind)
        if tool is None or ranges is None:
            return False
        start, count = ranges
        commands.append([tool, str(pid), "0", str(own), "1", "1", str(start), str(count)])
    for command in commands:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
        if done.returncode and command is commands[0]:
            return False
        if done.returncode:
            raise RunnerError("sandbox.userns", f"{command[0]} failed: {done.stderr.strip()[-300:]}; see /etc/subgid")
    return True


def _subordinate_range(kind: str) -> tuple[int, int] | None:
    uid = os.geteuid()
    try:
        keys = {str(uid), pwd.getpwuid(uid).pw_name}
    except KeyError:
        keys = {str(uid)}
    try:
        with open(f"/etc/sub{kind}") as file:
            rows = [line.strip().split(":") for line in file]
    except OSError:
        return None
    return next(((int(r[1]), int(r[2])) for r in rows if len(r) == 3 and r[0] in keys and r[1].isdigit()), None)


def raise_loopback() -> None:
    """Bring up ``lo``. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        name = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack("16sh14x", fcntl.ioctl(sock, _SIOCGIFFLAGS, name))[1]
        fcntl.ioctl(sock, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
