"""The tables of the benchmark against other libraries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from inflight import Case
from limits import CALLBACK, LARGE, OF_BOUND, Verdict
from markdown import micros, name_of, ranks_of, size_of, table
from results import Results
from roofline import Roofline

#: Whom we are compared with, by name; all others are ourselves.
THEM = ("gloo", "gloo awaited", "mpich", "open mpi")


def verdict_table(verdicts: Sequence[Verdict]) -> str:
    words = {True: "met", False: "**MISSED**", None: "–"}
    rows = [(each.what, each.limit, each.measured, words[each.met]) for each in verdicts]
    met = sum(each.met is True for each in verdicts)
    missed = sum(each.met is False for each in verdicts)
    head = f"## What was promised\n\n{met} met, {missed} missed, {len(verdicts) - met - missed} not measured.\n\n"
    return head + table(("what", "limit", "measured", "verdict"), rows)


def failure_table(skipped: dict[str, str], all_results: Iterable[Results]) -> str | None:
    """Return why something is missing, if anything is."""
    rows = [(name, "all", f"skipped: {reason}") for name, reason in skipped.items()]
    for results in all_results:
        rows += [
            (system, ranks_of(results.world_size), f"failed: {failure}")
            for system in results.systems
            if (failure := results.failure(system)) is not None
        ]
    return f"## What is missing\n\n{table(('system', 'ranks', 'why'), rows)}" if rows else None


def allreduce_ratios(results: Results, ours: str) -> str:
    """Return how many times faster one of our transports is than each peer, by size."""
    them = [name for name in THEM if name in results.systems]
    rows = []
    for case in results.cases(_allreduce):
        summary = results.summary(ours, case)
        cells = [_ratio(results, case, ours, other) for other in them]
        rows.append((size_of(case.nbytes), "–" if summary is None else micros(summary.figures.p50), *cells))
    head = ("size", "p50 µs", *(f"× {name}" for name in them))
    return f"### {ours}: times faster, {ranks_of(results.world_size)}\n\n{table(head, rows)}"


def allreduce_details(results: Results) -> str:
    """Return one row for each size and system, with the columns of nccl-tests."""
    rows: list[Sequence[object]] = []
    for case in results.cases(_allreduce):
        rows += [_details(results, case, system) for system in results.systems]
    head = (
        "size",
        "system",
        "p50 µs",
        "p95",
        "p99",
        "algbw GB/s",
        "busbw",
        "#wrong",
        "CPU µs/op",
        "launches",
        "iterations",
    )
    return f"### All systems, {ranks_of(results.world_size)}\n\n{table(head, rows)}"


def collective_table(results: Results, ours: str) -> str | None:
    """Return the other collectives: our time, and each peer's with how many times faster we are."""
    them = [name for name in THEM if name in results.systems and name != "gloo awaited"]
    rows = []
    for case in results.cases(lambda case: case.kind != "allreduce"):
        mine = results.summary(ours, case)
        cells: list[object] = [case.kind, size_of(case.nbytes)]
        cells += ["–"] * 4 if mine is None else [*map(micros, mine.figures[:3]), f"{mine.figures.busbw / 1e9:.3f}"]
        for other in them:
            theirs = results.summary(other, case)
            cells += ["–" if theirs is None else micros(theirs.figures.p50), _ratio(results, case, ours, other)]
        summaries = [results.summary(system, case) for system in (ours, *them)]
        cells.append(sum(each.wrong for each in summaries if each is not None))
        rows.append(cells)
    if not rows:
        return None
    columns = [cell for name in them for cell in (f"{name} µs", "×")]
    head = ("collective", "size", f"{ours} p50 µs", "p95", "p99", "busbw GB/s", *columns, "#wrong")
    return f"### {ranks_of(results.world_size)}\n\n{table(head, rows)}"


def inflight_table(all_results: Iterable[Results]) -> str | None:
    """Return the time of one call with many in flight."""
    rows = []
    for results in all_results:
        for case in results.cases(lambda case: case.inflight > 1):
            for system in results.systems:
                summary = results.summary(system, case)
                if summary is not None:
                    ratio = "" if system in THEM else _ratio(results, case, system, "gloo awaited")
                    times = map(micros, summary.figures[:3])
                    place = (ranks_of(results.world_size), name_of(case), system)
                    rows.append((*place, *times, micros(summary.cpu), summary.wrong, ratio))
    head = ("ranks", "what", "system", "p50 µs per call", "p95", "p99", "CPU µs/op", "#wrong", "× gloo awaited")
    return table(head, rows) if rows else None


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
    """Return large allreduces as multiples of the bound: size, system, time, bound, and how many times that is."""
    rows = []
    for case in results.cases(lambda case: _allreduce(case) and case.nbytes >= LARGE):
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


def _allreduce(case: Case) -> bool:
    return case.kind == "allreduce" and case.inflight == 1


def _details(results: Results, case: Case, system: str) -> Sequence[object]:
    summary = results.summary(system, case)
    if summary is None:
        return (size_of(case.nbytes), system, "failed" if results.failure(system) else "–", *[""] * 8)
    figures = summary.figures
    return (
        size_of(case.nbytes),
        system,
        *map(micros, figures[:3]),
        *(f"{value / 1e9:.3f}" for value in figures[3:]),
        summary.wrong,
        micros(summary.cpu),
        summary.launches,
        summary.iterations,
    )


def _ratio(results: Results, case: Case, ours: str, other: str) -> str:
    ratio = results.ratio(case, ours, other)
    return "–" if ratio is None else f"**{ratio.median:.2f}** ({ratio.least:.2f}–{ratio.most:.2f})"
