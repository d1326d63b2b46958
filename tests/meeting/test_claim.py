"""Rank claims: a new process takes over the claim of an ended process, but never the claim of a live process."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Coroutine
from math import inf
from typing import Any

import msgpack
import pytest

from aiocoll import FileStore, HashStore, PeerLostError, ProcessGroup, RendezvousError, Store, TCPStore, new_group
from aiocoll.meeting.cards import MOVED, MeetingMovedError, call_off
from aiocoll.meeting.claim import Claims, RankTakenError
from aiocoll.process import this_process
from aiocoll.runtime import Runtime
from aiocoll.store import PrefixStore
from aiocoll.store.commands import LEFT
from aiocoll.testing import VirtualLoop
from aiocoll.transport.stream.addresses import host_identity

#: The rendezvous timeout of the ranks in seconds.
LIMIT = 60.0


class HoldingStore(HashStore):
    """A store handle of one rank: carries out `last` requests; further requests wait until `released` is set."""

    def __init__(self, store: Store, last: float) -> None:
        super().__init__()
        self.held, self.released = asyncio.Event(), asyncio.Event()
        self._shared = store
        self._remaining = last

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._call_unless_held(lambda: self._shared._call(command, arguments))

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        if arguments == ("aiocoll/1/ended",):  # this is a background wait and not a step of the rank
            return await self._shared._wait(command, arguments, timeout)
        return await self._call_unless_held(lambda: self._shared._wait(command, arguments, timeout))

    async def _call_unless_held(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        self._remaining -= 1
        if self._remaining < 0 and not self.released.is_set():
            self.held.set()
            await self.released.wait()
        return await call()


async def meet(store: Store, rank: int, size: int) -> list[int]:
    """Meet the other ranks; return the rank numbers that an allgather collects from all ranks."""
    async with new_group(store=store, rank=rank, world_size=size, timeout=LIMIT) as pg:
        return await pg.allgather_object(rank)


async def outcomes(tasks: list[asyncio.Task[list[int]]]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def run_virtual(main: Awaitable[Any]) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)  # type: ignore[arg-type]


def loop_time() -> float:
    return asyncio.get_running_loop().time()


async def replace_at_request(size: int, victim: int, last: int, late: int | None) -> bool:
    """Cancel a rank at store request `last`, and start its successor; return whether the rank made this request."""
    store = HashStore()
    watched = HoldingStore(store, last)
    others = [rank for rank in range(size) if rank not in (victim, late)]
    tasks = [asyncio.create_task(meet(store, rank, size)) for rank in others]
    first = asyncio.create_task(meet(watched, victim, size))
    await asyncio.sleep(5.0)
    if not watched.held.is_set() and first.done():
        return False
    first.cancel()
    await asyncio.wait([first])
    tasks.append(asyncio.create_task(meet(store, victim, size)))
    await asyncio.sleep(1.0)
    if late is not None:
        tasks.append(asyncio.create_task(meet(store, late, size)))
    began = loop_time()
    found = await outcomes(tasks)
    assert loop_time() - began < 5.0
    if late is not None:
        assert found == [list(range(size))] * size
    elif any(each != list(range(size)) for each in found):
        for each in found:  # ranks that have already met lose a peer when it is replaced
            assert isinstance(each, RendezvousError | PeerLostError), found
            assert f"rank {victim}" in str(each)
    return watched.held.is_set()


@pytest.mark.parametrize(("size", "victim", "late"), [(2, 0, 1), (2, 1, 0), (3, 1, 2), (3, 0, 1), (4, 3, 0), (7, 5, 2)])
def test_successor_process_takes_a_free_rank_before_all_ranks_have_arrived(size: int, victim: int, late: int) -> None:
    for last in itertools.count():
        held = run_virtual(replace_at_request(size, victim, last, late))
        if not held:  # after its last request, the rank only waits for the other ranks
            break
    assert last > 3


@pytest.mark.parametrize(("size", "victim"), [(2, 0), (2, 1), (3, 1), (4, 3), (7, 5)])
def test_successor_process_takes_the_rank_or_the_errors_of_all_ranks_name_the_rank(size: int, victim: int) -> None:
    for last in itertools.count():
        if not run_virtual(replace_at_request(size, victim, last, None)):
            break
    assert last > 6


@pytest.mark.parametrize("size", [1, 2, 3])
def test_rank_claim_of_a_live_process_is_never_taken_over(size: int) -> None:
    async def main(last: int) -> bool:
        store = HashStore()
        watched = HoldingStore(store, last)
        tasks = [asyncio.create_task(meet(watched if rank == 0 else store, rank, size)) for rank in range(size)]
        await asyncio.sleep(5.0)
        if not watched.held.is_set():
            assert await outcomes(tasks) == [list(range(size))] * size
            return False
        if await store.check(["aiocoll/1/claim/0"]):
            with pytest.raises(RankTakenError, match="rank 0 is taken: another process joined as rank 0"):
                await meet(store, 0, size)
        watched.released.set()
        assert await outcomes(tasks) == [list(range(size))] * size
        return True

    for last in itertools.count():
        if not run_virtual(main(last)):
            break
    assert last > 4


# -- evidence that a process has ended


def claim_of_ended_process(**changes: Any) -> bytes:
    """Return the claim of an ended process that had the pid of this process."""
    here = this_process()
    claim = {"host": host_identity(), "namespace": here.namespace, "pid": here.pid, "started": here.started - 1}
    return bytes(16) + bytes(msgpack.packb([*(claim | changes).values()]))


def claims(store: Store, rank: int, size: int) -> Claims:
    return Claims(store, rank, size, Runtime.of(asyncio.get_running_loop()))


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs the start times of processes, from Linux")
async def test_rank_claim_of_an_ended_process_can_be_taken_over(tmp_path: Any) -> None:
    store = FileStore(tmp_path / "store")
    await store.set("aiocoll/1/claim/0", claim_of_ended_process())
    successor = claims(store, 0, 2)
    with successor.active():
        await successor.claim()
    assert successor.generation == 2
    assert await store.get("aiocoll/1/ended") == await store.get("aiocoll/1/card/0") == b"moved:"
    await store.aclose()


@pytest.mark.parametrize(
    "claim",
    [
        b"",
        bytes(16) + b"\xc1",
        bytes(16) + b"\x90",
        bytes(16) + b"\x81\xa1a\x01",
        claim_of_ended_process(host="elsewhere"),
        claim_of_ended_process(namespace=1),
        claim_of_ended_process(started=this_process().started),
    ],
    ids=["empty", "no msgpack", "short", "map", "other host", "other namespace", "living"],
)
async def test_rank_claim_of_a_possibly_live_process_is_respected(
    claim: bytes, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("aiocoll.meeting.claim._active", {claim})
    store = FileStore(tmp_path / "store")
    await store.set("aiocoll/1/claim/0", claim or b"?")
    with pytest.raises(RankTakenError):
        await claims(store, 0, 2).claim()
    await store.aclose()


async def test_store_server_marks_the_rank_claims_of_disconnected_clients() -> None:
    async with TCPStore("127.0.0.1", 0, is_master=True) as master:
        client = TCPStore("127.0.0.1", master.port)
        part = PrefixStore("part", client)
        assert await part._hold("held", b"", b"mine") == b"mine"
        assert await part._hold("held", b"other", b"again") == b"mine"
        assert await part._hold("changed", b"", b"mine") == b"mine"
        await client.set("part/changed", b"new")
        await client.aclose()
        while await master.get("part/held") != LEFT:  # noqa: ASYNC110 - the store does not notify changes
            await asyncio.sleep(0.001)
        assert await master.get("part/changed") == b"new"
        assert sorted(await master.list_keys()) == ["part/changed", "part/held", "part/held/left"]
        assert await master._hold("part/held", LEFT, b"next") == b"next"


async def test_store_server_does_not_free_a_rank_claim_because_of_a_process_id() -> None:
    """Check that only a closed connection frees the claim, since the process id may belong to a cloned host."""
    async with TCPStore("127.0.0.1", 0, is_master=True) as store:
        await store.set("aiocoll/1/claim/0", claim_of_ended_process())
        with pytest.raises(RankTakenError):
            await claims(store, 0, 2).claim()


async def test_successor_process_is_refused_after_all_cards_are_published() -> None:
    store = HashStore()
    await store.multi_set(["aiocoll/1/claim/1", "aiocoll/1/card/0", "aiocoll/1/card/1"], [LEFT, b"card", b"card"])
    successor = claims(store, 1, 2)
    with pytest.raises(RendezvousError, match="rank 1 was lost before all ranks had met: its process ended after all"):
        await successor.claim()
    assert (await store.get("aiocoll/1/ended")).startswith(b"off:rank 1 was lost")
    again = claims(store, 1, 2)
    await again.claim()
    assert again.generation == 2


async def test_ranks_meet_again_after_a_rendezvous_that_succeeded_on_only_some_ranks() -> None:
    """Mark a rendezvous as cancelled in the store, and check that no rank can complete this rendezvous any more."""
    store = HashStore(timeout=inf)
    for _ in range(3):
        assert await asyncio.gather(*(meet(store, rank, 2) for rank in range(2))) == [[0, 1]] * 2
    await store.set("aiocoll/4/ended", b"moved:")
    assert await asyncio.gather(*(meet(store, rank, 2) for rank in range(2))) == [[0, 1]] * 2
    assert await store.get("aiocoll/rank/0") == b"5"


async def test_rank_receives_the_reason_of_a_cancelled_rendezvous() -> None:
    store = HashStore()
    await store.set("aiocoll/1/claim/0", LEFT)
    rank = claims(store, 1, 2)
    await rank.claim()
    await call_off(store, 2, "on purpose")
    with pytest.raises(RendezvousError, match="on purpose"):
        await rank.restart_after_ended_rank()


async def test_ranks_that_cannot_meet_again_receive_the_reason() -> None:
    store = HashStore()
    await store.set("aiocoll/1/claim/0", LEFT)
    rank = claims(store, 1, 2)
    await rank.claim()
    with pytest.raises(MeetingMovedError):
        await rank.restart_after_ended_rank()
    await rank.claim()
    await call_off(store, 2, "on purpose")
    assert await rank.store.get("job") == b"off:on purpose"


async def test_rendezvous_cancelled_between_its_two_restart_requests_raises_an_error() -> None:
    store = HashStore()
    await store.set("aiocoll/1/claim/0", LEFT)
    await call_off(store, 2, "on purpose")
    await store.set("aiocoll/1/card/1", MOVED)
    rank = claims(store, 1, 2)
    await rank.claim()
    with pytest.raises(RendezvousError, match="on purpose"):
        await rank.restart_after_ended_rank()


async def test_process_with_another_world_size_does_not_disturb_the_next_rendezvous() -> None:
    store = HashStore()
    assert await asyncio.gather(*(meet(store, rank, 2) for rank in range(2))) == [[0, 1]] * 2
    with pytest.raises(RendezvousError, match="rank 1 was started with world_size=3, others with world_size=2"):
        await meet(store, 1, 3)
    assert await asyncio.gather(*(meet(store, rank, 2) for rank in range(2))) == [[0, 1]] * 2


async def open_group(joining: new_group) -> ProcessGroup:
    return await joining


async def test_rank_assignment_skips_ranks_that_are_taken() -> None:
    """Check that a new process gets the rank of an ended process, although the store counts ranks only upwards."""
    store = HashStore()
    waiting = [asyncio.create_task(open_group(new_group(store=store, world_size=3, timeout=LIMIT))) for _ in range(2)]
    await store.wait(["aiocoll/1/card/0", "aiocoll/1/card/1"])
    ended = waiting.pop()
    ended.cancel()
    await asyncio.wait([ended])
    waiting += [asyncio.create_task(open_group(new_group(store=store, world_size=3, timeout=LIMIT))) for _ in range(2)]
    groups = await asyncio.gather(*waiting)
    assert sorted(pg.rank() for pg in groups) == [0, 1, 2]
    await asyncio.gather(*(pg.shutdown() for pg in groups))


@pytest.mark.parametrize("size", [2, 3, 7])
def test_rendezvous_waits_for_the_successor_of_an_ended_process(size: int) -> None:
    """Start the last rank after a process has died and before its successor starts."""

    async def main() -> None:
        store = HashStore()
        first = asyncio.create_task(meet(store, 0, size))
        tasks = [asyncio.create_task(meet(store, rank, size)) for rank in range(1, size - 1)]
        await asyncio.sleep(1.0)
        first.cancel()
        await asyncio.wait([first])
        tasks.append(asyncio.create_task(meet(store, size - 1, size)))
        await asyncio.sleep(20.0)
        assert not any(task.done() for task in tasks)
        tasks.append(asyncio.create_task(meet(store, 0, size)))
        began = loop_time()
        assert await outcomes(tasks) == [list(range(size))] * size
        assert loop_time() - began < 1.0

    run_virtual(main())
