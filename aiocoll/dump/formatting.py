"""Short text form of a dump: the pending operations, and the operations that finished last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["format_dump"]

#: Maximum number of finished operations in the text; the newest one is last.
_ENDED = 3
#: Maximum number of pending operations in the text. Further pending operations are only counted.
_PENDING = 20


def format_dump(dump: Mapping[str, Any]) -> str:
    """Format a dump, as returned by `FlightRecorder.dump`, as a few lines of text."""
    return "".join(f"{line}\n" for line in _lines(dump))


def _lines(dump: Mapping[str, Any]) -> Iterator[str]:
    now = dump["clock"]["monotonic"]
    state = dump["state"] if dump["cause"] is None else f"{dump['state']}: {dump['cause']['text']}"
    yield f"group {dump['group']!r}, rank {dump['rank']} of {dump['world_size']}, process {dump['pid']}, {state}"
    pending = [entry for entry in dump["entries"] if entry["state"] == "pending"]
    for entry in pending[:_PENDING]:
        missing = entry["missing"]
        waits = f", waits for rank {', '.join(map(str, missing))}" if missing else ""
        yield f"  pending: {_describe(entry)}, for {now - entry['entered']:.1f} s{waits}"
    if len(pending) > _PENDING:
        yield f"  and {len(pending) - _PENDING} more pending operations"
    ended = [entry for entry in dump["entries"] if entry["state"] != "pending"]
    for entry in ended[-_ENDED:]:
        yield f"  {entry['state']}: {_describe(entry)}, {now - entry['finished']:.1f} s ago"
    if not dump["entries"]:
        yield "  no operation yet"


def _describe(entry: Mapping[str, Any]) -> str:
    if entry["kind"] == "message":
        number = f"{'any rank' if entry['peer'] is None else 'rank ' + str(entry['peer'])}, tag {entry['tag']}"
    elif entry["key"] is not None:
        number = f"key {entry['key']!r}, {entry['seq']}"
    else:
        number = f"sequence {entry['seq']}"
    return f"{entry['op']} ({number}) at {entry['site']} in {entry['function']}"
