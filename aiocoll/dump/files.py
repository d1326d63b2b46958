"""Dump files of flight recorders: their names, and atomic writes."""

from __future__ import annotations

import itertools
import os
import string
from collections.abc import Mapping
from contextlib import suppress
from hashlib import blake2b
from typing import Any, TextIO

__all__ = ["FORMAT", "KEYS", "VERSION", "file_name", "write_json"]

#: Format name and version at the beginning of each dump. `aiocoll trace` accepts only dumps with these values.
FORMAT, VERSION = "aiocoll flight recorder", 1
#: A dump contains the call counts of at most this many keys, the newest ones: about 300 KB.
KEYS = 10_000
#: Maximum number of characters from the group name in a file name. File systems limit file names to 255 bytes.
_LONGEST = 160
#: Characters of a group name that are not escaped in file names.
_PLAIN = frozenset(string.ascii_letters + string.digits + "_.-~")


def file_name(group: str, rank: int) -> str:
    """Return the dump file name of one rank in a group. Groups with different names have different file names."""
    # Do not use `urllib.parse.quote`: its import takes milliseconds, and fails if the process can no longer read it.
    octets = group.encode(errors="surrogatepass")
    safe = "".join(chr(each) if chr(each) in _PLAIN else f"%{each:02X}" for each in octets)
    if len(safe) > _LONGEST:
        safe = f"{safe[:_LONGEST]}~{blake2b(safe.encode(), digest_size=8).hexdigest()}"
    return f"dump-{safe}-{rank}.json"


def write_json(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write `content` to `path` atomically, readable by this user only; raise OSError on failure."""
    import json  # not at the top: many programs never write a dump

    with _create_temporary(*os.path.split(path)) as file:
        try:
            json.dump(content, file, separators=(",", ":"))
            file.close()
            os.replace(file.name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(file.name)
            raise


def _create_temporary(folder: str, name: str) -> TextIO:
    """Create a temporary file in `folder`. Try several names, since killed processes may have left such files."""
    numbers = itertools.count()
    while True:
        temporary = os.path.join(folder, f".{name[:200]}.{next(numbers)}")
        with suppress(FileExistsError):
            return open(temporary, "x", encoding="ascii", opener=lambda path, flags: os.open(path, flags, 0o600))
