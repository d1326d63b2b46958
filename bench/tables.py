"""Tables of the benchmark against other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inflight import Case
from limits import CALLBACK, LARGE, OF_BOUND, Verdict
from markdown import micros, name_of, ranks_of, size_of, table
from results import Results
from roofline import Roofline
from systems import AWAITED, BLOCKING, MPI_BLOCKING

from aiocoll.machine_load import MAX_LOAD

#: Mark after the first cell of a row with disturbed figures.
MARK = " \\*"


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    words = {True: "met", False: "**MISSED**", None: "–"}
    rows = [(each.what, each.limit, each.measured, words[each.met]) for each in verdicts]
    met = sum(each.met is True for each in verdicts)
    missed = sum(each.met is False for each in verdicts)
    head = (
        f"## Limits\n\n{met} met, {missed} missed, {len(verdicts) - met - missed} not measured. The limits against "
        "awaited peers and against blocking MPI are for the native accelerator.\n\n"
    )
    return head + table(("what", "limit", "measured", "verdict"), rows)


def failure_table(skipped: dict[str, str], all_results: Iterable[Results]) -> str | None:
    """Return a table of the systems that were not measured, with the reasons; None if all were measured."""
    rows = [(name, "all", f"skipped: {reason}") for name, reason in skipped.items()]
    for results in all_results:
        rows += [
            (system, ranks_of(results.world_size), f"failed: {failure}")
            for system in results.systems
            if (failure := results.failure(system)) is not None
        ]
    return f"## Missing systems\n\n{table(('system', 'ranks', 'why'), rows)}" if rows else None


def awaited_table(results: Results, system: str) -> str | None:
    """Return the table that compares `system` with peers whose calls are awaited; None if none was measured."""
    return _comparison(results, system, ("aiocoll pure", *AWAITED), AWAITED, "× fastest awaited peer")


def blocking_table(results: Results, system: str) -> str | None:
    """Return the table that compares `system` with peers whose calls block; None if none was measured."""
    return _comparison(results, system, BLOCKING, MPI_BLOCKING, "× faster MPI")


def _comparison(results: Results, system: str, columns: Sequence[str], rivals: Sequence[str], ratio: str) -> str | None:
    """Return a table row for each case: the times of all systems, and the speed relative to the fastest rival.

    Args:
        results: results of one world size.
        system: the system of aiocoll.
        columns: the other systems, as far as they were measured.
        rivals: the systems that the ratio compares with.
        ratio: the head of the column of ratios.
    """
    columns = [name for name in columns if name in results.systems]
    cases = [case for case in results.cases(lambda case: case.inflight == 1) if results.summary(system, case)]
    if not columns or not cases:
        return None
    names = (system, *columns)
    rows = []
    for case in cases:
        summaries = [results.summary(name, case) for name in names]
        times = ["–" if each is None else f"{micros(each.figures.p50)} ({micros(each.tenth)})" for each in summaries]
        wrong = sum(each.wrong for each in summaries if each is not None)
        size = "" if case.kind == "barrier" else size_of(case.nbytes)
        mark = MARK if results.is_disturbed(case, names) else ""
        rows.append((f"{case.kind}{mark}", size, *times, _ratio(results, case, system, *rivals), wrong))
    head = ("collective", "size", *(f"{name} µs" for name in names), ratio, "#wrong")
    return f"### {ranks_of(results.world_size)}\n\n{describe_marks(rows)}\n\n{table(head, rows)}"


def describe_marks(rows: Sequence[Sequence[object]]) -> str:
    """Return a line about the number of marked rows, to print above their table."""
    count = sum(str(row[0]).endswith(MARK) for row in rows)
    return f"{count} of {len(rows)} rows are marked{MARK}: others took more than {MAX_LOAD:g} cores during a launch."


def allreduce_details(results: Results) -> str | None:
    """Return a table with one row per size and system, and the columns of nccl-tests; None without measurements."""
    cases = results.cases(_is_allreduce)
    if not cases:
        return None
    rows = [_details(results, case, system) for case in cases for system in results.systems]
    head = (
        "size",
        "system",
        "p50 µs",
        "fastest tenth",
        "p95",
        "p99",
        "algbw GB/s",
        "busbw",
        "#wrong",
        "CPU µs/op",
        "launches",
        "iterations",
    )
    return f"### {ranks_of(results.world_size)}\n\n{describe_marks(rows)}\n\n{table(head, rows)}"


def inflight_table(all_results: Iterable[Results]) -> str | None:
    """Return a table with the time per call with many calls in flight; None if this was not measured."""
    rows = []
    for results in all_results:
        for case in results.cases(lambda case: case.inflight > 1):
            for system in results.systems:
                summary = results.summary(system, case)
                if summary is not None:
                    ratio = "" if system in AWAITED else _ratio(results, case, system, *AWAITED)
                    times = map(micros, (summary.figures.p50, summary.tenth, *summary.figures[1:3], summary.cpu))
                    mark = MARK if results.is_disturbed(case, [system]) else ""
                    place = (ranks_of(results.world_size) + mark, name_of(case), system)
                    rows.append((*place, *times, summary.wrong, ratio))
    times = ("p50 µs per call", "fastest tenth", "p95", "p99", "CPU µs/op")
    head = ("ranks", "what", "system", *times, "#wrong", "× fastest awaited peer")
    return f"{describe_marks(rows)}\n\n{table(head, rows)}" if rows else None


def roofline_table(rooflines: Sequence[Roofline]) -> str:
    rows = [
        (
            ranks_of(each.world_size),
            *(f"{value / 1e9:.1f}" for value in (each.copy, each.add, each.tcp, each.unix)),
            *(f"{value * 1e6:.2f}" for value in (each.flag, each.unix_trip, each.tcp_trip)),
        )
        for each in rooflines
    ]
    head = ("ranks", "np.copyto GB/s", "np.add GB/s", "tcp GB/s", "unix GB/s", "flag µs", "unix µs", "tcp µs")
    return table(head, rows)


def bound_rows(results: Results, roofline: Roofline) -> list[tuple[str, str, str, str, float]]:
    """Return table rows about large allreduces and their lower bound: size, system, time, bound, ratio."""
    rows = []
    for case in results.cases(lambda case: _is_allreduce(case) and case.nbytes >= LARGE):
        bound = roofline.bound(case.nbytes)
        for system in results.systems:
            summary = results.summary(system, case)
            if summary is not None:
                p50 = summary.figures.p50
                rows.append((size_of(case.nbytes), system, f"{p50 * 1e3:.2f}", f"{bound * 1e3:.2f}", p50 / bound))
    return rows


def bound_verdicts(results: Results, roofline: Roofline) -> list[Verdict]:
    return [
        Verdict(
            f"{system}, allreduce {size}, {results.world_size} ranks, against the bound",
            f"≤ {OF_BOUND:g}×",
            f"{times:.2f}×",
            times <= OF_BOUND,
        )
        for size, system, _, _, times in bound_rows(results, roofline)
        if system == "aiocoll auto"
    ]


def lag_verdict(what: str, p99: float) -> Verdict:
    return Verdict(f"longest callback, {what}", f"p99 ≤ {CALLBACK:g} ms CPU", f"{p99:.3f} ms", p99 <= CALLBACK)


def _is_allreduce(case: Case) -> bool:
    return case.kind == "allreduce" and case.inflight == 1


def _details(results: Results, case: Case, system: str) -> Sequence[object]:
    summary = results.summary(system, case)
    if summary is None:
        return (size_of(case.nbytes), system, "failed" if results.failure(system) else "–", *[""] * 9)
    figures = summary.figures
    return (
        size_of(case.nbytes) + (MARK if results.is_disturbed(case, [system]) else ""),
        system,
        *map(micros, (figures.p50, summary.tenth, *figures[1:3])),
        *(f"{value / 1e9:.3f}" for value in figures[3:]),
        summary.wrong,
        micros(summary.cpu),
        summary.launches,
        summary.iterations,
    )


def _ratio(results: Results, case: Case, system: str, *others: str) -> str:
    ratio = results.ratio(case, system, *others)
    return "–" if ratio is None else f"**{ratio.median:.2f}** ({ratio.least:.2f}–{ratio.most:.2f})"
