"""The benchmark against other libraries: `make bench`, or `make bench ARGS="--quick"`.

What is compared: allreduce of float32 at all sizes, the other collectives at two, many calls in flight; with aiocoll
over its transports, torch's Gloo (blocking, and awaited as asyncio programs do), MPICH and Open MPI through mpi4py.

How: a launch starts real processes, one per rank, and measures every case. One round launches every system once; rounds
follow each other, each starting with another system, so that whatever else the machine does hits all alike. No barrier
between iterations; the time of an iteration is that of its slowest rank. Every result is checked. The peers live in
environments of their own under bench/.venvs, made on the first run; what cannot be installed is skipped, and said so.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from busy import busy
from environments import Unavailable, prepare
from inflight import Case
from lag import SETTINGS, lag
from launch import launch
from markdown import name_of, ranks_of
from report import Report, write_csv
from results import Results
from roofline import roofline
from systems import DEFAULT_TRANSPORTS, PEERS, TRANSPORTS, System, ours
from tqdm import tqdm

from aiocoll.cli.bench import size
from aiocoll.cli.measure import Effort
from aiocoll.cli.workload import KINDS

KIB, MIB = 1 << 10, 1 << 20
SIZES = (4, 8, 64, KIB, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
QUICK_SIZES = (8, 64 * KIB, MIB, 16 * MIB)
#: Of the other collectives: of a rank's array or block.
OTHER_SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
#: Calls in flight together, and the bytes of each.
INFLIGHT, INFLIGHT_SIZE = 64, 4 * KIB
PARTS = ("allreduce", "collectives", "inflight", "lag", "roofline")

#: Launches of each system; the contract's numbers are medians over at least 5.
LAUNCHES, QUICK_LAUNCHES = 5, 2
#: Of a case in one launch: with these a run takes about 10 minutes on 2 cores, and 256 MiB are still seen 20 times.
EFFORT, QUICK_EFFORT = Effort(0.12, 4, 1000), Effort(0.03, 3, 200)
#: Iterations of loop lag at one setting, which fill a few thousand callbacks.
LAG_ITERATIONS, QUICK_LAG_ITERATIONS = 8, 2
#: Seconds for each figure of the roofline.
ROOFLINE, QUICK_ROOFLINE = 0.5, 0.1
#: Seconds of one launch: to start, and for each case; no launch that goes well takes a quarter of that.
START, EACH = 30, 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/main.py", description="Compare aiocoll with Gloo, MPICH and Open MPI on this machine."
    )
    add = parser.add_argument
    add("-n", type=int, nargs="+", default=[2, 4], metavar="RANKS", help="world sizes (default: 2 4)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--sizes", type=size, nargs="+", metavar="SIZE", help="of allreduce, such as 8 64K 1M")
    add("--collectives", nargs="+", choices=KINDS[1:], default=list(KINDS[1:]), help="besides allreduce (default: all)")
    add("--transports", nargs="+", choices=TRANSPORTS, default=list(DEFAULT_TRANSPORTS), help="of aiocoll")
    add("--peers", nargs="*", choices=tuple(PEERS), default=list(PEERS), help="default: all; none if empty")
    add("--launches", type=int, metavar="N", help=f"of each system (default: {LAUNCHES})")
    add("--busy", type=int, default=0, metavar="N", help="processes beside that keep a core busy each (default: 0)")
    add("--quick", action="store_true", help="few sizes and launches, under 90 seconds")
    add("--markdown", type=Path, metavar="FILE", help="write the report there too")
    add("--csv", type=Path, metavar="FILE", help="write the figures there")
    add("--png", type=Path, metavar="DIR", help="draw pictures there")
    args = parser.parse_args()
    if min(args.n) < 2:
        parser.error("-n: at least 2 ranks")
    if args.launches is not None and args.launches < 1:
        parser.error("--launches: at least 1")
    if args.busy < 0:
        parser.error("--busy: at least 0")
    args.sizes = sorted(args.sizes or (QUICK_SIZES if args.quick else SIZES))
    args.launches = args.launches or (QUICK_LAUNCHES if args.quick else LAUNCHES)
    return args


def main() -> None:
    start = time.monotonic()
    args = arguments()
    pythons, skipped = _environments(args.peers)
    first, *others = args.transports  # the first stands for us where not all are shown
    systems = [
        ours(first, KINDS),
        *map(ours, others),
        *(PEERS[name] for name in args.peers if PEERS[name].name not in skipped),
    ]
    report = Report(systems, skipped, busy=args.busy)
    try:
        with busy(args.busy):
            _measure(args, systems, pythons, report)
    except KeyboardInterrupt:
        print("\nInterrupted: this is what there is so far.", file=sys.stderr)
    report.seconds = time.monotonic() - start
    text = report.text()
    print(text)
    if args.markdown is not None:
        args.markdown.write_text(text + "\n")
    if args.csv is not None:
        write_csv(args.csv, report.results)
    if args.png is not None:
        from plots import plot

        for results in report.results:
            plot(results, systems[0].name, args.png)


def _environments(peers: Sequence[str]) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the Pythons of the environments, and why peers are skipped."""
    pythons: dict[str, Path] = {}
    failed: dict[str, str] = {}
    skipped = {}
    for peer in peers:
        name = PEERS[peer].environment
        assert name is not None
        if name not in pythons and name not in failed:
            try:
                pythons[name] = prepare(name)
            except Unavailable as error:
                failed[name] = str(error)
        if name in failed:
            skipped[PEERS[peer].name] = failed[name]
    return pythons, skipped


def _cases(args: argparse.Namespace) -> Iterator[Case]:
    if "allreduce" in args.parts:
        yield from (Case("allreduce", nbytes) for nbytes in args.sizes)
    if "collectives" in args.parts:
        for kind in args.collectives:
            yield from (Case(kind, nbytes) for nbytes in ((0,) if kind == "barrier" else OTHER_SIZES))
    if "inflight" in args.parts:
        yield Case("allreduce", INFLIGHT_SIZE, INFLIGHT)


def _measure(args: argparse.Namespace, systems: Sequence[System], pythons: dict[str, Path], report: Report) -> None:
    cases = list(_cases(args))
    launches = len(args.n) * args.launches * len(systems) if cases else 0
    settings = SETTINGS[: 1 if args.quick else None]
    lagging = args.n[: 1 if args.quick else None] if "lag" in args.parts else []
    lags = len(lagging) * len(settings)
    with tqdm(total=launches + lags, unit="launch", file=sys.stderr, dynamic_ncols=True) as progress:
        for world_size in args.n:
            if "roofline" in args.parts:
                progress.set_description(f"roofline, {ranks_of(world_size)}")
                report.rooflines.append(roofline(world_size, QUICK_ROOFLINE if args.quick else ROOFLINE))
            if cases:
                results = Results(world_size, [system.name for system in systems])
                report.results.append(results)
                _rounds(args, systems, pythons, cases, results, progress)
        for world_size in lagging:
            report.lags[world_size] = {}
            for loop, transport in settings:
                progress.set_description(f"loop lag, {world_size} ranks, {loop}, {transport}")
                iterations = QUICK_LAG_ITERATIONS if args.quick else LAG_ITERATIONS
                report.lags[world_size][loop, transport] = lag(world_size, loop, transport, iterations)
                progress.update()


def _rounds(
    args: argparse.Namespace,
    systems: Sequence[System],
    pythons: dict[str, Path],
    cases: Sequence[Case],
    results: Results,
    progress: tqdm[None],
) -> None:
    effort = QUICK_EFFORT if args.quick else EFFORT
    for number in range(args.launches):
        results.rounds.append({})
        first = number % len(systems)
        for system in (*systems[first:], *systems[:first]):
            taken = [case for case in cases if system.takes(case)]
            if taken and results.failure(system.name) is None:
                progress.set_description(f"{results.world_size} ranks, round {number + 1}, {system.name}")
                python = None if system.environment is None else pythons[system.environment]
                limit = START + EACH * len(taken)
                done = launch(system, python, results.world_size, taken, effort, limit)
                results.rounds[-1][system.name] = done
                if done.failure is not None:
                    what = name_of(taken[min(len(done.timings), len(taken) - 1)])
                    progress.write(f"{system.name} failed at {what}: {done.failure}", file=sys.stderr)
            progress.update()


if __name__ == "__main__":
    main()
