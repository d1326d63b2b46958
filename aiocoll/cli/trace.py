"""`aiocoll trace`: merge the dumps of ranks, and report where they diverged."""

from __future__ import annotations

import argparse

from aiocoll.cli.arguments import describe_command
from aiocoll.cli.divergence import report
from aiocoll.cli.merge import Unusable, collect
from aiocoll.cli.terminal import print_error
from aiocoll.dump.files import write_json
from aiocoll.dump.timeline import chrome_trace

__all__ = ["configure"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trace`; see `aiocoll.plugins.Command`."""
    describe_command(
        parser,
        codes={
            0: "nothing is wrong",
            1: "something is wrong: a failure, a divergence, a rank without a dump; or output could not be written",
            2: "a file cannot be used, or the command line is wrong",
        },
        description="Merge the dumps of ranks (pg.recorder.dump_json, AIOCOLL_DUMP_DIR) of one or several groups, and "
        "report for each which collective diverged first, which ranks are missing, what is pending and which rank is "
        "last.",
    )
    parser.add_argument("dumps", nargs="+", metavar="DUMP", help="a file of pg.recorder.dump_json, one per rank")
    parser.add_argument("--perfetto", metavar="FILE", help="write a trace for ui.perfetto.dev or chrome://tracing")
    parser.add_argument("--png", metavar="FILE", help="draw a timeline; needs matplotlib")
    parser.set_defaults(command=_trace)


def _trace(args: argparse.Namespace) -> int:
    try:
        groups = collect(args.dumps)
        well = True
        for number, group in enumerate(groups):
            lines, fine = report(group)
            print(*[""] * bool(number), *lines, sep="\n")
            well = well and fine
        if args.perfetto is not None:
            dumps = [group.dumps[rank] for group in groups for rank in group.ranks]
            write_json(args.perfetto, chrome_trace(dumps))
        if args.png is not None:
            from aiocoll.cli.timeline_plot import draw

            draw(groups, args.png)
    except (Unusable, OSError) as error:
        print_error("trace", error)
        return 2
    return 0 if well else 1
