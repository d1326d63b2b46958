"""CUDA calls that are launched before the ranks compare them: launch, order and mismatch errors."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupError,
    PeerLostError,
    ProcessGroup,
    Recv,
    ReduceOp,
    Send,
    Work,
)
from aiocoll.gpu.calls import pacing, program_order
from aiocoll.gpu.calls.call_comparison import CallComparison
from aiocoll.gpu.waiter import AT_MOST

from ..fakes.streams import ROOM
from ..internals import Limits, comm_of, dispatcher_of, set_nccl_only, waiter_of
from ..ranks import run_ranks, wait_until
from .groups import Gpus, clear_counts, gpus, host, repeat_allreduce, run_with_gpus, wait_for_idle_launcher

worlds = pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
LARGE = 40_000


def order_of(pg: ProcessGroup) -> Any:
    state = dispatcher_of(pg).device_calls.state
    return None if state is None else state.order


def program_of(pg: ProcessGroup) -> program_order.ProgramOrder:
    found: program_order.ProgramOrder = order_of(pg).program
    return found


# -- launches


@worlds
async def test_repeated_device_call_is_launched_before_its_comparison_but_a_first_call_is_not(world_size: int) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus, calls: list[str]) -> None:
        tensor = gpu.tensor(np.ones(3), pg.rank())
        calls.clear()
        first = pg.allreduce(tensor)
        assert "all_reduce" not in calls
        await first
        second = pg.allreduce(tensor)  # this call follows itself for the first time, so it is not launched ahead
        await second
        await clear_counts(pg, calls)
        await wait_for_idle_launcher(pg, gpu)
        works = [pg.allreduce(tensor) for _ in range(5)]
        # All five calls are on the device, although no rank has received a message for their comparison.
        assert calls.count("all_reduce") >= 5
        await asyncio.gather(*(work.join() for work in works))
        assert host(tensor).tolist() == [float(pg.size() ** 7)] * 3

    with gpus(world_size) as gpu:
        await run_ranks(world_size, body, gpu, gpu.calls())


async def test_repeated_device_call_is_launched_without_a_loop_iteration() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus, launched: set[int]) -> None:
        tensor = await repeat_allreduce(pg, gpu, 3)
        for _ in range(20):
            launched.clear()
            work = pg.allreduce(tensor)
            assert pg.rank() in launched
            await work

    def record_device(call: str) -> None:
        if call == "all_reduce":
            launched.add(gpu.cuda.current())

    launched: set[int] = set()
    with gpus(2) as gpu:
        gpu.nccl.hooks.append(record_device)
        await run_ranks(2, body, gpu, launched)


async def test_deferred_device_call_uses_its_device_even_if_another_device_is_current(
    limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits(device_check_interval=1000)  # so that the launcher stays idle

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, cuda = pg.rank(), gpu.cuda
        tensor = await repeat_allreduce(pg, gpu)
        await pg.broadcast(tensor, 0)
        await wait_for_idle_launcher(pg, gpu)
        await pg.barrier()
        cuda.use(rank)
        later = pg.allreduce(tensor)  # deferred, since this call follows the previous call for the first time
        cuda.use(1 - rank)
        gpu.shared_device(rank)._events.destroy()  # so that a new event is created, on the right device
        await later
        await wait_for_idle_launcher(pg, gpu)
        cuda.use(rank)
        queried.clear()
        work = pg.allreduce(tensor)
        assert queried == [rank] * 4  # three of the queries are about the array
        await work
        assert host(tensor).tolist() == [4.0] * 3

    def recorded_current() -> int:
        found = current()
        if threading.current_thread() is threading.main_thread():
            queried.append(found)
        return found

    queried: list[int] = []
    with gpus(2) as gpu:
        current = gpu.cuda.current
        monkeypatch.setattr(gpu.cuda, "current", recorded_current)
        await run_ranks(2, body, gpu)


async def test_on_stream_of_a_repeated_device_call_does_not_wait_for_other_ranks() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = await repeat_allreduce(pg, gpu)
        if pg.rank():
            await pg.recv(np.zeros(1), 0)
        work = pg.allreduce(tensor)
        await work.on_stream()
        assert pg.rank() or not work.done()
        if not pg.rank():
            await pg.send(np.zeros(1), 1)
        await work
        assert host(tensor).tolist() == [2.0] * 3

    await run_with_gpus(2, body)


async def test_await_of_a_launched_call_ends_when_the_device_is_done_and_rank_0_has_confirmed_the_call() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
        rank = pg.rank()
        tensor = await repeat_allreduce(pg, gpu)
        await pg.barrier()
        program, confirmed = program_of(pg), []
        with monkeypatch.context() as patched:
            patched.setattr(program, "confirm", confirmed.append)
            work = pg.allreduce(tensor)
            await work.on_stream()
            waiter = waiter_of(gpu.shared_device(rank), dispatcher_of(pg).device_calls.state.communicator.stream)  # type: ignore[union-attr]
            await wait_until(lambda: confirmed and waiter.is_idle)
            await gpu.shared_device(rank).run(lambda: None)
            assert not work.done()
        program.confirm(confirmed[-1])
        await work
        assert host(tensor).tolist() == [2.0] * 3

    with gpus(2) as gpu, pytest.MonkeyPatch.context() as monkeypatch:
        await run_ranks(2, body, gpu, monkeypatch)


@pytest.mark.parametrize("key", [False, True])
@pytest.mark.parametrize("behind", ["the group's", "the caller's"])
async def test_device_launch_never_waits_for_space_in_a_full_stream(behind: str, key: bool) -> None:
    """Check that a full stream blocks neither the event loop nor the launcher thread, and that all calls complete."""
    count = 1200 if behind == "the group's" else ROOM - 24  # as many calls as fit into the caller's stream

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = await repeat_allreduce(pg, gpu)
        stream = dispatcher_of(pg).device_calls.state.communicator.stream  # type: ignore[union-attr]
        device = gpu.shared_device(0)
        gate = gpu.cuda.gate(stream if behind == "the group's" else gpu.stream(0), 0)
        works = [pg.allreduce(tensor, key=str(number) if key else None) for number in range(count)]
        await wait_until(lambda: len(waiter_of(device, stream)._held) == count - AT_MOST and not device.is_launching)
        gate.open()
        await asyncio.gather(*(work.join() for work in works))
        assert [work.is_success() for work in works] == [True] * count

    await run_with_gpus(1, body)


async def test_staged_calls_host_calls_and_blocks_can_follow_many_launched_calls() -> None:
    """Make 40 launched calls, which need several reports for their comparison."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, size = pg.rank(), pg.size()
        for _ in range(3):
            tensor = gpu.tensor(np.ones(2), rank)
            works: list[Any] = [pg.allreduce(tensor) for _ in range(40)]
            bits = gpu.tensor(np.full(2, 1 << rank), rank)
            works.append(pg.allreduce(bits, ReduceOp.BOR))
            parts = [gpu.tensor(np.full(1 + peer, rank), rank) for peer in range(size)]
            into = [gpu.tensor(np.zeros(1 + rank, int), rank) for _ in range(size)]
            works.append(pg.alltoall(into, parts))
            works.append(pg.allreduce(np.ones(1)))
            async with pg.coalescing():
                pg.allreduce(other := gpu.tensor(np.ones(2), rank))
                pg.broadcast(root := gpu.tensor(np.full(2, rank), rank), size - 1)
            works.append(pg.allreduce(gpu.tensor(np.zeros(0), rank)))
            await asyncio.gather(*(work.join() for work in works))
            assert host(tensor).tolist() == [float(size**40)] * 2
            assert host(bits).tolist() == [(1 << size) - 1] * 2
            assert [host(each).tolist() for each in into] == [[peer] * (1 + rank) for peer in range(size)]
            assert (host(other).tolist(), host(root).tolist()) == ([float(size)] * 2, [size - 1] * 2)

    await run_with_gpus(3, body)


async def test_number_of_recorded_pairs_of_consecutive_calls_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_order, "KEPT", 1)
    monkeypatch.setattr("aiocoll.gpu.calls.communicator.KEPT", 0)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        for count in (1, 2, 3, 1, 2, 3):
            await repeat_allreduce(pg, gpu, 3, count)
            assert len(program_of(pg)._known) == 1
        assert not dispatcher_of(pg).device_calls.state.communicator._connected  # type: ignore[union-attr]

    await run_with_gpus(2, body)


async def test_verify_option_of_one_rank_makes_all_ranks_compare_calls_before_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        dispatcher = dispatcher_of(pg)
        assert dispatcher.options.verify == "behind"
        if pg.rank() == 1:
            monkeypatch.setattr(dispatcher, "options", dispatcher.options.resolve(None, {"AIOCOLL_VERIFY": "before"}))
        await repeat_allreduce(pg, gpu)
        assert order_of(pg) is None
        for _ in range(2):
            with pytest.raises(CollectiveMismatchError):
                await pg.allreduce(tensor := gpu.tensor(np.ones(3 + pg.rank()), pg.rank()))
            assert (host(tensor) == 1).all()
            await repeat_allreduce(pg, gpu)

    await run_with_gpus(3, body)


# -- mismatches


@pytest.mark.parametrize("other", [0, 1, 2])
@pytest.mark.parametrize("known", [False, True])
async def test_mismatch_of_launched_calls_names_both_calls_and_fails_the_group(other: int, known: bool) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> str:
        rank = pg.rank()
        for _ in range(3 if known else 1):
            await repeat_allreduce(pg, gpu, 1)
            await pg.broadcast(gpu.tensor(np.ones(2), rank), 1)
        await pg.barrier()  # wait here, so that no rank still awaits these calls when the group ends
        works = [pg.allreduce(gpu.tensor(np.ones(3), rank)) for _ in range(3)] if rank != other else []
        if rank == other:
            await pg.allreduce(gpu.tensor(np.ones(3), rank)).on_stream()
            works = [pg.broadcast(gpu.tensor(np.ones(2), rank), 1) for _ in range(20)]
        cause = await pg.wait_revoked()
        assert isinstance(cause, CollectiveMismatchError)
        for work in works[-1:]:
            with pytest.raises(CollectiveMismatchError):
                await work
        return str(cause)

    texts = await run_with_gpus(3, body)
    assert len(set(texts)) == 1
    assert f"rank {other} called BROADCAST(shape=[2]" in texts[0]
    assert "called ALLREDUCE(shape=[3]" in texts[0]
    assert "Collectives differ in the following: op, counts, root, reduce, shape" in texts[0]
    assert (
        'are undefined: they may have been launched before they were compared, which GroupOptions(verify="before")'
        in (texts[0])
    )


async def test_error_names_the_first_mismatch_among_calls_that_are_reported_together() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> str:
        rank = pg.rank()
        tensor = await repeat_allreduce(pg, gpu, 3)
        await pg.barrier()
        works = [pg.allreduce(tensor) for _ in range(3)]
        # The broadcast is not launched ahead, so its rank reports all its earlier calls at once.
        works.append(pg.broadcast(tensor, 1) if rank else pg.allreduce(tensor))
        for work in works:
            work.add_done_callback(lambda work: work.exception())
        return str(await pg.wait_revoked())

    with gpus(2) as gpu:
        for text in await run_ranks(2, body, gpu):
            assert "rank 1 called BROADCAST(shape=[3]" in text
            assert "rank 0 called ALLREDUCE(shape=[3]" in text


async def test_launched_calls_of_different_shapes_are_reported_as_a_mismatch() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await repeat_allreduce(pg, gpu)
        work = pg.allreduce(gpu.tensor(np.ones((2, 3) if pg.rank() else (3, 2)), pg.rank()))
        assert "differ in the following: shape" in str(await pg.wait_revoked())
        await asyncio.gather(work, return_exceptions=True)

    await run_with_gpus(2, body)


async def test_list_calls_that_differ_in_one_array_are_reported_as_a_mismatch() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        await repeat_allreduce(pg, gpu)
        tensors = [gpu.tensor(np.ones(2), rank), gpu.tensor(np.ones(3 + rank), rank)]
        with pytest.raises(CollectiveMismatchError, match=r"member 1 is ALLREDUCE.* on rank 0, ALLREDUCE.* on rank 1"):
            await pg.allreduce_coalesced(tensors)

    await run_with_gpus(2, body)


async def test_host_call_instead_of_a_device_call_is_reported_as_a_mismatch() -> None:
    """Make a host call on rank 0 and a device call on rank 1 with the same sequence number."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        await repeat_allreduce(pg, gpu)
        if pg.rank():
            await pg.recv(np.zeros(1), 0)
            work: Work[Any] = pg.allreduce(gpu.tensor(np.ones(3), pg.rank()))
        else:
            work = pg.broadcast(np.ones(3), 1)  # the broadcast sends no message to rank 1
            await pg.send(np.zeros(1), 1)
        cause = await pg.wait_revoked()
        await asyncio.gather(work, return_exceptions=True)
        assert isinstance(cause, CollectiveMismatchError)
        assert "rank 0 called BROADCAST(shape=[3], dtype=float64, device=cpu" in str(cause)

    await run_with_gpus(2, body)


async def test_repeated_or_premature_message_about_the_call_order_fails_the_group() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus, sender: int, note: dict[str, Any]) -> None:
        rank, comm = pg.rank(), comm_of(pg)
        await repeat_allreduce(pg, gpu)
        await pg.barrier()
        if rank == sender:
            comm.channels[1 - rank].send_control({"t": "device", "g": comm.id, **note})
        assert isinstance(await pg.wait_revoked(), GroupError)

    for sender, note in (
        (1, {"called": 1, "hash": 1, "seq": 1}),
        (1, {"confirmed": 9}),
        (0, {"called": 9, "hash": 1, "seq": 1}),
        (0, {"halted": 1}),
        (0, {"differs": {"rank": 0, "op": "X", "seq": 1, "key": None}, "position": 1}),
    ):
        with gpus(2) as gpu:
            await run_ranks(2, body, gpu, sender, note)


async def test_message_about_the_call_order_fails_a_group_that_compares_before_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIOCOLL_VERIFY", "before")

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        comm = comm_of(pg)
        await repeat_allreduce(pg, gpu)
        await pg.barrier()
        if pg.rank() == 0:
            comm.channels[1].send_control({"t": "device", "g": comm.id, "confirmed": 1})
        assert isinstance(await pg.wait_revoked(), GroupError)

    await run_with_gpus(2, body)


# -- keyed calls and messages


async def test_keyed_calls_and_messages_get_the_same_position_among_ordered_calls_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pacing, "CALM", 4)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, size = pg.rank(), pg.size()
        await repeat_allreduce(pg, gpu)
        assert program_of(pg).through is None
        for number in range(4):
            tensor = gpu.tensor(np.ones(3), rank)
            works: list[Any] = [pg.allreduce(tensor) for _ in range(rank + 1)]
            keyed = gpu.tensor(np.full(2, rank), rank)
            works.append(pg.allreduce(keyed, key=f"key {number}"))
            out, into = gpu.tensor(np.full(LARGE, rank), rank), gpu.tensor(np.zeros(LARGE, int), rank)
            works.append(pg.batch([Send(out, (rank + 1) % size), Recv(into, (rank - 1) % size)]))
            works += [pg.allreduce(tensor) for _ in range(size - rank)]
            await asyncio.gather(*(work.join() for work in works))
            assert host(tensor).tolist() == [float(size ** (size + 1))] * 3
            assert host(keyed).tolist() == [size * (size - 1) // 2] * 2
            assert set(host(into)) == {(rank - 1) % size}
            assert program_of(pg).through is not None
        for _ in range(5):
            await pg.allreduce(tensor)
        await wait_until(lambda: program_of(pg).through is None)

    await run_with_gpus(4, body)


@pytest.mark.parametrize("what", ["key", "message"])
async def test_keyed_call_or_message_is_staged_while_an_earlier_call_occupies_the_device(what: str) -> None:
    """Let rank 1 do the keyed call or message first, while a launched call occupies rank 0's device."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        tensor = await repeat_allreduce(pg, gpu)
        await pg.barrier()

        async def other() -> None:
            large = gpu.tensor(np.full(LARGE, rank), rank)
            if what == "key":
                await pg.allreduce(large, key="other")
                assert set(host(large)) == {1}
            elif rank:
                await pg.recv(large, 0)
                assert set(host(large)) == {0}
            else:
                await pg.send(large, 1)

        if rank:
            await other()
            await pg.allreduce(tensor)
        else:
            await asyncio.gather(pg.allreduce(tensor).join(), other())
        assert host(tensor).tolist() == [2.0] * 3
        await pg.allreduce(tensor)
        await pg.allreduce(tensor, key="again")
        assert host(tensor).tolist() == [8.0] * 3

    await run_with_gpus(2, body)


async def test_nccl_only_group_waits_for_an_agreed_call_order_instead_of_staging(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Let rank 1 make the launched call only after rank 0's maximum wait for a position."""
    monkeypatch.setattr(pacing, "MAX_WAIT", 0.0)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        set_nccl_only(pg, True)
        rank = pg.rank()
        tensor, keyed = await repeat_allreduce(pg, gpu), gpu.tensor(np.ones(3), rank)
        copies = gpu.cuda.calls["copy_to_host"]
        await pg.barrier()
        if rank:
            other, over = pg.allreduce(keyed, key="other"), asyncio.Event()
            await wait_until(lambda: program_of(pg).through is not None)
            comm_of(pg).call_later(pacing.MAX_WAIT, over.set)  # expires after rank 0's timer in the shared loop
            await over.wait()
            work = pg.allreduce(tensor)
        else:
            work, other = pg.allreduce(tensor), pg.allreduce(keyed, key="other")
        await asyncio.gather(work.join(), other.join())
        assert gpu.cuda.calls["copy_to_host"] == copies

    await run_with_gpus(2, body)


async def test_keyed_operation_with_an_agreed_position_waits_for_earlier_ordered_calls() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = await repeat_allreduce(pg, gpu)
        state = dispatcher_of(pg).device_calls.state
        assert state is not None
        begun: list[int] = []
        program_of(pg).through = program_of(pg).started + 1
        state.hold(state.number([0], True)[0], lambda _: begun.append(1), True)
        assert not begun
        await pg.allreduce(tensor)
        assert begun

    await run_with_gpus(1, body)


# -- failures


@pytest.mark.slow
@pytest.mark.parametrize("leaver", [0, 1])
async def test_error_of_a_device_call_names_a_rank_that_left_before_making_the_call(leaver: int) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = await repeat_allreduce(pg, gpu)
        await pg.barrier()
        if pg.rank() == leaver:
            return
        with pytest.raises(PeerLostError, match=f"needs rank {leaver}, which has left"):
            await pg.allreduce(tensor)

    await run_with_gpus(3, body)


async def test_device_call_completes_although_a_rank_leaves_after_making_the_call() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = await repeat_allreduce(pg, gpu)
        await pg.allreduce(tensor)
        assert host(tensor).tolist() == [3.0] * 3

    with gpus(3) as gpu:
        for _ in range(5):
            await run_ranks(3, body, gpu)


async def test_timeout_error_of_a_launched_call_names_the_rank_that_never_makes_the_call() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        tensor = await repeat_allreduce(pg, gpu)
        await pg.barrier()
        if pg.rank() < 2:
            with pytest.raises(CollectiveTimeoutError):
                await pg.allreduce(tensor, timeout=0.1)
        cause = await pg.wait_revoked()
        assert isinstance(cause, CollectiveTimeoutError)
        assert list(cause.ranks) == [2]

    await run_with_gpus(3, body)


# -- the comparison of calls and the agreement on their order on rank 0


class Rank0:
    """A rank 0 without a group: its call order, comparison and pacing objects, and the messages that they send."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.sent: list[Any] = []
        self.order = program_order.ProgramOrder(lambda *_: None, lambda _: None, lambda: None, alone=False)
        self.pacing = pacing.Pacing(
            2,
            lambda position: self.sent.append(("confirm", position)),
            lambda *how: self.sent.append(how),
            asyncio.get_running_loop().call_later,
            can_stage=True,
            is_shared=False,
        )
        self.comparison = CallComparison(
            2,
            self.order,
            self.pacing,
            lambda rank, start, hashes: self.sent.append(("compare", rank, start, len(hashes))),
        )

    def call(self) -> int:
        """Make a call; return the hash of all calls so far."""

        class Called:
            def begin(self, staged: bool) -> None:
                pass

        self.order.add(Called(), b"x", 1, is_numbered=False)  # type: ignore[arg-type]
        return self.order.hashes(self.order.called, self.order.called)[0]


async def test_operations_queued_during_a_halt_of_launches_start_when_all_ranks_have_halted() -> None:
    """Confirm all calls before the last rank halts, so that nothing else delays the operations."""
    rank = Rank0()
    begun: list[bool] = []
    rank.pacing.place(begun.append)
    rank.pacing.place(begun.append)
    rank.comparison.reported(1, 1, rank.call())
    rank.pacing.on_halt(0, 0)
    assert not begun
    rank.pacing.on_halt(1, 0)
    assert rank.sent == [("halt", 0, 0), ("confirm", 1), ("through", 1, 1)]
    assert begun == [False, False]
    rank.pacing.on_halt(1, 0)  # a repeated report has no effect
    assert len(rank.sent) == 3


async def test_rank_0_reports_a_mismatch_once_and_confirms_no_later_calls() -> None:
    rank = Rank0()
    rank.comparison.reported(1, 1, rank.call())
    first, second = rank.call(), rank.call()
    rank.comparison.reported(1, 2, first + 1)
    rank.comparison.reported(1, 3, second)
    assert rank.sent == [("confirm", 1), ("compare", 1, 2, 1)]
    with pytest.raises(ValueError, match="rank 1 has already reported position 3"):
        rank.comparison.reported(1, 3, second)
    rank.comparison.end()


async def test_rank_0_stages_keyed_operations_after_a_rank_has_left() -> None:
    rank = Rank0()
    begun: list[bool] = []
    rank.pacing.place(begun.append)
    rank.pacing.on_departure()
    rank.pacing.place(begun.append)
    assert begun == [True, True]
