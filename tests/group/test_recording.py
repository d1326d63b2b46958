"""The flight recorder of a group: dumps on request, on failure and on SIGUSR2, and Chrome traces."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupError, GroupOptions, HashStore, ProcessGroup, new_group, testing
from aiocoll.dump.files import file_name
from aiocoll.dump.timeline import chrome_trace, lanes
from aiocoll.testing.virtual import run_virtual
from tests.internals import comm_of
from tests.ranks import LINKS, options, parametrize_transports, run_ranks


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def file_names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


async def single_rank_group(name: str | None = None, **given: Any) -> ProcessGroup:
    return await new_group(store=HashStore(), rank=0, world_size=1, name=name, options=GroupOptions(**given))


@pytest.mark.ranks(2, 3)
@parametrize_transports(*LINKS)
async def test_recorder_dump_contains_the_calls(pg: ProcessGroup) -> None:
    me, ranks = pg.rank(), pg.size()
    await pg.allreduce(np.zeros((2, 3), np.float32))
    line = sys._getframe().f_lineno - 1
    await pg.barrier(key="done")
    if me == 0:
        await pg.send(np.zeros(5, np.int16), 1, tag=6)
    elif me == 1:
        await pg.recv_anysource(np.zeros(5, np.int16), tag=6)
    await pg.broadcast_object("x" if me == 0 else None, 0)
    pending = pg.recv(np.zeros(1), (me + 1) % ranks, tag=9)
    dump = pg.recorder.dump()
    assert json.loads(json.dumps(dump, allow_nan=False)) == dump
    assert (dump["group"], dump["rank"], dump["world_size"]) == (pg.group_name, me, ranks)
    assert (dump["global_ranks"], dump["pid"], dump["state"]) == ([*range(ranks)], os.getpid(), "open")
    first, barrier, *messages, parcel = (each for each in dump["entries"] if each["state"] == "finished")
    assert (first["op"], first["seq"], first["shape"], first["dtype"]) == ("ALLREDUCE", 1, [2, 3], "float32")
    assert (first["reduce"], first["bytes"], first["kind"]) == ("SUM", 24, "collective")
    assert first["site"] == f"{__file__}:{line}"
    assert first["function"] == test_recorder_dump_contains_the_calls.__qualname__
    assert first["entered"] == first["started"] <= first["finished"] <= dump["clock"]["monotonic"]
    assert (barrier["key"], barrier["seq"], barrier["bytes"]) == ("done", 1, 0)
    assert [(each["op"], each["peer"], each["tag"], each["bytes"]) for each in messages] == (
        [("SEND", 1, 6, 10), ("RECV", 0, 6, 10), ()][me : me + 1] if me < 2 else []
    )
    assert (parcel["dtype"], parcel["bytes"]) == ("object", None)
    last = dump["entries"][-1]
    assert (last["state"], last["started"], last["finished"], last["bytes"]) == ("pending", None, None, 8)
    await pg.barrier()
    await pg.send(np.zeros(1), (me - 1) % ranks, tag=9)
    await pending


def test_recorder_dump_of_a_pending_collective_names_the_missing_ranks() -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() != 1:
            work = pg.barrier()
            await asyncio.sleep(2)
            (entry,) = pg.recorder.dump()["entries"]
            assert (entry["state"], entry["missing"]) == ("pending", [1])
            pg.abort()
            work.exception()
        else:
            await pg.wait_revoked()
            dump = pg.recorder.dump()
            assert (dump["state"], dump["cause"]["kind"], dump["entries"]) == ("revoked", "GroupError", [])

    run_virtual(3, rank)


def test_compared_collective_is_recorded_as_one_entry_with_a_later_start() -> None:
    async def rank(pg: ProcessGroup) -> None:
        await asyncio.sleep(pg.rank())
        await pg.allreduce(np.zeros(3))
        (entry,) = pg.recorder.dump()["entries"]
        assert (entry["entered"], entry["started"]) == (pytest.approx(pg.rank()), pytest.approx(1))
        assert entry["finished"] >= entry["started"]

    run_virtual(2, rank, options=GroupOptions(debug="detail"))


async def test_written_dump_file_equals_the_returned_dump(tmp_path: Path) -> None:
    async with await single_rank_group() as pg:
        await pg.allreduce(1.0)
        pg.recorder.dump_json(tmp_path / "a.json")
        assert os.name != "posix" or (tmp_path / "a.json").stat().st_mode & 0o777 == 0o600
        found, now = load(tmp_path / "a.json"), pg.recorder.dump()
        assert found.pop("clock")["monotonic"] <= now.pop("clock")["monotonic"]
        assert found == now
        with pytest.raises(FileNotFoundError):
            pg.recorder.dump_json(tmp_path / "missing" / "a.json")
    assert pg.recorder.dump()["state"] == "closed"
    assert file_names(tmp_path) == ["a.json"]


async def test_dump_has_the_longest_times_for_which_the_loop_was_blocked(monkeypatch: pytest.MonkeyPatch) -> None:
    async with await single_rank_group() as pg:
        assert pg.recorder.dump()["longest_blocks"] == []
        blocks = [(2.5, 1.5, "here.py:7 in slow"), (9.0, 4.0, "here.py:8 in slower")]
        monkeypatch.setattr(comm_of(pg).endpoint.failure_detector, "longest_blocks", lambda: blocks)
        dump = pg.recorder.dump()
    now = dump["clock"]["monotonic"]
    assert dump["longest_blocks"] == [
        {"began": now - 2.5, "seconds": 1.5, "line": "here.py:7 in slow"},
        {"began": now - 9.0, "seconds": 4.0, "line": "here.py:8 in slower"},
    ]


# -- traces


def check_trace(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Check all fields of trace events, and that events of a thread do not overlap; return the operation events."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    whole = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event in trace["traceEvents"]:
        assert event["ph"] in "XM"
        assert isinstance(event["name"], str)
        assert type(event["pid"]) is type(event["tid"]) is int
        assert isinstance(event["args"], dict)
    named = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["name"] == "thread_name"}
    ends: dict[tuple[int, int], float] = {}
    for event in sorted(whole, key=lambda event: float(event["ts"])):
        thread = event["pid"], event["tid"]
        assert thread in named
        assert event["ts"] >= 0 <= event["dur"]
        assert event["ts"] >= ends.get(thread, 0.0) - 1e-3
        ends[thread] = event["ts"] + event["dur"]
    return whole


@pytest.mark.parametrize("world_size", [1, 2, 3])
async def test_chrome_trace_contains_every_operation(world_size: int, tmp_path: Path) -> None:
    async def rank(pg: ProcessGroup) -> dict[str, Any]:
        for work in [pg.allreduce(np.zeros(4), key=str(number)) for number in range(5)]:
            await work
        if pg.rank() == 0 and pg.size() > 1:
            await pg.send(np.zeros(3), 1)
        elif pg.rank() == 1:
            await pg.recv(np.zeros(3), 0)
        path = tmp_path / f"{pg.rank()}.json"
        pg.recorder.dump_trace(path)
        assert len(check_trace(load(path))) == len(pg.recorder.dump()["entries"])
        return pg.recorder.dump()

    dumps = await run_ranks(world_size, rank)
    whole = check_trace(json.loads(json.dumps(chrome_trace(dumps))))
    assert len(whole) == 5 * world_size + 2 * (world_size > 1)
    assert min(event["ts"] for event in whole) == 0
    assert {event["pid"] for event in whole} == set(range(world_size))
    assert {"ALLREDUCE '0' 1", "ALLREDUCE '4' 1"} < {event["name"] for event in whole} | {""}


def test_chrome_trace_supports_zero_operations_and_pending_operations() -> None:
    assert chrome_trace([])["traceEvents"] == []
    entries = [{"entered": 0.0, "finished": None}, {"entered": 1.0, "finished": 2.0}, {"entered": 2.0, "finished": 3.0}]
    assert lanes(entries, 5.0) == [0, 1, 1]


# -- automatic dumps


@pytest.mark.parametrize("transport", LINKS)
async def test_all_ranks_write_a_dump_of_a_failed_group(transport: str, tmp_path: Path) -> None:
    where = tmp_path / "made" / "when needed"

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            await pg.barrier()
            pg.abort("the disk is full")
        else:
            with suppress(GroupError):  # the abort message may overtake a frame of the barrier
                await pg.barrier()
        assert "the disk is full" in str(await pg.wait_revoked())

    await testing.run_ranks(3, rank, options=replace(options(transport), dump_dir=str(where)))
    assert file_names(where) == [file_name("world:0", each) for each in range(3)]
    for number in range(3):
        dump = load(where / file_name("world:0", number))
        assert (dump["rank"], dump["state"]) == (number, "revoked")
        assert "the disk is full" in dump["cause"]["text"]
        assert dump["entries"][0]["op"] == "BARRIER"


async def test_closed_group_writes_no_dump(tmp_path: Path) -> None:
    async with await single_rank_group(dump_dir=str(tmp_path)) as pg:
        await pg.barrier()
    assert file_names(tmp_path) == []


def test_failed_groups_on_a_virtual_clock_write_dumps(tmp_path: Path) -> None:
    async def rank(pg: ProcessGroup) -> None:
        pg.abort()

    run_virtual(2, rank, options=GroupOptions(dump_dir=str(tmp_path)))
    assert len(file_names(tmp_path)) == 2


@pytest.mark.parametrize("name", ["a/b", "..", "", "ä\n\0", "x" * 1000, "\udc80", "con:1", "a%2Fb"])
def test_dump_file_of_any_group_name_has_a_safe_unique_name(name: str) -> None:
    found = file_name(name, 12)
    assert found.isascii()
    assert not set(found) & set('/\\:*?"<>|\n\0 ')
    assert len(found) < 255
    assert found.endswith("-12.json")
    assert found not in {file_name(other, 12) for other in (name + "x", name + "%", "a%2F%62")}


async def test_groups_with_long_names_have_different_dump_files(tmp_path: Path) -> None:
    for end in "ab":
        pg = await single_rank_group("/" * 300 + end, dump_dir=str(tmp_path))
        pg.abort()
        await pg.shutdown()
    assert len(file_names(tmp_path)) == 2


@pytest.mark.parametrize("fault", ["a file", "/dev/full", "thread"])
async def test_failed_write_of_a_dump_is_only_logged(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = tmp_path / "file"
    if fault == "a file":
        where.write_text("no directory")
    elif fault == "/dev/full":

        def raise_disk_full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("os.replace", raise_disk_full)
    else:

        def fail_to_start(_: threading.Thread) -> None:
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(threading.Thread, "start", fail_to_start)
    pg = await single_rank_group(dump_dir=str(where))
    pg.abort("on purpose")
    assert "on purpose" in str(await pg.wait_revoked())
    await pg.shutdown()
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    assert f"cannot write the dump {where / file_name('world:0', 0)}" in record.getMessage()
    assert (record.group, record.rank) == ("world:0", 0)  # type: ignore[attr-defined]
    assert fault == "a file" or list(where.glob("*")) == []


async def test_log_names_the_dump_option_without_a_directory(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "aiocoll")
    pg = await single_rank_group()
    pg.abort()
    await pg.shutdown()
    assert "pg.recorder.dump() returns the last calls; set AIOCOLL_DUMP_DIR to have them written" in caplog.text


# -- the signal


@pytest.fixture
def earlier_signals() -> Iterator[list[int]]:
    """Install a signal handler; yield the received signals, and check that the handler is restored."""
    gc.collect()  # a group that was not closed listens until then
    had: list[int] = []

    def handler(number: int, _: object) -> None:
        had.append(number)

    old = signal.signal(signal.SIGUSR2, handler)
    yield had
    assert signal.getsignal(signal.SIGUSR2) is handler, "the groups did not restore the earlier handler"
    signal.signal(signal.SIGUSR2, old)


async def test_dump_signal_dumps_all_groups_and_calls_the_previous_handler(
    earlier_signals: list[int], tmp_path: Path
) -> None:
    one = await single_rank_group("one", dump_dir=str(tmp_path))
    async with one, await single_rank_group("two", dump_dir=str(tmp_path)), await single_rank_group("silent"):
        await one.allreduce(1)
        signal.raise_signal(signal.SIGUSR2)
        assert file_names(tmp_path) == [file_name("one", 0), file_name("two", 0)]
        assert earlier_signals == [signal.SIGUSR2]
        dump = load(tmp_path / file_name("one", 0))
        assert (dump["state"], len(dump["entries"])) == ("open", 1)


async def test_later_signal_handler_is_not_replaced_and_can_call_the_dump_handler(
    earlier_signals: list[int], tmp_path: Path
) -> None:
    first = await single_rank_group("first", dump_dir=str(tmp_path))
    dump_handler = signal.getsignal(signal.SIGUSR2)
    assert callable(dump_handler)

    def later(number: int, frame: Any) -> None:
        dump_handler(number, frame)

    signal.signal(signal.SIGUSR2, later)
    second = await single_rank_group("second", dump_dir=str(tmp_path))
    signal.raise_signal(signal.SIGUSR2)
    assert len(file_names(tmp_path)) == 2
    await first.shutdown()
    await second.shutdown()
    assert signal.getsignal(signal.SIGUSR2) is later
    signal.raise_signal(signal.SIGUSR2)
    assert len(earlier_signals) == 2
    signal.signal(signal.SIGUSR2, dump_handler)
    await (await single_rank_group("third", dump_dir=str(tmp_path))).shutdown()


async def test_signal_handler_of_the_program_is_not_replaced_without_a_dump_directory(
    earlier_signals: list[int],
) -> None:
    handler = signal.getsignal(signal.SIGUSR2)
    async with await single_rank_group():
        assert signal.getsignal(signal.SIGUSR2) is handler


def test_dump_signal_handler_is_not_installed_outside_of_the_main_thread(
    earlier_signals: list[int], tmp_path: Path
) -> None:
    handler = signal.getsignal(signal.SIGUSR2)

    async def main() -> None:
        async with await single_rank_group(dump_dir=str(tmp_path)):
            assert signal.getsignal(signal.SIGUSR2) is handler

    failed: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(main())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed
