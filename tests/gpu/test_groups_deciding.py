"""The agreement of all ranks of a group whether NCCL or staging handles CUDA arrays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveTimeoutError, GroupError, GroupRevokedError, ProcessGroup
from aiocoll.engine.operations.plan import EAGER_WINDOW
from aiocoll.engine.split_history import Split
from aiocoll.errors import PeerProtocolError
from aiocoll.gpu.calls.cards import Decision
from aiocoll.gpu.calls.device_state import DeviceState
from aiocoll.gpu.turns import Turn, Turns

from ..internals import Limits, comm_of, dispatcher_of, unmade_groups, wrap_methods, wrap_parts
from ..ranks import run_ranks, wait_until
from .groups import Gpus, gpus, host, run_with_gpus, uses_nccl

LARGE = EAGER_WINDOW + 1


@pytest.mark.parametrize("late", [0, 1, 2])
async def test_group_agrees_on_nccl_after_each_rank_has_sent_or_received_a_message(late: int) -> None:
    """Check each choice of the rank that uses a CUDA array last."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        tensor = gpu.tensor(np.full(LARGE, rank, np.uint8), rank)
        others = [each for each in range(3) if each != late]
        if rank != late:
            peer = others[1 - others.index(rank)]
            await (pg.send(tensor, peer) if rank == others[0] else pg.recv(tensor, peer))
            assert not uses_nccl(pg)
        await pg.barrier()
        if rank == late:
            work = pg.send(gpu.tensor(np.zeros(1), rank), others[0])
        await wait_until(lambda: uses_nccl(pg))
        if rank == late:
            await work
            await pg.send(tensor, others[1])
        elif rank == others[0]:
            await pg.recv(gpu.tensor(np.ones(1), rank), late)
        else:
            await pg.recv(tensor, late)
            assert (host(tensor) == late).all()

    with gpus(3) as gpu:
        calls = gpu.calls()
        await run_ranks(3, body, gpu)
        assert (calls.count("send"), calls.count("recv")) == (1, 1)


async def test_overlapping_groups_agree_on_nccl_without_waiting_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use three ranks in three groups of two, where each rank calls a different group first."""
    firsts = []

    def decide_late(decided: Any, side: DeviceState, number: int, decision: Decision) -> None:
        wait = 0.0 if side.comm in firsts else 0.05
        asyncio.get_running_loop().call_later(wait, decided, side, number, decision)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        groups = [await pg.split_group([pair]) for pair in ([0, 1], [1, 2], [2, 0])]
        first, second = groups[rank], groups[rank - 1]
        assert first is not None
        assert second is not None
        firsts.append(comm_of(first))
        await pg.barrier()
        one, two = (gpu.tensor(np.full(3, rank), rank, "float32") for _ in range(2))
        await asyncio.gather(first.allreduce(one).join(), second.allreduce(two).join())
        assert uses_nccl(first)
        assert uses_nccl(second)
        assert host(one).tolist() == [rank + (rank + 1) % 3] * 3
        assert host(two).tolist() == [rank + (rank - 1) % 3] * 3

    wrap_parts(monkeypatch, on_backend_decision=decide_late)
    await run_with_gpus(3, body)


async def test_groups_whose_ranks_have_devices_in_opposite_orders_do_not_wait_for_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def take_delayed(take: Any, turns: Turns, call: Callable[[], None]) -> Turn:
        """Delay the start of each device turn, so that all ranks take their first turn before any second turn."""

        def later() -> None:
            asyncio.get_running_loop().call_later(0.02, call)

        return take(turns, later)

    wrap_methods(monkeypatch, Turns, take=take_delayed)

    async def body(pg: ProcessGroup, gpu: Gpus, devices: list[int]) -> None:
        tensor = gpu.tensor(np.ones(3), devices[pg.rank()])
        await pg.allreduce(tensor, timeout=1)
        assert uses_nccl(pg)
        assert host(tensor).tolist() == [2] * 3

    with gpus(2) as gpu:
        await asyncio.gather(run_ranks(2, body, gpu, [0, 1]), run_ranks(2, body, gpu, [1, 0]))


async def test_failed_group_passes_its_device_turn_to_the_next_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a group time out because the start of rank 0's device turn is suppressed."""
    suppressed = []

    def take_and_suppress(take: Any, turns: Turns, call: Callable[[], None]) -> Turn:
        if not suppressed:
            suppressed.append(turns)
            return take(turns, lambda: None)
        return take(turns, call)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        stuck, other = await pg.split_group([[0, 1]]), await pg.split_group([[0, 1]], group_name="other")
        assert stuck is not None
        assert other is not None
        lost = stuck.allreduce(gpu.tensor(np.ones(1), rank), timeout=0.1)
        if rank == 0:
            await wait_until(lambda: bool(suppressed))
        work = other.allreduce(tensor := gpu.tensor(np.ones(1), rank))
        with pytest.raises(CollectiveTimeoutError):
            await lost
        await work
        assert uses_nccl(other)
        assert host(tensor).tolist() == [2]

    wrap_methods(monkeypatch, Turns, take=take_and_suppress)
    await run_with_gpus(2, body)


@pytest.mark.parametrize("late", [0, 1])
async def test_rank_can_create_its_group_after_other_ranks_have_made_device_calls(late: int) -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        if rank == late:
            await wait_until(lambda: unmade_groups(pg)) if rank == 0 else await pg.recv_object(0)
        elif rank == 0:
            pg.send_object(None, late)
        part = await pg.split_group([[0, 1], [2]])
        assert part is not None
        tensor = gpu.tensor(np.ones(3), rank)
        await part.allreduce(tensor)
        assert host(tensor).tolist() == [part.size()] * 3
        assert uses_nccl(part)
        assert not any(group.messages for group in unmade_groups(pg).values())

    await run_with_gpus(3, body)


async def test_device_control_messages_for_closed_or_foreign_groups_are_dropped() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        endpoint = comm_of(pg).endpoint
        part = await pg.split_group([[0, 1]])
        assert part is not None
        await part.shutdown()
        for identity in (comm_of(part).id, 7):
            endpoint.control.send(1 - pg.rank(), {"t": "device", "g": identity, "ready": True, "shares": False})
        await wait_until(lambda: unmade_groups(pg))
        assert list(unmade_groups(pg)) == [7]
        endpoint.registry.early.refuse_group(7, 1 - pg.rank(), None, (1 - pg.rank(),), pg.rank())
        assert not unmade_groups(pg)

    await run_with_gpus(2, body)


class SuppressedTurn:
    """A patch that suppresses the start callback of the first turn on one device.

    Attributes:
        calls: the suppressed callback, which a test may call later.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[Callable[[], None]] = []
        self.device = -1

        def take_and_suppress(take: Any, turns: Turns, call: Callable[[], None]) -> Turn:
            if not self.calls and turns is self.turns:
                self.calls.append(call)
                return take(turns, lambda: None)
            return take(turns, call)

        wrap_methods(monkeypatch, Turns, take=take_and_suppress)

    def select_device(self, gpu: Gpus, device: int) -> None:
        self.turns = gpu.shared_device(device).turns


async def send_around(pg: ProcessGroup, gpu: Gpus) -> None:
    """Send short CUDA arrays around a ring, so that every rank has used a CUDA array."""
    rank, size = pg.rank(), pg.size()
    device = comm_of(pg).endpoint.rank
    sent = pg.send(gpu.tensor(np.full(2, rank), device), (rank + 1) % size)
    into = gpu.tensor(np.zeros(2, int), device)
    await pg.recv(into, (rank - 1) % size)
    await sent
    assert host(into).tolist() == [(rank - 1) % size] * 2


@pytest.mark.parametrize("leaver", [0, 1, 2])
@pytest.mark.parametrize("stuck", [1, 2])
async def test_rank_that_leaves_during_the_nccl_agreement_does_not_block_other_groups(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, stuck: int, leaver: int
) -> None:
    """Let a rank leave while a device turn is pending; other groups can still use the devices."""
    turns = SuppressedTurn(monkeypatch)
    limits(backend_decision_timeout=0.05)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        part, other = await pg.split_group([[0, 1, 2]]), await pg.split_group([[0, 1, 2]], group_name="other")
        assert part is not None
        assert other is not None
        await send_around(part, gpu)
        await wait_until(lambda: turns.calls)
        await pg.barrier()
        if rank == leaver:
            await part.shutdown()
        else:
            await wait_until(lambda: leaver in comm_of(part).left)
        await other.allreduce(gpu.tensor(np.ones(2), rank))
        assert uses_nccl(other)
        if rank != leaver:
            long = gpu.tensor(np.full(LARGE, rank, np.uint8), rank)
            peer = (3 - leaver) - rank
            await (part.send(long, peer) if rank < peer else part.recv(long, peer))
            assert (host(long) == min(rank, peer)).all()
            assert not uses_nccl(part)

    with gpus(3) as gpu:
        turns.select_device(gpu, stuck)
        await run_ranks(3, body, gpu)


async def test_rank_that_leaves_still_creates_the_communicator_that_other_ranks_wait_for(
    monkeypatch: pytest.MonkeyPatch, limits: Limits
) -> None:
    turns = SuppressedTurn(monkeypatch)
    limits(device_departure_timeout=0.05)

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        part = await pg.split_group([[0, 1, 2]])
        assert part is not None
        await send_around(part, gpu)
        await wait_until(lambda: turns.calls)
        if rank == 1:
            ending = asyncio.ensure_future(part.shutdown())
            await asyncio.sleep(0)
        await pg.barrier()
        if rank == 2:
            turns.calls[0]()
        if rank == 1:
            await ending
        else:
            await wait_until(lambda: uses_nccl(part))

    with gpus(3) as gpu:
        turns.select_device(gpu, 2)
        await run_ranks(3, body, gpu)


async def test_group_stages_arrays_if_a_rank_left_before_the_agreement_on_nccl() -> None:
    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        part = await pg.split_group([[0, 1, 2]])
        assert part is not None
        short = gpu.tensor(np.full(2, rank), rank)
        if rank == 1:
            await part.send(short, 0)
            await part.shutdown()
        elif rank == 0:
            await part.recv(short, 1)
            await wait_until(lambda: 1 in comm_of(part).left)
            await pg.send_object(None, 2)
            await part.recv(short, 2)
        else:
            await pg.recv_object(0)
            await part.send(short, 0)
        if rank != 1:
            await wait_until(
                lambda: (
                    dispatcher_of(part).device_calls is not None
                    and dispatcher_of(part).device_calls.state.decision is not None
                )
            )
            assert dispatcher_of(part).device_calls is not None
            assert dispatcher_of(part).device_calls.state.decision == Decision(False, "rank 1 has left")

    await run_with_gpus(3, body)


async def test_messages_about_device_turns_after_the_nccl_decision_are_ignored() -> None:
    """Send the messages about a device turn again after the decision."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, member = pg.rank(), comm_of(pg)
        tensor = gpu.tensor(np.ones(1), rank)
        await pg.allreduce(tensor)
        await wait_until(lambda: uses_nccl(pg))
        member.endpoint.control.send(
            1 - rank, {"t": "device", "g": member.id, **({"ready": True, "shares": False} if rank else {"turn": True})}
        )
        await pg.allreduce(tensor)
        await pg.barrier()
        assert not gpu.shared_device(rank).turns._row

    await run_with_gpus(2, body)


CARD = {"library": 22809, "why": "", "bus": "", "unfinished": False, "float8": False, "ahead": True}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("sender", "note"),
    [
        (1, {}),
        (1, {"card": None}),
        (1, {"card": {}}),
        (1, {"card": {**CARD, "library": "2"}}),
        (1, {"card": {**CARD, "ahead": 1}}),
        (0, {"card": CARD}),
        (0, {"ready": True, "shares": False}),
        (1, {"turn": True}),
        (1, {"number": 1, "decision": [False, "", b"", False, False, False, False]}),
        (0, {"number": "1", "decision": [False, "", b"", False, False, False, False]}),
        (0, {"number": 1, "decision": [False, "", b"", False, False, False]}),
        (0, {"number": 1, "decision": [True, "", "", False, False, False, False]}),
        (1, {"called": -1, "hash": 1, "seq": 1}),
        (1, {"called": 1, "hash": "", "seq": 1}),
        (0, {"pace": "on", "number": 5, "through": 1, "upto": 1}),
        (0, {"compare": [1]}),
        (1, {"differs": {}, "position": 1}),
        (1, {"match": None}),
        (1, {"match": None, "batches": [[1, 1]]}),
        (1, {"match": None, "batches": [[1, 1, 2], [0, 1, 2]]}),
        (1, {"match": [1, 0], "batches": []}),
        (1, {"match": [1, 2, 1], "batches": []}),
        (1, {"match": [-1, 0, 1], "batches": []}),
        (1, {"match": [1, 0, []], "batches": []}),
        (0, {"match": [1, 0, 1], "batches": []}),
        (0, {"begin": [[1, 0, 1]]}),
        (0, {"begin": 1, "number": 5}),
        (0, {"begin": [[1, 2, 5]], "number": 5}),
        (0, {"begin": [[1, 0, 5]], "number": None}),
        (1, {"begin": [[1, 0, 5]], "number": 5}),
    ],
    ids=str,
)
async def test_invalid_control_message_about_nccl_fails_the_group(sender: int, note: dict[str, Any], when: str) -> None:
    """Send invalid messages before and after the receiving rank has used a CUDA array."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, member = pg.rank(), comm_of(pg)
        if when == "after":
            await pg.allreduce(gpu.tensor(np.ones(1), rank))
        await pg.barrier()
        if rank == sender:
            member.endpoint.control.send(1 - rank, {"t": "device", "g": member.id, **note})
        elif when == "before":
            await wait_until(lambda: member.devices._kept or member.cause)
            with pytest.raises(GroupRevokedError):
                pg.send(gpu.tensor(np.ones(1), rank), sender)
        error = await pg.wait_revoked()
        assert isinstance(error, PeerProtocolError)
        assert f"rank {sender}" in str(error)

    await run_with_gpus(2, body)


async def test_rank_that_fails_during_the_nccl_agreement_blocks_no_other_rank() -> None:
    """Let a rank's group fail between its report for the agreement and the decision."""

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank = pg.rank()
        first, second = await pg.split_group([[0, 1, 2]]), await pg.split_group([[2, 1, 0]], group_name="second")
        assert first is not None
        assert second is not None
        await pg.barrier()
        work = first.allreduce(gpu.tensor(np.ones(1), rank))
        if rank == 2:
            deciding = dispatcher_of(first).device_calls.state._agreement  # type: ignore[union-attr]
            await wait_until(lambda: deciding._settled is not None)
            assert not deciding._is_settled
            first.abort("enough")
            # A decision for staging that arrives late creates no communicator, so that the rank can ignore this
            # decision.
            deciding.handle_late({"number": 1, "decision": Decision(False, "")})
        with pytest.raises(GroupError, match="enough"):
            await work
        tensor = gpu.tensor(np.full(1, rank), rank)
        await second.allreduce(tensor)
        assert uses_nccl(second)
        assert host(tensor).tolist() == [3]

    with gpus(3) as gpu:
        calls = gpu.calls()
        await run_ranks(3, body, gpu)
        assert calls.count("init") == 6


async def test_early_device_message_of_a_nonmember_is_kept_for_another_group_with_the_same_id() -> None:
    made: list[int] = []

    async def body(pg: ProcessGroup, gpu: Gpus) -> None:
        rank, early = pg.rank(), comm_of(pg).endpoint.registry.early
        identity = Split(comm_of(pg).id, 0, None, (0, 1)).identity()
        note = {"t": "device", "g": identity, "ready": True, "shares": False}
        if rank == 0:
            await wait_until(lambda: len(made) == 2)
            early.keep_message(identity, 2, note, direct=False)
        part = await pg.split_group([[0, 1], [2]])
        assert part is not None
        made.append(rank)
        tensor = gpu.tensor(np.full(1, rank), rank)
        await part.allreduce(tensor)
        assert uses_nccl(part)
        assert host(tensor).tolist() == [1 if rank < 2 else 2]
        if rank == 0:
            assert unmade_groups(pg)[identity].messages == [(2, note)]

    await run_with_gpus(3, body)
