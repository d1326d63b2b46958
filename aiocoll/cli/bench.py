"""`aiocoll bench`: measurement of collectives on this machine, with a table in the format of nccl-tests.

All ranks are processes of this host, on uvloop. The comparison with other libraries is in the folder bench/ of the
repository, not in the package.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import textwrap
from contextlib import suppress

from aiocoll.algorithms.spec import spec_of
from aiocoll.cli import tune
from aiocoll.cli.arguments import describe_command, positive
from aiocoll.cli.bench_files import as_json, try_csv, write_csv
from aiocoll.cli.measure import Effort
from aiocoll.cli.sweep import HEADING, sweep
from aiocoll.cli.terminal import print_error, styled
from aiocoll.cli.workload import DTYPES, KINDS, OPS, Case
from aiocoll.errors import AiocollError
from aiocoll.machine_load import MAX_LOAD, LoadMeter, MachineLoad, load_average, usable_cores
from aiocoll.native import IMPLEMENTATION
from aiocoll.numerals import parse_int
from aiocoll.options import GroupOptions
from aiocoll.testing import run_processes
from aiocoll.transport.registry import AUTO, transports

__all__ = ["configure", "size"]

#: Ratio between one benchmark size and the next. With 4, the table of all sizes fits on a screen.
FACTOR = 4
UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
#: Measuring effort per size. Half a second suffices for the p99 of short calls; calls of 256 MiB get 5 iterations.
EFFORT = Effort(seconds=0.5, least=5, most=2000)
#: Timeouts in seconds, for the rendezvous and for each case. The slowest case takes a tenth of its timeout.
START, EACH = 60.0, 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `bench`; see `aiocoll.plugins.Command`."""
    describe_command(
        parser,
        codes={0: "all results were right", 1: "a result was wrong, or could not be measured or written"},
        usage="aiocoll bench [COLLECTIVE] [options]",
        description="Measure a collective between processes of this machine, for sizes from --min to --max in steps "
        f"of {FACTOR}. Times are those of the slowest rank. Results are checked.",
        epilog="Sizes are bytes, or end in K, M or G (1024 each): of a rank's array, or of all blocks together. "
        "busbw is what a link carries, as nccl-tests defines it.",
    )
    parser.add_argument(
        "collective",
        nargs="?",
        choices=KINDS,
        default="allreduce",
        metavar="COLLECTIVE",
        help=f"{', '.join(KINDS)} (default: allreduce)",
    )
    parser.add_argument("-n", "--nproc", type=positive, default=2, metavar="RANKS", help="number of ranks (default: 2)")
    parser.add_argument("--min", type=size, default=4, metavar="SIZE", help="the smallest size (default: 4)")
    parser.add_argument("--max", type=size, default=256 << 20, metavar="SIZE", help="the largest size (default: 256M)")
    parser.add_argument(
        "--transport",
        type=_transport,
        default=AUTO,
        metavar="NAME",
        help=f"{AUTO}, {', '.join(transports.names())}, or the name of a plugin (default: {AUTO})",
    )
    parser.add_argument("--op", choices=OPS, default="sum", help="the reduction (default: sum)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the elements (default: float32)")
    parser.add_argument("--csv", metavar="FILE", help="also write the table to this file")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object with all figures, the machine and the versions"
    )
    tune.add_arguments(parser)
    parser.set_defaults(command=lambda args: _tune(args, parser) if args.tune else _run(args, parser))


def size(text: str) -> int:
    """Parse a size such as 64K; return the number of bytes.

    Raises:
        argparse.ArgumentTypeError: the text is not a size.
    """
    number = text.rstrip("KkMmGg")
    unit = text[len(number) :].upper()
    with suppress(ValueError):
        if unit in UNITS and (value := parse_int(number)) > 0:
            return value * UNITS[unit]
    raise argparse.ArgumentTypeError(f"{text!r} is not a size; write a number of bytes, such as 4096, 64K or 2G")


def _transport(text: str) -> str:
    try:
        return GroupOptions(transport=text).transport
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _tune(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if args.json:
        parser.error("--json: not allowed with --tune, which writes a JSON file")
    return tune.run(args)


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        cases = _cases(args)
        if args.csv is not None:
            try_csv(args.csv)
    except ValueError as error:
        parser.error(str(error))
    average, meter = load_average(), LoadMeter()
    if not args.json:
        print(_title(args), styled(HEADING, "heading", sys.stdout), sep="\n", flush=True)
    try:
        timings = asyncio.run(
            run_processes(
                args.nproc,
                sweep,
                cases,
                EFFORT,
                not args.json,
                options=GroupOptions(transport=args.transport),
                timeout=START + EACH * len(cases),
                loop="uvloop",
            )
        )
        if args.csv is not None:
            write_csv(args.csv, args, cases, timings[0])
    except (AiocollError, ChildProcessError, TimeoutError, OSError) as error:
        print_error("bench", error)
        return 1
    load = meter.lap()
    print(as_json(args, average, load, cases, timings[0]) if args.json else _footer(load))
    return int(any(timing.wrong for timing in timings[0]))


def _title(args: argparse.Namespace) -> str:
    op = f" {args.op}" if spec_of(args.collective).reduces else ""
    where = f"{args.nproc} ranks on {len(usable_cores())} cores, transport {args.transport}"
    return _comment(f"{args.collective}{op}, {args.dtype}, {where}, {IMPLEMENTATION}")


def _footer(load: MachineLoad) -> str:
    warning = f"; do not trust the times: more than {MAX_LOAD:g} cores were not available" if load.is_high else ""
    return _comment(f"load: {load}{warning}")


def _comment(text: str) -> str:
    return textwrap.fill(f"# {text}", 80, subsequent_indent="# ")


def _cases(args: argparse.Namespace) -> list[Case]:
    """Return the benchmark cases that the arguments request.

    Raises:
        ValueError: the arguments contradict each other; the message names the one to change.
    """
    if args.op == "avg" and args.collective == "scan":
        raise ValueError("--op avg: not defined for scan; use sum")
    if args.collective == "barrier":
        return [Case("barrier", 0)]
    if args.min > args.max:
        raise ValueError(f"--min {args.min}: must not be more than --max, {args.max}")
    sizes = [args.min]
    while sizes[-1] * FACTOR <= args.max:
        sizes.append(sizes[-1] * FACTOR)
    return [Case(args.collective, size, dtype=args.dtype, op=args.op) for size in sizes]
