"""A folder for the sockets of one user: nobody else can take a name in it first."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from contextlib import suppress

from aiocoll.errors import RendezvousError

__all__ = ["private_folder"]


def private_folder(env: Mapping[str, str]) -> str:
    """Return a folder that only this user may enter, the same for all of its processes on this host.

    Raises:
        RendezvousError: another user has made what should be that folder.
    """
    import tempfile

    folder = env.get("XDG_RUNTIME_DIR", "")
    if _is_private(folder):
        return folder
    folder = os.path.join(tempfile.gettempdir(), f"aiocoll-{os.geteuid()}")
    with suppress(OSError):  # it is there, or cannot be
        os.mkdir(folder, 0o700)
    if not _is_private(folder):
        raise RendezvousError(
            f"{folder} is not a folder of this user alone, so others could keep ranks from meeting in it: remove it, "
            "or let XDG_RUNTIME_DIR name one that is"
        )
    return folder


def _is_private(folder: str) -> bool:
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077
