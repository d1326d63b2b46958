"""Markdown tables, and the names of sizes, cases and world sizes in them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from inflight import Case

#: Heads of columns with words, aligned to the left. Other columns have numbers, aligned to the right.
WORDS = frozenset(
    ("system", "collective", "what", "range", "error", "target", "limit", "loop", "transport", "what, in ms", "why")
)


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table; the names in `head` determine how columns are aligned."""
    rule = "|".join("---" if name.strip("* ") in WORDS else "--:" for name in head)
    return "\n".join([_row(head), f"|{rule}|", *map(_row, rows)])


def size_of(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:g} {name}"
    return f"{nbytes} B"


def name_of(case: Case) -> str:
    many = f"{case.inflight} × " if case.inflight > 1 else ""
    return case.kind if case.kind == "barrier" else f"{many}{case.kind} {size_of(case.nbytes)}"


def ranks_of(world_size: int) -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{world_size} rank{'s' if world_size > 1 else ''}" + (f" on {cores} cores" if world_size > cores else "")


def micros(seconds: float) -> str:
    return f"{seconds * 1e6:,.1f}"


def _row(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"
