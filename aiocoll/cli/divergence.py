"""Analysis of a group's dumps: which calls differ, which ranks are missing, which rank is late."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean

from aiocoll.cli.merge import Entry, GroupDumps, MergedCall
from aiocoll.dump.files import KEYS
from aiocoll.engine.failure.deadlines import REPORT_AFTER
from aiocoll.engine.operations.differences import called, mismatch, opposed

__all__ = ["Divergence", "Lateness", "divergence", "lateness", "report"]

#: Operations that a report names of each kind.
NAMED = 8


@dataclass(frozen=True)
class Divergence:
    """The first collective at which the ranks of a group diverged.

    Attributes:
        call: the collective.
        words: how two ranks' calls differ; None if they do not.
        missing: the ranks that have a dump and have not entered it.
        later: number of later collectives that diverged too.
    """

    call: MergedCall
    words: str | None
    missing: tuple[int, ...]
    later: int


@dataclass(frozen=True)
class Lateness:
    """The rank that was last on average, in the collectives that all ranks with a dump entered.

    Attributes:
        rank: that rank.
        seconds: its delay after the first rank, on average.
        last: number of collectives that it entered last.
        calls: number of all those collectives.
    """

    rank: int
    seconds: float
    last: int
    calls: int


def divergence(group: GroupDumps) -> Divergence | None:
    """Return the first collective that ranks called differently, or that some have not entered; None if there is none.

    A collective that a rank has not entered counts if the group has failed, or after the others waited for 250 ms.
    """
    found = [(call, words, missing) for call in group.calls for words, missing in _apart(group, call)]
    # By number where there is one: that does not depend on the clocks of several hosts.
    ordered = min((each for each in found if each[0].key is None), key=lambda each: each[0].seq, default=None)
    keyed = next((each for each in found if each[0].key is not None), None)
    both = [each for each in (ordered, keyed) if each is not None]
    if not both:
        return None
    call, words, missing = min(both, key=lambda each: each[0].first)
    return Divergence(call, words, missing, len(found) - 1)


def _apart(group: GroupDumps, call: MergedCall) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """Yield how the calls of the ranks differ and which ranks are missing, if either is the case."""
    words = _differ(group, call)
    missing = tuple(rank for rank in group.ranks if rank not in call.entries and _is_missing(group, call, rank))
    if words is not None or missing:
        yield words, missing


def _differ(group: GroupDumps, call: MergedCall) -> str | None:
    # Calls of debug="detail" are compared by the same rules as all others.
    calls = [{**entry, "debug": None} for _, entry in sorted(call.entries.items())]
    for index, each in enumerate(calls[1:], 1):
        other = opposed(each, calls[:index])
        if other is not None:
            return str(mismatch(group.name, other, each))
    return None


def _is_missing(group: GroupDumps, call: MergedCall, rank: int) -> bool:
    """Whether a rank without an entry of `call` has not entered it; else the entry was overwritten."""
    dump = group.dumps[rank]
    if call.key is None:
        entered = call.seq <= dump["entered"]
    else:
        counts = dump["keys"]
        # Of a key too old to have its count in the dump, only the first use is known to be none.
        unknown = call.key not in counts and call.seq > 1 and len(counts) == KEYS
        entered = unknown or call.seq <= counts.get(call.key, 0)
    if entered:
        return False
    return group.cause is not None or group.dumped(rank) - call.first >= REPORT_AFTER


def lateness(group: GroupDumps) -> Lateness | None:
    """Return the rank that came last on average; None if there is nothing to compare."""
    shared = [call for call in group.calls if len(call.entered) == len(group.ranks)]
    if len(group.ranks) < 2 or not shared:
        return None
    average = {rank: fmean(call.entered[rank] - call.first for call in shared) for rank in group.ranks}
    rank = max(average, key=lambda each: average[each])
    last = sum(call.entered[rank] == max(call.entered.values()) for call in shared)
    return Lateness(rank, average[rank], last, len(shared))


# -- words


def report(group: GroupDumps) -> tuple[list[str], bool]:
    """Return the lines of a group's report, and whether no problem was found."""
    ranks = f"{group.world_size} rank{'s' * (group.world_size != 1)}"
    lines = [f"group {group.name!r}: {ranks}, {len(group.calls)} collectives remembered"]
    if group.silent:
        lines.append(f"  no dump of {_ranks(group.silent)}: killed, or not given here")
    cause = group.cause
    if cause is not None:
        lines.append(f"  failed: {cause.get('kind')}: {cause.get('text')}")
    found = divergence(group)
    lines += ["  no collective diverged"] if found is None else _told(group, found)
    lines += _unfinished(group)
    late = lateness(group)
    if late is not None:
        lines.append(
            f"  last to arrive on average: rank {late.rank}, {_time(late.seconds)} after the first; it was the last in "
            f"{late.last} of {late.calls} collectives"
        )
    return lines, cause is None and found is None and not group.silent


def _told(group: GroupDumps, found: Divergence) -> list[str]:
    call = found.call
    lines = [f"  diverged first: {_named(call.entries[min(call.entries)])}"]
    if found.words is not None and (group.cause is None or found.words != group.cause.get("text")):
        lines.append(f"    {found.words}")
    for entry, ranks in _plans_by_array(call):
        lines.append(f"    {_ranks(ranks)} called {called(entry)} at {_site(entry)}")
    lines += [f"    missing: rank {rank}, {_last(group, rank)}" for rank in found.missing]
    if found.later:
        lines.append(f"    and {found.later} later collective{'s' * (found.later > 1)} diverged too")
    return lines


def _plans_by_array(call: MergedCall) -> list[tuple[Entry, list[int]]]:
    """Return the calls of the ranks, grouped by their text."""
    found: dict[tuple[str, str], tuple[Entry, list[int]]] = {}
    for rank, entry in sorted(call.entries.items()):
        found.setdefault((called(entry), _site(entry)), (entry, []))[1].append(rank)
    return list(found.values())


def _last(group: GroupDumps, rank: int) -> str:
    """Return what a rank did last, and which message it waits for, which may be the reason."""
    collectives = group.entries(rank, "collective")
    words = "in no collective yet"
    if collectives:
        last = collectives[-1]
        age = group.dumped(rank) - last["entered"] - group.shifts[rank]
        words = f"last in {_named(last)} at {_site(last)}, entered {_time(age)} before its dump, {last['state']}"
    waiting = [entry for entry in group.entries(rank, "message") if entry["state"] != "finished"]
    if waiting:
        waits = "waits" if waiting[-1]["state"] == "pending" else "waited"
        words += f"; it {waits} in {_named(waiting[-1])} at {_site(waiting[-1])}"
    return words


def _unfinished(group: GroupDumps) -> list[str]:
    """Name what is pending and what has failed, the oldest first."""
    lines = []
    for state in ("pending", "failed"):
        found: dict[tuple[str, str], list[int]] = {}
        for rank in group.ranks:
            for entry in group.dumps[rank]["entries"]:
                if entry["state"] == state:
                    what = _named(entry) + (f" with {entry.get('error')}" if state == "failed" else "")
                    found.setdefault((what, _site(entry)), []).append(rank)
        for (what, site), ranks in list(found.items())[:NAMED]:
            lines.append(f"  {state} on {_ranks(sorted(set(ranks)))}: {what} at {site}")
        if len(found) > NAMED:
            lines.append(f"  {state}: {len(found) - NAMED} more")
    return lines


def _named(entry: Entry) -> str:
    if entry["kind"] == "message":
        peer = "any rank" if entry.get("peer") is None else f"rank {entry['peer']}"
        return f"{entry['op']} ({'to' if entry['op'] == 'SEND' else 'from'} {peer}, tag {entry.get('tag')})"
    return f"{entry['op']} (sequence {entry['seq'] if entry['key'] is None else _keyed(entry)})"


def _keyed(entry: Entry) -> str:
    return f"{entry['key']!r} {entry['seq']}"


def _site(entry: Entry) -> str:
    return f"{entry['site']} in {entry['function']}"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
