"""SIGUSR2 without a dump directory: aiocoll prints a summary, and keeps signal handlers of the program."""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import re
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from aiocoll import HashStore, ProcessGroup, new_group
from aiocoll.cli import start
from aiocoll.dump import signals
from tests.ranks import run_ranks


async def single_rank_group(name: str | None = None) -> ProcessGroup:
    return await new_group(store=HashStore(), rank=0, world_size=1, name=name)


@pytest.fixture
def default() -> Iterator[None]:
    """Restore the default action of SIGUSR2, and collect leftover groups of other tests, which listen to the signal."""
    gc.collect()
    old = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    yield
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL, "the default action was not restored"
    signal.signal(signal.SIGUSR2, old)


async def test_signal_without_a_directory_logs_a_summary(default: None, capfd: pytest.CaptureFixture[str]) -> None:
    async with await single_rank_group("one") as one, await single_rank_group("two"):
        await one.barrier()
        await one.allreduce(1, key="loss")
        one.recv_anysource(np.zeros(3), tag=7)
        signal.raise_signal(signal.SIGUSR2)
        output = capfd.readouterr().err
        one.abort()
    here = r"test_signals\.py"
    where = "test_signal_without_a_directory_logs_a_summary"
    at = rf"at .*{here}:\d+ in {where}"
    for pattern in (
        rf"group 'one', rank 0 of 1, process {os.getpid()}, open\n  pending: RECV \(any rank, tag 7\) {at}, ",
        rf"  finished: BARRIER \(sequence 1\) {at}, [0-9.]+ s ago\n",
        rf"  finished: ALLREDUCE \(key 'loss', 1\) {at}",
        rf"group 'two', rank 0 of 1, process {os.getpid()}, open\n  no operation yet\n",
        rf"main thread, innermost call last:\n(.*\n)+.*{here}\", line \d+, in {where}\n.*raise_signal",
    ):
        assert re.search(pattern, output), output


async def test_signal_summary_names_the_awaited_ranks(default: None, capfd: pytest.CaptureFixture[str]) -> None:
    called, reported = [asyncio.Event(), asyncio.Event()], asyncio.Event()

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        if pg.rank() == 2:
            for each in called:
                await each.wait()
            signal.raise_signal(signal.SIGUSR2)
            reported.set()
        work = pg.barrier()
        if pg.rank() < 2:
            called[pg.rank()].set()
            await reported.wait()
        await work

    await run_ranks(3, rank)
    output = capfd.readouterr().err
    assert len(re.findall("  pending: BARRIER", output)) == 2
    assert len(re.findall("group 'world:0', rank [0-2] of 3", output)) == 3


@pytest.mark.parametrize("handler", ["ignored", "of the loop", "in C"])
async def test_signal_handler_of_the_program_is_not_replaced(
    handler: str, default: None, capfd: pytest.CaptureFixture[str]
) -> None:
    received: list[int] = []
    loop = asyncio.get_running_loop()
    if handler == "ignored":
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    elif handler == "of the loop":
        loop.add_signal_handler(signal.SIGUSR2, received.append, 1)
    else:
        faulthandler.register(signal.SIGUSR2)
    try:
        put = signal.getsignal(signal.SIGUSR2)
        async with await single_rank_group():
            assert signal.getsignal(signal.SIGUSR2) is put
            signal.raise_signal(signal.SIGUSR2)
        output = capfd.readouterr().err
        assert "group 'world:0'" not in output
        assert ("most recent call first" in output) == (handler == "in C")
    finally:
        faulthandler.unregister(signal.SIGUSR2)
        if handler == "of the loop":
            assert loop.remove_signal_handler(signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


async def test_signal_summary_of_many_operations_is_truncated(default: None, capfd: pytest.CaptureFixture[str]) -> None:
    async with await single_rank_group() as pg:
        for _ in range(50):
            await pg.barrier()
        for tag in range(30):
            pg.recv_anysource(np.zeros(1), tag=tag)
        signal.raise_signal(signal.SIGUSR2)
        output = capfd.readouterr().err
        pg.abort()
    assert (output.count("pending: RECV"), output.count("finished: BARRIER")) == (20, 3)
    assert "  and 10 more pending operations\n" in output


def test_garbage_collected_signal_listener_is_not_called(default: None) -> None:
    """Check that aiocoll calls no deleted listener after the program has installed another signal handler."""
    received: list[object] = []

    class Listener:
        def signalled(self) -> str:
            received.append(self)
            return ""

    signals.listen(Listener(), asked=True)  # the listener is garbage collected at once
    signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    listener = Listener()
    signals.listen(listener, asked=True)
    signal.raise_signal(signal.SIGUSR2)
    signals.unlisten(listener)
    assert received == [listener, signal.SIGUSR2]
    signal.signal(signal.SIGUSR2, signal.SIG_DFL)


class NestingListener:
    """A listener that receives further signals while it writes a dump."""

    def __init__(self, signals: list[int]) -> None:
        self._signals = signals
        self._depth = 0
        self.deepest = 0
        self.dumps = 0

    def signalled(self) -> str:
        self._depth += 1
        self.dumps += 1
        self.deepest = max(self.deepest, self._depth)
        for _ in range(self._signals.pop(0) if self._signals else 0):
            signal.raise_signal(signal.SIGUSR2)
        self._depth -= 1
        return ""


@pytest.mark.parametrize(
    ("during", "dumps"), [([0], 1), ([1], 2), ([5], 2), ([2, 2], 2), ([9] * 50, 2)], ids=["0", "1", "5", "2 2", "storm"]
)
def test_signals_during_a_dump_lead_to_one_more_dump(default: None, during: list[int], dumps: int) -> None:
    listener = NestingListener(during)
    signals.listen(listener, asked=True)
    try:
        signal.raise_signal(signal.SIGUSR2)
        assert (listener.deepest, listener.dumps) == (1, dumps)
        during.clear()
        signal.raise_signal(signal.SIGUSR2)
        assert (listener.deepest, listener.dumps) == (1, dumps + 1)
    finally:
        signals.unlisten(listener)


def test_signals_during_the_programs_handler_do_not_call_the_handler_recursively(default: None) -> None:
    depths, depth = [], 0

    def handle_signal(number: int, frame: object) -> None:
        nonlocal depth
        depth += 1
        depths.append(depth)
        if len(depths) == 1:
            signal.raise_signal(signal.SIGUSR2)
        depth -= 1

    signal.signal(signal.SIGUSR2, handle_signal)
    listener = NestingListener([])
    signals.listen(listener, asked=True)
    try:
        signal.raise_signal(signal.SIGUSR2)
        assert (depths, listener.dumps) == ([1, 1], 2)
    finally:
        signals.unlisten(listener)
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)


def test_failed_dump_does_not_prevent_later_dumps(default: None) -> None:
    class FailingListener:
        def signalled(self) -> str:
            raise OSError("disk full")

    failing, listener = FailingListener(), NestingListener([])
    signals.listen(failing, asked=True)
    try:
        with pytest.raises(OSError, match="disk full"):
            signal.raise_signal(signal.SIGUSR2)
        signals.listen(listener, asked=True)
        signals.unlisten(failing)
        signal.raise_signal(signal.SIGUSR2)
        assert listener.dumps == 1
    finally:
        signals.unlisten(failing)
        signals.unlisten(listener)


def test_dump_signals_of_a_rank_without_a_group_do_not_nest(default: None, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def write(fd: int, data: bytes) -> int:
        written.append(fd)
        signal.raise_signal(signal.SIGUSR2)
        return len(data)

    signal.signal(signal.SIGUSR2, start._write_stack)
    monkeypatch.setattr(os, "write", write)
    try:
        signal.raise_signal(signal.SIGUSR2)
        signal.raise_signal(signal.SIGUSR2)
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    assert written == [2, 2]
