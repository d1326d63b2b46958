"""Messages from a rank to itself, and messages to or from `PROC_NULL`."""

from __future__ import annotations

import asyncio
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import aiocoll
from aiocoll import (
    PROC_NULL,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupError,
    GroupRevokedError,
    ProcessGroup,
    Recv,
    Send,
    SerializationError,
)
from aiocoll.engine.links.flow_control import LINK_WINDOW

from ..internals import Limits, comm_of
from ..ranks import TRANSPORTS, parametrize_transports

KIB, MIB = 1024, 1024 * 1024


@pytest.mark.ranks(2)
@parametrize_transports(*TRANSPORTS)
async def test_messages_to_self_can_have_any_length_and_order(pg: ProcessGroup) -> None:
    me = pg.rank()
    for nbytes in (0, 1, 256 * KIB, 256 * KIB + 1, 3 * MIB + 5):
        data = (np.arange(nbytes) % 251).astype("uint8")
        for first in ("send", "recv"):
            target = np.full(nbytes + 2, 255, "uint8")
            if first == "send":
                sending = pg.send(data, me, tag=4)
                assert sending.done() == (nbytes <= 256 * KIB)
                receiving = pg.recv(target[1:-1], me, tag=4)
            else:
                receiving = pg.recv(target[1:-1], me, tag=4)
                sending = pg.send(data, me, tag=4)
            assert (await receiving).tobytes() == data.tobytes()
            assert await sending is data
            assert (target[0], target[-1]) == (255, 255)
            assert receiving.source_rank() == me
    assert pg.pending() == []
    assert comm_of(pg).matching._active == comm_of(pg).matching.outgoing == {}
    assert comm_of(pg).matching.loopback.nbytes == 0


@pytest.mark.ranks(1, 2, 3)
async def test_messages_to_self_keep_their_order_independent_of_other_messages(pg: ProcessGroup) -> None:
    me, size = pg.rank(), pg.size()
    lengths = [3, 300 * KIB, 0, 5, 300 * KIB]
    for dst in range(size):
        for number, length in enumerate(lengths):
            pg.send(np.full(length, 10 * me + number, "uint8"), dst, tag=number % 2)
    for src in range(size):
        for tag in (1, 0):
            for number in range(tag, len(lengths), 2):
                got = await pg.recv(np.zeros(lengths[number], "uint8"), src, tag)
                assert (got == 10 * src + number).all()
    await pg.drain()


@pytest.mark.ranks(1)
async def test_messages_to_self_support_every_dtype_and_layout(pg: ProcessGroup) -> None:
    for dtype in ("bool", "int8", "uint16", "int64", "float16", "float32", "complex128", ml_dtypes.bfloat16):
        x = np.arange(12).reshape(3, 4).astype(dtype)
        y = np.zeros((4, 3), dtype)
        await pg.batch([Send(x, 0), Recv(y.T, 0)])
        np.testing.assert_array_equal(y.T, x)


@pytest.mark.ranks(2)
@parametrize_transports(*TRANSPORTS)
async def test_messages_to_self_work_with_any_source_receives_objects_and_batches(pg: ProcessGroup) -> None:
    me, other = pg.rank(), 1 - pg.rank()
    pg.send(np.array([me]), me, tag=1)
    pg.send(np.array([me]), other, tag=1)
    got = {}
    for _ in range(2):
        work = pg.recv_anysource(np.zeros(1, int), tag=1)
        sent = int((await work)[0])
        got[sent] = work.source_rank()
    assert got == {0: 0, 1: 1}
    thing = {"a": [1, b"x" * 300_000]}
    sending = pg.send_object(thing, me, tag=2)
    received = await pg.recv_object(None, tag=2)
    assert received == thing
    assert received is not thing
    await sending
    await pg.send_object("to me", me)
    work = pg.send(np.ones(MIB), me)
    items = pg.incoming()
    assert await anext(items) == (me, "to me")
    source, array = await anext(items)
    assert (source, array.nbytes, array.min()) == (me, 8 * MIB, 1)
    await work
    a, b, c = np.full(3, 5.0), np.zeros(3), np.zeros(3)
    await pg.batch([Recv(b, me), Send(a, me), Send(a + me, other), Recv(c, other)])
    assert b.tolist() == [5.0] * 3
    assert c.tolist() == [5.0 + other] * 3
    async with pg.coalescing():
        got_back = pg.recv(np.zeros(1), me, tag=9)
        pg.send(np.full(1, 7.0), me, tag=9)
    assert (await got_back)[0] == 7


@pytest.mark.ranks(1)
async def test_unreceived_messages_to_self_are_limited_by_the_eager_window(pg: ProcessGroup) -> None:
    """Check that a send beyond the eager window waits for its receive, as between two ranks."""
    size = 256 * KIB
    works = [pg.send(np.full(size, number, "uint8"), 0) for number in range(LINK_WINDOW // size + 3)]
    assert [work.done() for work in works] == [True] * (LINK_WINDOW // size) + [False] * 3
    for number, work in enumerate(works):
        assert (await pg.recv(np.zeros(size, "uint8"), 0) == number).all()
        await work
    assert pg.send(np.zeros(size, "uint8"), 0).done()
    await pg.recv(np.zeros(size, "uint8"), 0)


@pytest.mark.ranks(1)
async def test_array_sent_to_self_can_be_overwritten_after_the_send(pg: ProcessGroup) -> None:
    x = np.ones(10)
    await pg.send(x, 0)
    x[:] = 2
    assert (await pg.recv(np.zeros(10), 0) == 1).all()


@pytest.mark.ranks(3)
async def test_mismatched_message_to_self_fails_the_group_on_all_ranks(pg: ProcessGroup) -> None:
    if pg.rank() == 2:
        pg.send(np.ones(3), 2)
        with pytest.raises(CollectiveMismatchError, match=r"counts.*rank 2 called RECV\(.*rank 2 called SEND\("):
            await pg.recv(np.ones(4), 2)
    assert isinstance(await pg.wait_revoked(), CollectiveMismatchError)
    assert comm_of(pg).matching._active == {}


@pytest.mark.ranks(2)
async def test_messages_to_self_time_out_and_can_be_cancelled(pg: ProcessGroup) -> None:
    me = pg.rank()
    with pytest.raises(CollectiveTimeoutError, match=f"received no message with tag 0 from rank {me} within 0.02 s"):
        await pg.recv(np.zeros(1), me, timeout=0.02)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await pg.recv(np.zeros(1), me)
    pg.send(np.full(1, 3.0), me)
    assert (await pg.recv(np.zeros(1), me))[0] == 3
    await pg.barrier()
    if me == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"SEND .*did not complete within 0.05 s"):
            await pg.send(np.ones(MIB), me, timeout=0.05)
    await pg.wait_revoked()


@pytest.mark.ranks(2)
async def test_abort_fails_the_send_and_the_receive_of_a_message_to_self(pg: ProcessGroup) -> None:
    works: list[Any] = [pg.send(np.ones(MIB), pg.rank()), pg.recv(np.ones(1), pg.rank(), tag=1)]
    await pg.barrier()
    if pg.rank():
        pg.abort("enough")
    for work in works:
        with pytest.raises(GroupError, match="enough"):
            await work
    with pytest.raises(GroupRevokedError):
        pg.send(np.ones(1), pg.rank())


@pytest.mark.ranks(2)
async def test_end_of_the_group_ends_messages_to_self(pg: ProcessGroup) -> None:
    sending, receiving = pg.send(np.ones(MIB), pg.rank()), pg.recv(np.ones(1), pg.rank(), tag=1)
    pg.timeout = 0.02
    await pg.shutdown()
    for work in (sending, receiving):
        assert isinstance(work.exception(), GroupClosedError)


@pytest.mark.ranks(1)
async def test_event_loop_runs_during_a_long_message_to_self(pg: ProcessGroup, limits: Limits) -> None:
    data, target = np.ones(64 * MIB, "uint8"), np.zeros(64 * MIB, "uint8")
    receiving = pg.recv(target, 0)
    sending = pg.send(data, 0)
    turns = 0
    while not receiving.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 3
    assert (target == 1).all()
    await sending


# -- PROC_NULL


@pytest.mark.ranks(2)
async def test_messages_with_proc_null_complete_at_once(pg: ProcessGroup) -> None:
    x = np.arange(3.0)
    sent = pg.send(x, PROC_NULL, tag=5)
    assert sent.done()
    assert await sent is x
    y = np.full(3, 7.0)
    work = pg.recv(y, PROC_NULL)
    assert work.done()
    assert work.source_rank() == PROC_NULL
    assert await work is y
    assert await pg.send_object({"a": 1}, PROC_NULL) is None
    got = pg.recv_object(PROC_NULL)
    assert await got is None
    assert got.source_rank() == PROC_NULL
    strided = np.full((3, 4), 7.0)
    assert (await pg.recv(strided.T, PROC_NULL)).base is strided
    assert (y == 7).all()
    assert (strided == 7).all()
    assert pg.pending() == []
    other = 1 - pg.rank()
    z = np.zeros(3)
    batch = [Recv(y, PROC_NULL), Send(x + pg.rank(), other), Recv(z, other), Send(x, PROC_NULL)]
    assert [id(each) for each in await pg.batch(batch)] == [id(each.tensor) for each in batch]
    assert (y == 7).all()
    assert (z == x + other).all()
    async with pg.coalescing():
        pg.recv(y, PROC_NULL)
        both = pg.batch([Recv(y, PROC_NULL), Send(x + 5, other), Recv(z, other)])
    assert (await both)[2] is z
    assert (z == x + 5).all()
    assert (y == 7).all()


@pytest.mark.ranks(2)
async def test_messages_with_proc_null_check_their_arguments(pg: ProcessGroup) -> None:
    calls: list[tuple[Any, type[Exception], str]] = [
        (lambda: pg.send("text", PROC_NULL), TypeError, "tensor must be"),
        (lambda: pg.send(np.ones(1), PROC_NULL, tag=-1), ValueError, "tag=-1 is out of range"),
        (lambda: pg.recv(bytes(3), PROC_NULL), ValueError, "read-only"),
        (lambda: pg.recv(np.ones(1), PROC_NULL, timeout=-1), ValueError, "timeout=-1"),
        (lambda: pg.send_object(object(), PROC_NULL), SerializationError, "object"),
        (lambda: pg.recv_object(PROC_NULL, tag="a"), TypeError, "tag must be an int"),
        (lambda: pg.send(np.ones(1), -1), ValueError, "dst=-1 is not a rank of group"),
        (lambda: pg.recv(np.ones(1), pg.size()), ValueError, "src=2 is not a rank of group"),
        (lambda: pg.batch([Send(np.ones(1), -3)]), ValueError, r"operations\[0\].dst=-3 is not a rank"),
        *(
            (call, ValueError, "root is PROC_NULL, which is no rank of group 'world:0': ranks are 0 to 1")
            for call in (
                lambda: pg.broadcast(np.ones(1), PROC_NULL),
                lambda: pg.reduce(np.ones(1), root=PROC_NULL),
                lambda: pg.gather(None, np.ones(1), PROC_NULL),
                lambda: pg.scatter(np.ones(1), None, PROC_NULL),
                lambda: pg.broadcast_object(1, PROC_NULL),
                lambda: pg.gather_object(1, PROC_NULL),
                lambda: pg.scatter_object([1, 2], PROC_NULL),
            )
        ),
        (lambda: pg.split_group([0, PROC_NULL]), ValueError, r"ranks\[1\] is PROC_NULL"),
    ]
    for call, error, message in calls:
        with pytest.raises(error, match=message):
            call()
    assert pg.pending() == []
    await pg.barrier()


@pytest.mark.ranks(1)
async def test_closed_group_refuses_messages_with_proc_null(pg: ProcessGroup) -> None:
    await pg.shutdown()
    for call in (lambda: pg.send(np.ones(1), PROC_NULL), lambda: pg.recv_object(PROC_NULL)):
        with pytest.raises(GroupClosedError):
            call()


def test_proc_null_is_a_number_below_minus_one() -> None:
    assert PROC_NULL == aiocoll.PROC_NULL < -1
