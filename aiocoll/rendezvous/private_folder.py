"""A folder for the sockets of one user: nobody else can take a name in it first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from aiocoll.errors import RendezvousError
from aiocoll.users import owner_trouble

__all__ = ["private_folder"]


def private_folder(env: Mapping[str, str]) -> str:
    """Return a folder that only this user may enter, the same for all of its processes on this host.

    Raises:
        RendezvousError: another user has made what should be that folder.
    """
    import tempfile

    folder = env.get("XDG_RUNTIME_DIR", "")
    if _trouble(folder) is None:
        return folder
    folder = os.path.join(tempfile.gettempdir(), f"aiocoll-{os.geteuid()}")
    with suppress(OSError):  # it is there, or cannot be
        os.mkdir(folder, 0o700)
    if (trouble := _trouble(folder)) is not None:
        raise RendezvousError(
            f"{folder} is not a folder of this user alone ({trouble}), so others could keep ranks from meeting in it: "
            "remove it, or let XDG_RUNTIME_DIR name one that is"
        )
    return folder


def _trouble(folder: str) -> str | None:
    """Return why other users may enter a folder, or own it; None if they cannot."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return error.strerror
    try:
        return owner_trouble(fd) or ("others may enter it" if os.fstat(fd).st_mode & 0o077 else None)
    finally:
        os.close(fd)
