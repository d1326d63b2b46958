"""What people at a terminal see of the command line: versions, exit codes, colours, how far a long run is."""

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

from ..internals import Limits, replaced

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


def helped(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    with pytest.raises(SystemExit, match="0"):
        main([*command, "--help"])
    return capsys.readouterr().out


def test_the_version_has_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == VERSION


def test_a_module_that_is_run_is_the_same_command() -> None:
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


def test_every_command_lists_its_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    general = helped(capsys)
    assert set(re.findall(r"^    (\w+) ", general, re.MULTILINE)) == CODES.keys()
    for command, codes in CODES.items():
        said = helped(capsys, command)
        assert max(map(len, said.splitlines())) <= 80
        _, listed = said.split("\nexit codes:\n")
        lines = re.findall(r"^  (\S+) +\S.*$", listed.split("\n\n")[0], re.MULTILINE)
        assert (set(lines), len(lines)) == (codes, len(codes)), said


@pytest.mark.parametrize("command", ["bench", "doctor", "trace"])
def test_whatever_is_interrupted_ends_with_130(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    replaced(monkeypatch, bench_processes=interrupted, doctor_look=interrupted, trace_collect=interrupted)
    replaced(monkeypatch, doctor_meeting=interrupted)
    assert main([command, *(["dump"] if command == "trace" else [])]) == 130


def test_a_benchmark_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def died(*_: object, **__: object) -> None:
        raise ChildProcessError("rank 1 of 2 was killed by SIGKILL")

    replaced(monkeypatch, bench_processes=died)
    assert main(["bench", "--json"]) == 1
    assert capsys.readouterr() == ("", "aiocoll bench: rank 1 of 2 was killed by SIGKILL\n")


@pytest.mark.parametrize("wrong", [0, 3])
def test_wrong_results_are_in_the_object_and_the_exit_code(
    wrong: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(ranks: int, *_: object, **__: object) -> list[list[Timing]]:
        monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))  # the load of the benchmark itself
        load[:] = [MachineLoad(0.254, 0.1, None, inf)]
        return [[Timing([4_000, 2_000, 3_000], 5e-6, wrong)]] * ranks

    load = [MachineLoad(9.0, 9.0, 9.0, 9.0)]
    monkeypatch.setattr(os, "getloadavg", lambda: (1.375, 0.0, 0.0))
    monkeypatch.setattr(LoadMeter, "lap", lambda _: load[0])
    replaced(monkeypatch, bench_processes=measured)
    argv = ["bench", "allreduce", "-n", "3", "--min", "4K", "--max", "4K", "--op", "max", "--dtype", "int16", "--json"]
    assert main(argv) == int(wrong > 0)
    out, err = capsys.readouterr()
    assert err == ""
    said = json.loads(out)
    assert said.pop("cores") == len(os.sched_getaffinity(0))
    assert said.pop("system").startswith(f"{platform.system()} ")
    assert said == {
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


def test_an_object_of_what_reduces_nothing_has_no_op(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measured(ranks: int, *_: object, **__: object) -> list[list[Timing]]:
        return [[Timing([1000], 0.0, 0)]] * ranks

    replaced(monkeypatch, bench_processes=measured)
    assert main(["bench", "barrier", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["op"], said["results"][0]["bytes"]) == (None, 0)


def test_tuning_makes_no_such_object(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--tune", "--json"])
    assert "--json: not with --tune" in capsys.readouterr().err


def test_standard_output_is_one_object_and_a_terminal_shows_how_far_it_is() -> None:
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


def test_tables_fit_on_eighty_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def measured(ranks: int, *_: object, **__: object) -> list[list[Timing]]:
        return [[Timing([10**10 - 1], 1.0, 10**6 - 1)]] * ranks

    replaced(monkeypatch, bench_processes=measured)
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
def test_who_gets_colours(
    terminal: bool, environ: dict[str, str], colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    stream = Terminal() if terminal else io.StringIO()
    assert has_colours(stream) is colours
    assert styled("x", "bad", stream) == ("\x1b[1;31mx\x1b[0m" if colours else "x")


@pytest.mark.parametrize("colours", [False, True])
def test_a_report_is_the_same_with_colours(
    colours: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [CheckResult("host", "disk", "full", "empty it", fine=False), CheckResult("host", "fan", "loud", "wait")]
    met = CheckResult("ranks", "meeting", "2 met")
    replaced(
        monkeypatch, doctor_look=lambda *_: found, doctor_meeting=lambda ranks: ([], met), doctor_load=lambda _: []
    )
    monkeypatch.setenv("FORCE_COLOR", "1" if colours else "")
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert ("\x1b[1;31mPROBLEM:\x1b[0m empty it" in said) is colours
    assert ("\x1b[33mhint:\x1b[0m wait" in said) is colours
    assert re.sub(r"\x1b\[[0-9;]*m", "", said).splitlines() == [
        "host",
        "  disk     full",
        "           PROBLEM: empty it",
        "  fan      loud",
        "           hint: wait",
        "ranks",
        "  meeting  2 met",
        "1 problem, see above",
    ]


async def test_progress_is_shown_again_and_again_and_then_removed(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: asyncio.Queue[int] = asyncio.Queue()

    async def look(seconds: int) -> str:
        looked.put_nowait(seconds)
        return f"at {seconds}"

    limits(progress_again=0.0)
    for stream, shown in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        with Progress() as progress:
            async with progress.watching(look):
                await asyncio.sleep(0)
                while shown and await looked.get() < 2:
                    pass
            progress.show("the end")
        written = stream.getvalue()
        if shown:
            assert written.startswith("\r\x1b[Kat 0\r\x1b[Kat 1\r\x1b[Kat 2")
            assert written.endswith("\r\x1b[K\r\x1b[Kthe end\r\x1b[K")
        else:
            assert (written, looked.qsize()) == ("", 0)


async def test_what_fails_to_look_shows_nothing_and_harms_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(seconds: int) -> str:
        raise OSError("gone")

    monkeypatch.setattr(sys, "stderr", Terminal())
    async with Progress().watching(look):
        await asyncio.sleep(0)


@pytest.mark.parametrize("command", ["bench -n 1 --min 4 --max 4 --json", "doctor --json", "doctor"])
def test_whoever_reads_may_have_enough(command: str) -> None:
    """As in `aiocoll bench --json | head -1`: no traceback, and no failure."""
    ours, theirs = os.pipe()
    os.close(ours)
    with open(theirs, "w") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "aiocoll", *command.split()],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")
