"""Decoding of large received objects: in steps over many loop iterations, while other tasks run."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from aiocoll import GroupError, ProcessGroup, SerializationError
from aiocoll.codec import decode, dumps

from ..internals import comm_of, replace_parts
from ..ranks import LINKS, parametrize_transports, run_ranks

NUMBERS = list(range(10_000, 40_000))
#: The number of bytes that the decoder reads in one step.
STEP = 1024
STEPS = len(dumps(NUMBERS)) // STEP


def make_steps_slow(pg: ProcessGroup) -> None:
    """Make every decoding step take the whole time budget of a callback on this rank."""
    seconds = itertools.count()
    comm_of(pg).endpoint.runtime.ticks = lambda: float(next(seconds))


class LoopCounter:
    """A counter of event loop iterations."""

    def __init__(self) -> None:
        self.count = 0
        self._task = asyncio.ensure_future(self._turn())

    async def _turn(self) -> None:
        while True:
            self.count += 1
            await asyncio.sleep(0)

    async def stop(self) -> int:
        self._task.cancel()
        await asyncio.wait([self._task])
        return self.count


CALLS: dict[str, tuple[Callable[[ProcessGroup], Any], Any]] = {
    "broadcast_object": (lambda pg: pg.broadcast_object(NUMBERS if pg.rank() == 0 else None, 0), NUMBERS),
    "scatter_object": (lambda pg: pg.scatter_object([0, NUMBERS] if pg.rank() == 0 else None, 0), NUMBERS),
    "gather_object": (lambda pg: pg.gather_object(NUMBERS, 1), [NUMBERS, NUMBERS]),
    "allgather_object": (lambda pg: pg.allgather_object(NUMBERS), [NUMBERS, NUMBERS]),
    "alltoall_object": (lambda pg: pg.alltoall_object([NUMBERS, NUMBERS]), [NUMBERS, NUMBERS]),
    "recv_object": (lambda pg: pg.recv_object(0) if pg.rank() else pg.send_object(NUMBERS, 1), NUMBERS),
    "incoming": (lambda pg: anext(pg.incoming()) if pg.rank() else pg.send_object(NUMBERS, 1), (0, NUMBERS)),
}


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
@pytest.mark.parametrize("call", CALLS)
async def test_event_loop_runs_while_a_large_object_is_decoded(pg: ProcessGroup, call: str) -> None:
    start, expected = CALLS[call]
    await pg.barrier()
    make_steps_slow(pg)
    turns = LoopCounter()
    result = await start(pg)
    counted = await turns.stop()
    if pg.rank() == 1:
        assert result == expected
        assert counted >= STEPS
    await pg.barrier()


@pytest.mark.parametrize("call", ["allgather_object", "recv_object"])
async def test_end_of_the_group_ends_the_decoding_of_an_object(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reached = asyncio.Event()

    def read_forever(*_: Any, **__: Any) -> Any:
        reached.set()
        while True:
            yield

    replace_parts(monkeypatch, read_object=read_forever)

    async def rank(pg: ProcessGroup) -> None:
        work = CALLS[call][0](pg)
        await reached.wait()
        if pg.rank() == 1:
            work.abort()
            with pytest.raises(GroupError, match="was aborted by rank 1"):
                await work
        else:
            with suppress(GroupError):
                await work

    await run_ranks(2, rank)


@pytest.mark.parametrize("call", ["allgather_object", "recv_object", "incoming"])
async def test_malformed_large_object_is_refused_and_the_group_continues(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Append an invalid byte, which only the last decoding step can find."""
    replace_parts(monkeypatch, dump_object=lambda obj, **_: dumps(obj) + b"\xc0")

    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()
        make_steps_slow(pg)
        if pg.rank() or call == "allgather_object":
            with pytest.raises(SerializationError, match="bytes are not a valid object"):
                await CALLS[call][0](pg)
        else:
            await CALLS[call][0](pg)
        await pg.barrier()

    await run_ranks(2, rank)


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_cancelled_incoming_iterator_loses_no_partly_decoded_message(pg: ProcessGroup) -> None:
    """Cancel the iterator repeatedly; each next iterator continues the decoding, so that every message arrives."""
    await pg.barrier()
    make_steps_slow(pg)
    if pg.rank() == 0:
        for number in range(3):
            await pg.send_object([number, NUMBERS], 1)
    else:
        got, cancelled = [], 0
        while len(got) < 3:
            task = asyncio.ensure_future(anext(pg.incoming()))
            for _ in range(3):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task])
            if task.cancelled():
                cancelled += 1
            else:
                got.append(task.result())
        assert got == [(0, [number, NUMBERS]) for number in range(3)]
        assert cancelled >= STEPS
    await pg.barrier()


def test_step_size_of_these_tests_equals_the_step_size_of_the_decoder() -> None:
    assert decode._STEP == STEP
