"""Pictures of allreduce by array size: time, bus bandwidth, and the speed relative to peers, if any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from inflight import Case
from markdown import ranks_of, size_of
from results import Results
from systems import PEERS

mpl.use("Agg")
from matplotlib import pyplot as plt

_PEERS = {system.name for system in PEERS.values()}
#: Size in inches, and dots per inch.
SIZE, DPI = (18, 5.5), 110


def plot(results: Results, compared_system: str, folder: Path) -> Path | None:
    """Write the picture of a world size and return its path; return None if no allreduce was measured."""
    cases = results.cases(lambda case: case.kind == "allreduce" and case.inflight == 1)
    if not cases:
        return None
    panels = 3 if _PEERS & set(results.systems) else 2
    figure, (times, bandwidths, *ratios) = plt.subplots(1, panels, figsize=SIZE, layout="constrained")
    for number, system in enumerate(results.systems):
        found = [(case, summary) for case in cases if (summary := results.summary(system, case)) is not None]
        sizes = [case.nbytes for case, _ in found]
        style: dict[str, Any] = {"label": system, "marker": "s" if system in _PEERS else "o", "markersize": 4}
        style |= {"linestyle": "--" if system in _PEERS else "-", "color": f"C{number}"}
        times.plot(sizes, [each.figures.p50 * 1e6 for _, each in found], **style)
        # Show the algorithm bandwidth for a single rank, whose bus bandwidth is 0.
        speeds = [(each.figures.busbw if results.world_size > 1 else each.figures.algbw) / 1e9 for _, each in found]
        bandwidths.plot(sizes, speeds, **style)
        if system in _PEERS:
            compared = [
                (case.nbytes, ratio.median) for case in cases if (ratio := results.ratio(case, compared_system, system))
            ]
            ratios[0].plot(*zip(*compared, strict=True), **style) if compared else None
    _finish(times, "time, µs", cases)
    _finish(bandwidths, f"{'bus ' if results.world_size > 1 else ''}bandwidth, GB/s", cases)
    for axes in ratios:
        axes.axhline(1, color="black", linewidth=0.8)
        _finish(axes, f"times faster: {compared_system} than each peer", cases)
    figure.suptitle(f"allreduce of float32, {ranks_of(results.world_size)}")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"allreduce-{results.world_size}-ranks.png"
    figure.savefig(path, dpi=DPI)
    plt.close(figure)
    return path


def _finish(axes: Any, title: str, cases: list[Case]) -> None:
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks([case.nbytes for case in cases], [size_of(case.nbytes) for case in cases], rotation=60)
    axes.grid(True, which="major", alpha=0.4)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)
