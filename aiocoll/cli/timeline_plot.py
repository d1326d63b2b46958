"""The timeline of groups as a PNG: a row per rank, bars from entry to end, and the point where the ranks diverged.

Most bars of a long record are too short to be visible, so a second picture shows the calls around the divergence, or
the last ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aiocoll.cli.divergence import Divergence, divergence
from aiocoll.cli.merge import Entry, GroupDumps, Unusable
from aiocoll.dump.timeline import lanes, named

__all__ = ["draw"]

#: Calls that one picture shows well, and how many before a divergence the second one shows.
READABLE, BEFORE = 24, 12
#: Inches: width of a picture, height of a rank's row, and what title and axis take.
WIDTH, ROW, FRAME = 14.0, 0.62, 1.1
#: Points of a label, and the width of a letter in inches then; a bar has a label if there is room.
FONT, LETTER = 7, 0.065
#: Parts of a row that collectives take, if there are messages, and that bars take in all.
COLLECTIVES, ALL = 0.6, 0.88
#: Of a row, the room for what the mark of a divergence says.
MARK = 0.3
COLOURS = ("#4477aa", "#66ccee", "#228833", "#ccbb44", "#aa3377", "#999933", "#44aa99", "#882255", "#88ccee", "#6699cc")
FAILED, PENDING, MESSAGE = "#d62728", "#ffcc99", "#bbbbbb"
#: On these, labels are black.
BRIGHT = ("#66ccee", "#ccbb44", "#88ccee", PENDING, MESSAGE)

Window = tuple[float, float]


def draw(groups: Sequence[GroupDumps], path: str) -> None:
    """Draw `groups` below each other into the file `path`.

    Raises:
        Unusable: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unusable("--png needs matplotlib: pip install 'aiocoll[trace]'") from None
    pictures = [picture for group in groups for picture in _pictures(group)]
    heights = [FRAME + ROW * group.world_size for group, *_ in pictures]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    axes = figure.subplots(len(pictures), 1, height_ratios=heights, squeeze=False)[:, 0]
    for ax, (group, apart, title, window) in zip(axes, pictures, strict=True):
        _Picture(ax, group, apart, window).draw(title)
    figure.savefig(path, format="png", dpi=110)


def _pictures(group: GroupDumps) -> list[tuple[GroupDumps, Divergence | None, str, Window]]:
    """Return what to draw of a group: all of it, and a part."""
    apart = divergence(group)
    starts = [entry["entered"] + group.shifts[rank] for rank in group.ranks for entry in group.dumps[rank]["entries"]]
    ends = [_end(group, rank, entry) for rank in group.ranks for entry in group.dumps[rank]["entries"]]
    if not starts:
        now = max(map(group.dumped, group.ranks))
        return [(group, apart, f"group {group.name!r}: nothing recorded", (now - 1.0, now))]
    whole = min(starts), max(ends)
    pictures = [(group, apart, f"group {group.name!r}: all that is remembered", whole)]
    if len(group.calls) > READABLE:
        if apart is None:
            pictures.append(
                (group, apart, f"the last {READABLE} collectives", (group.calls[-READABLE].first, whole[1]))
            )
        else:
            first = group.calls[max(0, group.calls.index(apart.call) - BEFORE)].first
            last = apart.call.first + 0.4 * (apart.call.first - first)
            pictures.append((group, apart, "around the divergence", (first, min(last, whole[1]))))
    return pictures


def _end(group: GroupDumps, rank: int, entry: Entry) -> float:
    finished = entry["finished"]
    return group.dumped(rank) if finished is None else float(finished) + group.shifts[rank]


class _Picture:
    """One part of a group's time on one pair of axes."""

    def __init__(self, ax: Any, group: GroupDumps, apart: Divergence | None, window: Window) -> None:
        self._ax = ax
        self._group = group
        self._apart = apart
        self._start, end = window
        span = max(end - self._start, 1e-6)
        self._unit, self._factor = next(
            (unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if span * factor >= 1
        )
        self._span = span * self._factor
        ops = sorted({entry["op"] for call in group.calls for entry in call.entries.values()})
        self._colours = {op: COLOURS[index % len(COLOURS)] for index, op in enumerate(ops)}

    def draw(self, title: str) -> None:
        """Draw everything."""
        group, ax = self._group, self._ax
        for rank in group.ranks:
            messages = group.entries(rank, "message")
            share = COLLECTIVES if messages else ALL
            self._row(rank, group.entries(rank, "collective"), -ALL / 2, share)
            self._row(rank, messages, -ALL / 2 + share, ALL - share)
        self._mark()
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_xlim(0, self._span)
        # Below the last row there is room for what the mark says.
        ax.set_ylim(group.world_size - 0.5 + (MARK if self._apart is not None else 0.0), -0.5)
        words = [f"rank {rank}" + "\n(no dump)" * (rank in group.silent) for rank in range(group.world_size)]
        ax.set_yticks(range(group.world_size), words, fontsize=8)
        ax.set_xlabel(f"time in {self._unit}", fontsize=8)
        ax.tick_params(labelsize=8)
        ax.grid(axis="x", linewidth=0.4, alpha=0.5)
        ax.set_axisbelow(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        self._legend()

    def _row(self, rank: int, entries: Sequence[Entry], top: float, height: float) -> None:
        """Draw the collectives, or the messages, of a rank, those that overlap on lanes of their own."""
        if not entries:
            return
        group = self._group
        placed = lanes(entries, group.dumps[rank]["clock"]["monotonic"])
        lane_height = height / (max(placed) + 1)
        for entry, lane in zip(entries, placed, strict=True):
            left = self._at(entry["entered"] + group.shifts[rank])
            right = self._at(_end(group, rank, entry))
            if right < 0 or left > self._span:
                continue
            place = rank + top + lane * lane_height
            self._bar(entry, max(left, 0.0), min(right, self._span), place, lane_height)

    def _bar(self, entry: Entry, left: float, right: float, top: float, height: float) -> None:
        state, message = entry["state"], entry["kind"] == "message"
        fill = MESSAGE if message else self._colours[entry["op"]]
        fill = {"failed": FAILED, "pending": PENDING}.get(state, fill)
        hatch, edge = ("///", FAILED) if state == "pending" else (None, "white")
        # What is shorter than a pixel is drawn as one.
        width = max(right - left, self._span / 1500)
        self._ax.broken_barh(
            [(left, width)], (top, height * 0.94), facecolor=fill, edgecolor=edge, linewidth=0.3, hatch=hatch
        )
        label = named(entry)
        room = width / self._span * (WIDTH - 1.5)
        if len(label) * LETTER < room and height * ROW * 72 > FONT:
            dark = fill in BRIGHT
            self._ax.text(
                left + width / 2,
                top + height / 2,
                label,
                fontsize=FONT,
                color="black" if dark else "white",
                ha="center",
                va="center",
                clip_on=True,
            )

    def _mark(self) -> None:
        """Show where the ranks diverged and who is missing there."""
        if self._apart is None:
            return
        call, group = self._apart.call, self._group
        first = self._at(call.first)
        self._ax.axvline(first, color=FAILED, linestyle="--", linewidth=1)
        entry = call.entries[min(call.entries)]
        right = first > self._span / 2
        self._ax.text(
            first,
            group.world_size - 0.5 + 0.9 * MARK,
            f" {named(entry)}: diverged here ",
            fontsize=FONT,
            color=FAILED,
            ha="right" if right else "left",
            va="bottom",
        )
        for rank in self._apart.missing:
            end = min(self._at(group.dumped(rank)), self._span)
            self._ax.broken_barh(
                [(first, max(end - first, self._span / 200))],
                (rank - ALL / 2, ALL),
                facecolor="none",
                edgecolor=FAILED,
                linestyle=":",
                linewidth=1.2,
            )
            self._ax.text(
                (first + max(end, first)) / 2,
                rank,
                "not entered",
                fontsize=FONT,
                color=FAILED,
                ha="center",
                va="center",
            )

    def _legend(self) -> None:
        from matplotlib.patches import Patch

        patches = [Patch(facecolor=colour, label=op) for op, colour in self._colours.items()]
        patches += [
            Patch(facecolor=FAILED, label="failed"),
            Patch(facecolor=PENDING, edgecolor=FAILED, hatch="///", label="pending"),
            Patch(facecolor=MESSAGE, label="message"),
        ]
        self._ax.legend(
            handles=patches, loc="lower right", bbox_to_anchor=(1, 1), ncols=len(patches), fontsize=7, frameon=False
        )

    def _at(self, time: float) -> float:
        return (time - self._start) * self._factor
