"""Files of flight recorders: their names, and writing one atomically."""

from __future__ import annotations

import itertools
import os
import string
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any, TextIO

__all__ = ["FORMAT", "KEYS", "VERSION", "file_name", "write_json"]

#: Identifies a dump.
FORMAT, VERSION = "aiocoll flight recorder", 1
#: Number of keys, the newest ones, whose counts are in a dump: some 300 KB.
KEYS = 10_000
#: Characters of a group's name in the name of a file; file systems take 255 bytes in all.
_LONGEST = 160
#: Characters of it that stay as they are.
_PLAIN = frozenset(string.ascii_letters + string.digits + "_.-~")


def file_name(group: str, rank: int) -> str:
    """Return the file name of one rank's dump, for any group name; names of two groups differ."""
    # As `urllib.parse.quote`, which takes milliseconds to load, and which a process without rights may not read.
    octets = group.encode(errors="surrogatepass")
    safe = "".join(chr(each) if chr(each) in _PLAIN else f"%{each:02X}" for each in octets)
    if len(safe) > _LONGEST:
        safe = f"{safe[:_LONGEST]}~{blake2b(safe.encode(), digest_size=8).hexdigest()}"
    return f"dump-{safe}-{rank}.json"


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write `content` to `path` atomically, for this user alone; OSError if that fails."""
    import json  # many programs never need it

    with _beginning(*os.path.split(path)) as file:
        try:
            json.dump(content, file, separators=(",", ":"))
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def _beginning(folder: str, name: str) -> TextIO:
    """Make a file beside that of this name; processes that were killed, on any host, may have left some there."""
    numbers = itertools.count()
    while True:
        beginning = os.path.join(folder, f".{name[:200]}.{next(numbers)}")
        with suppress(FileExistsError):
            return open(beginning, "x", encoding="ascii", opener=lambda path, flags: os.open(path, flags, 0o600))
