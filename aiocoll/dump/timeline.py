"""Timelines from dumps, as traces for Perfetto (ui.perfetto.dev) and chrome://tracing.

The format is Chrome's "Trace Event Format": a JSON object with a list of events. Each rank is a process. Overlapping
operations are on different threads, because viewers nest events that overlap on one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["chrome_trace", "lanes", "named", "offsets"]

Dump = Mapping[str, Any]
Entry = Mapping[str, Any]

#: Microseconds per second. Times in a Chrome trace are in microseconds.
_US = 1e6
#: Fields of a dump entry that describe the call. The other fields are timestamps.
_ARGUMENTS = ("seq", "key", "shape", "dtype", "bytes", "counts", "root", "reduce", "peer", "tag", "state", "error",
              "site", "function")  # fmt: skip


def named(entry: Entry) -> str:
    """Return a short name for a recorded operation: its kind, key and sequence number."""
    name = entry["op"] if entry["key"] is None else f"{entry['op']} {entry['key']!r}"
    return name if entry["seq"] is None else f"{name} {entry['seq']}"


def offsets(dumps: Sequence[Dump]) -> list[float]:
    """Return one clock offset per dump, which converts its times to the clock of the first dump's host.

    Ranks on one host share a monotonic clock, so they have the same offset. Between hosts the precision is the
    precision of their wall clocks.
    """
    ahead: dict[str, list[float]] = {}
    for dump in dumps:
        clock = dump["clock"]
        ahead.setdefault(clock["host"], []).append(clock["wall"] - clock["monotonic"])
    # Use the median, because a wall clock may have been adjusted between two dumps.
    middle = {host: sorted(found)[len(found) // 2] for host, found in ahead.items()}
    return [middle[dump["clock"]["host"]] - middle[dumps[0]["clock"]["host"]] for dump in dumps]


def lanes(entries: Sequence[Entry], until: float) -> list[int]:
    """Assign each entry the lowest lane without overlapping entries. Pending operations last until `until`."""
    free: list[float] = []
    found = []
    for entry in entries:
        lane = next((lane for lane, end in enumerate(free) if end <= entry["entered"]), len(free))
        end = until if entry["finished"] is None else entry["finished"]
        free[lane : lane + 1] = [end]
        found.append(lane)
    return found


def chrome_trace(dumps: Sequence[Dump]) -> dict[str, Any]:
    """Return the dumps of one or several groups as a Chrome trace in JSON form, with times from 0."""
    shifts = offsets(dumps)
    times = [entry["entered"] + shift for dump, shift in zip(dumps, shifts, strict=True) for entry in dump["entries"]]
    start = min(times, default=0.0)
    events: list[dict[str, Any]] = []
    threads: dict[int, int] = {}
    for dump, shift in zip(dumps, shifts, strict=True):
        process = dump["global_ranks"][dump["rank"]]
        if process not in threads:
            name = f"rank {process} ({dump['host']}, process {dump['pid']})"
            events += [
                _meta("process_name", process, 0, name=name),
                _meta("process_sort_index", process, 0, sort_index=process),
            ]
        for kind in ("collective", "message"):
            threads[process] = threads.get(process, 0)
            for event in _lane_events(dump, kind, process, threads[process], shift - start):
                events.append(event)
                threads[process] = max(threads[process], event["tid"])
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"groups": sorted({dump["group"] for dump in dumps})},
    }


def _lane_events(dump: Dump, kind: str, process: int, above: int, shift: float) -> Iterator[dict[str, Any]]:
    """Yield the trace events of one kind of operation. Each lane is a thread; thread numbers start at `above` + 1."""
    entries = [entry for entry in dump["entries"] if entry["kind"] == kind]
    until = dump["clock"]["monotonic"]
    named_threads: set[int] = set()
    for entry, lane in zip(entries, lanes(entries, until), strict=True):
        thread = above + 1 + lane
        if thread not in named_threads:
            named_threads.add(thread)
            more = f" ({lane + 1})" if lane else ""
            yield _meta("thread_name", process, thread, name=f"{dump['group']}: {kind}s{more}")
            yield _meta("thread_sort_index", process, thread, sort_index=thread)
        end = until if entry["finished"] is None else entry["finished"]
        yield {
            "name": named(entry),
            "cat": f"{kind},{entry['state']}",
            "ph": "X",
            "ts": (entry["entered"] + shift) * _US,
            "dur": max(0.0, end - entry["entered"]) * _US,
            "pid": process,
            "tid": thread,
            "args": {name: entry[name] for name in _ARGUMENTS if entry.get(name) is not None},
        }


def _meta(what: str, process: int, thread: int, **args: Any) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "ts": 0, "args": args}
