"""The private folder for a user's unix sockets, in which no other user can create entries."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress

from aiocoll.errors import RendezvousError
from aiocoll.users import owner_trouble

__all__ = ["private_folder"]


def private_folder(env: Mapping[str, str]) -> str:
    """Return a folder that only this user may enter, the same one for all of the user's processes on this host.

    Raises:
        RendezvousError: another user owns the folder or may enter it.
    """
    import tempfile

    folder = env.get("XDG_RUNTIME_DIR", "")
    if _find_problem(folder) is None:
        return folder
    folder = os.path.join(tempfile.gettempdir(), f"aiocoll-{os.geteuid()}")
    with suppress(OSError):  # the folder exists, or the check below reports the problem
        os.mkdir(folder, 0o700)
    if (problem := _find_problem(folder)) is not None:
        raise RendezvousError(
            f"{folder} is not private to this user ({problem}), so other users could block the rendezvous: remove it, "
            "or set XDG_RUNTIME_DIR to a private folder"
        )
    return folder


def _find_problem(folder: str) -> str | None:
    """Return the reason why a folder is not private to this user; None if it is private."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        return error.strerror
    try:
        return owner_trouble(fd) or ("others may enter it" if os.fstat(fd).st_mode & 0o077 else None)
    finally:
        os.close(fd)
