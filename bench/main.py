"""Benchmark of aiocoll and other libraries: `make bench`, or `make bench ARGS="--quick"`.

It compares all collectives of float32, and many calls in flight: aiocoll over its transports with torch's Gloo, MPICH
and Open MPI (through mpi4py). *On the same work* are the modes of these that leave the event loop free, *against the
limit* those that block it.

A launch starts one process per rank and measures every case. A round launches every system once, and begins with
another system than the round before, so that a change of the machine affects all systems. A launch is repeated if other
processes took too much of the cores during it. The time of an iteration is that of its slowest rank, and every result
is checked. The peers have environments under bench/.venvs, made by the first run; the report names those that cannot be
installed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from busy import busy
from environments import Unavailable, prepare
from inflight import Case
from launch import launch, launch_until_quiet
from loop_lag import SETTINGS, lag
from machine import measured_load
from markdown import name_of, ranks_of
from report import Report, write_csv
from results import Results
from roofline import roofline
from systems import DEFAULT_TRANSPORTS, PEER_CHOICES, PEERS, TRANSPORTS, System, choose_peers, make_aiocoll
from tqdm import tqdm

from aiocoll.cli.bench import size
from aiocoll.cli.measure import Effort
from aiocoll.cli.workload import KINDS
from aiocoll.machine_load import LoadMeter

KIB, MIB = 1 << 10, 1 << 20
#: Sizes of allreduce, and of a rank's array or block in the other collectives.
SIZES = (8, 4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
OTHER_SIZES = (8, 4 * KIB, 64 * KIB, MIB, 4 * MIB)
QUICK_SIZES = (8, 64 * KIB, MIB)
QUICK_OTHER_SIZES = (4 * KIB,)
#: Number of calls in flight together, and bytes of each call.
INFLIGHT, INFLIGHT_SIZE = 64, 4 * KIB
PARTS = ("allreduce", "collectives", "inflight", "lag", "roofline")

#: Number of launches of each system.
LAUNCHES, QUICK_LAUNCHES = 15, 1
#: Maximum number of repetitions of a launch while the load is high. A quick run only marks such launches.
REPEATS, QUICK_REPEATS = 5, 0
#: Effort for a case in one launch. The seconds limit slow calls: in mode "test" with 4 ranks on 2 cores, a call of
#: MPICH takes 16 ms.
EFFORT, QUICK_EFFORT = Effort(0.05, 3, 1000), Effort(0.01, 2, 200)
#: Number of allreduces in a measurement of loop lag. Together they run a few thousand callbacks.
LAG_ITERATIONS, QUICK_LAG_ITERATIONS = 8, 2
#: Seconds of measurement for each figure of the roofline.
ROOFLINE, QUICK_ROOFLINE = 0.5, 0.1
#: Seconds after which a launch counts as hung: to start, and for each case. The slowest case takes a quarter of it.
START, EACH = 30, 5


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/main.py", description="Compare aiocoll with Gloo, MPICH and Open MPI on this machine."
    )
    add = parser.add_argument
    add("-n", type=int, nargs="+", default=[2, 4], metavar="RANKS", help="world sizes (default: 2 4)")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    add("--sizes", type=size, nargs="+", metavar="SIZE", help="such as 8 64K 1M (default: more of allreduce)")
    add(
        "--collectives",
        nargs="+",
        choices=KINDS[1:],
        default=list(KINDS[1:]),
        help="in addition to allreduce (default: all)",
    )
    add("--transports", nargs="+", choices=TRANSPORTS, help="of aiocoll (default: auto pure unix tcp; --quick: auto)")
    add(
        "--peers",
        nargs="*",
        choices=PEER_CHOICES,
        default=list(PEERS),
        metavar="PEER",
        help=f"{', '.join(PEER_CHOICES)}; a library means all its modes (default: all; none if empty)",
    )
    add("--launches", type=int, metavar="N", help=f"of each system (default: {LAUNCHES})")
    add("--busy", type=int, default=0, metavar="N", help="other processes that each keep a core busy (default: 0)")
    add("--quick", action="store_true", help="few sizes and launches, under 90 seconds")
    add("--markdown", type=Path, metavar="FILE", help="write the report there too")
    add("--csv", type=Path, metavar="FILE", help="write the figures there")
    add("--png", type=Path, metavar="DIR", help="draw pictures there")
    args = parser.parse_args()
    if min(args.n) < 2:
        parser.error("-n: give at least 2 ranks")
    if args.launches is not None and args.launches < 1:
        parser.error("--launches: give at least 1")
    if args.busy < 0:
        parser.error("--busy: give at least 0")
    args.other_sizes = sorted(args.sizes or (QUICK_OTHER_SIZES if args.quick else OTHER_SIZES))
    args.sizes = sorted(args.sizes or (QUICK_SIZES if args.quick else SIZES))
    args.launches = args.launches or (QUICK_LAUNCHES if args.quick else LAUNCHES)
    args.transports = args.transports or (DEFAULT_TRANSPORTS[:1] if args.quick else DEFAULT_TRANSPORTS)
    args.peers = choose_peers(args.peers)
    return args


def main() -> None:
    start = time.monotonic()
    args = arguments()
    pythons, skipped = _environments(args.peers)
    systems = [
        *map(make_aiocoll, args.transports),
        *(PEERS[name] for name in args.peers if PEERS[name].name not in skipped),
    ]
    report = Report(systems, skipped, measured_load(), busy=args.busy)
    try:
        with busy(args.busy):
            _measure(args, systems, pythons, report)
    except KeyboardInterrupt:
        print("\nInterrupted: the report has the results so far.", file=sys.stderr)
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
    """Return the Python path for each peer library, and for each skipped library the reason."""
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
            yield from (Case(kind, nbytes) for nbytes in ((0,) if kind == "barrier" else args.other_sizes))
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
    effort, repeats = (QUICK_EFFORT, QUICK_REPEATS) if args.quick else (EFFORT, REPEATS)
    meter = LoadMeter()
    for number in range(args.launches):
        results.rounds.append({})
        first = number % len(systems)
        for system in (*systems[first:], *systems[:first]):
            measured = [case for case in cases if system.can_run(case)]
            if measured and results.failure(system.name) is None:
                progress.set_description(f"{results.world_size} ranks, round {number + 1}, {system.name}")
                python = None if system.environment is None else pythons[system.environment]
                limit = START + EACH * len(measured)
                start = partial(launch, system, python, results.world_size, measured, effort, limit)
                done = launch_until_quiet(start, meter, repeats)
                results.rounds[-1][system.name] = done
                if done.failure is not None:
                    what = name_of(measured[min(len(done.timings), len(measured) - 1)])
                    progress.write(f"{system.name} failed at {what}: {done.failure}", file=sys.stderr)
            progress.update()


if __name__ == "__main__":
    main()
