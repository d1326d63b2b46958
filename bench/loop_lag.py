"""Time for which callbacks block the event loop during large allreduces, on ranks that run loop_lag_rank.py."""

from __future__ import annotations

import json
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from launch import run_all
from markdown import ranks_of, size_of, table

RANK = Path(__file__).with_name("loop_lag_rank.py")
#: Bytes of the arrays.
NBYTES = 256 << 20
#: Seconds until a rank counts as hung; a normal run takes a tenth of that.
LIMIT = 120
#: Measured settings: event loop and transport.
SETTINGS = (("uvloop", "auto"), ("uvloop", "tcp"), ("asyncio", "auto"), ("asyncio", "tcp"))

#: By loop and transport: the results of each rank, or the reason why the launch failed.
Found = Mapping[tuple[str, str], Sequence[Mapping[str, Any]] | str]


def lag(world_size: int, loop: str, transport: str, iterations: int) -> list[dict[str, Any]] | str:
    """Start ranks that run loop_lag_rank.py; return the results of each rank, or why the launch failed."""
    config = {
        "loop": loop,
        "transport": transport,
        "nbytes": NBYTES,
        "iterations": iterations,
        "world_size": world_size,
        "job_key": secrets.token_hex(16),
    }
    commands = [[sys.executable, str(RANK), json.dumps(config | {"rank": rank})] for rank in range(world_size)]
    with tempfile.TemporaryDirectory() as folder:  # where the ranks meet
        outputs = run_all(commands, folder, LIMIT)
    return outputs if isinstance(outputs, str) else [json.loads(output) for output in outputs]


def longest(ranks: Sequence[Mapping[str, Any]]) -> float:
    """Return the p99 of the durations of all callbacks, in milliseconds of thread CPU time."""
    return float(np.percentile(np.concatenate([rank["cpu"] for rank in ranks]), 99) * 1e3)


def lag_table(world_size: int, found: Found) -> str:
    """Return a table of callback durations, with one row per loop, transport and clock."""
    rows: list[Sequence[object]] = []
    for (loop, transport), ranks in found.items():
        if isinstance(ranks, str):
            rows.append((loop, transport, "failed", ranks, *[""] * 4))
            continue
        each = max(rank["seconds"] for rank in ranks) * 1e3
        for name, what in (("cpu", "thread CPU"), ("wall", "wall clock"), ("late", "1 ms sleep late")):
            values = np.maximum(0, np.concatenate([rank[name] for rank in ranks])) * 1e3  # uvloop wakes a little early
            numbers = (f"{value:.3f}" for value in np.percentile(values, (50, 99, 100)))
            place = (loop, transport, f"{each:.0f}") if name == "cpu" else ("", "", "")
            rows.append((*place, what, values.size, *numbers))
    head = ("loop", "transport", "ms each", "what, in ms", "count", "p50", "p99", "max")
    return f"### {ranks_of(world_size)}, allreduces of {size_of(NBYTES)}\n\n{table(head, rows)}"
