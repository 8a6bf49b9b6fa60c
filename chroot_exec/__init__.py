"""Runs programs in an unpacked image the way a container runtime would, on a machine that has none.

Usage: ``python3 -m chroot_exec REQUEST.json [--output RECEIPT.json]`` (``-`` reads standard input), or
``python3 -m chroot_exec sweep STATE`` to clean up what dead runs left. Standard library only, Python 3.10 or later,
Linux. The request and the receipt are described in ``protocol`` and ``receipt``. ``-m`` imports from the working
folder: start it, as root above all, where only files of your own are, or with ``-P`` (Python 3.11 or later).

``fd:N`` in the place of a file is a descriptor that the caller passes, of a memfd say, of which a crash leaves nothing.
``--parent PID`` ends the run when its caller ends.

Every check has a sandbox of its own: private mount, PID, IPC, UTS and (unless asked otherwise) network namespaces,
plus a user namespace when rootless; the tree below an overlay whose upper layer is memory, so that a check can write
anywhere and leaves nothing; a fresh ``/dev``, ``/proc``, read-only ``/sys``, ``/tmp`` and ``/run``; few capabilities,
no_new_privs, a seccomp deny list. All mounts live in the private namespace: when its last process is gone, and PID 1
takes all others with it, so are they.

Exit status with checks: 0 all passed or were allowed to defer, 1 a check said no, 2 the request is wrong, 125 the
runner itself failed, 128 + N when signal N (INT, TERM, HUP, QUIT) ended the run before its end. With ``exec``: the
program's own status, 128 + N when signal N ended it, 126 when it cannot be executed, 127 when it is not found, and 125
or 2 as above; the receipt's ``outcome`` is ``error`` exactly when the runner, not the program, failed.
"""

__version__ = "1"
