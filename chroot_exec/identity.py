"""Who a program runs as, and what it may do: user, groups, capabilities, limits, filter."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass

from chroot_exec import seccomp, syscalls
from chroot_exec.errors import RunnerError
from chroot_exec.resolve import Root

_ID_END = (1 << 32) - 1
_LAST_CAPABILITY = 63

# What Docker grants, without MKNOD (there is no device control group here) and NET_RAW.
CAPABILITIES = {
    "CHOWN": 0, "DAC_OVERRIDE": 1, "FOWNER": 3, "FSETID": 4, "KILL": 5, "SETGID": 6, "SETUID": 7, "SETPCAP": 8,
    "NET_BIND_SERVICE": 10, "SYS_CHROOT": 18, "AUDIT_WRITE": 29, "SETFCAP": 31,
}  # fmt: skip


@dataclass(frozen=True)
class Identity:
    """A user as the kernel sees one, and its home."""

    uid: int
    gid: int
    groups: tuple[int, ...]
    home: str


def read_identity(user: str, root: Root) -> Identity:
    """The identity for an image config's ``User`` (name or number, optionally ``:group``).

    Names are looked up in the image's own /etc/passwd and /etc/group, which are only read. A number needs no entry.

    Raises:
        RunnerError: ``user.unknown``.
    """
    passwd = root.read("/etc/passwd", 1 << 20) or b""
    group = root.read("/etc/group", 1 << 20) or b""
    return find_identity(user, passwd, group)


def find_identity(user: str, passwd: bytes, group: bytes) -> Identity:
    """As ``read_identity``, from the two files' bytes (config.md of the OCI image spec, "User")."""
    name, _, group_name = user.partition(":")
    entry = _entry(passwd, name or "0", 7)
    number = _number(name or "0")
    if entry is None and number is None:
        raise RunnerError("user.unknown", f"user {name!r} is not in the image's /etc/passwd")
    uid = _id(entry[2], user) if entry else number or 0
    gid = _id(entry[3], user) if entry else 0
    # Kept from Docker: supplementary groups come with a user's own group, not with one that was asked for.
    groups = _memberships(group, entry[0]) if entry and not group_name else ()
    if group_name:
        found = _entry(group, group_name, 4)
        asked = _id(found[2], user) if found else _number(group_name)
        if asked is None:
            raise RunnerError("user.unknown", f"group {group_name!r} is not in the image's /etc/group")
        gid = asked
    return Identity(uid, gid, groups, entry[5] if entry and entry[5].startswith("/") else "/")


def _lines(data: bytes, count: int) -> list[list[str]]:
    rows = [line.split(":") for line in data.decode("utf-8", "surrogateescape").split("\n")]
    return [row for row in rows if len(row) >= count]


def _entry(data: bytes, key: str, count: int) -> list[str] | None:
    rows = _lines(data, count)
    number = _number(key)
    by_name = next((row for row in rows if row[0] == key), None)
    return by_name or next((row for row in rows if number is not None and _number(row[2]) == number), None)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 11 and int(text) < _ID_END else None


def _id(text: str, user: str) -> int:
    number = _number(text)
    if number is None:
        raise RunnerError("user.unknown", f"user {user!r}: {text!r} in the image's /etc/passwd or /etc/group is no id")
    return number


def _memberships(group: bytes, name: str) -> tuple[int, ...]:
    ids = [_number(row[2]) for row in _lines(group, 4) if name in row[3].split(",")]
    return tuple(sorted({i for i in ids if i is not None}))


def become(identity: Identity, rlimits: Mapping[str, int], keep_chroot: bool) -> None:
    """Turn this process into the payload's, for good; raises OSError, RunnerError. The next step is exec.

    Args:
        keep_chroot: False where only chroot(2) holds the program in, and CAP_SYS_CHROOT would let it out.
    """
    for name, value in rlimits.items():
        _set_limit(name, value)
    mapped = _mapped("/proc/self/uid_map", identity.uid) and _mapped("/proc/self/gid_map", identity.gid)
    if not mapped:
        _enter_own_user(identity)
    keep = sum(1 << bit for name, bit in CAPABILITIES.items() if keep_chroot or name != "SYS_CHROOT")
    for bit in range(_LAST_CAPABILITY):
        if not keep >> bit & 1 and _in_bounding_set(bit):
            syscalls.prctl(syscalls.PR_CAPBSET_DROP, bit)
    if mapped:
        _set_groups(identity)
        os.setresgid(identity.gid, identity.gid, identity.gid)
        os.setresuid(identity.uid, identity.uid, identity.uid)
    syscalls.prctl(syscalls.PR_CAP_AMBIENT, syscalls.PR_CAP_AMBIENT_CLEAR_ALL)
    syscalls.set_capabilities(keep & _permitted() if identity.uid == 0 else 0)
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if seccomp.supported():
        seccomp.install()


def _set_limit(name: str, value: int) -> None:
    limit = getattr(resource, "RLIMIT_" + name.upper())
    try:
        resource.setrlimit(limit, (value, value))
    except ValueError:
        most = resource.getrlimit(limit)[1]
        raise RunnerError(
            "exec.limit", f"the limit {name} cannot be {value} here: this machine's hard limit is {most}; ask for less"
        ) from None


def _in_bounding_set(bit: int) -> bool:
    try:
        return syscalls.prctl(syscalls.PR_CAPBSET_READ, bit) == 1
    except OSError:
        return False


def _permitted() -> int:
    with open("/proc/self/status", "rb") as file:
        line = next(line for line in file if line.startswith(b"CapPrm:"))
    return int(line.split()[1], 16)


def _mapped(path: str, number: int) -> bool:
    with open(path, "rb") as file:
        rows = [[int(n) for n in line.split()] for line in file]
    return any(first <= number < first + count for first, _, count in rows)


def _set_groups(identity: Identity) -> None:
    try:
        os.setgroups([g for g in identity.groups if _mapped("/proc/self/gid_map", g)])
    except PermissionError:
        # A user namespace that an ordinary user made without newgidmap: the kernel forbids it for good reason.
        with open("/proc/self/setgroups", "rb") as file:
            if file.read().strip() != b"deny":
                raise


def _enter_own_user(identity: Identity) -> None:
    """A user namespace in which this process has an id that the outer one does not map."""
    uid, gid = os.geteuid(), os.getegid()
    # The files of /proc/self belong to root while a process is not dumpable; nothing else runs in here yet.
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 1)
    syscalls.unshare(syscalls.CLONE_NEWUSER)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{identity.uid} {uid} 1"),
        ("gid_map", f"{identity.gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "wb") as file:
            file.write(text.encode())
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)
