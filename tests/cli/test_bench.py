"""`aiocoll bench`: measurement of every collective, detection of wrong results, and the printed table."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.algorithms.spec import spec_of
from aiocoll.cli.calls import call_of, combine_of
from aiocoll.cli.measure import Effort, Figures, Timing, measure, times_of
from aiocoll.cli.workload import DTYPES, KINDS, OPS, Case, Workload, bus_factor
from aiocoll.native import IMPLEMENTATION
from aiocoll.testing import run_ranks

#: Seconds within which a command must end; it usually takes less than 10 % of this time.
LIMIT = 60
FEW = Effort(seconds=0, least=3, most=3)


async def measure_cases(pg: ProcessGroup, cases: Sequence[Case], effort: Effort = FEW) -> list[Timing]:
    found = []
    for case in cases:
        load = Workload(case, pg.rank(), pg.size())
        found.append(await measure(load, times_of(call_of(pg, load)), combine_of(pg), effort))
    return found


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
async def test_bench_measures_every_collective_with_equal_reports_on_all_ranks(world_size: int) -> None:
    cases = [Case(kind, nbytes) for kind in KINDS for nbytes in (4, 4 * (113 * world_size + 1), 1 << 16)]
    ranks = await run_ranks(world_size, measure_cases, cases)
    assert all(rank == ranks[0] for rank in ranks)
    assert [timing.wrong for timing in ranks[0]] == [0] * len(cases)
    assert [len(timing.nanoseconds) for timing in ranks[0]] == [3] * len(cases)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.ranks(3)
async def test_bench_computes_correct_results_for_every_op_and_dtype(pg: ProcessGroup, dtype: str) -> None:
    ops = [(kind, op) for kind in KINDS if spec_of(kind).reduces for op in OPS if (kind, op) != ("scan", "avg")]
    cases = [Case(kind, 5000, dtype=dtype, op=op) for kind, op in ops]
    timings = await measure_cases(pg, cases)
    assert {case: timing.wrong for case, timing in zip(cases, timings, strict=True)} == dict.fromkeys(cases, 0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "barrier"])
def test_bench_reports_wrong_results_of_a_collective_that_does_nothing(kind: str) -> None:
    load = Workload(Case(kind, 4096), 0 if kind == "gather" else 1, 2)
    if kind == "reduce":
        load = Workload(Case(kind, 4096), 0, 2)
    load.fill_patterns()
    assert load.count_wrong() > 0
    load.fill_repeatable()
    if kind in ("allreduce", "allgather", "reduce_scatter", "alltoall", "gather", "scatter"):
        assert load.count_wrong_after(1) > 0


def test_bench_finds_a_single_wrong_element() -> None:
    load = Workload(Case("broadcast", 4 * (113 * 4096 + 500)), 0, 2)
    load.fill_patterns()
    assert load.inplace is not None
    for place in (0, 113 * 4096 - 1, 113 * 4096, -1):
        load.inplace[place] += 1
    assert load.count_wrong() == 4


@pytest.mark.ranks(2)
async def test_bench_counts_the_wrong_elements_of_all_ranks(pg: ProcessGroup) -> None:
    load = Workload(Case("allreduce", 4096), pg.rank(), pg.size())

    async def call() -> None:
        x: Any = load.inplace
        await pg.allreduce(x)
        if pg.rank() == 1:
            x[17] = -1

    timing = await measure(load, times_of(call), combine_of(pg), FEW)
    # Wrong elements: 2 on rank 1 after the first call, in a fresh array. Then 4 on both ranks, in the warm-up block
    # and in the measured block, since the sum spreads the error.
    assert timing.wrong == 6


async def test_measurement_ends_at_its_time_limit_or_its_maximum_number_of_calls() -> None:
    efforts = {Effort(0, 1, 1000): 1, Effort(1e9, 1, 131): 131, Effort(0, 100, 1000): 100}
    for effort, count in efforts.items():
        (timing,) = (await run_ranks(2, measure_cases, [Case("allreduce", 64)], effort))[0]
        assert len(timing.nanoseconds) == count


async def test_measurement_ends_soon_if_calls_become_slow() -> None:
    """Check that the number of calls in a block follows from earlier calls, and at most doubles."""
    blocks: list[int] = []

    async def times(rounds: int) -> list[int]:
        blocks.append(rounds)
        return [1_000 if len(blocks) <= 3 else 1_000_000_000] * rounds

    async def combine(*_: object) -> None:
        """Do nothing: a single rank combines no values."""

    timing = await measure(Workload(Case("barrier", 0), 0, 2), times, combine, Effort(0.5, 5, 1000))
    # Blocks of calls: a checked call, the warm-up, the least number of calls, twice that number, a checked call.
    assert blocks == [1, 1 + 1, 1 + 5, 1 + 10, 1]
    assert len(timing.nanoseconds) == 15


@pytest.mark.parametrize(("dtype", "world_size"), [("float16", 7), ("float16", 64), ("float32", 3), ("float32", 1024)])
def test_repeated_sums_of_a_measured_block_stay_exact(dtype: str, world_size: int) -> None:
    rounds = Workload(Case("allreduce", 64, dtype=dtype), 0, world_size).rounds
    assert rounds >= 2
    x = np.ones(1, dtype)
    for _ in range(rounds):
        x *= x.dtype.type(world_size)
    assert np.isfinite(x[0])
    assert int(x[0]) == world_size**rounds or rounds == 48


def test_reported_bandwidths_match_the_formulas_of_nccl_tests() -> None:
    factors = {kind: bus_factor(kind, 4) for kind in KINDS}
    assert factors["allreduce"] == 1.5
    assert {factors[kind] for kind in ("allgather", "reduce_scatter", "alltoall", "gather", "scatter")} == {0.75}
    assert {factors[kind] for kind in ("broadcast", "reduce", "scan", "barrier")} == {1}
    figures = Figures.of(Case("allreduce", 1 << 20), 4, [1_000_000] * 9)
    assert figures == pytest.approx((1e-3, 1e-3, 1e-3, (1 << 20) * 1e3, (1 << 20) * 1.5e3))


def test_bench_rounds_sizes_down_to_equal_numbers_of_elements_per_rank() -> None:
    assert Case("allgather", 4 * 10).size(3) == 36
    assert Case("allgather", 4).size(3) == 12
    assert Case("allreduce", 7).size(3) == 4


def bench(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "aiocoll", "bench", *map(str, args)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
        # Debug mode reports slow steps, which occur on a busy machine.
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONASYNCIODEBUG": ""},
    )


@pytest.mark.slow
def test_bench_command_prints_a_table_and_writes_a_csv_file(tmp_path: Path) -> None:
    done = bench("allgather", "-n", 3, "--min", 48, "--max", "3K", "--transport", "unix", "--csv", tmp_path / "x.csv")
    assert (done.returncode, done.stderr) == (0, "")
    table = done.stdout.splitlines()
    title = " ".join(line.removeprefix("# ") for line in table if line.startswith("#"))
    *head, first, second, third, fourth = (line for line in table if not line.startswith("#"))
    title, _, load = title.partition(" load: ")
    assert max(map(len, [*head, first, second, third, fourth])) <= 80
    assert re.fullmatch(rf"allgather, float32, 3 ranks on \d+ cores, transport unix, {IMPLEMENTATION}", title)
    assert re.match(r"other processes \d+\.\d\d cores, steal \d+\.\d\d cores, CPU pressure ", load)
    assert " ".join(head).split()[:9] == ["size", "count", "time", "p50", "p95", "p99", "algbw", "busbw", "#wrong"]
    lines = [line.split() for line in (first, second, third, fourth)]
    assert [(int(line[0]), int(line[1]), int(line[-1])) for line in lines] == [
        (48, 12, 0),
        (192, 48, 0),
        (768, 192, 0),
        (3072, 768, 0),
    ]
    with open(tmp_path / "x.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["bytes"]) for row in rows] == [48, 192, 768, 3072]
    assert {row["wrong"] for row in rows} == {"0"}
    for row in rows:
        assert float(row["busbw_gbs"]) == pytest.approx(float(row["algbw_gbs"]) * 2 / 3, abs=1e-5)
        assert int(row["iterations"]) >= 5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "error"),
    [
        (("allreduce", "--min", "many"), "is not a size"),
        (("allreduce", "--min", "0"), "is not a size"),
        (("allreduce", "--min", "2K", "--max", "1K"), "--min 2048: must not be more than --max, 1024"),
        (("scan", "--op", "avg"), "--op avg: not defined for scan"),
        (("-n", "0"), "0 is not a positive number"),
        (("sum",), "invalid choice"),
    ],
)
def test_bench_command_refuses_invalid_arguments(args: Sequence[str], error: str) -> None:
    done = bench(*args)
    assert done.returncode == 2
    assert error in done.stderr


def test_bench_command_refuses_an_unwritable_csv_file_at_once(tmp_path: Path) -> None:
    done = bench("barrier", "--csv", tmp_path / "none" / "x.csv")
    assert done.returncode == 2
    assert "--csv" in done.stderr
    assert "none" in done.stderr
    assert done.stdout == ""
