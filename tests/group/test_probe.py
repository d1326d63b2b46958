"""Probes: they report the next message without receiving it."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    PROC_NULL,
    BackendUnavailableError,
    CollectiveTimeoutError,
    Envelope,
    GroupClosedError,
    GroupError,
    PeerLostError,
    ProcessGroup,
    Recv,
    Send,
)

from ..internals import comm_of, make_calls_fail, replace_parts
from ..ranks import TRANSPORTS, parametrize_transports, run_ranks, wait_until

MIB = 1024 * 1024


@pytest.mark.ranks(2)
@parametrize_transports(*TRANSPORTS)
@pytest.mark.parametrize("first", ["probe", "message"])
async def test_probe_reports_the_message_of_the_next_receive(pg: ProcessGroup, first: str) -> None:
    """Include messages that are too long to be sent before the receive."""
    messages: list[Any] = [np.arange(3, dtype="int16"), np.zeros(0), np.ones((2, MIB)), {"a": 1}, None]
    if pg.rank() == 0:
        if first == "probe":
            await pg.recv_object(1, tag=9)
        for each in messages:
            await (pg.send(each, 1, tag=3) if isinstance(each, np.ndarray) else pg.send_object(each, 1, tag=3))
        await pg.barrier()
        return
    work = pg.probe(0, tag=3)
    if first == "probe":
        assert not work.done()
        await pg.send_object("go", 0, tag=9)
    for each in messages:
        envelope = await work
        assert work.source_rank() == 0
        assert (envelope.source, envelope.tag) == (0, 3)
        assert pg.iprobe(tag=3) == pg.iprobe(0, 3) == envelope
        if isinstance(each, np.ndarray):
            assert envelope == Envelope(0, 3, each.nbytes, each.dtype)
            assert envelope.count == each.size
            got = np.full(envelope.count, 77, envelope.dtype)
            assert (await pg.recv(got, envelope.source, tag=3)).tobytes() == each.tobytes()
        else:
            assert envelope.dtype is None
            assert envelope.count == 1
            assert await pg.recv_object(envelope.source, tag=3) == each
        work = pg.probe(None, tag=3, timeout=30)
    assert pg.iprobe(tag=3) is None
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await work
    assert pg.pending() == []
    assert comm_of(pg).matching._probes == {}
    await pg.barrier()


@pytest.mark.ranks(4)
@parametrize_transports("memory", "unix", "shm")
async def test_probe_supports_any_source_and_a_given_source(pg: ProcessGroup) -> None:
    me = pg.rank()
    if me:
        await pg.send(np.full(me, me), 0)
        await pg.send(np.full(10 * me, me), 0)
        return
    for source in (3, 1, 2):
        assert (await pg.probe(source)).count == source
    seen = []
    for _ in range(6):
        envelope = await pg.probe()
        got = await pg.recv(np.zeros(envelope.count, envelope.dtype), envelope.source)
        assert (got == envelope.source).all()
        seen.append((envelope.source, envelope.count))
    assert [count for source, count in seen if source == 2] == [2, 20]
    assert sorted(seen) == [(1, 1), (1, 10), (2, 2), (2, 20), (3, 3), (3, 30)]


@pytest.mark.ranks(2)
async def test_concurrent_probes_report_the_same_message(pg: ProcessGroup) -> None:
    if pg.rank() == 1:
        probes = [pg.probe(), pg.probe(0), pg.probe(1), pg.probe(0, tag=1), pg.probe()]
        await pg.send_object("ready", 0)
        assert [await probes[index] for index in (0, 1, 4)] == [Envelope(0, 0, 8, np.dtype(float))] * 3
        assert not probes[2].done()
        assert not probes[3].done()
        await pg.send(np.ones(2), 1)  # rank 1 sends to itself, after the message of rank 0
        assert (await probes[2]).count == 2
        assert (await pg.probe()).count == 1
        assert (await pg.recv(np.zeros(1), 0))[0] == 5
        assert (await pg.probe()).count == 2
        await pg.recv(np.zeros(2), 1)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await probes[3]
    else:
        await pg.recv_object(1)
        await pg.send(np.full(1, 5.0), 1)
    await pg.barrier()


@pytest.mark.ranks(2)
@parametrize_transports("memory", "unix", "shm")
async def test_posted_receive_takes_its_message_before_a_probe(pg: ProcessGroup) -> None:
    if pg.rank() == 1:
        probe = pg.probe(0)
        receive = pg.recv(np.zeros(1), 0)
        await pg.send_object("ready", 0)
        assert (await receive)[0] == 1
        envelope = await probe
        assert envelope.count == 2
        assert (await pg.recv(np.zeros(2), 0))[0] == 2
    else:
        await pg.recv_object(1)
        await pg.send(np.full(1, 1.0), 1)
        await pg.send(np.full(2, 2.0), 1)


@pytest.mark.ranks(2)
async def test_incoming_iterator_can_take_a_probed_message(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        for number in range(3):
            await pg.send(np.full(number + 1, number), 1)
        await pg.send(np.ones(MIB), 1)
        return
    items = pg.incoming()
    for number in range(3):
        assert (await pg.probe()).count == number + 1
        source, message = await anext(items)
        assert (source, message.tolist()) == (0, [number] * (number + 1))
    serving = asyncio.ensure_future(anext(items))
    envelope = await pg.probe()  # the sender still holds most bytes
    assert envelope.nbytes == 8 * MIB
    assert len((await serving)[1]) == MIB
    assert pg.iprobe() is None


@pytest.mark.ranks(2)
async def test_cancelled_probe_loses_no_message(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        for number in range(100):
            await pg.send_object(number, 1)
        await pg.barrier()
        return
    got: list[int] = []

    async def serve() -> None:
        while True:
            envelope = await pg.probe()
            await asyncio.sleep(0)
            work = pg.recv_object(envelope.source)  # completes at once, so that it cannot be interrupted
            got.append(work.result())

    turns = 0
    while len(got) < 100:
        serving = asyncio.ensure_future(serve())
        for _ in range(turns % 5):
            await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait([serving])
        turns += 1
    assert got == list(range(100))
    await pg.barrier()


@pytest.mark.ranks(2)
async def test_message_that_a_cancelled_incoming_iterator_returns_can_be_probed_again(
    pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pg.rank() == 0:
        await pg.send_object(list(range(50_000)), 1)
        await pg.barrier()
        return
    items = pg.incoming()
    await pg.probe()
    serving = asyncio.ensure_future(anext(items))
    await wait_until(lambda: not comm_of(pg).matching._waiting)
    assert not serving.done()
    work = pg.probe()
    assert not work.done()
    serving.cancel()
    await asyncio.wait([serving])
    assert (await work).dtype is None
    assert await pg.recv_object(0) == list(range(50_000))
    await pg.barrier()


@pytest.mark.ranks(2)
async def test_probe_timeout_does_not_fail_the_group_and_group_failure_fails_the_probe(pg: ProcessGroup) -> None:
    message = r"received no message with tag 4 from any rank within 0.02 s"
    with pytest.raises(CollectiveTimeoutError, match=message):
        await pg.probe(tag=4, timeout=0.02)
    work = pg.probe()
    assert repr(work) == "<Work PROBE src=any tag=0 pending>"
    assert pg.pending() == [work]
    await pg.barrier()
    if pg.rank():
        pg.abort("enough")
    with pytest.raises(GroupError, match="enough"):
        await work
    with pytest.raises(GroupError, match="enough"):
        pg.iprobe()


@pytest.mark.ranks(2)
async def test_probe_fails_when_its_source_rank_leaves(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        await pg.barrier()
        return
    work = pg.probe(0)
    await pg.barrier()
    with pytest.raises(PeerLostError, match="rank 0"):
        await work


@pytest.mark.ranks(2)
async def test_probe_refuses_wrong_arguments_and_supports_proc_null(pg: ProcessGroup) -> None:
    for call in (pg.probe, pg.iprobe):
        with pytest.raises(ValueError, match="source=2 is not a rank"):
            call(2)
        with pytest.raises(TypeError, match=r"source must be a rank \(int\), not str"):
            call("a")  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="tag=-1 is out of range"):
            call(0, -1)
    with pytest.raises(ValueError, match="timeout=-1"):
        pg.probe(timeout=-1)
    work = pg.probe(PROC_NULL, 3)
    assert work.done()
    assert work.source_rank() == PROC_NULL
    envelope = await work
    assert pg.iprobe(PROC_NULL, 3) == envelope
    assert (envelope.source, envelope.count) == (PROC_NULL, 0)
    assert pg.pending() == []


@pytest.mark.ranks(1)
async def test_closed_group_refuses_probe_and_iprobe(pg: ProcessGroup) -> None:
    await pg.shutdown()
    for call in (pg.probe, pg.iprobe):
        with pytest.raises(GroupClosedError):
            call()


@pytest.mark.ranks(2)
async def test_probe_in_a_block_starts_with_the_block(pg: ProcessGroup) -> None:
    other = 1 - pg.rank()
    async with pg.coalescing():
        work = pg.probe(other)
        pg.send(np.ones(3), other)
    assert (await work).count == 3
    await pg.recv(np.zeros(3), other)


@pytest.mark.parametrize("transport", ["unix", "shm"])
async def test_iprobe_finds_received_messages_without_a_loop_iteration(transport: str) -> None:
    sent = asyncio.Event()

    async def rank(pg: ProcessGroup) -> None:
        other = 1 - pg.rank()
        await pg.batch([Send(np.ones(1), other, 1), Recv(np.zeros(1), other, 1)])  # opens the link
        await pg.barrier()
        if pg.rank() == 0:
            work = pg.send(np.ones(1), 1)
            sent.set()
            await work
        else:
            await sent.wait()  # the event resumes this task before the loop polls the link
            assert pg.iprobe(0) == Envelope(0, 0, 8, np.dtype(float))
            await pg.recv(np.zeros(1), 0)
        await pg.barrier()

    await run_ranks(2, rank, transport=transport)


@pytest.mark.ranks(1)
async def test_message_with_an_unknown_dtype_fails_only_the_probe(
    pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.arange(4.0)
    await pg.send(x, 0)
    with monkeypatch.context() as patch:
        make_calls_fail(patch, BackendUnavailableError("arrays of bfloat16 need ml_dtypes"), "probe_dtype")
        with pytest.raises(BackendUnavailableError, match="need ml_dtypes"):
            await pg.probe()
    assert (await pg.probe()).dtype == x.dtype
    assert (await pg.recv(np.zeros(4), 0) == x).all()


@pytest.mark.ranks(2)
async def test_probe_reports_a_structured_dtype_with_unknown_layout_as_bytes(
    pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remove the layout from the dtype table, because both ranks share this process and so know the layout."""
    replace_parts(monkeypatch, probe_layout=lambda _: None)
    x = np.array([(1, 2.5)] * 3, [("a", "<i4"), ("b", "<f8")])
    if pg.rank() == 0:
        await pg.send(x, 1)
    else:
        envelope = await pg.probe(0)
        assert (envelope.dtype, envelope.count) == (np.uint8, 36)
        y = np.zeros_like(x)
        await pg.recv(y, 0)
        assert (x == y).all()
