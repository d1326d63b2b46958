"""PNG timelines of groups: the verdict as title, one row per rank, waiting in pale and transfer in solid colours.

Most bars of a long record would be thinner than a pixel. A long record therefore gets an overview with shares of time,
and a second picture with the calls around the divergence, or with the last calls.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from aiocoll.cli.divergence import Finding, diagnose, divergence, lateness
from aiocoll.cli.merge import Entry, GroupDumps, MergedCall, Unusable
from aiocoll.dump.timeline import lanes, named

__all__ = ["draw", "make_pictures"]

#: Maximum number of calls that a picture shows as bars, and number of calls shown before the call in the verdict.
READABLE, BEFORE = 24, 12
#: Number of time bins in the overview.
BINS = 240
#: Sizes in inches: width of a picture; heights of a rank's row, of title plus axis, of a line of the verdict.
WIDTH, ROW, FRAME, LINE = 14.0, 0.62, 1.1, 0.32
#: Maximum characters of a line of the verdict.
COLUMNS = 125
#: Font size of labels in points, and width of a letter in inches. A label is drawn only if its bar has room for it.
FONT, LETTER = 8, 0.075
#: Fractions of a row's height: for collectives if the row also has messages, and for all bars together.
COLLECTIVES, ALL = 0.6, 0.88
COLOURS = ("#4477aa", "#228833", "#ccbb44", "#aa3377", "#66ccee", "#999933", "#44aa99", "#882255", "#88ccee", "#6699cc")
FAULT, TINT, MESSAGE = "#c1121f", "#fdecea", "#999999"
#: Opacity of the bars that show waiting.
PALE = 0.28

Window = tuple[float, float]


def draw(groups: Sequence[GroupDumps], path: str) -> None:
    """Draw the timelines of `groups`, one below the other, into the file `path`.

    Raises:
        Unusable: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unusable("--png needs matplotlib: pip install 'aiocoll[trace]'") from None
    pictures = [picture for group in groups for picture in make_pictures(group)]
    heights = [picture.height for picture in pictures]
    figure = Figure(figsize=(WIDTH, sum(heights)), layout="constrained")
    axes = figure.subplots(len(pictures), 1, height_ratios=heights, squeeze=False)[:, 0]
    for ax, picture in zip(axes, pictures, strict=True):
        picture.draw(ax)
    figure.savefig(path, format="png", dpi=110)


def make_pictures(group: GroupDumps) -> Iterator[_Picture]:
    """Yield the pictures of a group: one with all calls; for many calls, one with some calls and an overview."""
    finding = diagnose(group, divergence(group), lateness(group))
    verdict = textwrap.fill(f"{group.name}: {finding.text}", COLUMNS)
    starts = [entry["entered"] + group.shifts[rank] for rank in group.ranks for entry in group.dumps[rank]["entries"]]
    ends = [_end(group, rank, entry) for rank in group.ranks for entry in group.dumps[rank]["entries"]]
    if not starts:
        now = max(map(group.dumped, group.ranks))
        yield _Picture(group, finding, (now - 1.0, now), verdict, "nothing recorded")
        return
    whole = min(starts), max(ends)
    if len(group.calls) <= READABLE:
        yield _Picture(group, finding, whole, verdict, "all recorded calls")
        return
    if finding.call is None:
        part = group.calls[-READABLE].first, whole[1]
        yield _Picture(group, finding, part, verdict, f"the last {READABLE} collectives")
    else:
        first = group.calls[max(0, group.calls.index(finding.call) - BEFORE)].first
        # Give the wait in this call only half of the picture: drawn in full, it would make earlier calls too narrow.
        last = min(finding.call.first + max(finding.call.first - first, 1e-4), whole[1])
        yield _Picture(group, finding, (first, last), verdict, f"around {named(_any(finding.call))}")
    yield _Overview(group, finding, whole, "", f"all {len(group.calls)} recorded collectives: share of time")


def _end(group: GroupDumps, rank: int, entry: Entry) -> float:
    finished = entry["finished"]
    return group.dumped(rank) if finished is None else float(finished) + group.shifts[rank]


def _any(call: MergedCall) -> Entry:
    return call.entries[min(call.entries)]


class _Picture:
    """A picture of a time window of a group, with a bar for each call."""

    def __init__(self, group: GroupDumps, finding: Finding, window: Window, verdict: str, title: str) -> None:
        self._group = group
        self._finding = finding
        self._verdict = verdict
        self._title = title
        self._start, end = window
        span = max(end - self._start, 1e-6)
        self._unit, self._factor = next(
            (unit, factor) for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)) if span * factor >= 1
        )
        self._span = span * self._factor
        ops = sorted({entry["op"] for call in group.calls for entry in call.entries.values()})
        self._colours = {op: COLOURS[index % len(COLOURS)] for index, op in enumerate(ops)}
        self._calls = {(call.key, call.seq): call for call in group.calls}
        #: Legend entries for the kinds of bars drawn so far: arguments of `Patch` by label.
        self._kinds: dict[str, dict[str, Any]] = {}

    @property
    def height(self) -> float:
        """Return the height of the picture in inches."""
        lines = self._verdict.count("\n") + 1 if self._verdict else 0
        return FRAME + ROW * self._group.world_size + LINE * lines

    def draw(self, ax: Any) -> None:
        """Draw the picture on the matplotlib axes `ax`."""
        group = self._group
        self._ax = ax
        self._tint_fault()
        self._draw_rows()
        self._label_fault()
        if self._verdict:
            ax.text(
                *(0, 1.0 + 0.42 / (ROW * group.world_size), self._verdict),
                transform=ax.transAxes,
                fontsize=13,
                fontweight="bold",
                va="bottom",
                color=FAULT if group.cause is not None or self._finding.ranks else "black",
            )
        ax.set_title(self._title, loc="left", fontsize=9, color="#555555")
        ax.set_xlim(0, self._span)
        ax.set_ylim(group.world_size - 0.5, -0.5)
        words = [f"rank {rank}" + "\n(no dump)" * (rank in group.silent) for rank in range(group.world_size)]
        ax.set_yticks(range(group.world_size), words, fontsize=9)
        for rank in self._finding.ranks:
            ax.get_yticklabels()[rank].set(color=FAULT, fontweight="bold")
        ax.set_xlabel(f"time in {self._unit}", fontsize=8)
        ax.tick_params(axis="x", labelsize=8)
        ax.grid(axis="x", linewidth=0.4, alpha=0.5)
        ax.set_axisbelow(True)
        for side in ("top", "right"):
            ax.spines[side].set_visible(False)
        self._draw_legend()

    def _draw_rows(self) -> None:
        group = self._group
        for rank in group.ranks:
            messages = group.entries(rank, "message")
            share = COLLECTIVES if messages else ALL
            self._draw_row(rank, group.entries(rank, "collective"), -ALL / 2, share)
            self._draw_row(rank, messages, -ALL / 2 + share, ALL - share)

    def _draw_row(self, rank: int, entries: Sequence[Entry], top: float, height: float) -> None:
        """Draw the collectives, or the messages, of a rank, with overlapping calls in separate lanes."""
        if not entries:
            return
        group = self._group
        placed = lanes(entries, group.dumps[rank]["clock"]["monotonic"])
        lane_height = height / (max(placed) + 1)
        for entry, lane in zip(entries, placed, strict=True):
            left = self._at(entry["entered"] + group.shifts[rank])
            right = self._at(_end(group, rank, entry))
            if right >= 0 and left <= self._span:
                middle = self._at(self._wait_end(rank, entry))
                self._draw_call(entry, (left, middle, right), rank + top + lane * lane_height, lane_height)

    def _wait_end(self, rank: int, entry: Entry) -> float:
        """Return when a rank stopped to wait in a call: when the last rank entered the call, or when the call ended."""
        end = _end(self._group, rank, entry)
        if entry["kind"] == "message" or entry["seq"] is None:
            return end if entry["state"] != "finished" else float(entry["entered"]) + self._group.shifts[rank]
        call = self._calls[entry["key"], entry["seq"]]
        if entry["state"] != "finished":
            return end
        return min(max(call.entered.values()), end)

    def _draw_call(self, entry: Entry, times: tuple[float, float, float], top: float, height: float) -> None:
        """Draw one call; `times` are its start, the end of its wait, and its end."""
        left, middle, right = (min(max(time, 0.0), self._span) for time in times)
        is_message = entry["kind"] == "message"
        kind = "message" if is_message else entry["op"]
        fill = MESSAGE if is_message else self._colours[entry["op"]]
        is_unfinished = entry["state"] != "finished"
        if middle > left:
            label = f"{kind}: waiting for other ranks"
            self._kinds[label] = {"facecolor": fill, "alpha": PALE}
            hatch = "///" if entry["state"] == "pending" else None
            self._add_bar(left, middle, top, height, facecolor=fill, alpha=PALE, hatch=hatch)
        if right > middle or not is_unfinished:
            self._kinds[f"{kind}: transfer"] = {"facecolor": fill}
            self._add_bar(middle, right, top, height, facecolor=fill)
        if is_unfinished:
            # Draw only a thin edge, so that the missing rank stands out, not the ranks that waited for it.
            self._ax.plot([right, right], [top, top + height * 0.94], color=FAULT, linewidth=2)
            self._kinds["failed" if entry["state"] == "failed" else "pending at the end"] = {"facecolor": FAULT}
        text = named(entry)
        room = (right - left) / self._span * (WIDTH - 1.5)
        if len(text) * LETTER < room and height * ROW * 72 > FONT:
            colour = "white" if not is_unfinished and right - middle > middle - left else "black"
            place = (left + right) / 2, top + height / 2
            self._ax.text(*place, text, fontsize=FONT, color=colour, ha="center", va="center", clip_on=True)

    def _add_bar(self, left: float, right: float, top: float, height: float, **style: Any) -> None:
        width = max(right - left, self._span / 1500)  # at least a pixel
        self._ax.broken_barh([(left, width)], (top, height * 0.94), linewidth=0, **style)

    def _tint_fault(self) -> None:
        """Colour the background of the rows of the ranks at fault."""
        for rank in self._finding.ranks:
            self._ax.axhspan(rank - 0.5, rank + 0.5, color=TINT, zorder=0)

    def _label_fault(self) -> None:
        """Write the state of the ranks at fault into their rows, from the time when the others began to wait."""
        finding = self._finding
        if not finding.ranks or not finding.label:
            return
        since = self._at(finding.call.first) if finding.call is not None else 0.0
        for rank in finding.ranks:
            is_absent = finding.call is None or rank not in finding.call.entries
            if is_absent and since < self._span:
                self._ax.broken_barh(
                    [(since, self._span - since)],
                    (rank - ALL / 2, ALL),
                    facecolor="none",
                    edgecolor=FAULT,
                    linestyle="--",
                    linewidth=1.2,
                )
            text = finding.label if len(finding.label) < COLUMNS // 2 else textwrap.fill(finding.label, COLUMNS // 2)
            near = since < 0.7 * self._span
            self._ax.text(
                since + self._span / 200 if near else since - self._span / 200,
                rank,
                text,
                fontsize=FONT + 1,
                fontweight="bold",
                color=FAULT,
                ha="left" if near else "right",
                va="center",
                bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
            )

    def _draw_legend(self) -> None:
        from matplotlib.patches import Patch

        patches = [Patch(label=label, **style) for label, style in sorted(self._kinds.items())]
        if patches:
            self._ax.legend(
                handles=patches,
                loc="lower right",
                bbox_to_anchor=(1, 1),
                ncols=min(len(patches), 6),
                fontsize=8,
                frameon=False,
            )

    def _at(self, time: float) -> float:
        return (time - self._start) * self._factor


class _Overview(_Picture):
    """A picture of the whole record: for each rank and time bin, the shares of transfer and of waiting."""

    def _draw_rows(self) -> None:
        group = self._group
        edges = np.linspace(0.0, self._span, BINS + 1)
        width = self._span / BINS
        for rank in group.ranks:
            transfer, waiting = np.zeros(BINS), np.zeros(BINS)
            for entry in group.entries(rank, "collective"):
                left = self._at(entry["entered"] + group.shifts[rank])
                right = self._at(_end(group, rank, entry))
                middle = self._at(self._wait_end(rank, entry))
                waiting += _overlap(edges, left, middle) / width
                transfer += _overlap(edges, max(left, middle), right) / width
            for share, base, label, style in (
                (np.minimum(transfer, 1.0), np.zeros(BINS), "transfer", {"facecolor": COLOURS[0]}),
                (np.minimum(waiting, 1.0), transfer, "waiting", {"facecolor": COLOURS[0], "alpha": PALE}),
            ):
                share = np.clip(np.minimum(base + share, 1.0) - base, 0.0, 1.0)
                if share.any():
                    self._kinds[label] = style
                    bottom = rank + ALL / 2 - ALL * base
                    self._ax.bar(edges[:-1], -ALL * share, width, bottom, align="edge", linewidth=0, **style)


def _overlap(edges: Any, left: float, right: float) -> Any:
    """Return for each time bin the length of its overlap with the interval from `left` to `right`."""
    return np.clip(np.minimum(edges[1:], right) - np.maximum(edges[:-1], left), 0.0, None)
