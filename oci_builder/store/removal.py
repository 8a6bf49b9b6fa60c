"""How folders of our own go, everywhere: no link is followed and no mount is crossed (forkd #264, imagecomposer #760).

What somebody mounted in one of them is not ours, and is no more in the folder than what a link leads to.
"""

from __future__ import annotations

import errno
from contextlib import suppress
from pathlib import Path

from chroot_exec.errors import RunnerError
from chroot_exec.teardown import remove_tree


def remove_folder(place: Path) -> None:
    """Remove a folder (or file, or link) and all in it. Idempotent: one that is not there is fine.

    Raises:
        OSError: the disk; ``EBUSY`` where something is mounted in it: nothing was removed then.
    """
    with suppress(FileNotFoundError):
        try:
            remove_tree(str(place))
        except RunnerError as error:
            raise OSError(errno.EBUSY, error.message, str(place)) from None


def clear_folder(place: Path) -> None:
    """As ``remove_folder``, at the end of some work: what cannot be removed stays, and is in nobody's way."""
    with suppress(OSError):
        remove_folder(place)
