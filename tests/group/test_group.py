"""Process groups: revocation, lost ranks, leaving, closing, and the owning event loop."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupError,
    GroupRevokedError,
    HashStore,
    PeerLostError,
    ProcessGroup,
    ReduceOp,
    new_group,
)
from aiocoll.security.handshake import CONFIRM_SIZE
from aiocoll.transport.byte_stream import ByteStream
from aiocoll.transport.stream import transport as stream

from ..ranks import LINKS, hub_of, parametrize_transports, run_in_fork, run_ranks, wait_until


@pytest.mark.ranks(3)
async def test_group_returns_its_name_rank_and_size(pg: ProcessGroup) -> None:
    assert pg.size() == 3
    assert pg.global_ranks == (0, 1, 2)
    assert pg.timeout == 300.0
    assert pg.backend_for("cpu") == "aio"
    assert repr(pg) == f"<ProcessGroup 'world:0' rank {pg.rank()} of 3, open>"
    with pytest.raises(ValueError, match="device='tpu' has no backend in group 'world:0'"):
        pg.backend_for("tpu")
    assert pg.pending() == []
    work = pg.recv(np.zeros(3), (pg.rank() + 1) % 3)
    assert pg.pending() == [work]
    await pg.send(np.ones(3), (pg.rank() + 2) % 3)
    await work
    assert pg.pending() == []


# -- revocation


async def make_calls(pg: ProcessGroup) -> None:
    await pg.barrier()  # the aborting rank may pass the barrier before the others
    await pg.allreduce(np.ones(4))


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_abort_fails_every_rank_and_keeps_the_first_cause(pg: ProcessGroup) -> None:
    revoked = asyncio.ensure_future(pg.wait_revoked())
    if pg.rank() == 1:
        await pg.barrier()
        pg.abort("the disk is full")
        pg.abort("another reason")
    else:
        with pytest.raises(GroupError, match="'world:0' was aborted by rank 1: the disk is full"):
            await make_calls(pg)
    cause = await revoked
    assert type(cause) is GroupError
    assert cause.ranks == (1,)
    assert await pg.wait_revoked() is cause
    with pytest.raises(GroupRevokedError, match=r"was revoked: .*the disk is full") as raised:
        pg.barrier()
    assert raised.value.__cause__ is cause
    assert "revoked" in repr(pg)


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_call_timeout_fails_the_group_on_every_rank_and_names_the_missing_ranks(pg: ProcessGroup) -> None:
    if pg.rank() == 2:
        assert isinstance(await pg.wait_revoked(), CollectiveTimeoutError)
    else:
        message = r"ALLREDUCE \(sequence 1\) of group 'world:0' did not complete within 0.4 s on rank [01]"
        with pytest.raises(CollectiveTimeoutError, match=message) as raised:
            await pg.allreduce(np.ones(4), timeout=0.4)
        assert raised.value.ranks == (2,)
        assert raised.value.seq == 1
        assert "rank 2 (in no operation yet)" in str(raised.value)
    with pytest.raises(GroupRevokedError) as revoked:
        pg.allreduce(np.ones(4))
    assert isinstance(revoked.value.__cause__, CollectiveTimeoutError)


@pytest.mark.ranks(2)
async def test_short_timeout_expires_while_other_calls_start(pg: ProcessGroup) -> None:
    """Start a call with a longer timeout every 0.05 s, which must not delay the first timeout."""
    if pg.rank() == 1:
        await pg.wait_revoked()
        return
    loop = asyncio.get_running_loop()
    start = loop.time()
    first = pg.barrier(timeout=0.1)
    works = []

    def start_barrier() -> None:
        if not first.done() and loop.time() < start + 5:
            works.append(pg.barrier(timeout=0.2))
            loop.call_later(0.05, start_barrier)

    start_barrier()
    with pytest.raises(CollectiveTimeoutError, match=r"within 0.1 s"):
        await first
    assert len(works) < 50
    for work in works:
        assert isinstance(work.exception(), CollectiveTimeoutError)


async def test_timeout_of_the_group_is_the_default_timeout_of_its_calls() -> None:
    store = HashStore()

    async def rank(rank: int) -> None:
        async with new_group(store=store, rank=rank, world_size=2, timeout=timedelta(seconds=0.3)) as pg:
            assert pg.timeout == 0.3
            if rank == 0:
                with pytest.raises(CollectiveTimeoutError, match=r"within 0.3 s"):
                    await pg.barrier()
            else:
                await pg.wait_revoked()

    await asyncio.gather(rank(0), rank(1))
    await store.aclose()


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_raising_custom_op_fails_every_rank(pg: ProcessGroup) -> None:
    def broken(a: object, b: object, out: object) -> None:
        raise ZeroDivisionError("the user's own")

    tensor = np.ones(1000)
    with pytest.raises(GroupError, match="the user's own"):
        await pg.allreduce(tensor, ReduceOp.custom(broken))
    with pytest.raises(GroupRevokedError):
        pg.barrier()


# -- ranks that are lost


@pytest.mark.ranks(3)
async def test_broken_link_fails_the_call_on_every_rank(pg: ProcessGroup) -> None:
    work = pg.recv(np.zeros(1), (pg.rank() + 1) % 3)
    with suppress(GroupError):  # rank 0 may cut the link before the other ranks have received all objects
        await pg.allgather_object("opens the data links")
    if pg.rank() == 0:
        hub_of(pg).cut(1, 2)
    with pytest.raises(PeerLostError, match=r"rank [12] of group 'world:0' is lost") as raised:
        await work
    assert raised.value.how == "unreachable"
    assert raised.value.ranks in ((1,), (2,))
    with pytest.raises(GroupRevokedError) as revoked:
        pg.barrier()
    assert isinstance(revoked.value.__cause__, PeerLostError)


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_error_of_a_call_that_needs_a_rank_that_has_left_names_the_rank(pg: ProcessGroup) -> None:
    await pg.barrier()
    if pg.rank() == 2:
        return
    with pytest.raises(PeerLostError, match=r"ALLREDUCE on rank [01] .* needs rank 2, which has left") as raised:
        await pg.allreduce(np.ones(4))
    assert raised.value.how == "left"
    assert raised.value.ranks == (2,)


@pytest.mark.ranks(4)
@parametrize_transports(*LINKS)
@pytest.mark.parametrize("leaver", [0, 1, 3])
async def test_rank_that_leaves_does_not_disturb_calls_between_other_ranks(pg: ProcessGroup, leaver: int) -> None:
    await pg.barrier()
    if pg.rank() == leaver:
        return
    with pytest.raises(PeerLostError, match=f"needs rank {leaver}, which has left"):
        await pg.recv(np.zeros(1), leaver)
    one, two, three = (rank for rank in range(4) if rank != leaver)
    for sender, receiver in ((one, two), (two, three), (three, one)):
        if pg.rank() == sender:
            await pg.send(np.ones(100_000), receiver)
        elif pg.rank() == receiver:
            assert (await pg.recv(np.zeros(100_000), sender)).all()


@pytest.mark.parametrize("transport", LINKS)
async def test_message_sent_before_leaving_is_received(transport: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            for peer in (1, 2):
                assert (await pg.recv(np.zeros(5), peer) == peer).all()
        else:
            await pg.send(np.full(5, float(pg.rank())), 0)

    for _ in range(10):
        await run_ranks(3, rank, transport=transport)


@pytest.mark.parametrize("transport", LINKS[1:])
async def test_goodbye_does_not_overtake_data_on_a_link_that_is_not_yet_accepted(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let rank 0 accept the data link only after the goodbye has arrived on the control link."""
    receive = stream.receive_message

    async def receive_slowly(stream: ByteStream, nbytes: int) -> bytes:
        data = await receive(stream, nbytes)
        if nbytes == CONFIRM_SIZE:
            for _ in range(200):
                await asyncio.sleep(0)
        return data

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            assert (await pg.recv(np.zeros(5), 1) == 1).all()
        else:
            await pg.send(np.ones(5), 0)

    monkeypatch.setattr(stream, "receive_message", receive_slowly)
    await run_ranks(2, rank, transport=transport)


@pytest.mark.parametrize("transport", LINKS)
async def test_collective_completes_although_a_finished_rank_has_left(transport: str) -> None:
    """Let the gather root call after rank 2 has contributed and left, but before rank 1 has called."""
    left = asyncio.Event()

    async def rank(pg: ProcessGroup) -> None:
        tensor = np.full(3, float(pg.rank()))
        if pg.rank() == 2:
            await pg.gather(None, tensor, 0)
            await pg.shutdown()
            left.set()
        elif pg.rank() == 1:
            await pg.recv_object(0)
            await pg.gather(None, tensor, 0)
        else:
            await left.wait()
            with pytest.raises(PeerLostError):
                await pg.recv(np.zeros(1), 2)
            work = pg.gather(None, tensor, 0)
            await pg.send_object("now", 1)
            gathered = await work
            assert [each.tolist() for each in gathered] == [[rank] * 3 for rank in range(3)]

    await run_ranks(3, rank, transport=transport)


@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("call", ["barrier", "allreduce", "allgather_object"])
async def test_leaving_right_after_a_collective_causes_no_failure(call: str, transport: str) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await {
            "barrier": pg.barrier,
            "allreduce": lambda: pg.allreduce(np.ones(1000)),
            "allgather_object": lambda: pg.allgather_object(pg.rank()),
        }[call]()

    for _ in range(5):
        await run_ranks(5, rank, transport=transport)


@pytest.mark.parametrize("transport", LINKS)
async def test_ranks_can_leave_a_group_in_any_order(transport: str) -> None:
    """Let each rank leave in a given order, after it has sent a message to all remaining ranks."""

    async def rank(pg: ProcessGroup, order: list[int]) -> None:
        mine = order.index(pg.rank())
        for leaving in range(mine):
            # Receive the message of a rank that leaves earlier; the rank expects no reply.
            await pg.recv_object(order[leaving])
        for peer in order[mine + 1 :]:
            await pg.send_object("I leave", peer)

    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 0, 3, 2], [2, 0, 1, 3]):
        await run_ranks(4, rank, order, transport=transport)


@pytest.mark.parametrize("transport", LINKS)
async def test_failure_is_reported_to_all_ranks_after_the_first_ranks_have_left(transport: str) -> None:
    """Abort the group after ranks 0 and 1 have left, which makes rank 2 the hub."""
    informed = set()

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() < 2:
            await pg.barrier()
            return
        await pg.barrier()
        for gone in (1, 0):
            with pytest.raises(PeerLostError):
                await pg.recv(np.zeros(1), gone)
        informed.add(pg.rank())
        if pg.rank() == 4:
            await wait_until(lambda: informed == {2, 3, 4})
            pg.abort("as the last but one")
        assert "as the last but one" in str(await pg.wait_revoked())

    await run_ranks(5, rank, transport=transport)


# -- closing


@pytest.mark.ranks(2)
async def test_closed_group_refuses_calls(pg: ProcessGroup) -> None:
    await pg.shutdown()
    await pg.shutdown()
    await pg.aclose()
    for call in (pg.barrier, lambda: pg.send(np.ones(1), 1 - pg.rank()), lambda: pg.allgather_object(1)):
        with pytest.raises(GroupClosedError, match="group 'world:0' was closed by this rank"):
            call()
    assert "closed" in repr(pg)
    pg.abort("too late, and no error")


@pytest.mark.parametrize("transport", LINKS)
async def test_leaving_a_group_waits_for_started_works(transport: str) -> None:
    tensors = [np.ones(300_000) for _ in range(2)]

    async def rank(pg: ProcessGroup) -> None:
        pg.allreduce(tensors[pg.rank()])

    await run_ranks(2, rank, transport=transport)
    assert all((tensor == 2).all() for tensor in tensors)


async def test_exception_in_the_group_block_aborts_the_group_on_other_ranks() -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            raise LookupError("no such file")
        with pytest.raises(GroupError, match="aborted by rank 1: LookupError: no such file"):
            await pg.barrier()

    with pytest.raises(LookupError):
        await run_ranks(3, rank)


@pytest.mark.ranks(2)
async def test_drain_waits_for_all_works_and_raises_the_first_error(pg: ProcessGroup) -> None:
    peer = 1 - pg.rank()
    works = [pg.allreduce(np.ones(1000)), pg.recv(np.zeros(3), peer, 1), pg.send(np.ones(3), peer, 1)]
    await pg.drain()
    assert all(work.is_success() for work in works)
    late = pg.recv(np.zeros(1), peer, 2, timeout=0.05)
    with pytest.raises(CollectiveTimeoutError):
        await pg.drain()
    assert late.done()
    await pg.drain()
    await pg.barrier()


@pytest.mark.ranks(2)
async def test_drain_does_not_raise_for_a_withdrawn_receive(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        first = pg.recv(np.zeros(1), 1, 1)
        waiting = asyncio.ensure_future(pg.recv(np.zeros(1), 1, 2).join())
        draining = asyncio.ensure_future(pg.drain())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await pg.send_object("go on", 1)
        await draining
        assert first.is_success()
    else:
        await pg.recv_object(0)
        await pg.send(np.ones(1), 0, 1)


# -- the owning event loop and process


@pytest.mark.ranks(2)
async def test_call_from_another_thread_is_refused(pg: ProcessGroup) -> None:
    raised = []

    def call() -> None:
        try:
            pg.barrier()
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "asyncio.run_coroutine_threadsafe" in raised[0]
    await pg.barrier()


async def test_call_from_another_loop_is_refused() -> None:
    async def rank(pg: ProcessGroup) -> None:
        async def call() -> None:
            pg.barrier()

        def other() -> str:
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                asyncio.run(call())
            return "refused"

        assert await asyncio.to_thread(other) == "refused"

    await run_ranks(1, rank)
    await asyncio.get_running_loop().shutdown_default_executor()


@pytest.mark.ranks(1)
async def test_call_in_a_forked_child_is_refused(pg: ProcessGroup) -> None:
    assert "a forked child cannot use it: make a new group in the child" in run_in_fork(pg.barrier)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("error", [None, SystemExit(0)])
async def test_forked_child_that_leaves_the_group_block_does_not_close_the_group_of_its_parent(
    pg: ProcessGroup, error: BaseException | None
) -> None:
    if pg.rank() == 0:
        assert run_in_fork(lambda: pg.__aexit__(None, error, None).send(None)) == ""
    assert await pg.allreduce(1) == 2


def test_call_of_a_forked_child_in_the_same_event_loop_is_refused() -> None:
    loop = asyncio.SelectorEventLoop()
    store = HashStore()

    async def call(pg: ProcessGroup) -> None:
        await pg.barrier()

    pg = loop.run_until_complete(new_group(store=store, rank=0, world_size=1).__aenter__())
    raised = run_in_fork(lambda: loop.run_until_complete(call(pg)))
    assert "a forked child cannot use it: make a new group in the child" in raised
    loop.run_until_complete(call(pg))
    loop.run_until_complete(pg.shutdown())
    loop.run_until_complete(store.aclose())
    loop.close()


def test_group_works_after_its_event_loop_moves_to_another_thread() -> None:
    loop = asyncio.SelectorEventLoop()
    store = HashStore()

    async def call(pg: ProcessGroup) -> None:
        assert await pg.allreduce(2) == 2

    async def call_in_this_thread(pg: ProcessGroup) -> str:
        def refused() -> str:
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                pg.barrier()
            return "refused"

        await call(pg)
        pending_check.set_result(refused)
        return await asyncio.wrap_future(answer)

    pg = loop.run_until_complete(new_group(store=store, rank=0, world_size=1).__aenter__())
    loop.run_until_complete(call(pg))
    pending_check: Future[Callable[[], str]] = Future()
    answer: Future[str] = Future()
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(loop.run_until_complete, call_in_this_thread(pg))
        answer.set_result(pending_check.result(10)())
        assert found.result(10) == "refused"
    with pytest.raises(RuntimeError, match="belongs to another event loop"):
        pg.barrier()
    loop.run_until_complete(call(pg))
    loop.run_until_complete(pg.shutdown())
    loop.run_until_complete(store.aclose())
    loop.close()


# -- mismatches


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
@pytest.mark.parametrize(
    ("field", "calls"),
    [
        ("op", (lambda pg, x: pg.allreduce(x), lambda pg, x: pg.broadcast(x, 0))),
        ("op", (lambda pg, x: pg.barrier(), lambda pg, x: pg.reduce(x, 0))),
        ("op", (lambda pg, x: pg.barrier(), lambda pg, x: pg.allgather_object(1))),
        ("dtype", (lambda pg, x: pg.allreduce(x), lambda pg, x: pg.allreduce(x.view("int64")))),
        ("counts", (lambda pg, x: pg.allreduce(x), lambda pg, x: pg.allreduce(x[1:]))),
        ("counts", (lambda pg, x: pg.broadcast(x, 1), lambda pg, x: pg.broadcast(x[1:], 1))),
        ("reduce", (lambda pg, x: pg.allreduce(x), lambda pg, x: pg.allreduce(x, ReduceOp.MAX))),
        ("root", (lambda pg, x: pg.reduce(x, 0), lambda pg, x: pg.reduce(x, 1))),
        ("root", (lambda pg, x: pg.broadcast(x, 1), lambda pg, x: pg.broadcast(x, 0))),
        ("root", (lambda pg, x: pg.broadcast_object("a", 1), lambda pg, x: pg.broadcast_object("a", 0))),
    ],
    ids=["op", "op-root-only", "op-object", "dtype", "count", "count-broadcast", "reduce", "root", "waiting", "object"],
)
async def test_mismatch_of_two_calls_is_raised_on_both_ranks(pg: ProcessGroup, field: str, calls: tuple) -> None:
    around = np.arange(1000.0) + pg.rank()
    before = around.copy()
    message = f"Collectives differ in the following: .*{field}.*rank 0 called .*SequenceNumber=1.*rank 1 called"

    async def call() -> None:
        # If this rank completes before the other rank calls, its next call raises the mismatch error.
        await calls[pg.rank()](pg, around[8:-8])
        await pg.wait_revoked()
        pg.barrier()

    with pytest.raises((CollectiveMismatchError, GroupRevokedError)) as raised:
        await call()
    error = raised.value.__cause__ if isinstance(raised.value, GroupRevokedError) else raised.value
    assert isinstance(error, CollectiveMismatchError)
    assert re.search(message, str(error))
    assert error.ranks == (0, 1)
    np.testing.assert_array_equal(around, before)


@pytest.mark.ranks(5)
@parametrize_transports(*LINKS)
async def test_mismatch_between_two_ranks_is_raised_on_all_ranks(pg: ProcessGroup) -> None:
    tensor = np.ones(50_000, "float32" if pg.rank() == 3 else "float64")
    with pytest.raises(CollectiveMismatchError, match=r"dtype=float32.*") as raised:
        await pg.allreduce(tensor)
    assert 3 in raised.value.ranks
    # Other ranks may have reduced each other's data, but no data of rank 3.
    assert (tensor == 1).all() if pg.rank() == 3 else set(tensor) <= {1, 2, 3, 4}


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_different_order_of_calls_is_reported_as_a_mismatch(pg: ProcessGroup) -> None:
    x, y = np.ones(10), np.ones(20)
    works = [pg.allreduce(each) for each in ((x, y) if pg.rank() else (y, x))]
    for work in works:
        with pytest.raises(CollectiveMismatchError, match=r"counts=\[20\].*counts=\[10\]|\[10\].*\[20\]"):
            await work
    assert (x == 1).all()
    assert (y == 1).all()


async def test_groups_fail_independently() -> None:
    store = HashStore()

    async def rank(rank: int) -> None:
        async with (
            new_group(store=store, rank=rank, world_size=2) as one,
            new_group(store=store, rank=rank, world_size=2) as two,
        ):
            await one.barrier()
            if rank:
                one.abort("only this one")
            await one.wait_revoked()
            assert (await two.allreduce(np.ones(10)) == 2).all()

    await asyncio.gather(rank(0), rank(1))
    await store.aclose()


@pytest.mark.ranks(2)
async def test_new_timeout_applies_to_later_calls(pg: ProcessGroup) -> None:
    loop = asyncio.get_running_loop()
    before = [pg.recv(np.zeros(1), 1 - pg.rank(), tag) for tag in range(1, 100)]
    part = await pg.split_group([0, 1])
    assert part is not None
    pg.timeout = timedelta(seconds=1.5)
    assert (pg.timeout, part.timeout) == (1.5, 300.0)
    later = await pg.split_group([0, 1])
    assert later is not None
    assert later.timeout == 1.5
    start = loop.time()
    if pg.rank() == 0:
        with pytest.raises(CollectiveTimeoutError, match=r"within 1.5 s"):
            await pg.barrier()
        assert 1.4 < loop.time() - start < 5
    else:
        await pg.wait_revoked()
    assert all(work.exception() for work in before)


@pytest.mark.ranks(1)
async def test_invalid_timeout_is_refused(pg: ProcessGroup) -> None:
    for wrong in (-5, math.nan):
        with pytest.raises(ValueError, match=r"timeout=.*: must be >= 0 seconds"):
            pg.timeout = wrong
    for other in (None, "3", [1.0]):
        with pytest.raises(TypeError, match="timeout must be seconds"):
            pg.timeout = other  # type: ignore[assignment]
    assert pg.timeout == 300.0
    pg.timeout = math.inf
    assert await pg.allreduce(1) == 1
