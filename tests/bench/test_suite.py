"""The benchmark against other libraries: statistics, tables, failures, load, and calls of peer libraries."""

from __future__ import annotations

import asyncio
import csv
import importlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiocoll import ProcessGroup
from aiocoll.cli.calls import call_of, combine_of
from aiocoll.cli.measure import Effort, Timing, measure, times_of
from aiocoll.cli.workload import KINDS
from aiocoll.machine_load import MachineLoad
from bench.inflight import Case, Workloads, calls_of

FOLDER = Path(__file__).parents[2] / "bench"
NAMES = (
    "busy",
    "environments",
    "launch",
    "libraries",
    "limits",
    "markdown",
    "report",
    "results",
    "roofline",
    "systems",
    "tables",
)
SMALL, LARGE = Case("allreduce", 64), Case("allreduce", 16 << 20)


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """Yield the modules of bench/, a folder of programs that is not a package."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def load(others: float) -> MachineLoad:
    return MachineLoad(others, 0.0, None, inf)


def make_launch(
    bench: Any, case: Case, micros: float, failure: str | None = None, load: MachineLoad | None = None
) -> Any:
    found = {} if failure else {case: Timing([int(micros * 1000)] * 4, cpu=1e-6, wrong=0)}
    return bench.launch.Launch(found, failure, 1.0, load)


def make_results(bench: Any, case: Case, *times: Mapping[str, float]) -> Any:
    """Return benchmark results with one round per mapping. Each mapping has microseconds by system name."""
    results = bench.results.Results(2, ["aiocoll auto", "gloo blocking", "mpich blocking", "open mpi blocking"])
    results.rounds += [{name: make_launch(bench, case, value) for name, value in each.items()} for each in times]
    return results


def test_benchmark_ratio_is_the_median_over_the_rounds(bench: Any) -> None:
    results = make_results(
        bench,
        SMALL,
        {"aiocoll auto": 1, "gloo blocking": 10},
        {"aiocoll auto": 2, "gloo blocking": 60},
        {"aiocoll auto": 10, "gloo blocking": 20},
    )
    assert results.ratio(SMALL, "aiocoll auto", "gloo blocking") == pytest.approx((10, 2, 30))


def test_benchmark_ratio_uses_the_fastest_peer_library_of_each_round(bench: Any) -> None:
    results = make_results(
        bench,
        SMALL,
        {"aiocoll auto": 1, "mpich blocking": 4, "open mpi blocking": 8},
        {"aiocoll auto": 1, "mpich blocking": 9, "open mpi blocking": 2},
        {"aiocoll auto": 1, "mpich blocking": 3},
        {"mpich blocking": 3},
    )
    assert results.ratio(SMALL, "aiocoll auto", "mpich blocking", "open mpi blocking") == pytest.approx((3, 2, 4))
    assert results.ratio(SMALL, "aiocoll auto", "gloo blocking") is None


def test_summary_combines_all_launches_of_a_benchmark(bench: Any) -> None:
    results = make_results(bench, LARGE, *({"gloo blocking": value} for value in (1000, 5000, 2000)))
    summary = results.summary("gloo blocking", LARGE)
    assert (summary.launches, summary.iterations, summary.wrong) == (3, 12, 0)
    assert summary.figures.p50 == pytest.approx(2e-3)
    assert summary.figures.algbw == pytest.approx((16 << 20) / 2e-3)
    assert results.summary("mpich blocking", LARGE) is None


def test_time_of_concurrent_calls_is_reported_per_call(bench: Any) -> None:
    many = Case("allreduce", 4096, 64)
    summary = make_results(bench, many, {"gloo blocking": 6400}).summary("gloo blocking", many)
    assert summary.figures.p50 == pytest.approx(100e-6)
    assert summary.cpu == pytest.approx(1e-6 / 64)


@pytest.mark.parametrize(("gloo", "met"), [(100.1, True), (99.9, False), (None, None)])
def test_benchmark_limit_is_reported_as_met_missed_or_not_measured(
    bench: Any, gloo: float | None, met: bool | None
) -> None:
    results = make_results(bench, SMALL, {"aiocoll auto": 1.0, **({} if gloo is None else {"gloo blocking": gloo})})
    (verdict,) = [each for each in bench.limits.verdicts([results]) if each.what.endswith("against blocking Gloo")]
    assert verdict.met is met


def test_benchmark_case_has_at_most_one_limit_per_kind_of_peer(bench: Any) -> None:
    sizes = (8, 4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20)
    all_results = []
    for world_size in (2, 4):
        results = bench.results.Results(world_size, ["aiocoll auto"])
        cases = [Case(kind, size) for kind in KINDS for size in (sizes if kind != "barrier" else (0,))]
        found = {case: Timing([1000], 0.0, 0) for case in cases}
        results.rounds.append({"aiocoll auto": bench.launch.Launch(found, None, 1.0)})
        all_results.append(results)
    verdicts = list(bench.limits.verdicts(all_results))
    assert len({verdict.what for verdict in verdicts}) == len(verdicts)
    all_cells, small_ones, large_allreduces = 9 * len(sizes) + 1, 9 * 3 + 1, 3
    counts = {
        "2 ranks, against awaited peers": all_cells,
        "4 ranks, against awaited peers": 0,
        "2 ranks, against blocking MPI": all_cells,
        "4 ranks, against blocking MPI": small_ones + large_allreduces,
        "2 ranks, against blocking Gloo": all_cells - len(sizes),  # Gloo has no scan
        "4 ranks, against blocking Gloo": all_cells - len(sizes),
    }
    for against, count_iterations in counts.items():
        assert sum(verdict.what.endswith(against) for verdict in verdicts) == count_iterations
    limits = {verdict.what.removeprefix("aiocoll auto, "): verdict.limit for verdict in verdicts}
    awaited = [limits[f"scan {size}, 2 ranks, against awaited peers"] for size in map(bench.markdown.size_of, sizes)]
    assert awaited == ["≥ 5×", "≥ 4×", "≥ 2×", "≥ 2×", "≥ 1.5×", "≥ 1.2×"]
    assert limits["barrier, 2 ranks, against awaited peers"] == "≥ 5×"
    assert limits["allreduce 8 B, 2 ranks, against blocking MPI"] == "≥ 2×"
    assert limits["allreduce 256 KiB, 2 ranks, against blocking MPI"] == "≥ 1.7×"
    assert limits["allreduce 4 MiB, 2 ranks, against blocking MPI"] == "≥ 1.4×"
    assert limits["allreduce 8 B, 4 ranks, against blocking MPI"] == "≥ 1.5×"
    assert limits["barrier, 2 ranks, against blocking MPI"] == "≥ 2×"
    assert limits["gather 8 B, 2 ranks, against blocking MPI"] == "≥ 1.5×"
    assert limits["gather 4 KiB, 2 ranks, against blocking MPI"] == "≥ 1.2×"
    assert limits["gather 1 MiB, 2 ranks, against blocking MPI"] == "≥ 1×"
    assert limits["allreduce 64 KiB, 2 ranks, against blocking Gloo"] == "≥ 50×"
    assert limits["allreduce 256 KiB, 2 ranks, against blocking Gloo"] == "≥ 1×"


def test_awaited_and_blocking_peer_libraries_are_listed_in_separate_tables(bench: Any) -> None:
    names = ["aiocoll auto", "gloo future", "mpich test", "mpich blocking", "open mpi blocking", "gloo blocking"]
    results = bench.results.Results(2, names)
    times = (10, 400, 20, 2, 5, 1)
    results.rounds.append({name: make_launch(bench, SMALL, each) for name, each in zip(names, times, strict=True)})
    head, _, row = bench.tables.awaited_table(results, "aiocoll auto").splitlines()[-3:]
    assert head == (
        "| collective | size | aiocoll auto µs | gloo future µs | mpich test µs | × fastest awaited peer | #wrong |"
    )
    assert row == "| allreduce | 64 B | 10.0 (10.0) | 400.0 (400.0) | 20.0 (20.0) | **2.00** (2.00–2.00) | 0 |"
    head, _, row = bench.tables.blocking_table(results, "aiocoll auto").splitlines()[-3:]
    assert head == (
        "| collective | size | aiocoll auto µs | gloo blocking µs | mpich blocking µs | open mpi blocking µs | "
        "× faster MPI | #wrong |"
    )
    assert row == ("| allreduce | 64 B | 10.0 (10.0) | 1.0 (1.0) | 2.0 (2.0) | 5.0 (5.0) | **0.20** (0.20–0.20) | 0 |")


def test_comparison_table_without_results_of_peer_libraries_is_omitted(bench: Any) -> None:
    results = bench.results.Results(2, ["aiocoll auto", "gloo blocking"])
    results.rounds.append({name: make_launch(bench, SMALL, 1) for name in results.systems})
    assert bench.tables.awaited_table(results, "aiocoll auto") is None
    assert bench.tables.blocking_table(results, "aiocoll auto") is not None


def test_table_rows_are_marked_if_the_machine_was_loaded_during_a_launch(bench: Any) -> None:
    other = Case("scan", 64)
    results = bench.results.Results(2, ["aiocoll auto", "mpich blocking"])
    quiet, loud = load(0.3), load(0.31)
    results.rounds += [
        {
            "aiocoll auto": make_launch(bench, SMALL, 1, load=quiet),
            "mpich blocking": make_launch(bench, SMALL, 1, load=loud),
        },
        {
            "aiocoll auto": make_launch(bench, other, 1, load=quiet),
            "mpich blocking": make_launch(bench, other, 1, load=quiet),
        },
    ]
    assert results.is_disturbed(SMALL, ["aiocoll auto", "mpich blocking"])
    assert not results.is_disturbed(SMALL, ["aiocoll auto"])
    lines = bench.tables.blocking_table(results, "aiocoll auto").splitlines()
    assert lines[2] == "1 of 2 rows are marked \\*: others took more than 0.3 cores during a launch."
    assert [line.split(" | ")[0] for line in lines[-2:]] == ["| allreduce \\*", "| scan"]


class Meter:
    """A load meter whose measured intervals have the given loads; intervals between launches have a high load."""

    def __init__(self, *loads: float) -> None:
        self.loads = [load(each) for each in loads]
        self.laps = 0

    def lap(self) -> MachineLoad:
        self.laps += 1
        return load(5.0) if self.laps % 2 else self.loads[self.laps // 2 - 1]


@pytest.mark.parametrize(
    ("loads", "launches", "kept"),
    [
        ((0.1, 9.0), 1, 0),
        ((0.5, 0.1, 9.0), 2, 1),
        ((0.5, 0.4, 0.6, 0.7, 0.8, 0.9, 0.0), 6, 1),
    ],
)
def test_benchmark_launch_is_repeated_while_the_machine_load_is_high(
    bench: Any, loads: tuple[float, ...], launches: int, kept: int
) -> None:
    meter, done = Meter(*loads), []

    def start() -> Any:
        done.append(make_launch(bench, SMALL, len(done) + 1))
        return done[-1]

    best = bench.launch.launch_until_quiet(start, meter, 5)
    assert len(done) == launches
    assert best.timings == done[kept].timings
    assert (best.load, best.repeats) == (load(loads[kept]), launches - 1)


def test_launch_without_benchmark_cases_is_also_repeated_while_the_load_is_high(bench: Any) -> None:
    launches = iter(
        [bench.launch.Launch({"step": [2e-3]}, None, 1.0), bench.launch.Launch({"step": [1e-3]}, None, 1.0)]
    )
    best = bench.launch.launch_until_quiet(lambda: next(launches), Meter(0.5, 0.1), 5)
    assert (best.timings, best.load, best.repeats) == ({"step": [1e-3]}, load(0.1), 1)


def test_failed_benchmark_launch_is_not_repeated(bench: Any) -> None:
    results = iter([make_launch(bench, SMALL, 1), make_launch(bench, SMALL, 0, "exit code 1")])
    best = bench.launch.launch_until_quiet(lambda: next(results), Meter(0.5, 0.4), 5)
    assert (best.failure, best.load) == (None, load(0.5))


def test_benchmark_report_contains_the_machine_load_of_the_launches(bench: Any) -> None:
    results = bench.results.Results(2, ["aiocoll auto"])
    results.rounds += [{"aiocoll auto": make_launch(bench, SMALL, 1, load=load(each))} for each in (0.0, 0.1, 0.7)]
    results.rounds[2]["aiocoll auto"] = replace(results.rounds[2]["aiocoll auto"], repeats=5)
    report = bench.report.Report([bench.systems.make_aiocoll("auto")], {}, load(0.02), [results], seconds=90)
    lines = report.text().splitlines()
    assert any(line.endswith("load: other processes 0.02 cores, steal 0.00 cores, CPU pressure unknown, CPU quota none")
               for line in lines)  # fmt: skip
    assert lines[-1] == (
        "Took 1.5 minutes: 3 launches and 5 repetitions. Others took 0.10 cores during the median launch, 0.70 at "
        "most, and more than 0.3 during 1."
    )


def test_benchmark_report_lists_missing_and_wrong_results(bench: Any, tmp_path: Path) -> None:
    results = make_results(bench, SMALL, {"aiocoll auto": 1, "gloo blocking": 30})
    results.rounds[0]["mpich blocking"] = make_launch(bench, SMALL, 0, "exit code 1: no fabric")
    results.rounds[0]["gloo blocking"].timings[SMALL] = Timing([30_000], 0.0, 17)
    systems = [
        bench.systems.make_aiocoll("auto"),
        bench.systems.PEERS["gloo-blocking"],
        bench.systems.PEERS["mpich-blocking"],
    ]
    report = bench.report.Report(systems, {"open mpi blocking": "there is no such wheel"}, load(0.0), [results])
    lines = report.text().splitlines()
    assert "| open mpi blocking | all | skipped: there is no such wheel |" in lines
    assert "| mpich blocking | 2 ranks | failed: exit code 1: no fabric |" in lines
    (row,) = [line for line in lines if line.startswith("| 64 B | gloo blocking |")]
    assert row.split(" | ")[8] == "17"
    (row,) = [line for line in lines if line.startswith("| 64 B | mpich blocking |")]
    assert "failed" in row
    bench.report.write_csv(tmp_path / "x.csv", [results])
    with open(tmp_path / "x.csv", newline="") as file:
        rows = {row["system"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"aiocoll auto", "gloo blocking"}
    assert (rows["gloo blocking"]["wrong"], rows["gloo blocking"]["p50_us"], rows["gloo blocking"]["bytes"]) == (
        "17",
        "30.000",
        "64",
    )


def test_benchmark_report_names_the_busy_processes_that_it_started(bench: Any) -> None:
    systems = [bench.systems.make_aiocoll("tcp")]
    text = bench.report.Report(systems, {}, load(0.0), busy=3).text()
    assert "3 other processes that each keep a core busy" in text
    assert "busy" not in bench.report.Report(systems, {}, load(0.0)).machine


def test_busy_processes_of_a_benchmark_run_only_during_the_measurement(bench: Any) -> None:
    with bench.busy.busy(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


async def test_busy_process_ends_with_its_parent() -> None:
    """Wait until standard output is closed: the busy process has inherited it from its parent."""
    program = "import busy, os\nwith busy.busy(1): os.kill(os.getpid(), 9)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=FOLDER, stdout=subprocess.PIPE)
    async with asyncio.timeout(20):
        assert (await process.communicate())[0] == b""


def test_benchmark_launch_measures_all_cases(bench: Any) -> None:
    cases = [SMALL, Case("gather", 4096), Case("allreduce", 4096, 4), Case("barrier", 0)]
    done = bench.launch.launch(bench.systems.make_aiocoll("tcp"), None, 3, cases, Effort(0, 3, 3), 60)
    assert done.failure is None
    assert list(done.timings) == cases
    assert [(len(timing.nanoseconds), timing.wrong) for timing in done.timings.values()] == [(3, 0)] * 4


@pytest.mark.ranks(2)
async def test_benchmark_measures_concurrent_calls(pg: ProcessGroup) -> None:
    loads = Workloads(Case("allreduce", 4096, inflight=64), pg.rank(), pg.size())
    call = calls_of([call_of(pg, load) for load in loads.all])
    timing = await measure(loads, times_of(call), combine_of(pg), Effort(0, 3, 3))
    assert (len(timing.nanoseconds), timing.wrong) == (3, 0)


def test_wrong_result_of_any_concurrent_call_is_found() -> None:
    loads = Workloads(Case("allreduce", 4096, inflight=3), 0, 2)
    loads.fill_patterns()
    assert loads.count_wrong() == 3 * loads.all[0].count_wrong() > 0
    loads.fill_repeatable()
    assert loads.count_wrong_after(1) == 3 * loads.all[2].count_wrong_after(1) > 0


def test_failed_benchmark_launch_keeps_its_results_and_reports_the_reason(bench: Any) -> None:
    cases = [SMALL, Case("allsum", 64)]
    done = bench.launch.launch(bench.systems.make_aiocoll("tcp"), None, 2, cases, Effort(0, 3, 3), 60)
    assert list(done.timings) == [SMALL]
    assert "ValueError: kind='allsum' is not a collective; use one of allreduce, reduce," in done.failure


def test_hanging_benchmark_launch_is_ended_at_its_time_limit(bench: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o700)
    done = bench.launch.launch(bench.systems.make_aiocoll("tcp"), python, 2, [SMALL], Effort(0, 3, 3), 1)
    assert done.timings == {}
    assert done.failure == "not done after 1 s"


def test_launch_failure_reason_is_the_error_or_the_first_line_of_output(bench: Any) -> None:
    trace = "Traceback (most recent call last):\n  File ...\nmpi4py.MPI.Error: no such|thing\n---\n"
    assert bench.launch._reason("exit code 1", trace) == "exit code 1: mpi4py.MPI.Error: no such/thing"
    assert bench.launch._reason("exit code 213", "-----\n  A value is missing.\nTry it.\n") == (
        "exit code 213: A value is missing."
    )
    assert bench.launch._reason("killed by SIGKILL", "") == "killed by SIGKILL"


def test_library_name_selects_all_modes_of_the_library(bench: Any) -> None:
    chosen = bench.systems.choose_peers(["mpich-spin", "gloo", "mpich-spin"])
    assert chosen == ["gloo-future", "gloo-thread", "gloo-blocking", "mpich-spin"]
    assert bench.systems.choose_peers([]) == []
    assert bench.systems.choose_peers(bench.systems.PEER_CHOICES) == list(bench.systems.PEERS)


def test_only_libraries_with_awaitable_calls_run_concurrent_calls(bench: Any) -> None:
    many = Case("allreduce", 64, inflight=4)
    awaited = {name for name, system in bench.systems.PEERS.items() if system.can_run(many)}
    assert awaited == {name for name in bench.systems.PEERS if not name.endswith("blocking")}
    assert {bench.systems.PEERS[name].name for name in awaited} == set(bench.systems.AWAITED)


class Request:
    """An MPI request that is complete after a given number of tests."""

    def __init__(self, tests: int) -> None:
        self.left = tests

    def Test(self) -> bool:
        self.left -= 1
        return self.left <= 0


@pytest.mark.parametrize(("spin", "tests", "iterations"), [(0.0, 1, 0), (0.0, 4, 3), (1000.0, 1000, 0)])
async def test_mpi_request_is_tested_once_per_loop_iteration_after_spinning(
    bench: Any, spin: float, tests: int, iterations: int
) -> None:
    passed = 0

    async def count_iterations() -> None:
        nonlocal passed
        while True:
            await asyncio.sleep(0)
            passed += 1

    counting = asyncio.create_task(count_iterations())
    await asyncio.sleep(0)  # the task has started
    request = Request(tests)
    await bench.libraries._poll_request(request, spin)
    counting.cancel()
    assert (request.left, passed) == (0, iterations)


class Comm:
    """An MPI communicator that records its calls."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append((name, arguments))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("allreduce", "Allreduce"),
        ("broadcast", "Bcast"),
        ("reduce", "Reduce"),
        ("scan", "Scan"),
        ("barrier", "Barrier"),
        ("allgather", "Allgather"),
        ("reduce_scatter", "Reduce_scatter_block"),
        ("alltoall", "Alltoall"),
        ("gather", "Gather"),
        ("scatter", "Scatter"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_blocking_and_nonblocking_mpi_calls_get_the_same_arguments(bench: Any, kind: str, name: str, rank: int) -> None:
    comm = Comm(rank)
    load = Workloads(Case(kind, 64 if kind != "barrier" else 0), rank, 2).all[0]
    call = bench.libraries._mpi_call(comm, SimpleNamespace(IN_PLACE="in place", SUM="sum"), load)
    call.block()
    call.start()
    (first, arguments), (second, same) = comm.calls
    assert (first, second) == (name, f"I{name.lower()}")
    assert all(one is other for one, other in zip(arguments, same, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["future", "thread", "blocking"])
def test_benchmark_measures_gloo_in_all_modes(bench: Any, mode: str) -> None:
    pytest.importorskip("torch")
    gloo = bench.systems.PEERS[f"gloo-{mode}"]
    cases = [Case(kind, 64) for kind in KINDS] + [Case("allreduce", 64, 4)]
    taken = [case for case in cases if gloo.can_run(case)]
    done = bench.launch.launch(gloo, None, 2, taken, Effort(0, 3, 3), 60)
    assert done.failure is None
    assert list(done.timings) == taken
    assert [(len(timing.nanoseconds), timing.wrong) for timing in done.timings.values()] == [(3, 0)] * len(taken)


def test_failed_installation_of_a_peer_library_reports_the_reason(bench: Any) -> None:
    with pytest.raises(bench.environments.Unavailable, match=r"^ValueError: no such thing$"):
        bench.environments._run(sys.executable, "-c", "raise ValueError('no such thing')")


def test_roofline_bound_counts_the_bytes_that_are_read_and_written(bench: Any) -> None:
    roofline = bench.roofline.Roofline(4, copy=8e9, add=0, tcp=0, unix=0, flag=0, unix_trip=0, tcp_trip=0)
    assert roofline.bound(1_000_000_000) == 1.0


def test_memory_and_socket_speeds_of_this_machine_can_be_measured(bench: Any) -> None:
    found = bench.roofline.roofline(2, 0.01)
    assert found.world_size == 2
    assert min(found.copy, found.add, found.tcp, found.unix, found.flag, found.unix_trip, found.tcp_trip) > 0
