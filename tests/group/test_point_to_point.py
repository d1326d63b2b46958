"""Messages between two ranks: order, matching, sizes, withdrawn receives, and errors."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupRevokedError,
    PeerLostError,
    ProcessGroup,
    Recv,
    Send,
    SerializationError,
)
from aiocoll.completion import Completion
from aiocoll.engine.links.channel import Channel
from aiocoll.engine.operations.signature import P2P
from aiocoll.transport.frame import EAGER, FrameKind
from aiocoll.work import completion_of

from ..internals import Limits, comm_of, observe_methods
from ..ranks import TRANSPORTS, parametrize_transports, run_ranks, wait_until

MIB = 1024 * 1024


@pytest.mark.ranks(2)
@parametrize_transports(*TRANSPORTS)
async def test_messages_of_a_source_and_tag_keep_their_order(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        for number in range(300):
            pg.send(np.array([number]), 1, tag=number % 3)
        await pg.drain()
    else:
        for tag in (2, 0, 1):
            got = [int((await pg.recv(np.zeros(1, int), 0, tag))[0]) for _ in range(100)]
            assert got == list(range(tag, 300, 3))


@pytest.mark.ranks(2)
@parametrize_transports(*TRANSPORTS)
@pytest.mark.parametrize("posted", [True, False], ids=["posted", "unposted"])
@pytest.mark.parametrize("nbytes", [0, 1, 100_000, 300_000, 8 * MIB + 5])
async def test_messages_between_two_ranks_can_have_any_length(pg: ProcessGroup, nbytes: int, posted: bool) -> None:
    async def rank(pg: ProcessGroup) -> None:
        data = (np.arange(nbytes) % 251).astype("uint8")
        if pg.rank() == 0:
            if posted:
                await pg.recv_object(1)
            await pg.send(data, 1)
        else:
            target = np.full(nbytes + 2, 255, "uint8")
            if posted:
                work = pg.recv(target[1:-1], 0)
                await pg.send_object("posted", 0)
            else:
                await pg.recv_object(0, tag=7)
                work = pg.recv(target[1:-1], 0)
            assert (await work).tobytes() == data.tobytes()
            assert (target[0], target[-1]) == (255, 255)

    if pg.rank() == 0 and not posted:
        pg.send((np.arange(nbytes) % 251).astype("uint8"), 1)
        await pg.send_object("on its way", 1, tag=7)
        await pg.drain()
    else:
        await rank(pg)


@pytest.mark.ranks(4)
@parametrize_transports("memory", "unix", "shm")
async def test_receive_from_any_source_reports_the_sender(pg: ProcessGroup) -> None:
    if pg.rank():
        for number in range(5):
            await pg.send(np.array([pg.rank(), number]), 0, tag=3)
        return
    seen: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for _ in range(15):
        tensor = np.zeros(2, int)
        work = pg.recv_anysource(tensor, tag=3)
        await work
        assert work.source_rank() == tensor[0]
        seen[int(tensor[0])].append(int(tensor[1]))
    assert list(seen.values()) == [list(range(5))] * 3


@pytest.mark.ranks(2)
async def test_source_rank_of_a_receive_is_available_only_after_completion(pg: ProcessGroup) -> None:
    work = pg.barrier()
    with pytest.raises(ValueError, match="only a completed receive has one"):
        work.source_rank()
    await work


@pytest.mark.ranks(3)
@parametrize_transports("memory", "unix", "shm")
async def test_batch_starts_all_messages_and_returns_the_tensors(pg: ProcessGroup) -> None:
    size, rank = pg.size(), pg.rank()
    right, left = (rank + 1) % size, (rank - 1) % size
    out, into, big = np.full(5, rank), np.zeros(5, int), np.full(MIB, rank, "uint8")
    taken = np.zeros(MIB, "uint8")
    result = await pg.batch([Recv(into, left), Send(big, right, 1), Recv(taken, None, 1), Send(out, right)])
    assert [id(each) for each in result] == [id(each) for each in (into, big, taken, out)]
    assert (into == left).all()
    assert (taken == left).all()
    assert await pg.batch([]) == []


@pytest.mark.ranks(2)
async def test_batch_with_a_wrong_message_starts_no_message(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    with pytest.raises(TypeError, match=r"operations\[1\] must be a Send or a Recv, not str"):
        pg.batch([Send(np.ones(1), peer), "what"])
    with pytest.raises(ValueError, match=r"operations\[1\].dst=2 is not a rank"):
        pg.batch([Send(np.ones(1), peer), Send(np.ones(1), 2)])
    with pytest.raises(ValueError, match=r"operations\[1\].tag=-1 is out of range"):
        pg.batch([Send(np.ones(1), peer), Recv(np.ones(1), peer, -1)])
    assert pg.pending() == []
    await pg.batch([Send(np.full(1, 5.0), peer), Recv(tensor := np.ones(1), peer)])
    assert tensor[0] == 5


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("sent", "wanted", "message"),
    [
        (np.ones(3), np.ones(4), r"counts.*rank 0 called SEND\(.*counts=\[3\].*rank 1 called RECV\(.*counts=\[4\]"),
        (np.ones(3), np.ones(3, int), "dtype.*SEND.*dtype=float64.*RECV.*dtype=int64"),
        (np.ones(0), np.ones(1), r"counts=\[0\].*counts=\[1\]"),
        (np.ones(MIB), np.ones(1), r"counts=\[1048576\].*counts=\[1\]"),
    ],
    ids=["length", "dtype", "empty", "big"],
)
async def test_receive_of_a_message_of_another_kind_raises_a_mismatch_error(
    pg: ProcessGroup, sent: Any, wanted: Any, message: str
) -> None:
    if pg.rank() == 0:
        work = pg.send(sent, 1)
        assert isinstance(await pg.wait_revoked(), CollectiveMismatchError)
        await asyncio.gather(work, return_exceptions=True)
    else:
        target = np.full_like(wanted, 7)
        with pytest.raises(CollectiveMismatchError, match=message):
            await pg.recv(target, 0)
        assert (target == 7).all()


@pytest.mark.ranks(2)
async def test_receive_of_an_array_refuses_an_object(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        await pg.send_object([1, 2], 1)
        await pg.wait_revoked()
    else:
        with pytest.raises(CollectiveMismatchError, match=r"dtype=object.*dtype=float64"):
            await pg.recv(np.ones(3), 0)


@pytest.mark.ranks(2)
async def test_receive_timeout_does_not_fail_the_group(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    tensor = np.zeros(2)
    message = f"received no message with tag 4 from rank {peer} within 0.05 s"
    with pytest.raises(CollectiveTimeoutError, match=message) as raised:
        await pg.recv(tensor, peer, 4, timeout=0.05)
    assert raised.value.ranks == (peer,)
    with pytest.raises(CollectiveTimeoutError, match=r"from any rank within 0.05 s"):
        await pg.recv_object(tag=4, timeout=0.05)
    await pg.barrier()
    pg.send(np.ones(2), peer, 4)
    assert (await pg.recv(tensor, peer, 4) == 1).all()


@pytest.mark.ranks(2)
async def test_receive_is_withdrawn_with_its_last_awaiter(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    untouched = np.zeros(1)
    work = pg.recv(untouched, peer)
    first, second = (asyncio.ensure_future(work.join()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    assert not work.done()
    second.cancel()
    await asyncio.wait([second])
    assert work.done()
    assert isinstance(work.exception(), asyncio.CancelledError)
    await pg.barrier()
    await pg.send(np.ones(1), peer)
    assert (await pg.recv(np.zeros(1), peer))[0] == 1
    assert untouched[0] == 0


@pytest.mark.ranks(2)
async def test_batch_is_withdrawn_with_its_last_awaiter(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    untouched = np.zeros(2)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await pg.batch([Recv(untouched[:1], peer), Recv(untouched[1:], peer)])
    assert pg.pending() == []
    await pg.barrier()
    await pg.batch([Send(np.ones(1), peer), Recv(tensor := np.zeros(1), peer)])
    assert (*untouched, tensor[0]) == (0, 0, 1)


@pytest.mark.ranks(2)
@parametrize_transports("unix")
async def test_matched_receive_is_not_withdrawn(pg: ProcessGroup) -> None:
    """Cancel the await of the receive while the message is arriving."""
    if pg.rank() == 0:
        await pg.send(np.ones(4 * MIB), 1)
    else:
        work = pg.recv(np.zeros(4 * MIB), 0)
        waiting = asyncio.ensure_future(work.join())
        await wait_until(lambda: completion_of(work).withdraw is None)
        assert not work.done()
        waiting.cancel()
        await asyncio.wait([waiting])
        assert (await work == 1).all()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda pg: pg.send(np.ones(1), -1), ValueError, "dst=-1 is not a rank of group 'world:0': ranks are 0 to 1"),
        (lambda pg: pg.recv(np.ones(1), 2), ValueError, "src=2 is not a rank of group 'world:0': ranks are 0 to 1"),
        (lambda pg: pg.send(np.ones(1), True), TypeError, r"dst must be a rank \(int\), not bool"),
        (lambda pg: pg.send(np.ones(1), 1, "a"), TypeError, "tag must be an int, not str"),
        (lambda pg: pg.recv(np.ones(1), 1, 2**30), ValueError, "tag=1073741824 is out of range"),
        (lambda pg: pg.send("text", 1), TypeError, "tensor must be .*, not str"),
        (lambda pg: pg.recv(bytes(3), 1), ValueError, "tensor is read-only"),
        (lambda pg: pg.recv(np.ones(1), 1, timeout=-1), ValueError, "timeout=-1: must be >= 0"),
        (lambda pg: pg.send_object(object(), 1), SerializationError, "object"),
        (lambda pg: pg.recv_object(1, tag=1.0), TypeError, "tag must be an int, not float"),
    ],
)
async def test_message_call_with_wrong_arguments_starts_no_message(
    pg: ProcessGroup, call: Any, error: type[Exception], message: str
) -> None:
    if pg.rank() == 0:
        with pytest.raises(error, match=message):
            call(pg)
        assert pg.pending() == []
        await pg.send(np.full(1, 3.0), 1)
    else:
        assert (await pg.recv(np.zeros(1), 0))[0] == 3


@pytest.mark.ranks(2)
async def test_messages_of_strided_arrays_are_staged(pg: ProcessGroup) -> None:
    whole = np.zeros((4, 4))
    if pg.rank() == 0:
        await pg.send(np.arange(16.0).reshape(4, 4).T, 1)
    else:
        result = await pg.recv(whole.T[:, :], 0)
        assert result.base is whole
        np.testing.assert_array_equal(whole, np.arange(16.0).reshape(4, 4))


@pytest.mark.ranks(3)
@parametrize_transports("memory", "unix", "shm")
async def test_incoming_iterator_yields_arrays_and_objects(pg: ProcessGroup) -> None:
    if pg.rank():
        await pg.send(np.arange(3, dtype="int16"), 0, tag=1)
        await pg.send_object({"from": pg.rank()}, 0, tag=1)
        await pg.send(np.ones(MIB), 0, tag=1)
        await pg.send_object(None, 0, tag=1)
        return
    seen: dict[int, list[Any]] = {1: [], 2: []}
    async for source, message in pg.incoming(tag=1):
        seen[source].append(message)
        if sum(map(len, seen.values())) == 8:
            break
    for source, (small, thing, big, nothing) in seen.items():
        assert small.dtype == np.int16
        assert small.tolist() == [0, 1, 2]
        assert thing == {"from": source}
        assert (big == 1).all()
        assert len(big) == MIB
        assert nothing is None
        small[0] = 5  # the receiver owns the received array and can change it


@pytest.mark.ranks(2)
async def test_incoming_iterator_ends_when_the_group_is_closed(pg: ProcessGroup) -> None:
    async def serve() -> list[Any]:
        return [message async for message in pg.incoming()]

    serving = asyncio.ensure_future(serve())
    await pg.send_object(pg.rank(), 1 - pg.rank())
    await wait_until(lambda: comm_of(pg).matching._listeners)
    await pg.barrier()
    await pg.shutdown()
    assert await serving == [(1 - pg.rank(), 1 - pg.rank())]


@pytest.mark.ranks(2)
@parametrize_transports("memory", "unix", "shm")
async def test_cancelled_incoming_iterator_loses_no_messages(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        for number in range(200):
            await pg.send_object(number, 1)
        return
    got: list[int] = []

    async def serve() -> None:
        async for _, message in pg.incoming():
            got.append(message)

    turns = 0
    while len(got) < 200:
        serving = asyncio.ensure_future(serve())
        for _ in range(turns % 4):
            await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait([serving])
        turns += 1
    assert got == list(range(200))


@pytest.mark.ranks(3)
async def test_pending_incoming_iterator_raises_the_cause_of_the_group_failure(pg: ProcessGroup) -> None:
    """Check that a pending receive raises the same error, and a later iteration `GroupRevokedError` with this cause."""
    incoming = pg.incoming()
    waiting = [asyncio.ensure_future(anext(each)) for each in (incoming, pg.incoming(tag=1))]
    await wait_until(lambda: len(comm_of(pg).matching._listeners) == 2)
    receiving = pg.recv_object()
    await pg.barrier()
    if pg.rank() == 0:
        pg.report_death(2, "for a test")
    texts = set()
    for pending in (*waiting, receiving):
        with pytest.raises(PeerLostError) as raised:
            await pending
        assert type(raised.value) is PeerLostError
        assert (raised.value.ranks, raised.value.how) == ((2,), "killed")
        texts.add(str(raised.value))
    assert len(texts) == 1
    with pytest.raises(GroupRevokedError) as later:
        await anext(incoming)
    assert isinstance(later.value.__cause__, PeerLostError)


async def test_received_object_above_the_size_limit_is_refused_and_its_bytes_are_freed(limits: Limits) -> None:
    limits(max_object_bytes=1000)

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            for size in (2000, 2 * MIB):
                await pg.send_object(b"x" * size, 1)
            await pg.send_object("small", 1)
        else:
            # Wait until the first object has arrived completely before its receive starts; the second object arrives
            # later.
            await wait_until(lambda: [each for each in comm_of(pg).matching._active.values() if each.complete])
            for _ in range(2):
                with pytest.raises(SerializationError, match=r"rank 0 sent an object of .* bytes; the limit is 1000"):
                    await pg.recv_object(0)
            assert await pg.recv_object(0) == "small"
            assert comm_of(pg).matching._active == {}

    await run_ranks(2, rank)


async def test_empty_message_completes_its_receive_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    observe_methods(monkeypatch, Completion, finish=lambda completion, *_: ended.append(completion))

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            await pg.recv_object(1)
            await pg.send(np.zeros(0), 1)
        else:
            work = pg.recv(np.zeros(0), 0)
            await pg.send_object("posted", 0)
            await work
            assert ended.count(completion_of(work)) == 1
            assert comm_of(pg).matching._active == {}

    await run_ranks(2, rank)


@pytest.mark.ranks(2)
async def test_incoming_iterator_requests_the_rest_of_a_message_when_the_sender_is_ready(
    pg: ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deliver the first part and then a READY frame; the iterator must answer it with a GRANT frame."""
    if pg.rank() == 1:
        await pg.recv_object(0)
        return
    member, op = comm_of(pg), P2P | 5 << 32
    channel = member.channels[1]
    requests: list[tuple[Any, ...]] = []
    monkeypatch.setattr(Channel, "control", lambda channel, *args: requests.append(args))
    listening = asyncio.ensure_future(anext(aiter(pg.incoming(tag=5))))
    await asyncio.sleep(0)
    member.deliver(channel, (FrameKind.DATA, EAGER, 0, member.id, op, 6, 0, 2, 4), memoryview(b"ab"))
    for _ in range(3):
        await asyncio.sleep(0)
    assert requests == []
    member.deliver(channel, (FrameKind.READY, EAGER, 0, member.id, op, 6, 0, 0, 4), memoryview(b""))
    for _ in range(3):
        await asyncio.sleep(0)
    assert requests == [(FrameKind.GRANT, member.id, op)]
    member.deliver(channel, (FrameKind.DATA, 0, 0, member.id, op, 6, 2, 2, 4), memoryview(b"cd"))
    source, message = await listening
    assert (source, message.tobytes()) == (1, b"abcd")
    monkeypatch.undo()
    await pg.send_object("done", 1)


async def test_message_longer_than_the_header_allows_is_refused() -> None:
    # The array uses no physical memory, because the test never accesses its pages.
    huge = np.zeros(2**32, np.uint8)

    async def send(pg: ProcessGroup) -> None:
        with pytest.raises(ValueError, match="tensor has 4294967296 bytes; a message holds at most 4294967295"):
            pg.send(huge, 1 - pg.rank())

    await run_ranks(2, send)
