"""A seccomp deny list: calls by which a privileged process changes the host answer EPERM."""

from __future__ import annotations

import ctypes
import os
import struct

from chroot_exec import syscalls

_ARCH_X86_64 = 0xC000003E
_X32_BIT = 0x40000000
_ALLOW = 0x7FFF0000
_ERRNO_EPERM = 0x00050001
_LOAD, _JUMP_EQUAL, _JUMP_GE, _RETURN = 0x20, 0x15, 0x35, 0x06

# Numbers of x86_64 (arch/x86/entry/syscalls/syscall_64.tbl).
DENIED = {
    "syslog": 103, "pivot_root": 155, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167,
    "swapoff": 168, "reboot": 169, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176,
    "quotactl": 179, "clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "perf_event_open": 298, "open_by_handle_at": 304, "clock_adjtime": 305, "setns": 308, "finit_module": 313,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
    "open_tree_attr": 467,
}  # fmt: skip
_SOCKET, _FIRST_ARGUMENT = 41, 16
_IOCTL, _SECOND_ARGUMENT = 16, 24
# No network namespace holds them: in a virtual machine they lead to its host, whose agents listen there.
DENIED_FAMILIES = {"AF_VSOCK": 40}
# They type into the caller's terminal, where its shell reads (bubblewrap's CVE-2017-5226).
DENIED_IOCTLS = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def program() -> bytes:
    """The filter as classic BPF instructions."""
    numbers = sorted(DENIED.values())
    by_argument = (
        (_SOCKET, _FIRST_ARGUMENT, DENIED_FAMILIES.values()), (_IOCTL, _SECOND_ARGUMENT, DENIED_IOCTLS.values()),
    )  # fmt: skip
    deny = 5 + len(numbers) + sum(3 + len(values) for _, _, values in by_argument)
    code = [(_LOAD, 0, 0, 4), (_JUMP_EQUAL, 0, deny - 2, _ARCH_X86_64), (_LOAD, 0, 0, 0)]
    code.append((_JUMP_GE, deny - 4, 0, _X32_BIT))
    code += [(_JUMP_EQUAL, deny - (4 + i) - 1, 0, number) for i, number in enumerate(numbers)]
    for call, argument, values in by_argument:
        # The kernel takes the lower half of the argument only, and so does this load (flatpak's CVE-2019-10063).
        code += [(_JUMP_EQUAL, 0, 2 + len(values), call), (_LOAD, 0, 0, argument)]
        code += [(_JUMP_EQUAL, deny - len(code) - i - 1, 0, value) for i, value in enumerate(values)]
        code.append((_RETURN, 0, 0, _ALLOW))
    code += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _ERRNO_EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)


def supported() -> bool:
    """Whether the numbers above are this machine's."""
    return os.uname().machine == "x86_64"


def install() -> None:
    """Install the filter for this process and its children; needs no_new_privs. Raises OSError."""
    code = program()
    buffer = ctypes.create_string_buffer(code, len(code))
    value = _Program(len(code) // 8, ctypes.addressof(buffer))
    syscalls.prctl(syscalls.PR_SET_SECCOMP, syscalls.SECCOMP_MODE_FILTER, pointer=ctypes.byref(value))
