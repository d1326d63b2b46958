"""Analysis of a group's flight recorder dumps: different calls, missing ranks, late ranks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from aiocoll.cli.merge import Entry, GroupDumps, MergedCall
from aiocoll.cli.top.formatting import format_duration
from aiocoll.dump.files import KEYS
from aiocoll.dump.timeline import named
from aiocoll.engine.failure.deadlines import REPORT_AFTER
from aiocoll.engine.operations.differences import called, find_mismatch, mismatch_error

__all__ = ["Divergence", "Finding", "Lateness", "diagnose", "divergence", "lateness", "report"]

#: Maximum number of pending operations, and of failed operations, that a report lists.
NAMED = 8
#: Minimum average delay in seconds at which the verdict names a rank as late.
LATE = 1e-3
#: Minimum delay in seconds of one rank at a single collective at which the verdict names this collective.
LATE_ONCE = 1.0
#: Minimum ratio of the time for which the others waited only for one rank to the same time of any other rank, at which
#: the verdict names that rank as late. Among equal ranks, some rank is always the last one on average.
DISTINCT = 3.0
#: Pattern of an operation with its arguments, as in "RECV(shape=[], dtype=object)".
_ARGUMENTS = re.compile(r"\b([A-Z][A-Z_]+)\([^()]*\)")


@dataclass(frozen=True)
class Divergence:
    """The first collective at which the ranks of a group diverged.

    Attributes:
        call: the collective.
        difference: the difference between the calls of two ranks; None if all calls match.
        missing: ranks with a dump that have not entered the collective.
        later: number of later collectives that diverged too.
    """

    call: MergedCall
    difference: str | None
    missing: tuple[int, ...]
    later: int


@dataclass(frozen=True)
class Finding:
    """The verdict on a group, in one sentence.

    Attributes:
        text: the sentence.
        ranks: the ranks at fault; empty if there are none.
        label: the state of these ranks, in a few words.
        call: the collective in which the others waited, or in which the calls differed; None if there is none.
    """

    text: str
    ranks: tuple[int, ...] = ()
    label: str = ""
    call: MergedCall | None = None


@dataclass(frozen=True)
class Lateness:
    """The rank with the largest average delay at those collectives that every rank with a dump has entered.

    Attributes:
        rank: that rank.
        seconds: its delay after the first rank, on average.
        last: number of collectives that it entered last.
        calls: number of collectives that all ranks with a dump entered.
        is_distinct: whether the others waited for it alone much longer than for any other rank.
    """

    rank: int
    seconds: float
    last: int
    calls: int
    is_distinct: bool


def divergence(group: GroupDumps) -> Divergence | None:
    """Return the first collective with different calls or missing ranks; None if there is no such collective.

    A collective that a rank has not entered counts if the group has failed, or after the others waited for 250 ms.
    """
    found = [
        (call, difference, missing) for call in group.calls for difference, missing in _find_difference(group, call)
    ]
    # Collectives without a key are ordered by their sequence number, which does not depend on the clocks of hosts.
    ordered = min((each for each in found if each[0].key is None), key=lambda each: each[0].seq, default=None)
    keyed = next((each for each in found if each[0].key is not None), None)
    both = [each for each in (ordered, keyed) if each is not None]
    if not both:
        return None
    call, difference, missing = min(both, key=lambda each: each[0].first)
    return Divergence(call, difference, missing, len(found) - 1)


def _find_difference(group: GroupDumps, call: MergedCall) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """If the ranks diverge at `call`, yield one pair: a text about different calls (or None), and the missing ranks."""
    difference = _find_different_calls(group, call)
    missing = tuple(rank for rank in group.ranks if rank not in call.entries and _is_missing(group, call, rank))
    if difference is not None or missing:
        yield difference, missing


def _find_different_calls(group: GroupDumps, call: MergedCall) -> str | None:
    # Drop the recorded debug level of each call, so that all calls are compared by the same rules.
    calls = [{**entry, "debug": None} for _, entry in sorted(call.entries.items())]
    for index, each in enumerate(calls[1:], 1):
        other = find_mismatch(each, calls[:index])
        if other is not None:
            return str(mismatch_error(group.name, other, each))
    return None


def _is_missing(group: GroupDumps, call: MergedCall, rank: int) -> bool:
    """Return whether a rank has never entered `call`. A missing entry in its dump may also have been overwritten."""
    dump = group.dumps[rank]
    if call.key is None:
        entered = call.seq <= dump["entered"]
    else:
        counts = dump["keys"]
        # A dump has counts of the latest keys only, so the count of an older key is unknown. A rank with an unknown
        # count is certainly missing only in the first call with that key.
        unknown = call.key not in counts and call.seq > 1 and len(counts) == KEYS
        entered = unknown or call.seq <= counts.get(call.key, 0)
    if entered:
        return False
    return group.cause is not None or group.dumped(rank) - call.first >= REPORT_AFTER


def lateness(group: GroupDumps) -> Lateness | None:
    """Return the rank that entered collectives last on average; None if no collective can be compared."""
    shared = _shared_calls(group)
    if not shared:
        return None
    average = {rank: fmean(call.entered[rank] - call.first for call in shared) for rank in group.ranks}
    rank = max(average, key=lambda each: average[each])
    last = sum(call.entered[rank] == max(call.entered.values()) for call in shared)
    total = dict.fromkeys(group.ranks, 0.0)
    for delay, each, _ in _delays(shared):
        total[each] += delay
    others = max(delay for each, delay in total.items() if each != rank)
    return Lateness(rank, average[rank], last, len(shared), total[rank] >= DISTINCT * others)


def _shared_calls(group: GroupDumps) -> list[MergedCall]:
    """Return the collectives that all ranks with a dump entered; an empty list if only one rank has a dump."""
    return [call for call in group.calls if len(call.entered) == len(group.ranks) > 1]


def _delays(shared: list[MergedCall]) -> list[tuple[float, int, MergedCall]]:
    """Return, for each collective, the time for which the others waited only for the last rank, and that rank."""
    found = []
    for call in shared:
        (before, _), (last, rank) = sorted((time, rank) for rank, time in call.entered.items())[-2:]
        found.append((last - before, rank, call))
    return found


# -- the verdict


def diagnose(group: GroupDumps, found: Divergence | None, late: Lateness | None) -> Finding:
    """Return the verdict on a group: the rank at fault, its line in the program, and how long others waited for it.

    Args:
        group: the dumps.
        found: the result of `divergence`.
        late: the result of `lateness`.
    """
    cause = group.cause
    if found is not None and (found.difference is not None or not found.missing):
        return _diagnose_mismatch(found.call)
    call = _last_unfinished(group) if found is None else found.call
    if found is not None and call is not None:
        ranks = found.missing
        if len(ranks) > 1:
            text = f"{_ranks(ranks)} did not enter {_first_call_text(call)}{_waited(group, call)}"
            return Finding(text, ranks, "did not enter it", call)
        return _diagnose_absence(group, ranks, call)
    if cause is not None:
        return _diagnose_cause(group, cause, call)
    if group.silent:
        return Finding(f"no failure recorded, but {_ranks(group.silent)} wrote no dump", tuple(group.silent), "no dump")
    delayed = _diagnose_delay(group)
    if delayed is not None:
        return delayed
    if late is None or late.seconds < LATE or not late.is_distinct:
        return Finding("no failure: no collective diverged")
    return Finding(
        f"rank {late.rank} arrived last in {late.last} of {late.calls} collectives, "
        f"{format_duration(late.seconds)} after the first on average; no failure"
    )


def _diagnose_delay(group: GroupDumps) -> Finding | None:
    """Return the verdict on a rank that entered one collective long after the others; None if there is none.

    A rank that is as late at many collectives is described by its average delay instead.
    """
    delays = _delays(_shared_calls(group))
    if not delays:
        return None
    longest, rank, call = max(delays, key=lambda each: each[0])
    total = sum(delay for delay, late, _ in delays if late == rank)
    if longest < LATE_ONCE or longest < total / 2:
        return None
    others = [each for each in group.ranks if each != rank]
    delay = format_duration(longest)
    line = _blocking_line(group, rank, call.entered[rank] - longest, call.entered[rank])
    label = f"blocked at {line}" if line else f"{delay} late"
    block = f"was {label}, and " if line else ""
    return Finding(
        f"rank {rank} {block}entered {_first_call_text(call)} {delay} after {_ranks(others)}; no failure",
        (rank,),
        label,
        call,
    )


def _blocking_line(group: GroupDumps, rank: int, begin: float, end: float) -> str:
    """Return the line that blocked the rank's loop for half of the time from `begin` to `end`; "" if none did."""
    for block in group.dumps[rank].get("longest_blocks") or ():
        began = block["began"] + group.shifts[rank]
        if min(end, began + block["seconds"]) - max(begin, began) >= (end - begin) / 2:
            return _without_folder(block["line"])
    return ""


def _diagnose_mismatch(call: MergedCall) -> Finding:
    plans = sorted(_group_calls(call), key=lambda plan: len(plan[1]))
    calls = "; ".join(f"{_ranks(ranks)} at {_line(entry)}" for entry, ranks in plans)
    is_odd = len(plans) > 1 and len(plans[0][1]) < len(plans[1][1])
    entry, ranks = plans[0]
    label = f"{entry['op']}{list(entry['shape'])} at {_line(entry)}"
    return Finding(
        f"ranks made different calls in {_first_call_text(call)}: {calls}", tuple(ranks) if is_odd else (), label, call
    )


def _diagnose_cause(group: GroupDumps, cause: dict[str, Any], call: MergedCall | None) -> Finding:
    """Return the verdict on a failed group whose dumps show no divergence."""
    ranks = _ranks_at_fault(group, cause)
    waited = "" if call is None else _waited(group, call, with_call=True)
    if not ranks:
        return Finding(
            f"the group failed: {cause.get('kind')}: {_without_arguments(str(cause.get('text')))}", call=call
        )
    if cause.get("kind") == "PeerLostError":
        label = "lost: " + _without_arguments(str(cause.get("text"))).rpartition(": ")[2]
        return Finding(f"{_ranks(ranks)} {'were' if len(ranks) > 1 else 'was'} {label}{waited}", ranks, label, call)
    if cause.get("kind") == "CollectiveTimeoutError" and call is not None:
        return _diagnose_absence(group, ranks, call)
    return Finding(
        f"the group failed because of {_ranks(ranks)}: {_without_arguments(str(cause.get('text')))}",
        ranks,
        "failed",
        call,
    )


def _diagnose_absence(group: GroupDumps, ranks: tuple[int, ...], call: MergedCall) -> Finding:
    rank = ranks[0]
    line = _blocking_line(group, rank, call.first, group.dumped(rank)) if rank in group.dumps else ""
    label = f"blocked at {line}" if line else _position(group, rank)
    if label.startswith("blocked"):
        return Finding(f"{_ranks(ranks)} was {label}{_waited(group, call, with_call=True)}", ranks, label, call)
    return Finding(
        f"{_ranks(ranks)} did not enter {_first_call_text(call)}: {label}{_waited(group, call)}", ranks, label, call
    )


def _ranks_at_fault(group: GroupDumps, cause: dict[str, Any]) -> tuple[int, ...]:
    """Return the ranks that are named in the recorded cause of the group's failure."""
    ranks = cause.get("ranks")
    known = ranks if isinstance(ranks, list) else []
    return tuple(rank for rank in known if isinstance(rank, int) and 0 <= rank < group.world_size)


def _last_unfinished(group: GroupDumps) -> MergedCall | None:
    """Return the last collective that failed or is pending on some rank; None if all collectives finished."""
    for call in reversed(group.calls):
        if any(entry["state"] != "finished" for entry in call.entries.values()):
            return call
    return None


def _waited(group: GroupDumps, call: MergedCall, with_call: bool = False) -> str:
    """Return a text about the longest wait of the ranks that have not finished `call`; "" if all have finished it."""
    times = {
        rank: (group.dumped(rank) if entry["finished"] is None else entry["finished"] + group.shifts[rank])
        - call.entered[rank]
        for rank, entry in call.entries.items()
        if entry["state"] != "finished"
    }
    if not times:
        return ""
    return (
        f"; {_ranks(sorted(times))} waited {format_duration(max(times.values()))}"
        + f" in {_first_call_text(call)}" * with_call
    )


def _position(group: GroupDumps, rank: int) -> str:
    """Describe the position of a rank in its program, from its own dump or else from the records of its peers."""
    if rank in group.dumps:
        blocked = group.dumps[rank].get("blocked")
        if blocked:
            return f"blocked at {_without_folder(str(blocked[-1]))}"
        messages = [entry for entry in group.entries(rank, "message") if entry["state"] != "finished"]
        if messages:
            return f"it waited in {messages[-1]['op']} at {_line(messages[-1])}"
    by_peers = _cause_of_rank(group, rank)
    if by_peers:
        return by_peers
    collectives = group.entries(rank, "collective") if rank in group.dumps else []
    if collectives:
        return f"last in {named(collectives[-1])} at {_line(collectives[-1])}"
    return "not seen by its peers" if rank not in group.dumps else "in no collective yet"


def _cause_of_rank(group: GroupDumps, rank: int) -> str:
    """Return the text about `rank` in the recorded cause of the group's failure; "" if the cause has none."""
    text = "" if group.cause is None else str(group.cause.get("text"))
    _, found, rest = text.partition(f"rank {rank} (")
    depth = 1
    for end, letter in enumerate(rest if found else ""):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if not depth:
            return re.sub(r"^which ", "it ", _without_arguments(rest[:end]))
    return ""


def _without_arguments(text: str) -> str:
    """Remove the arguments of calls, such as ``(shape=[])``, from a message."""
    return _ARGUMENTS.sub(r"\1", text)


def _first_call_text(call: MergedCall) -> str:
    return named(call.entries[min(call.entries)])


def _line(entry: Entry) -> str:
    """Return the name of the file and the line in which a call was made, without the directory."""
    return os.path.basename(str(entry["site"]))


def _without_folder(place: str) -> str:
    """Return the file, line and function of a place that blocked a loop, without the file's folder and its callers."""
    return os.path.basename(place.split(", called from ")[0])


# -- words


def report(group: GroupDumps) -> tuple[list[str], bool]:
    """Return the lines of a group's report, and True if no problem was found."""
    found, late = divergence(group), lateness(group)
    ranks = f"{group.world_size} rank{'s' * (group.world_size != 1)}"
    lines = [f"group {group.name!r}: {ranks}, {len(group.calls)} collectives remembered"]
    lines.append(f"  verdict: {diagnose(group, found, late).text}")
    if group.silent:
        lines.append(f"  no dump of {_ranks(group.silent)}: killed, blocked, or its dump was not passed")
    seen = {rank: _cause_of_rank(group, rank) for rank in group.silent}
    lines += [f"    rank {rank}, as its peers recorded it: {text}" for rank, text in seen.items() if text]
    cause = group.cause
    if cause is not None:
        lines.append(f"  failed: {cause.get('kind')}: {cause.get('text')}")
    lines += ["  no collective diverged"] if found is None else _describe_divergence(group, found)
    lines += _unfinished(group)
    if late is not None:
        lines.append(
            f"  last to arrive on average: rank {late.rank}, {_time(late.seconds)} after the first; it was the last in "
            f"{late.last} of {late.calls} collectives"
        )
    return lines, cause is None and found is None and not group.silent


def _describe_divergence(group: GroupDumps, found: Divergence) -> list[str]:
    call = found.call
    lines = [f"  diverged first: {_call_text(call.entries[min(call.entries)])}"]
    if found.difference is not None and (group.cause is None or found.difference != group.cause.get("text")):
        lines.append(f"    {found.difference}")
    for entry, ranks in _group_calls(call):
        lines.append(f"    {_ranks(ranks)} called {called(entry)} at {_site(entry)}")
    lines += [f"    missing: rank {rank}, {_describe_last_call(group, rank)}" for rank in found.missing]
    if found.later:
        lines.append(f"    and {found.later} later collective{'s' * (found.later > 1)} diverged too")
    return lines


def _group_calls(call: MergedCall) -> list[tuple[Entry, list[int]]]:
    """Return the distinct calls that ranks made in a collective, each with its ranks."""
    found: dict[tuple[str, str], tuple[Entry, list[int]]] = {}
    for rank, entry in sorted(call.entries.items()):
        found.setdefault((called(entry), _site(entry)), (entry, []))[1].append(rank)
    return list(found.values())


def _describe_last_call(group: GroupDumps, rank: int) -> str:
    """Return a text about the last collective of a rank, and about a message for which the rank waits."""
    collectives = group.entries(rank, "collective")
    text = "in no collective yet"
    if collectives:
        last = collectives[-1]
        age = group.dumped(rank) - last["entered"] - group.shifts[rank]
        text = f"last in {_call_text(last)} at {_site(last)}, entered {_time(age)} before its dump, {last['state']}"
    waiting = [entry for entry in group.entries(rank, "message") if entry["state"] != "finished"]
    if waiting:
        waits = "waits" if waiting[-1]["state"] == "pending" else "waited"
        text += f"; it {waits} in {_call_text(waiting[-1])} at {_site(waiting[-1])}"
    return text


def _unfinished(group: GroupDumps) -> list[str]:
    """Return report lines about pending and failed operations, the oldest first."""
    lines = []
    for state in ("pending", "failed"):
        found: dict[tuple[str, str], list[int]] = {}
        for rank in group.ranks:
            for entry in group.dumps[rank]["entries"]:
                if entry["state"] == state:
                    what = _call_text(entry) + (f" with {entry.get('error')}" if state == "failed" else "")
                    found.setdefault((what, _site(entry)), []).append(rank)
        for (what, site), ranks in list(found.items())[:NAMED]:
            lines.append(f"  {state} on {_ranks(sorted(set(ranks)))}: {what} at {site}")
        if len(found) > NAMED:
            lines.append(f"  {state}: {len(found) - NAMED} more")
    return lines


def _call_text(entry: Entry) -> str:
    if entry["kind"] == "message":
        peer = "any rank" if entry.get("peer") is None else f"rank {entry['peer']}"
        return f"{entry['op']} ({'to' if entry['op'] == 'SEND' else 'from'} {peer}, tag {entry.get('tag')})"
    return f"{entry['op']} (sequence {entry['seq'] if entry['key'] is None else _key_text(entry)})"


def _key_text(entry: Entry) -> str:
    return f"{entry['key']!r} {entry['seq']}"


def _site(entry: Entry) -> str:
    return f"{entry['site']} in {entry['function']}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _time(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
