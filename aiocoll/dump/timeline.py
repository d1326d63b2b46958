"""What ranks recorded, as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is Chrome's "Trace Event Format": a JSON object with a list of events. A rank is a process, and operations
that overlap are on different threads, since a viewer nests events that overlap on one thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["chrome_trace", "lanes", "named", "offsets"]

Dump = Mapping[str, Any]
Entry = Mapping[str, Any]

#: Microseconds of a second: the unit of the format.
_US = 1e6
#: Fields of an entry that describe the call; the others are its times.
_ARGUMENTS = ("seq", "key", "shape", "dtype", "bytes", "counts", "root", "reduce", "peer", "tag", "state", "error",
              "site", "function")  # fmt: skip


def named(entry: Entry) -> str:
    """Name an operation in a word or two."""
    name = entry["op"] if entry["key"] is None else f"{entry['op']} {entry['key']!r}"
    return name if entry["seq"] is None else f"{name} {entry['seq']}"


def offsets(dumps: Sequence[Dump]) -> list[float]:
    """Return the offsets that bring the times of all dumps to the clock of the first one's host.

    Ranks of one host share a monotonic clock, so they get the same offset; between hosts the precision is that of their
    wall clocks.
    """
    ahead: dict[str, list[float]] = {}
    for dump in dumps:
        clock = dump["clock"]
        ahead.setdefault(clock["host"], []).append(clock["wall"] - clock["monotonic"])
    # The median: a wall clock may have been set between two dumps.
    middle = {host: sorted(found)[len(found) // 2] for host, found in ahead.items()}
    return [middle[dump["clock"]["host"]] - middle[dumps[0]["clock"]["host"]] for dump in dumps]


def lanes(entries: Sequence[Entry], until: float) -> list[int]:
    """Return for each entry, sorted by entry, the lowest lane that is free then; what is pending lasts to `until`."""
    free: list[float] = []
    found = []
    for entry in entries:
        lane = next((lane for lane, end in enumerate(free) if end <= entry["entered"]), len(free))
        end = until if entry["finished"] is None else entry["finished"]
        free[lane : lane + 1] = [end]
        found.append(lane)
    return found


def chrome_trace(dumps: Sequence[Dump]) -> dict[str, Any]:
    """Return dumps, of one group or of several, as the JSON object of a trace; its times begin at 0."""
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
    """Yield the operations of one kind, on threads numbered from `above` + 1 on, and the threads' names."""
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
