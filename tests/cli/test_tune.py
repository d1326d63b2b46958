"""`aiocoll bench --tune`: the measurements, and the file that groups read."""

import argparse
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from aiocoll.algorithms import Machine, Tuning
from aiocoll.algorithms.machine import SingleCopy
from aiocoll.cli import tune
from aiocoll.cli.main import main
from aiocoll.cli.tune_single_copy import SIZES, disabled_accelerator, measure_single_copy, paying
from aiocoll.errors import RendezvousError
from aiocoll.transport.shm.process_memory import can_read
from aiocoll.tuning import default_path, load

from ..internals import Limits

ARGS = argparse.Namespace(tune=True)
QUIET, BUSY = Machine(20e-6, 5e-6, 1e-9, 1e-10), Machine(80e-6, 4e-6, 2e-9, 2e-10)


TUNING = Tuning(tcp=QUIET, unix=QUIET, single_copy=SingleCopy(1 << 20, 1 << 18, math.inf))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> dict:
    """Replace the measurements of `aiocoll bench --tune` by fake measurements; return the fake results by medium."""
    launches = {"tcp": [BUSY, QUIET, BUSY], "unix": [QUIET]}

    async def measure(*_: object) -> dict:
        return launches

    async def measure_single_copy(*_: object) -> SingleCopy:
        return TUNING.single_copy

    monkeypatch.setattr(tune, "measure", measure)
    monkeypatch.setattr(tune, "measure_single_copy", measure_single_copy)
    return launches


@pytest.fixture
def tuning_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of the tuning file, in a directory that does not exist yet."""
    monkeypatch.delenv("AIOCOLL_TUNING", raising=False)
    environ = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    monkeypatch.setenv("XDG_CACHE_HOME", environ["XDG_CACHE_HOME"])
    return Path(default_path(environ))


@pytest.mark.slow
async def test_tune_measures_every_transport_with_two_processes(limits: Limits) -> None:
    limits(tune_time_limit=0.0)
    launches = await tune.measure(launches=3, seconds=0.0)
    assert {"tcp", "unix"} <= launches.keys()
    for (machine,) in launches.values():
        assert all(0 < number < 1 for number in machine)
        assert machine.overhead <= machine.alpha / 2


def test_tune_writes_the_fastest_launch_to_the_tuning_file(
    launches: dict, tuning_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for _ in range(2):  # the second run replaces the file
        assert tune.run(ARGS) == 0
        assert load(None, {"XDG_CACHE_HOME": str(tuning_path.parents[1])}) == TUNING
    assert list(tuning_path.parent.iterdir()) == [tuning_path]
    printed = capsys.readouterr().out
    assert "tcp       20.0 µs        5.0 µs     1.0 GB/s    10.0 GB/s    20 KiB\n" in printed
    assert "tcp: latency was 20.0 to 80.0 µs: something else keeps this machine busy" in printed
    assert "unix: latency" not in printed
    assert "single copy: moved from 1024 KiB on, spread from 256 KiB on, reduced never\n" in printed
    assert f"Written to {tuning_path}" in printed


def test_tune_reports_unavailable_single_copy(
    launches: dict, tuning_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    async def measure_single_copy(*_: object) -> None:
        return None

    monkeypatch.setattr(tune, "measure_single_copy", measure_single_copy)
    assert tune.run(ARGS) == 0
    assert load(None, {"XDG_CACHE_HOME": str(tuning_path.parents[1])}) == Tuning(tcp=QUIET, unix=QUIET)
    assert "single copy: processes of this host cannot read the memory of other processes\n" in capsys.readouterr().out


@pytest.mark.parametrize("given", [None, "1"])
def test_tune_measures_single_copy_without_the_accelerator(given: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AIOCOLL_NATIVE", raising=False)
    if given is not None:
        monkeypatch.setenv("AIOCOLL_NATIVE", given)
    with disabled_accelerator():
        command = [sys.executable, "-c", "from aiocoll.native import IMPLEMENTATION; print(IMPLEMENTATION)"]
        assert subprocess.check_output(command, text=True).startswith("pure Python")
    assert os.environ.get("AIOCOLL_NATIVE") == given


@pytest.mark.slow
async def test_tune_measures_single_copy_with_two_processes() -> None:
    found = await measure_single_copy(1)
    if can_read() is None:
        assert found is not None
        assert all(nbytes in (*SIZES, math.inf) for nbytes in found)
    else:
        assert found is None


@pytest.mark.parametrize(
    ("ratios", "least"),
    [
        ({1: 0.5, 4: 0.5, 16: 1.0}, 1),
        ({1: 0.5, 4: 1.1, 16: 0.5}, 16),
        ({1: 2.0, 4: 0.9, 16: 0.5}, 4),
        ({1: 0.5, 4: 0.5, 16: 1.1}, math.inf),
    ],
)
def test_minimum_single_copy_size_is_the_smallest_from_which_single_copy_is_always_faster(
    ratios: dict[int, float], least: float
) -> None:
    assert paying(ratios) == least


def test_tune_writes_to_the_given_file(
    launches: dict, tuning_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIOCOLL_TUNING", str(tmp_path / "mine.json"))
    assert tune.run(ARGS) == 0
    assert load(str(tmp_path / "mine.json"), {}) == TUNING
    assert not tuning_path.exists()


def test_tune_reports_an_unwritable_file(launches: dict, tuning_path: Path, capsys: pytest.CaptureFixture) -> None:
    tuning_path.mkdir(parents=True)
    assert tune.run(ARGS) == 1
    assert "aiocoll bench: [Errno 21] Is a directory" in capsys.readouterr().err
    assert list(tuning_path.parent.iterdir()) == [tuning_path]


def test_two_hosts_can_write_the_tuning_file_at_once(
    launches: dict, tuning_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Write to a shared directory from two hosts, with the same pid on both."""
    replace, written = Path.replace, []

    def write_meanwhile(fresh: Path, target: Path) -> Path:
        if not written:
            written.append(target)
            assert tune.run(ARGS) == 0
        return replace(fresh, target)

    monkeypatch.setattr(os, "getpid", lambda: 1)
    monkeypatch.setattr(Path, "replace", write_meanwhile)
    assert tune.run(ARGS) == 0
    assert list(tuning_path.parent.iterdir()) == written == [tuning_path]


@pytest.mark.parametrize(
    "error", [RendezvousError("no rank came"), TimeoutError("it did not end"), KeyboardInterrupt()]
)
def test_failed_measurement_writes_no_tuning_file(
    tuning_path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    async def measure(*_: object) -> dict:
        raise error

    monkeypatch.setattr(tune, "measure", measure)
    interrupted = isinstance(error, KeyboardInterrupt)
    assert main(["bench", "--tune"]) == (130 if interrupted else 1)
    assert capsys.readouterr().err == ("" if interrupted else f"aiocoll bench: {error}\n")
    assert not tuning_path.exists()


def test_bench_command_accepts_the_tune_option(capsys: pytest.CaptureFixture) -> None:
    parser = argparse.ArgumentParser()
    tune.add_arguments(parser)
    assert not parser.parse_args([]).tune
    assert parser.parse_args(["--tune"]).tune
