"""Statistics of the launches, and tables of them in Markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

KIB, MIB = 1 << 10, 1 << 20
#: Times faster than Gloo, with 2 ranks: the smallest and largest size each promise is about.
TARGETS = {
    "tcp": ((0, 64 * KIB, 5.0), (64 * KIB + 1, 1 << 62, 1.3)),
    "unix": ((0, 64 * KIB, 8.0), (16 * MIB, 1 << 62, 2.5)),
}
#: Milliseconds of thread CPU that a callback may take at p99.
LONGEST_CALLBACK = 1.0


@dataclass
class Launch:
    """One launch of one peer: seconds of each iteration on its slowest rank, and wrong elements, by size."""

    seconds: dict[int, np.ndarray]
    wrong: dict[int, int]

    @classmethod
    def of(cls, ranks: Sequence[Mapping[str, Any]]) -> Launch:
        sizes = [int(size) for size in ranks[0]["wrong"]]
        return cls(
            {size: np.max([rank["nanoseconds"][str(size)] for rank in ranks], axis=0) / 1e9 for size in sizes},
            {size: sum(rank["wrong"][str(size)] for rank in ranks) for size in sizes},
        )


@dataclass
class FaultRun:
    """One run of one fault.

    Attributes:
        seconds: until the last survivor had raised; None if one had not when the patience was over.
        named: share of the survivors whose error names the victim.
        errors: classes of what was raised.
        shrunk: seconds from there to the first result of the group without the victim; None if not measured.
    """

    seconds: float | None
    named: float
    errors: tuple[str, ...]
    shrunk: float | None


def heading(loop_lag: bool) -> str:
    what = "what holds the event loop" if loop_lag else "float32 SUM in place, against Gloo (blocking)"
    return f"# Allreduce: {what}\n"


def machine() -> str:
    """Return what the numbers depend on, in three lines."""
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    versions = " · ".join(f"{name} {_version(name)}" for name in ("aiocoll", "numpy", "uvloop", "torch"))
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    return (
        f"{model}, {len(os.sched_getaffinity(0))} cores, {platform.system()} {platform.release()}\\\n"
        f"Python {platform.python_version()} · {versions}\\\n"
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC, load {load}"
    )


def table(world_size: int, sizes: Sequence[int], launches: Mapping[str, Sequence[Launch]]) -> str:
    """Return one row per size and peer; percentiles are of all iterations of all launches."""
    lines = [
        f"## {world_size} ranks{_crowded(world_size)}, {len(launches['gloo'])} launches of each",
        "",
        *_head("bytes", "peer", "p50 µs", "p95", "p99", "algbw GB/s", "busbw", "#wrong", "× Gloo", "range", "target"),
    ]
    for size in sizes:
        gloo = [median(each.seconds[size]) for each in launches["gloo"]]
        for peer, found in launches.items():
            p50, p95, p99 = np.percentile(np.concatenate([each.seconds[size] for each in found]), (50, 95, 99))
            bandwidth = size / p50 / 1e9
            ratios = [theirs / median(ours.seconds[size]) for theirs, ours in zip(gloo, found, strict=True)]
            lines.append(
                _row(
                    _bytes(size),
                    peer,
                    *(f"{value * 1e6:,.1f}" for value in (p50, p95, p99)),
                    f"{bandwidth:.3f}",
                    f"{bandwidth * 2 * (world_size - 1) / world_size:.3f}",
                    sum(each.wrong[size] for each in found),
                    "" if peer == "gloo" else f"**{median(ratios):.2f}**",
                    "" if peer == "gloo" else f"{min(ratios):.2f} to {max(ratios):.2f}",
                    _verdict(world_size, peer, size, median(ratios)),
                )
            )
    return "\n".join(lines)


def lag_table(world_size: int, nbytes: int, found: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> str:
    """Return one row per loop, transport and clock; every rank's callbacks are in it."""
    lines = [
        f"## {world_size} ranks{_crowded(world_size)}, callbacks during allreduces of {_bytes(nbytes)}",
        "",
        *_head("loop", "transport", "ms each", "what, in ms", "count", "p50", "p99", "max", "target"),
    ]
    for (loop, transport), ranks in found.items():
        each = max(rank["seconds"] for rank in ranks) * 1e3
        for name, what in (("cpu", "thread CPU"), ("wall", "wall clock"), ("late", "1 ms sleep late")):
            values = np.maximum(0, np.concatenate([rank[name] for rank in ranks])) * 1e3  # uvloop wakes a little early
            p50, p99, longest = np.percentile(values, (50, 99, 100))
            verdict = f"p99 ≤ {LONGEST_CALLBACK:g}: {'met' if p99 <= LONGEST_CALLBACK else 'MISSED'}"
            numbers = (f"{value:.3f}" for value in (p50, p99, longest))
            place = (loop, transport, f"{each:.0f}") if name == "cpu" else ("", "", "")
            lines.append(_row(*place, what, values.size, *numbers, verdict if name == "cpu" else ""))
    lines += ["", "Timers have a granularity of 1 ms, which alone makes a sleep up to 1 ms late."]
    return "\n".join(lines)


def fault_table(fault: str, world_size: int, patience: float, found: Mapping[str, Sequence[FaultRun]]) -> str:
    """Return one row per peer."""
    lines = [
        f"## {fault} of one of {world_size} ranks{_crowded(world_size)}",
        "",
        *_head("peer", "runs", "p50 s", "p99 s", "max s", "error", "names the rank", "shrink p99 s"),
    ]
    for peer, runs in found.items():
        taken = [patience if run.seconds is None else run.seconds for run in runs]
        over = ["> " if any(run.seconds is None for run in runs) else ""] * 3
        numbers = [f"{sign}{value:.3f}" for sign, value in zip(over, np.percentile(taken, (50, 99, 100)), strict=True)]
        errors = ", ".join(sorted({error for run in runs for error in run.errors})) or "none"
        named = f"{sum(run.named for run in runs) / len(runs):.0%}"
        shrunk = [run.shrunk for run in runs if run.shrunk is not None]
        lines.append(
            _row(peer, len(runs), *numbers, errors, named, f"{np.percentile(shrunk, 99):.3f}" if shrunk else "–")
        )
    return "\n".join(lines)


def _verdict(world_size: int, peer: str, size: int, ratio: float) -> str:
    if world_size == 2:
        for low, high, target in TARGETS.get(peer, ()):
            if low <= size <= high:
                return f"≥ {target:g}: {'met' if ratio >= target else 'MISSED'}"
    return ""


def _crowded(world_size: int) -> str:
    cores = len(os.sched_getaffinity(0))
    return f" on {cores} cores" if world_size > cores else ""


def _bytes(size: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if size >= unit:
            return f"{size // unit} {name}"
    return f"{size} B"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "(not installed)"


def _head(*names: str) -> Iterable[str]:
    left = {"peer", "range", "error", "target", "loop", "transport", "what, in ms"}
    return _row(*names), "|" + "|".join("---" if name in left else "--:" for name in names) + "|"


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"
