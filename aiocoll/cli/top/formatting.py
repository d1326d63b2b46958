"""Texts of `aiocoll top`: table cells and the lines around tables, as plain text or for `rich`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from aiocoll.cli.top.jobs import JobOutcome
from aiocoll.cli.top.model import GroupView, HostLoad, PendingView, RankView

__all__ = [
    "BAD",
    "LIMITED",
    "format_duration",
    "format_ended_job",
    "format_groups",
    "format_headline",
    "format_host_load",
    "history",
    "kind_table",
    "name_ranks",
    "notes",
    "rank_numbers",
    "rank_table",
    "size",
]  # fmt: skip

#: States in which a rank delays the others.
LIMITED: Final = ("late", "blocked", "stopped", "silent", "slow")
BAD: Final = ("gone", "lost")
#: Maximum number of ranks in the table of a group; further ranks are only counted.
ROWS: Final = 40
#: Minimum terminal width at which process ids are shown.
WIDE: Final = 100
#: Minimum number of request rounds before the bar chart of rates is shown.
ROUNDS: Final = 3
_BARS: Final = "▁▂▃▄▅▆▇█"

_RANKS: Final = ("rank", "state", "ops/s", "bytes/s", "p50", "p99", "waited for", "waits", "pending")
_KINDS: Final = ("operation", "algorithm", "by", "ops/s", "bytes/s", "p50", "p99")
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

Table = tuple[Sequence[str], int, list[Sequence[str]]]


def format_headline(group: GroupView) -> str:
    """Return the line above the tables of a group: name, size, state and rates."""
    rates = "" if group.ops is None else f", {_count(group.ops)} ops/s, {size(group.nbytes)}/s"
    state = group.state if group.cause is None else f"{group.state}: {group.cause}"
    return f"{group.name}: {group.size} ranks, {state}{rates}"


def format_host_load(load: HostLoad | None) -> str:
    """Return the line about the load of this host."""
    if load is None:
        return ""
    words = f"host: load {load.average:.1f} on {load.cores} core{'s' * (load.cores != 1)}"
    return words + "; ranks wait for a free core" * load.is_high


def history(group: GroupView) -> str:
    """Return a line with a bar chart of the operations per second in the last rounds; "" for too few rounds."""
    if len(group.history) < ROUNDS:
        return ""
    most = max(group.history) or 1.0
    bars = "".join(_BARS[round(each / most * (len(_BARS) - 1))] for each in group.history)
    return f"ops/s, last {len(group.history)} rounds: {bars} (highest {_count(most)})"


def format_ended_job(title: str, end: JobOutcome | None, groups: Sequence[GroupView], width: int) -> str:
    """Return the text about a job that has ended: its exit code and cause, and the last state of its groups."""
    lines = [f"{title}: it has ended" + (f" with exit code {end.code}" if end is not None else "")]
    lines += end.lines if end is not None else ()
    last = f"\nlast state:\n{format_groups(groups, width)}" if groups else ""
    return "".join(f"{line}\n" for line in lines) + last


def rank_table(group: GroupView, width: int, most: int = ROWS) -> Table:
    """Return the head of the table of ranks, the number of its left-aligned columns, and its rows."""
    rows = [_rank_row(each) for each in group.ranks[:most]]
    if width < WIDE:
        return _RANKS, 2, rows
    processes = ["-" if each.process is None else str(each.process) for each in group.ranks[:most]]
    return (*_RANKS, "process"), 2, [(*row, number) for row, number in zip(rows, processes, strict=True)]


def kind_table(group: GroupView) -> Table:
    """Return the head of the table of operations, the number of its left-aligned columns, and its rows."""
    return (
        _KINDS,
        3,
        [
            (
                each.op,
                each.algorithm or "-",
                each.transport or "-",
                *(_count(each.ops), size(each.nbytes), format_duration(each.p50), format_duration(each.p99)),
            )
            for each in group.kinds
        ],
    )


def notes(group: GroupView, most: int = ROWS) -> Iterable[tuple[str, str]]:
    """Yield pairs of a rank state (or "") and a line about it, to print below the table of ranks."""
    if len(group.ranks) > most:
        yield "", f"and {len(group.ranks) - most} more ranks, for which others wait less"
    by_detail: dict[tuple[str, str], list[int]] = {}
    for rank in group.ranks:
        if rank.detail and rank.state not in ("revoked", "remote", "closed", "left"):
            by_detail.setdefault((rank.state, rank.detail), []).append(rank.rank)
    for (state, detail), ranks in by_detail.items():
        yield state, f"{name_ranks(ranks)} {state}: {detail}"
    for each in group.pending:
        yield "", _in_flight(each)
    if not group.counted:
        yield "", "no rates: GroupOptions(stats=False) or AIOCOLL_STATS=0 disables the counters of the ranks"


def format_groups(groups: Sequence[GroupView], width: int, load: HostLoad | None = None) -> str:
    """Return the tables and notes of all groups as plain text."""
    lines: list[str] = []
    if not groups:
        lines.append("no rank has an open group")
    for group in groups:
        lines += [""] * bool(lines)
        lines += [group.verdict, format_headline(group)]
        lines += _aligned(rank_table(group, width))
        lines += [text for _, text in notes(group)]
        if group.kinds:
            lines += ["", *_aligned(kind_table(group))]
        lines += [history(group)] * bool(history(group))
    lines += [format_host_load(load)] * (load is not None and bool(groups))
    return "".join(f"{line}\n" for line in lines)


def format_duration(seconds: float | None) -> str:
    """Return a time in seconds as text with a unit."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} µs"
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def size(nbytes: float | None) -> str:
    """Return a number of bytes as text with a unit."""
    if nbytes is None:
        return "-"
    step = min(max(int(nbytes).bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    value = nbytes / 1024**step
    return f"{value:.0f} {_UNITS[step]}" if value >= 100 or not step else f"{value:.3g} {_UNITS[step]}"


def _rank_row(rank: RankView) -> Sequence[str]:
    pending = "-"
    if rank.missing:
        pending = f"not in {rank.missing}"
    elif rank.pending:
        pending = f"{rank.pending}, {format_duration(rank.oldest)}" if rank.oldest >= 0.25 else str(rank.pending)
    return (
        str(rank.rank),
        rank.state,
        _count(rank.ops),
        size(rank.nbytes),
        *(format_duration(rank.p50), format_duration(rank.p99), _share(rank.waited_for), _share(rank.waits), pending),
    )


def _in_flight(each: PendingView) -> str:
    missing = f", {name_ranks(each.missing)} missing" if each.missing else ""
    seconds = format_duration(each.seconds)
    return f"{each.op} pending for {seconds} on {name_ranks(each.ranks)}{missing}, called at {each.site}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return a list of ranks as text, such as "rank 0-2, 5"."""
    return f"rank {rank_numbers(ranks)}"


def rank_numbers(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks as text, with ranges for consecutive ranks."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    shown = [f"{first}" if first == last else f"{first}-{last}" for first, last in parts[:8]]
    return f"{', '.join(shown)}{', …' if len(parts) > 8 else ''}"


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:.3g}M" if value >= 999_950 else f"{value / 1e3:.3g}k" if value >= 9_999.5 else f"{value:.4g}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.0f} %"


def _aligned(table: Table) -> list[str]:
    head, words, rows = table
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if number < words else cell.rjust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (head, *rows)
    ]
