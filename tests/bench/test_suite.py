"""The benchmark against other libraries: that its statistics are right, and that a peer that fails is told of."""

from __future__ import annotations

import asyncio
import csv
import importlib
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aiocoll import ProcessGroup
from aiocoll.cli.calls import call_of, combine_of
from aiocoll.cli.measure import Effort, Timing, measure, times_of
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
    """Return the modules of the folder, which are programs and no package."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield SimpleNamespace(**{name: importlib.import_module(name) for name in NAMES})
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


def launched(bench: Any, case: Case, micros: float, failure: str | None = None, **timing: Any) -> Any:
    found = {} if failure else {case: Timing([int(micros * 1000)] * 4, **({"cpu": 1e-6, "wrong": 0} | timing))}
    return bench.launch.Launch(found, failure, 1.0)


def rounds(bench: Any, case: Case, *times: Mapping[str, float]) -> Any:
    """Return results whose rounds have taken so many microseconds, by system."""
    results = bench.results.Results(2, ["aiocoll auto", "gloo", "mpich", "open mpi"])
    results.rounds += [{name: launched(bench, case, value) for name, value in each.items()} for each in times]
    return results


def test_a_ratio_is_the_median_of_those_of_the_rounds(bench: Any) -> None:
    results = rounds(
        bench,
        SMALL,
        {"aiocoll auto": 1, "gloo": 10},
        {"aiocoll auto": 2, "gloo": 60},
        {"aiocoll auto": 10, "gloo": 20},
    )
    assert results.ratio(SMALL, "aiocoll auto", "gloo") == pytest.approx((10, 2, 30))


def test_the_faster_of_two_peers_may_be_another_in_each_round(bench: Any) -> None:
    results = rounds(
        bench,
        SMALL,
        {"aiocoll auto": 1, "mpich": 4, "open mpi": 8},
        {"aiocoll auto": 1, "mpich": 9, "open mpi": 2},
        {"aiocoll auto": 1, "mpich": 3},
        {"mpich": 3},
    )
    assert results.ratio(SMALL, "aiocoll auto", "mpich", "open mpi") == pytest.approx((3, 2, 4))
    assert results.ratio(SMALL, "aiocoll auto", "gloo") is None


def test_a_summary_is_of_the_launches(bench: Any) -> None:
    results = rounds(bench, LARGE, *({"gloo": value} for value in (1000, 5000, 2000)))
    summary = results.summary("gloo", LARGE)
    assert (summary.launches, summary.iterations, summary.wrong) == (3, 12, 0)
    assert summary.figures.p50 == pytest.approx(2e-3)
    assert summary.figures.algbw == pytest.approx((16 << 20) / 2e-3)
    assert results.summary("mpich", LARGE) is None


def test_of_many_in_flight_the_time_is_that_of_one(bench: Any) -> None:
    many = Case("allreduce", 4096, 64)
    summary = rounds(bench, many, {"gloo": 6400}).summary("gloo", many)
    assert summary.figures.p50 == pytest.approx(100e-6)
    assert summary.cpu == pytest.approx(1e-6 / 64)


@pytest.mark.parametrize(("gloo", "met"), [(20.1, True), (19.9, False), (None, None)])
def test_a_promise_is_kept_or_not_or_unknown(bench: Any, gloo: float | None, met: bool | None) -> None:
    results = rounds(bench, SMALL, {"aiocoll auto": 1.0, **({} if gloo is None else {"gloo": gloo})})
    (verdict,) = [each for each in bench.limits.verdicts([results]) if each.what.endswith("against gloo")]
    assert verdict.met is met


def test_every_cell_of_the_contract_is_looked_at_once(bench: Any) -> None:
    sizes = (8, 64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
    all_results = []
    for world_size in (2, 4):
        results = bench.results.Results(world_size, ["aiocoll auto", "aiocoll tcp"])
        cases = [Case("allreduce", nbytes) for nbytes in sizes]
        found = {case: Timing([1000], 0.0, 0) for case in cases}
        results.rounds.append(dict.fromkeys(results.systems, bench.launch.Launch(found, None, 1.0)))
        all_results.append(results)
    what = [verdict.what for verdict in bench.limits.verdicts(all_results)]
    assert len(what) == len(set(what))
    # Of 12 sizes all but 256 KiB and 4 MiB; against MPI 8 B, and from 16 KiB on, or with 4 ranks from 1 MiB on.
    assert sum("auto" in each and each.endswith("against gloo") for each in what) == 20
    assert sum("tcp" in each and "2 ranks" in each for each in what) == 10
    large = ("1 MiB", "4 MiB", "16 MiB", "64 MiB", "256 MiB")
    assert [each.partition(", ")[2] for each in what if "mpich" in each] == [
        *(
            f"allreduce {size}, 2 ranks, against mpich / open mpi"
            for size in ("8 B", "16 KiB", "64 KiB", "256 KiB", *large)
        ),
        *(f"allreduce {size}, 4 ranks, against mpich / open mpi" for size in large),
    ]


def test_the_report_says_what_is_missing_and_what_is_wrong(bench: Any, tmp_path: Path) -> None:
    results = rounds(bench, SMALL, {"aiocoll auto": 1, "gloo": 30})
    results.rounds[0]["mpich"] = launched(bench, SMALL, 0, "exit code 1: no fabric")
    results.rounds[0]["gloo"].timings[SMALL] = Timing([30_000], 0.0, 17)
    systems = [bench.systems.ours("auto"), bench.systems.PEERS["gloo"], bench.systems.PEERS["mpich"]]
    report = bench.report.Report(systems, {"open mpi": "there is no such wheel"}, [results])
    lines = report.text().splitlines()
    assert "| open mpi | all | skipped: there is no such wheel |" in lines
    assert "| mpich | 2 ranks | failed: exit code 1: no fabric |" in lines
    (row,) = [line for line in lines if line.startswith("| 64 B | gloo |")]
    assert row.split(" | ")[7] == "17"
    (row,) = [line for line in lines if line.startswith("| 64 B | mpich |")]
    assert "failed" in row
    bench.report.write_csv(tmp_path / "x.csv", [results])
    with open(tmp_path / "x.csv", newline="") as file:
        rows = {row["system"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"aiocoll auto", "gloo"}
    assert (rows["gloo"]["wrong"], rows["gloo"]["p50_us"], rows["gloo"]["bytes"]) == ("17", "30.000", "64")


def test_the_report_says_what_else_was_busy(bench: Any) -> None:
    assert (
        "3 processes beside that keep a core busy each"
        in bench.report.Report([bench.systems.ours("tcp")], {}, busy=3).text()
    )
    assert "busy" not in bench.report.Report([bench.systems.ours("tcp")], {}).machine


def test_busy_processes_run_meanwhile_and_no_longer(bench: Any) -> None:
    with bench.busy.busy(2) as processes:
        assert [process.poll() for process in processes] == [None, None]
    assert [process.returncode for process in processes] == [-signal.SIGKILL] * 2


async def test_a_busy_process_ends_with_the_one_that_has_started_it() -> None:
    """Of which it has the standard output, too: that is at its end when both are gone."""
    program = "import busy, os\nwith busy.busy(1): os.kill(os.getpid(), 9)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, cwd=FOLDER, stdout=subprocess.PIPE)
    async with asyncio.timeout(20):
        assert (await process.communicate())[0] == b""


def test_a_launch_measures_all_cases(bench: Any) -> None:
    cases = [SMALL, Case("gather", 4096), Case("allreduce", 4096, 4), Case("barrier", 0)]
    done = bench.launch.launch(bench.systems.ours("tcp", ["gather", "barrier"]), None, 3, cases, Effort(0, 3, 3), 60)
    assert done.failure is None
    assert list(done.timings) == cases
    assert [(len(timing.nanoseconds), timing.wrong) for timing in done.timings.values()] == [(3, 0)] * 4


@pytest.mark.ranks(2)
async def test_many_in_flight(pg: ProcessGroup) -> None:
    loads = Workloads(Case("allreduce", 4096, inflight=64), pg.rank(), pg.size())
    call = calls_of([call_of(pg, load) for load in loads.all])
    timing = await measure(loads, times_of(call), combine_of(pg), Effort(0, 3, 3))
    assert (len(timing.nanoseconds), timing.wrong) == (3, 0)


def test_what_is_wrong_in_any_of_many_in_flight_is_found() -> None:
    loads = Workloads(Case("allreduce", 4096, inflight=3), 0, 2)
    loads.fresh()
    assert loads.wrong() == 3 * loads.all[0].wrong() > 0
    loads.steady()
    assert loads.wrong_after(1) == 3 * loads.all[2].wrong_after(1) > 0


def test_a_launch_that_fails_says_why_and_keeps_what_it_has(bench: Any) -> None:
    cases = [SMALL, Case("allsum", 64)]
    done = bench.launch.launch(bench.systems.ours("tcp"), None, 2, cases, Effort(0, 3, 3), 60)
    assert list(done.timings) == [SMALL]
    assert "ValueError: kind='allsum' is not a collective; use one of allreduce, reduce," in done.failure


def test_a_launch_that_hangs_is_ended(bench: Any, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o700)
    done = bench.launch.launch(bench.systems.ours("tcp"), python, 2, [SMALL], Effort(0, 3, 3), 1)
    assert done.timings == {}
    assert done.failure == "not done after 1 s"


def test_a_reason_is_the_error_or_what_was_said_first(bench: Any) -> None:
    trace = "Traceback (most recent call last):\n  File ...\nmpi4py.MPI.Error: no such|thing\n---\n"
    assert bench.launch._reason("exit code 1", trace) == "exit code 1: mpi4py.MPI.Error: no such/thing"
    assert bench.launch._reason("exit code 213", "-----\n  A value is missing.\nTry it.\n") == (
        "exit code 213: A value is missing."
    )
    assert bench.launch._reason("killed by SIGKILL", "") == "killed by SIGKILL"


def test_what_cannot_be_installed_says_why(bench: Any) -> None:
    with pytest.raises(bench.environments.Unavailable, match=r"^ValueError: no such thing$"):
        bench.environments._run(sys.executable, "-c", "raise ValueError('no such thing')")


def test_a_bound_is_what_must_be_read_and_written(bench: Any) -> None:
    roofline = bench.roofline.Roofline(4, copy=8e9, add=0, tcp=0, unix=0, flag=0, unix_trip=0, tcp_trip=0)
    assert roofline.bound(1_000_000_000) == 1.0


def test_the_machine_can_be_measured(bench: Any) -> None:
    found = bench.roofline.roofline(2, 0.01)
    assert found.world_size == 2
    assert min(found.copy, found.add, found.tcp, found.unix, found.flag, found.unix_trip, found.tcp_trip) > 0
