"""The live table of `aiocoll top`, drawn with `rich`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from aiocoll.cli.top.formatting import (
    BAD,
    LIMITED,
    Table,
    format_headline,
    format_host_load,
    history,
    kind_table,
    notes,
    rank_table,
)
from aiocoll.cli.top.model import GroupView, HostLoad
from aiocoll.errors import BackendUnavailableError

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.styled import Styled
    from rich.table import Table as RichTable
    from rich.text import Text
except ImportError as error:
    raise BackendUnavailableError(
        "the live table needs rich: pip install 'aiocoll[top]', or use --once, --json or --web"
    ) from error

__all__ = ["render", "watch"]

#: Minimum number of rank rows shown per group, and number of screen lines above and below these rows.
LEAST: Final = 4
AROUND: Final = 16

_STYLES: Final = {"ok": "green", **dict.fromkeys(LIMITED, "bold yellow"), **dict.fromkeys(BAD, "bold red")}


def watch(
    title: str,
    sample: Callable[[], Sequence[GroupView]],
    last: Callable[[], Sequence[GroupView]],
    load: Callable[[], HostLoad | None],
    over: Callable[[], bool],
    interval: float,
) -> None:
    """Show the groups that `sample()` returns, updated every `interval` seconds, until Ctrl-C or the end of the job.

    While no group is open, show the groups that `last()` returns, greyed.
    """
    console = Console()
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while not over():
            began = time.monotonic()
            live.update(render(title, sample(), *console.size, last=last(), load=load()), refresh=True)
            time.sleep(max(0.0, began + interval - time.monotonic()))


def render(
    title: str,
    groups: Sequence[GroupView],
    width: int,
    height: int,
    *,
    last: Sequence[GroupView] = (),
    load: HostLoad | None = None,
) -> RenderableType:
    """Return the content of the screen, with as many ranks as fit in `height` lines.

    If `groups` is empty, show the groups in `last`, greyed.
    """
    about = Text(
        " · ".join(filter(None, (title, format_host_load(load)))), style="dim", overflow="ellipsis", no_wrap=True
    )
    if groups:
        return Group(about, _render_groups(groups, width, height))
    if not last:
        return Group(about, Text("\nno rank has an open group"))
    return Group(
        about, Text("\nno rank has an open group; last state:"), Styled(_render_groups(last, width, height), "dim")
    )


def _render_groups(groups: Sequence[GroupView], width: int, height: int) -> RenderableType:
    most = max(LEAST, height // len(groups) - AROUND)
    parts: list[RenderableType] = []
    for group in groups:
        style = "bold" if group.state == "open" else "bold red"
        verdict_style = "bold red" if group.culprits or group.state == "revoked" else "bold green"
        parts += [Text(""), Text(group.verdict, style=verdict_style), Text(format_headline(group), style=style)]
        parts.append(_table(rank_table(group, width, most), state=1))
        parts += [Text(text, style=_STYLES.get(state, "")) for state, text in notes(group, most)]
        if group.kinds:
            parts += [Text(""), _table(kind_table(group))]
        if bars := history(group):
            parts.append(Text(bars, style="dim", overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def _table(table: Table, state: int | None = None) -> RichTable:
    head, words, rows = table
    made = RichTable(box=None, pad_edge=False, padding=(0, 1), header_style="cyan")
    for number, name in enumerate(head):
        made.add_column(name, justify="left" if number < words else "right", no_wrap=True)
    for row in rows:
        style = _STYLES.get(row[state], "") if state is not None else ""
        made.add_row(*(Text(cell, style=style if number == state else "") for number, cell in enumerate(row)))
    return made
