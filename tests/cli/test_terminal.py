"""The commands at a terminal: versions, exit codes, colours and progress."""

from __future__ import annotations

import asyncio
import io
import json
import os
import platform
import pty
import re
import subprocess
import sys
from math import inf
from pathlib import Path

import numpy as np
import pytest

import aiocoll
from aiocoll.cli.checks import CheckResult
from aiocoll.cli.main import main
from aiocoll.cli.measure import Timing
from aiocoll.cli.sweep import row
from aiocoll.cli.terminal import Progress, has_colours, styled
from aiocoll.cli.workload import KINDS, OPS, Case
from aiocoll.machine_load import LoadMeter, MachineLoad
from aiocoll.native import IMPLEMENTATION, core

from ..internals import Limits, replace_parts

ROOT = Path(__file__).parents[2]
VERSION = (
    f"aiocoll {aiocoll.__version__} ({IMPLEMENTATION}), Python {platform.python_version()}, NumPy {np.__version__}\n"
)
CODES = {
    "run": {"0", "N", "128+N", "1", "2", "130"},
    "bench": {"0", "1", "2", "130"},
    "doctor": {"0", "1", "2", "130"},
    "top": {"0", "1", "2", "130"},
    "trace": {"0", "1", "2", "130"},
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")


def help_text(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    return capsys.readouterr().out


def test_version_option_prints_the_data_that_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == VERSION


def test_python_m_aiocoll_runs_the_same_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "aiocoll", "--version"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, VERSION, "")


def test_help_of_every_command_lists_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    general = help_text(capsys)
    assert set(re.findall(r"^    (\w+) ", general, re.MULTILINE)) == CODES.keys()
    for command, codes in CODES.items():
        output = help_text(capsys, command)
        assert max(map(len, output.splitlines())) <= 80
        _, listed = output.split("\nexit codes:\n")
        lines = re.findall(r"^  (\S+) +\S.*$", listed.split("\n\n")[0], re.MULTILINE)
        assert (set(lines), len(lines)) == (codes, len(codes)), output


@pytest.mark.parametrize("command", ["bench", "doctor", "trace"])
def test_interrupted_command_ends_with_130(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    replace_parts(monkeypatch, run_bench_processes=interrupt, run_doctor_checks=interrupt, collect_dumps=interrupt)
    replace_parts(monkeypatch, run_doctor_rendezvous=interrupt)
    assert main([command, *(["dump"] if command == "trace" else [])]) == 130


def test_failed_benchmark_prints_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise ChildProcessError("rank 1 of 2 was killed by SIGKILL")

    replace_parts(monkeypatch, run_bench_processes=fail)
    assert main(["bench", "--json"]) == 1
    assert capsys.readouterr() == ("", "aiocoll bench: rank 1 of 2 was killed by SIGKILL\n")


@pytest.mark.parametrize("wrong", [0, 3])
def test_bench_reports_wrong_results_in_the_json_object_and_the_exit_code(
    wrong: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fake_timings(ranks: int, *_: object, **__: object) -> list[list[Timing]]:
        monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))  # the benchmark itself causes this load
        load[:] = [MachineLoad(0.254, 0.1, None, inf)]
        return [[Timing([4_000, 2_000, 3_000], 5e-6, wrong)]] * ranks

    load = [MachineLoad(9.0, 9.0, 9.0, 9.0)]
    monkeypatch.setattr(os, "getloadavg", lambda: (1.375, 0.0, 0.0))
    monkeypatch.setattr(LoadMeter, "lap", lambda _: load[0])
    replace_parts(monkeypatch, run_bench_processes=fake_timings)
    argv = ["bench", "allreduce", "-n", "3", "--min", "4K", "--max", "4K", "--op", "max", "--dtype", "int16", "--json"]
    assert main(argv) == int(wrong > 0)
    out, err = capsys.readouterr()
    assert err == ""
    output = json.loads(out)
    assert output.pop("cores") == len(os.sched_getaffinity(0))
    assert output.pop("system").startswith(f"{platform.system()} ")
    assert output == {
        "format": "aiocoll bench",
        "version": 1,
        "aiocoll": aiocoll.__version__,
        "compiled": core is not None,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "load": 1.38,
        "machine_load": {"others": 0.25, "steal": 0.1, "pressure": None, "quota": None, "high": True},
        "collective": "allreduce",
        "op": "max",
        "dtype": "int16",
        "ranks": 3,
        "transport": "auto",
        "results": [
            {
                "bytes": 4096,
                "count": 2048,
                "iterations": 3,
                "p50_us": 3.0,
                "p95_us": 3.9,
                "p99_us": 3.98,
                "algbw_gbs": round(4096 / 3e3, 6),
                "busbw_gbs": round(4096 / 3e3 * 4 / 3, 6),
                "cpu_us": 5.0,
                "wrong": wrong,
            }
        ],
    }


def test_bench_json_has_a_null_op_for_a_collective_without_reduction(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def fake_timings(ranks: int, *_: object, **__: object) -> list[list[Timing]]:
        return [[Timing([1000], 0.0, 0)]] * ranks

    replace_parts(monkeypatch, run_bench_processes=fake_timings)
    assert main(["bench", "barrier", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert (output["op"], output["results"][0]["bytes"]) == (None, 0)


def test_bench_with_tune_refuses_the_json_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--tune", "--json"])
    assert "--json: not allowed with --tune" in capsys.readouterr().err


def test_bench_prints_one_json_object_and_progress_at_a_terminal() -> None:
    master, slave = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "aiocoll", "bench", "--max", "16", "--json"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=slave,
            timeout=60,
            check=False,
        )
        shown = os.read(master, 1 << 16).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert done.returncode == 0
    assert [result["bytes"] for result in json.loads(done.stdout)["results"]] == [4, 16]
    assert shown == "\r\x1b[K1 of 2: 4 B\r\x1b[K2 of 2: 16 B\r\x1b[K"


def test_printed_tables_fit_in_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def fake_timings(ranks: int, *_: object, **__: object) -> list[list[Timing]]:
        return [[Timing([10**10 - 1], 1.0, 10**6 - 1)]] * ranks

    replace_parts(monkeypatch, run_bench_processes=fake_timings)
    for kind in KINDS:
        for op in OPS if kind == "reduce_scatter" else OPS[:1]:
            main(["bench", kind, "-n", "1000", "--op", op, "--dtype", "float64", "--min", "2G", "--max", "2G"])
    lines = capsys.readouterr().out.splitlines()
    lines += [row(Case(kind, 2 << 30, dtype="int8"), 1000, Timing([9 * 10**9], 0.0, 0)) for kind in KINDS]
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize(
    ("terminal", "environ", "colours"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"NO_COLOR": "1"}, False),
        (True, {"NO_COLOR": "0"}, False),
        (True, {"NO_COLOR": ""}, True),
        (True, {"TERM": "dumb"}, False),
        (False, {"FORCE_COLOR": "1"}, True),
        (False, {"FORCE_COLOR": ""}, False),
        (False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
    ],
)
def test_colours_depend_on_the_terminal_and_the_environment(
    terminal: bool, environ: dict[str, str], colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stream = Terminal() if terminal else io.StringIO()
    assert has_colours(stream) is colours
    assert styled("x", "bad", stream) == ("\x1b[1;31mx\x1b[0m" if colours else "x")


@pytest.mark.parametrize("colours", [False, True])
def test_report_text_is_equal_with_and_without_colours(
    colours: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [CheckResult("host", "disk", "full", "empty it", fine=False), CheckResult("host", "fan", "loud", "wait")]
    met = CheckResult("ranks", "meeting", "2 met")
    replace_parts(
        monkeypatch,
        run_doctor_checks=lambda *_: found,
        run_doctor_rendezvous=lambda ranks: ([], met),
        check_machine_load=lambda _: [],
    )
    monkeypatch.setenv("FORCE_COLOR", "1" if colours else "")
    assert main(["doctor"]) == 1
    output = capsys.readouterr().out
    assert ("\x1b[1;31mPROBLEM:\x1b[0m empty it" in output) is colours
    assert ("\x1b[33mhint:\x1b[0m wait" in output) is colours
    assert re.sub(r"\x1b\[[0-9;]*m", "", output).splitlines() == [
        "host",
        "  disk     full",
        "           PROBLEM: empty it",
        "  fan      loud",
        "           hint: wait",
        "ranks",
        "  meeting  2 met",
        "1 problem, see above",
    ]


async def test_progress_line_is_updated_and_removed_at_the_end(limits: Limits, monkeypatch: pytest.MonkeyPatch) -> None:
    reported: asyncio.Queue[int] = asyncio.Queue()

    async def progress_text(seconds: int) -> str:
        reported.put_nowait(seconds)
        return f"at {seconds}"

    limits(progress_interval=0.0)
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress() as progress:
            async with progress.watching(progress_text):
                await asyncio.sleep(0)
                while shown and await reported.get() < 2:
                    pass
            progress.show("the end")
        written = stream.getvalue()
        if shown:
            assert written.startswith("\r\x1b[Kat 0\r\x1b[Kat 1\r\x1b[Kat 2")
            assert written.endswith("\r\x1b[K\r\x1b[Kthe end\r\x1b[K")
        else:
            assert (written, reported.qsize()) == ("", 0)


async def test_progress_line_is_omitted_if_it_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async def progress_text(seconds: int) -> str:
        raise OSError("gone")

    monkeypatch.setattr(sys, "stderr", Terminal())
    async with Progress().watching(progress_text):
        await asyncio.sleep(0)


@pytest.mark.parametrize("command", ["bench -n 1 --min 4 --max 4 --json", "doctor --json", "doctor"])
def test_command_ends_without_an_error_if_the_output_reader_has_closed(command: str) -> None:
    """Close standard output before the command writes, as `aiocoll bench --json | head -1` may."""
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "aiocoll", *command.split()],
            # Debug mode reports slow steps, which occur on a busy machine.
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONASYNCIODEBUG": ""},
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
