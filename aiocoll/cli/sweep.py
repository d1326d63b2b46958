"""The code of the ranks of `aiocoll bench`: they measure one case after another; rank 0 can print a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext

from aiocoll.cli.calls import call_of, combine_of
from aiocoll.cli.measure import Effort, Figures, Timing, measure, times_of
from aiocoll.cli.sink import CommandOutput, OutputLostError
from aiocoll.cli.terminal import Progress, styled
from aiocoll.cli.workload import Case, Workload
from aiocoll.group.process_group import ProcessGroup

__all__ = ["HEADING", "row", "sweep"]

HEADING = (
    f"{'size':>10} {'count':>10} {'time p50':>10} {'p95':>10} {'p99':>10} {'algbw':>8} {'busbw':>8} {'#wrong':>6}\n"
    f"{'B':>10} {'elements':>10} {'us':>10} {'us':>10} {'us':>10} {'GB/s':>8} {'GB/s':>8}"
)


def row(case: Case, world_size: int, timing: Timing) -> str:
    """Return the row of a benchmark case in the printed table, with the columns of `HEADING`."""
    figures = Figures.of(case, world_size, timing.nanoseconds)
    times = " ".join(f"{value * 1e6:>10.1f}" for value in (figures.p50, figures.p95, figures.p99))
    place = f"{case.size(world_size):>10} {case.count(world_size):>10}"
    wrong = f"{timing.wrong:>6}"
    if timing.wrong:
        wrong = styled(wrong, "bad", sys.stdout)
    return f"{place} {times} {figures.algbw / 1e9:>8.3f} {figures.busbw / 1e9:>8.3f} {wrong}"


async def sweep(pg: ProcessGroup, cases: Sequence[Case], effort: Effort, table: bool) -> list[Timing]:
    """Measure `cases` in order. All ranks call this with the same arguments, and get the same result.

    Raises:
        OSError: rank 0 cannot print the table.
    """
    rank, world_size = pg.rank(), pg.size()
    found = []
    with CommandOutput() if rank == 0 else nullcontext() as output, Progress() as progress:
        for number, case in enumerate(cases, 1):
            if rank == 0:
                progress.show(f"{number} of {len(cases)}: {case.nbytes} B")
            load = Workload(case, rank, world_size)
            found.append(await measure(load, times_of(call_of(pg, load)), combine_of(pg), effort))
            if output is not None and table:
                progress.clear()
                _print(row(case, world_size, found[-1]), output)
    return found


def _print(line: str, output: CommandOutput) -> None:
    try:
        print(line, flush=True)
    except OutputLostError as lost:
        if not output.has_no_reader:
            raise OSError(str(lost)) from None
        # The output has no reader any more, as in `aiocoll bench | head`. Continue, since the other ranks wait.
