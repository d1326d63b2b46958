"""Dumps of flight recorders, read from files and merged by group."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiocoll.dump.files import FORMAT, VERSION
from aiocoll.dump.timeline import offsets
from aiocoll.engine.control.messages import CALLED, NAMED
from aiocoll.engine.control.shapes import (
    Check,
    SchemaError,
    Scope,
    any_value,
    fields,
    integer,
    list_of,
    map_of,
    none_or,
    one_of,
    seconds,
    text,
)

__all__ = ["GroupDumps", "MergedCall", "Unusable", "collect"]

Dump = dict[str, Any]
Entry = dict[str, Any]

_NUMBER, _TEXT = integer(1 << 64), text()
#: Checks of those dump fields that this module uses. `_ENTRY` and `_PERHAPS` check the fields of one dump entry.
_DUMP: dict[str, Check] = {
    "group": _TEXT, "id": _NUMBER, "rank": _NUMBER, "world_size": _NUMBER, "global_ranks": list_of(_NUMBER),
    "host": _TEXT, "pid": _NUMBER, "state": _TEXT, "entered": _NUMBER, "keys": map_of(_NUMBER),
    "clock": fields(host=_TEXT, monotonic=seconds, wall=seconds), "cause": none_or(map_of(any_value)),
    "entries": list_of(any_value, 1 << 20),
}  # fmt: skip
#: Checks of optional dump fields: dumps of aiocoll 0.1 lack them.
_LATER: dict[str, Check] = {
    "blocked": none_or(list_of(any_value, 2)),
    "longest_blocks": none_or(list_of(fields(began=seconds, seconds=seconds, line=_TEXT), 64)),
}
_ENTRY: dict[str, Check] = {
    **NAMED, "kind": one_of("collective", "message"), "shape": list_of(_NUMBER), "entered": seconds,
    "finished": none_or(seconds), "state": one_of("pending", "finished", "failed"), "site": _TEXT, "function": _TEXT,
}  # fmt: skip
_PERHAPS: dict[str, Check] = {
    **CALLED, "peer": none_or(_NUMBER), "tag": none_or(_NUMBER), "error": none_or(_TEXT), "bytes": none_or(_NUMBER),
}  # fmt: skip


class Unusable(Exception):
    """Raised for a file that is no dump, or dumps that contradict each other. The message names file and reason."""


@dataclass
class MergedCall:
    """A collective, with the dump entry of each rank that made the call.

    Attributes:
        key: the key of the call; None if it has none.
        seq: its sequence number, or the count of its key.
        entries: the entry of each rank that made the call, by rank.
        entered: the time at which each rank entered it, in seconds on one clock, by rank.
    """

    key: str | None
    seq: int
    entries: dict[int, Entry] = field(default_factory=dict)
    entered: dict[int, float] = field(default_factory=dict)

    @property
    def first(self) -> float:
        """Return the time at which the first rank entered the collective."""
        return min(self.entered.values())


class GroupDumps:
    """The flight recorder dumps of one group, at most one per rank.

    Args:
        dumps: one per rank that has a dump, in the order of ranks.

    Attributes:
        ranks: the ranks with a dump.
        silent: the ranks without a dump.
        shifts: seconds to add to the times of each rank, to convert them to one clock.
        calls: all recorded collectives, in the order of their first entry.
    """

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self.name: str = dumps[0]["group"]
        self.world_size: int = dumps[0]["world_size"]
        self.dumps: dict[int, Dump] = {dump["rank"]: dump for dump in dumps}
        self.ranks = list(self.dumps)
        self.silent = [rank for rank in range(self.world_size) if rank not in self.dumps]
        self.shifts: dict[int, float] = dict(zip(self.dumps, offsets(dumps), strict=True))
        calls: dict[tuple[str | None, int], MergedCall] = {}
        for rank in self.ranks:
            for entry in self.entries(rank, "collective"):
                if entry["seq"] is None:
                    continue  # a collective of the library itself, not of a call
                call = calls.setdefault((entry["key"], entry["seq"]), MergedCall(entry["key"], entry["seq"]))
                call.entries[rank] = entry
                call.entered[rank] = entry["entered"] + self.shifts[rank]
        self.calls = sorted(calls.values(), key=lambda call: call.first)

    def entries(self, rank: int, kind: str) -> list[Entry]:
        """Return the recorded entries of a rank, of kind "collective" or "message", oldest first."""
        return [entry for entry in self.dumps[rank]["entries"] if entry["kind"] == kind]

    def dumped(self, rank: int) -> float:
        """Return the time at which the rank wrote its dump, converted to the common clock of all ranks."""
        monotonic: float = self.dumps[rank]["clock"]["monotonic"]
        return monotonic + self.shifts[rank]

    @property
    def cause(self) -> dict[str, Any] | None:
        """Return the cause of the group's failure that most ranks report; None if the group was not revoked."""
        causes = [dump["cause"] for dump in self.dumps.values() if dump["cause"] is not None]
        texts = [cause.get("text") for cause in causes]
        return max(causes, key=lambda cause: texts.count(cause.get("text")), default=None)


def collect(paths: Sequence[str]) -> list[GroupDumps]:
    """Read dump files; return the dumps by group, in the order of group names.

    Raises:
        Unusable: a file is no dump, or dumps contradict each other; the message names the file and the reason.
    """
    found: dict[tuple[str, int], dict[int, tuple[str, Dump]]] = {}
    for path in paths:
        dump = _load(path)
        ranks = found.setdefault((dump["group"], dump["id"]), {})
        rank = dump["rank"]
        if rank in ranks:
            raise Unusable(
                f"{ranks[rank][0]} and {path} are both dumps of rank {rank} of group {dump['group']!r}: give one dump "
                "per rank"
            )
        for other, known in ranks.values():
            if known["global_ranks"] != dump["global_ranks"]:
                raise Unusable(
                    f"{other} and {path} disagree on the ranks of group {dump['group']!r}: they are from different jobs"
                )
        ranks[rank] = path, dump
    return [GroupDumps([ranks[rank][1] for rank in sorted(ranks)]) for _, ranks in sorted(found.items())]


def _load(path: str) -> Dump:
    try:
        dump = json.loads(Path(path).read_bytes())
    except OSError as error:
        raise Unusable(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # invalid JSON, or not text
        raise Unusable(f"{path}: is not JSON, or incomplete: {error}") from None
    if isinstance(dump, dict) and "traceEvents" in dump:
        raise Unusable(f"{path}: is a trace for Perfetto; give the dumps from which it was made")
    if not isinstance(dump, dict) or dump.get("format") != FORMAT:
        raise Unusable(f"{path}: is not a dump of pg.recorder")
    if dump.get("version") != VERSION:
        raise Unusable(
            f"{path}: has version {dump.get('version')!r} of the dump format; this aiocoll reads version {VERSION}: "
            "use the aiocoll version that wrote the dump"
        )
    try:
        return _check_dump(dump)
    except SchemaError as error:
        raise Unusable(f"{path}: is damaged: {error}") from None


def _check_dump(dump: Dump) -> Dump:
    """Check a dump, and return the fields that this version uses.

    Raises:
        SchemaError: a field is missing or not valid.
    """
    found = _check_fields(dump, _DUMP, _LATER, Scope(0, None))
    size = found["world_size"]
    if not len(found["global_ranks"]) == size > found["rank"]:
        raise SchemaError("rank: the group has no rank of this number")
    found["entries"] = [_check_fields(entry, _ENTRY, _PERHAPS, Scope(size, size)) for entry in found["entries"]]
    return found


def _check_fields(
    given: Any, needed: Mapping[str, Check], perhaps: Mapping[str, Check], scope: Scope
) -> dict[str, Any]:
    """Check a map, and return its known fields; later versions may write more fields.

    Raises:
        SchemaError: a field is missing or not valid.
    """
    if not isinstance(given, dict):
        raise SchemaError("entries: each entry must be a map")
    found = {name: value for name, value in given.items() if name in needed or name in perhaps}
    fields(perhaps, **needed)(found, scope)
    return found
