"""NumPy numbers as arguments: ranks, tags, sizes, timeouts and options."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from fractions import Fraction
from math import inf
from typing import Any

import numpy as np
import pytest

import aiocoll
from aiocoll import GroupOptions, Meeting, ProcessGroup, Recv, Send
from aiocoll.numerals import to_float, to_int
from aiocoll.options import seconds
from aiocoll.store import HashStore

from ..each import each
from ..ranks import parametrize_transports

#: Functions that convert an int to a NumPy number.
KINDS: list[Callable[[int], Any]] = [np.int64, np.uint8, np.int32, np.array, lambda number: np.array(number, np.int16)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(2, 3)
@parametrize_transports("memory", "shm")
async def test_messages_accept_numpy_ranks_and_tags(pg: ProcessGroup, kind: Callable[[int], Any]) -> None:
    size, rank = pg.size(), pg.rank()
    right, left, tag = kind((rank + 1) % size), kind((rank - 1) % size), kind(100)
    x, y = np.full(3, rank), np.zeros(3, int)
    expected = [(rank - 1) % size] * 3
    works = [pg.recv(y, left, tag=tag, timeout=kind(50)), pg.send(x, right, tag=tag, timeout=kind(50))]
    await asyncio.gather(*works)
    assert y.tolist() == expected
    y[:] = 0
    await pg.batch([Send(x, right, tag), Recv(y, left, tag)], timeout=kind(50))
    assert y.tolist() == expected
    y[:] = 0
    await pg.batch([Recv(y, None, tag), Send(x, right, tag)])
    assert y.tolist() == expected
    sent = pg.send_object(rank, right, tag=tag)
    envelope = await pg.probe(left, tag, timeout=kind(50))
    assert (envelope.source, envelope.tag) == ((rank - 1) % size, 100)
    assert type(envelope.tag) is int
    assert await pg.recv_object(left, tag=tag) == (rank - 1) % size
    await sent
    await pg.barrier()
    assert pg.iprobe(left, kind(101)) is None
    sent = pg.send_object(rank, right, tag=tag)
    async for source, found in pg.incoming(tag):
        assert (source, found) == ((rank - 1) % size, (rank - 1) % size)
        break
    await sent
    json.dumps(pg.recorder.dump())  # json.dumps fails if the dump contains NumPy numbers
    assert await pg.allreduce(1) == size


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.ranks(2, 3)
async def test_collectives_accept_numpy_roots_sizes_and_timeouts(pg: ProcessGroup, kind: Callable[[int], Any]) -> None:
    size, rank, last = pg.size(), pg.rank(), kind(pg.size() - 1)
    limit = kind(50)
    assert (await pg.broadcast(np.full(2, rank), last, timeout=limit)).tolist() == [size - 1] * 2
    assert await pg.reduce(rank + 1, last, timeout=limit) == (size * (size + 1) // 2 if rank == size - 1 else rank + 1)
    assert await pg.broadcast_object(rank, last, timeout=limit) == size - 1
    assert await pg.scatter_object([*range(size)] if rank == size - 1 else None, last, timeout=limit) == rank
    out = np.zeros(size, int)
    ones = [kind(1)] * size
    await pg.alltoall_base(out, np.arange(size) + 10 * rank, ones, ones, timeout=limit)
    assert out.tolist() == [rank + 10 * other for other in range(size)]
    with pytest.raises(ValueError, match=r"rank=\d is this rank, which is alive"):
        pg.report_death(kind(rank), "for a test")
    part = await pg.split_group([kind(each) for each in range(size)], timeout=limit)
    assert part is not None
    assert part.size() == size
    pg.timeout = limit
    assert pg.timeout == 50.0
    async with await pg.split(kind(3), kind(-rank) if kind is not np.uint8 else kind(size - rank)) as colour:
        assert colour.rank() == size - 1 - rank


@pytest.mark.ranks(2)
async def test_wrong_numeric_arguments_are_refused_and_nothing_is_sent(pg: ProcessGroup) -> None:
    other = 1 - pg.rank()
    for tag in (True, np.bool_(True), 1.0, np.float64(1), np.array([1, 2]), "1"):
        for call in (
            lambda: pg.send(np.ones(1), other, tag=tag),  # noqa: B023
            lambda: pg.recv(np.ones(1), other, tag=tag),  # noqa: B023
            lambda: pg.recv_object(other, tag=tag),  # noqa: B023
            lambda: pg.send_object(1, other, tag=tag),  # noqa: B023
            lambda: pg.incoming(tag),  # noqa: B023
            lambda: pg.iprobe(other, tag),  # noqa: B023
            lambda: pg.probe(other, tag),  # noqa: B023
        ):
            with pytest.raises(TypeError, match=f"tag must be an int, not {type(tag).__name__}"):
                call()
        with pytest.raises(TypeError, match=r"operations\[0\].tag must be an int"):
            pg.batch([Send(np.ones(1), other, tag)])
    for wrong in (np.array([0]), np.bool_(False), np.float32(0), np.array(0.0)):
        with pytest.raises(TypeError, match=r"operations\[1\].src must be a rank \(int\)"):
            pg.batch([Send(np.ones(1), other), Recv(np.ones(1), wrong)])
    with pytest.raises(ValueError, match=r"tag=-1 is out of range"):
        pg.send(np.ones(1), other, tag=np.int64(-1))
    assert await pg.allreduce(1) == 2


SECONDS: list[tuple[Any, float]] = [
    (5, 5.0),
    (np.int64(5), 5.0),
    (np.uint8(5), 5.0),
    (np.float16(0.5), 0.5),
    (np.float32(0.5), 0.5),
    (np.float64(inf), inf),
    (np.longdouble(2), 2.0),
    (np.array(5), 5.0),
    (np.array(0.5), 0.5),
    (Fraction(1, 2), 0.5),
    (10**400, inf),
    (timedelta(seconds=3), 3.0),
]


@each(("given", "expected"), SECONDS)
def test_timeout_can_be_any_real_number(given: Any, expected: float) -> None:
    for found in (seconds(given, "timeout"), HashStore(given).timeout):
        assert found == expected
        assert type(found) is float


@each("given", [True, np.bool_(True), "5", b"5", 1j, np.complex128(1), np.array([5.0]), np.array([1, 2]), object()])
def test_timeout_of_another_type_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match=r"timeout must be seconds, a timedelta or None, not"):
        seconds(given, "timeout")
    with pytest.raises(TypeError, match=r"timeout must be seconds or a timedelta, not"):
        HashStore(given)


@each("given", [np.float64("nan"), np.int64(-1), np.float32(-0.5), np.array(-inf)])
def test_negative_timeout_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"timeout=.*: must be >= 0 seconds"):
        seconds(given, "timeout")


async def test_stores_and_meetings_accept_numpy_integers() -> None:
    async with HashStore() as store:
        assert await store.add("n", np.int64(3)) == 3
        assert await store.add("n", np.array(-1)) == 2
        await store.wait(["n"], timeout=np.float32(5))
        with pytest.raises(TypeError, match="amount must be int"):
            await store.add("n", np.float64(1))  # type: ignore[arg-type]
        async with aiocoll.new_group(
            store=store, rank=np.int64(0), world_size=np.array(1), timeout=np.int32(5), options=GroupOptions()
        ) as pg:
            assert pg.rank() == 0
    with Meeting(np.int64(1)) as meeting:
        async with meeting.ticket(np.int64(0)).join() as pg:
            assert pg.size() == 1


def test_options_accept_numpy_numbers_and_keep_python_numbers() -> None:
    options = GroupOptions(
        connections=np.int64(2),
        spin_us=np.float32(50),
        warn_after=np.int32(3),
        port_range=(np.int64(40000), np.uint16(40010)),  # type: ignore[arg-type]
    )
    assert (options.connections, options.spin_us, options.warn_after) == (2, 50.0, 3.0)
    assert options.port_range == (40000, 40010)
    assert {type(port) for port in options.port_range} == {type(options.connections)} == {int}
    for name in ("connections", "spin_us", "warn_after"):
        with pytest.raises(TypeError, match=f"{name} must be "):
            GroupOptions(**{name: np.bool_(True)})  # type: ignore[arg-type]


def test_numbers_of_other_libraries_are_converted_by_their_index_method() -> None:
    class Number:
        def __index__(self) -> int:
            return 7

    assert to_int(Number(), "n") == 7
    assert type(to_int(np.int64(7), "n")) is int
    with pytest.raises(TypeError, match="n must be an int, not Number"):
        to_int(type("Number", (), {})(), "n")
    with pytest.raises(TypeError, match="n must be a number, not str"):
        to_float("7", "n")
    assert to_float(-(10**400), "n") == -inf
