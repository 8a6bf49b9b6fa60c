"""The few system calls that Python 3.10 does not offer, through ctypes. Each raises OSError."""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS = 0x00020000
CLONE_NEWUTS = 0x04000000
CLONE_NEWIPC = 0x08000000
CLONE_NEWUSER = 0x10000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
UMOUNT_NOFOLLOW = 8

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_CAPBSET_READ = 23
PR_CAPBSET_DROP = 24
PR_SET_NO_NEW_PRIVS = 38
PR_CAP_AMBIENT = 47
PR_CAP_AMBIENT_CLEAR_ALL = 4
PR_SET_SECCOMP = 22
SECCOMP_MODE_FILTER = 2

_AT_RECURSIVE = 0x8000
_MOUNT_ATTR_RDONLY = 1
_MOUNT_SETATTR = 442
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_CAP_VERSION_3 = 0x20080522


def _check(result: int, what: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """unshare(2)."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2)."""
    result = _libc.mount(
        os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), os.fsencode(data) or None
    )
    _check(result, f"mount {kind or 'bind'} at {target}")


def umount(target: str, flags: int = UMOUNT_NOFOLLOW) -> None:
    """umount2(2), never through a symbolic link at the end of ``target``."""
    _check(_libc.umount2(os.fsencode(target), ctypes.c_int(flags)), f"unmount {target}")


def make_read_only(target: str) -> None:
    """Make a mount and all below it read-only: mount_setattr(2), Linux 5.12 and later."""
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_MOUNT_SETATTR), ctypes.c_int(-100), os.fsencode(target), ctypes.c_uint(_AT_RECURSIVE),
        ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)),
    )  # fmt: skip
    _check(result, f"mount_setattr {target}")


def pivot_root(new: str, old: str) -> None:
    """pivot_root(2)."""
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(38, f"pivot_root: no system call number known for {os.uname().machine}")
    _check(_libc.syscall(ctypes.c_long(number), os.fsencode(new), os.fsencode(old)), "pivot_root")


def prctl(option: int, second: int = 0, third: int = 0, pointer: object = None) -> int:
    """prctl(2); ``pointer`` takes the place of the third argument."""
    last = pointer if pointer is not None else ctypes.c_ulong(third)
    zero = ctypes.c_ulong(0)
    return _check(_libc.prctl(ctypes.c_int(option), ctypes.c_ulong(second), last, zero, zero), f"prctl {option}")


def set_capabilities(mask: int) -> None:
    """Set the permitted and effective sets to ``mask`` and clear the inheritable set (capset(2))."""
    header = (ctypes.c_uint32 * 2)(_CAP_VERSION_3, 0)
    low, high = mask & 0xFFFFFFFF, mask >> 32
    data = (ctypes.c_uint32 * 6)(low, low, 0, high, high, 0)
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(data)), "capset")


def set_hostname(name: str) -> None:
    """sethostname(2)."""
    raw = name.encode()
    _check(_libc.sethostname(raw, ctypes.c_size_t(len(raw))), "sethostname")
