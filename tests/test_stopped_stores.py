"""Stores that stop replying, like a process after SIGSTOP: every call with a timeout ends soon after its timeout.

A scenario repeats the public calls that have a timeout: the store stops at the first request, at the second one, and so
on, until the call succeeds. Most scenarios run on a virtual clock.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiocoll.distributed as dist
from aiocoll import (
    AiocollError,
    BlockingGroup,
    FileStore,
    GroupError,
    HashStore,
    Meeting,
    PrefixStore,
    ProcessGroup,
    Recv,
    RedisStore,
    RendezvousError,
    Send,
    Store,
    TCPStore,
    elastic,
    new_group,
)
from aiocoll.store.log import LogFile
from aiocoll.store.session import Session
from aiocoll.testing import VirtualLoop, run_ranks

from .public_names import public_names
from .store.minimal_store import MinimalStore

#: The timeout of the tested calls, and the time by which a call may exceed its timeout, in seconds.
TIMEOUT, SOON = 5.0, 1.0
#: The timeout of calls in tests that run on the real clock, in seconds.
SHORT = 0.4

Call = Callable[[], Awaitable[Any]]


class StoppingStore(HashStore):
    """A store, shared by all ranks, that stops replying at a chosen request.

    Args:
        carried_out: whether the store carries out the request to which it does not reply.

    Attributes:
        requests: the number of requests since `stop_at`.
    """

    _may_stop = True  # marks the store as able to stop, like a store in another process

    def __init__(self, carried_out: bool = False) -> None:
        super().__init__()
        self.requests = 0
        self._last = inf
        self._carried_out = carried_out

    def stop_at(self, number: float) -> None:
        """Stop the store after `number` more requests."""
        self.requests = 0
        self._last = number

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        return await self._unless_stopped(super()._call(command, arguments), self._carried_out)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        return await self._unless_stopped(super()._wait(command, arguments, timeout), False)

    async def _unless_stopped(self, request: Coroutine[Any, Any, Any], carried_out: bool) -> Any:
        self.requests += 1
        if self.requests <= self._last or (carried_out and self.requests == self._last + 1):
            result = await request
        else:
            request.close()
        if self.requests > self._last:
            await asyncio.Event().wait()
        return result


class Timed:
    """A check that each call of a run ends in time. Errors of the calls are recorded."""

    def __init__(self, limit: float) -> None:
        self.failures: list[BaseException] = []
        self._limit = limit

    async def __call__(self, call: Awaitable[Any]) -> Any:
        """Await `call`; return its result, or None if it raises an aiocoll error."""
        time = asyncio.get_running_loop().time
        began = time()
        try:
            return await call
        except AiocollError as error:
            self.failures.append(error)
            return None
        finally:
            took = time() - began
            assert took <= self._limit + SOON, f"the call took {took:.2f} s"
            assert all(map(str, self.failures)), f"an error has no text: {self.failures}"


Scenario = Callable[[StoppingStore, Callable[[], None], Timed], Awaitable[None]]


def at_each_request(scenario: Scenario, carried_out: bool) -> list[list[BaseException]]:
    """Run `scenario` once for each request at which the store can stop; return the errors of each run."""
    found = []
    for last in itertools.count():

        async def run() -> StoppingStore:
            store = StoppingStore(carried_out)
            timed = Timed(TIMEOUT)
            await scenario(store, lambda: store.stop_at(last), timed)  # noqa: B023 - it runs at once
            found.append(timed.failures)
            return store

        try:
            with asyncio.Runner(loop_factory=VirtualLoop) as runner:
                store = runner.run(run())
        except BaseException as error:
            error.add_note(f"the store stopped at request {last + 1}")
            raise
        if store.requests <= last:
            return found


async def gather_all(*calls: Awaitable[Any]) -> list[Any]:
    async with asyncio.timeout(20 * TIMEOUT):
        return await asyncio.gather(*calls)


async def close_group(group: ProcessGroup | None) -> None:
    """Close a group; check that closing takes no time, even with a stopped store."""
    if group is not None:
        await Timed(0.0)(group.shutdown())


def _meet(size: int, assigned: bool) -> Scenario:
    async def scenario(store: StoppingStore, stop: Callable[[], None], timed: Timed) -> None:
        async def rank(number: int) -> None:
            given = None if assigned else number
            await close_group(
                await timed(_open_group(new_group(store=store, rank=given, world_size=size, timeout=TIMEOUT)))
            )

        stop()
        await gather_all(*map(rank, range(size)))

    return scenario


async def _open_group(made: new_group) -> ProcessGroup:
    return await made


async def init_process_group(store: StoppingStore, stop: Callable[[], None], timed: Timed) -> None:
    async def rank(number: int) -> None:
        await timed(dist.init_process_group(store=store, rank=number, world_size=2, timeout=TIMEOUT))
        if dist.is_initialized():
            await Timed(0.0)(dist.destroy_process_group())

    stop()
    await gather_all(*(asyncio.create_task(rank(number)) for number in range(2)))


async def second_group(store: StoppingStore, stop: Callable[[], None], timed: Timed) -> None:
    """Create a group while an earlier creation with a longer timeout still waits."""

    async def rank(number: int) -> None:
        first = asyncio.create_task(_open_group(new_group(store=store, rank=number, world_size=2, timeout=3 * TIMEOUT)))
        await asyncio.sleep(0)
        await close_group(await timed(_open_group(new_group(store=store, rank=number, world_size=2, timeout=TIMEOUT))))
        with suppress(AiocollError):
            await close_group(await first)

    stop()
    await gather_all(*map(rank, range(2)))


@asynccontextmanager
async def open_groups(store: Store, size: int, **given: Any) -> AsyncIterator[list[ProcessGroup]]:
    groups = await gather_all(
        *(_open_group(new_group(store=store, rank=rank, world_size=size, **given)) for rank in range(size))
    )
    yield groups
    await gather_all(*map(close_group, groups))


def _grow(size: int, newcomers: int, count: int, least: int) -> Scenario:
    async def scenario(store: StoppingStore, stop: Callable[[], None], timed: Timed) -> None:
        async with open_groups(store, size) as groups:
            stop()
            # If fewer newcomers arrive than requested, the group grows only after the timeout of `grow`.
            limit = TIMEOUT if count == newcomers else 2 * TIMEOUT
            try_limited_lock = Timed(limit)
            joining = [
                asyncio.create_task(try_limited_lock(_open_group(new_group(store=store, join=True, timeout=limit))))
                for _ in range(newcomers)
            ]
            await asyncio.sleep(0.01)
            grown = await gather_all(
                *(try_limited_lock(group.grow(count, TIMEOUT, at_least=least)) for group in groups)
            )
            await gather_all(*map(close_group, [*grown, *await gather_all(*joining)]))
            timed.failures += try_limited_lock.failures

    return scenario


async def merge(store: StoppingStore, stop: Callable[[], None], timed: Timed) -> None:
    async with open_groups(HashStore(), 2) as some, open_groups(HashStore(), 1) as others:
        stop()
        merged = await gather_all(*(timed(group.merge_remote_group(store, 3, TIMEOUT)) for group in [*some, *others]))
        await gather_all(*map(close_group, merged))


def _lose_rank(size: int, replaced: bool, wait: float) -> Scenario:
    """Return an elastic scenario: the last rank leaves, and a newcomer takes its place if `replaced` is true."""

    async def scenario(store: StoppingStore, stop: Callable[[], None], timed: Timed) -> None:
        begun, running = asyncio.Barrier(size), asyncio.Event()

        async def process(groups: AsyncGenerator[ProcessGroup, None], leaves: bool = False) -> None:
            async with aclosing(groups):
                while (pg := await timed(anext(groups, None))) is not None:
                    with suppress(GroupError):
                        if pg.group_name == "world:0":
                            if await begun.wait() == 0:
                                stop()
                                running.set()
                            if leaves:
                                return
                            await pg.allreduce(1.0)  # fails when the last rank leaves
                        else:
                            await pg.allreduce(1.0)

        def start(**where: Any) -> AsyncGenerator[ProcessGroup, None]:
            return elastic(store=store, timeout=TIMEOUT, mend_timeout=TIMEOUT, wait=wait, state={"n": 0}, **where)

        async def run_newcomer() -> None:
            await running.wait()
            await process(start(join=True))

        ranks = [process(start(rank=rank, world_size=size), rank == size - 1) for rank in range(size)]
        await gather_all(*ranks, *([run_newcomer()] if replaced else []))

    return scenario


SCENARIOS: dict[str, Scenario] = {
    **{f"new_group of {size}": _meet(size, False) for size in (1, 2, 3)},
    "new_group of 2 without ranks": _meet(2, True),
    "second new_group": second_group,
    "init_process_group": init_process_group,
    "grow without newcomers": _grow(2, 0, 1, 1),
    "grow by 1": _grow(2, 1, 1, 1),
    "grow of 1 by 2": _grow(1, 2, 2, 2),
    "grow by 1 of 2": _grow(2, 1, 2, 1),
    "merge_remote_group": merge,
    "elastic without newcomers": _lose_rank(2, False, 1.0),
    "elastic with a newcomer": _lose_rank(3, True, 1.0),
    "elastic that waits too long": _lose_rank(2, False, 60.0),
}
#: Scenarios whose calls fail even if the store replies, because newcomers are missing, with the error text.
MISSING = {
    "grow without newcomers": "0 of 1 newcomers came within 5 s",
    "elastic that waits too long": "no new group within mend_timeout=5 s, waiting for 1 newcomer(s)",
}


@pytest.mark.parametrize("carried_out", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_call_ends_in_time_if_its_store_stops_at_any_request(name: str, carried_out: bool) -> None:
    *stopped, answered = at_each_request(SCENARIOS[name], carried_out)
    assert len(stopped) > 4
    if name == "elastic without newcomers":
        assert not any(stopped), "elastic did not continue with the remaining ranks"
    else:
        assert stopped[0], "no call failed when the store stopped at the first request"
    assert bool(answered) == (name in MISSING)
    for error in answered:
        assert MISSING[name] in str(error)


# -- group calls that use no store


def _ones() -> np.ndarray:
    return np.ones(2)


async def _halo(pg: ProcessGroup) -> None:
    grid = pg.cart([2])
    assert grid is not None
    await grid.halo(np.zeros(4), timeout=TIMEOUT)


#: For each group method with a timeout, a function that each of two ranks runs to call the method.
GROUP_CALLS: dict[str, Callable[[ProcessGroup], Awaitable[Any]]] = {
    "allgather": lambda pg: pg.allgather([_ones(), _ones()], _ones(), timeout=TIMEOUT),
    "allgather_into_tensor": lambda pg: pg.allgather_into_tensor(np.ones(4), _ones(), timeout=TIMEOUT),
    "allgather_into_tensor_coalesced": lambda pg: pg.allgather_into_tensor_coalesced(
        [np.ones(4)], [_ones()], timeout=TIMEOUT
    ),
    "allgather_object": lambda pg: pg.allgather_object(1, timeout=TIMEOUT),
    "allreduce": lambda pg: pg.allreduce(_ones(), timeout=TIMEOUT),
    "allreduce_coalesced": lambda pg: pg.allreduce_coalesced([_ones()], timeout=TIMEOUT),
    "alltoall": lambda pg: pg.alltoall([_ones(), _ones()], [_ones(), _ones()], timeout=TIMEOUT),
    "alltoall_base": lambda pg: pg.alltoall_base(np.ones(4), np.ones(4), timeout=TIMEOUT),
    "alltoall_object": lambda pg: pg.alltoall_object([1, 2], timeout=TIMEOUT),
    "barrier": lambda pg: pg.barrier(timeout=TIMEOUT),
    "batch": lambda pg: pg.batch(
        [Send(_ones(), 1 - pg.rank()), Recv(_ones(), 1 - pg.rank())],
        timeout=TIMEOUT,
    ),
    "broadcast": lambda pg: pg.broadcast(_ones(), 0, timeout=TIMEOUT),
    "broadcast_object": lambda pg: pg.broadcast_object(1, 0, timeout=TIMEOUT),
    "exscan": lambda pg: pg.exscan(_ones(), timeout=TIMEOUT),
    "gather": lambda pg: pg.gather([_ones(), _ones()] if pg.rank() == 0 else None, _ones(), 0, timeout=TIMEOUT),
    "gather_object": lambda pg: pg.gather_object(1, timeout=TIMEOUT),
    "halo": _halo,
    "monitored_barrier": lambda pg: pg.monitored_barrier(TIMEOUT),
    "probe": lambda pg: _message(pg, lambda: pg.probe(0, timeout=TIMEOUT)),
    "recv": lambda pg: _message(pg, lambda: pg.recv(_ones(), 0, timeout=TIMEOUT)),
    "recv_anysource": lambda pg: _message(pg, lambda: pg.recv_anysource(_ones(), timeout=TIMEOUT)),
    "recv_object": lambda pg: _message(pg, lambda: pg.recv_object(0, timeout=TIMEOUT), 1),
    "reduce": lambda pg: pg.reduce(_ones(), 0, timeout=TIMEOUT),
    "reduce_scatter": lambda pg: pg.reduce_scatter(_ones(), [_ones(), _ones()], timeout=TIMEOUT),
    "reduce_scatter_tensor": lambda pg: pg.reduce_scatter_tensor(_ones(), np.ones(4), timeout=TIMEOUT),
    "reduce_scatter_tensor_coalesced": lambda pg: pg.reduce_scatter_tensor_coalesced(
        [_ones()], [np.ones(4)], timeout=TIMEOUT
    ),
    "scan": lambda pg: pg.scan(_ones(), timeout=TIMEOUT),
    "scatter": lambda pg: pg.scatter(_ones(), [_ones(), _ones()] if pg.rank() == 0 else None, 0, timeout=TIMEOUT),
    "scatter_object": lambda pg: pg.scatter_object([1, 2] if pg.rank() == 0 else None, timeout=TIMEOUT),
    "send": lambda pg: _message(pg, lambda: pg.recv(_ones(), 0, timeout=TIMEOUT)),
    "send_object": lambda pg: _message(pg, lambda: pg.recv_object(0, timeout=TIMEOUT), 1),
    "split_group": lambda pg: pg.split_group([0, 1], TIMEOUT),
    "distributed.monitored_barrier": lambda pg: dist.monitored_barrier(timeout=TIMEOUT),
    "distributed.new_group": lambda pg: dist.new_group([0, 1], timeout=TIMEOUT),
    "distributed.new_subgroups": lambda pg: dist.new_subgroups(1, timeout=TIMEOUT),
    "distributed.new_subgroups_by_enumeration": lambda pg: dist.new_subgroups_by_enumeration(
        [[0], [1]], timeout=TIMEOUT
    ),
    "distributed.split_group": lambda pg: dist.split_group(split_ranks=[[0], [1]], timeout=TIMEOUT),
}


async def _message(pg: ProcessGroup, receive: Call, obj: object = None) -> None:
    """Send a message from rank 0, and receive it on rank 1 by calling `receive`."""
    if pg.rank() == 1:
        await receive()
    elif obj is None:
        await pg.send(_ones(), 1, timeout=TIMEOUT)
    else:
        await pg.send_object(obj, 1, timeout=TIMEOUT)


@pytest.mark.parametrize("name", GROUP_CALLS)
def test_calls_of_a_group_work_while_its_store_is_stopped(name: str) -> None:
    async def main() -> None:
        store = StoppingStore()

        async def rank(pg: ProcessGroup) -> None:
            await pg.barrier()
            store.stop_at(0)
            await GROUP_CALLS[name](pg)

        began = asyncio.get_running_loop().time()
        await run_ranks(2, rank, store=store)
        assert store.requests == 0
        assert asyncio.get_running_loop().time() - began < SOON

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


# -- stores


WAITS: dict[str, Callable[[Store, float], Awaitable[Any]]] = {
    "get": lambda store, timeout: store.get("key", timeout),
    "wait": lambda store, timeout: store.wait(["key"], timeout),
    "multi_get": lambda store, timeout: store.multi_get(["key", "key"], timeout),
    "queue_pop": lambda store, timeout: store.queue_pop("queue", timeout=timeout),
    "set": lambda store, timeout: store.set("other", b""),
}


async def fill(store: Store) -> None:
    await store.set("key", b"value")
    await store.queue_push("queue", b"item")


class StoppingKeyValueStore(MinimalStore):
    """A user-defined store whose server stops replying at a chosen request."""

    def __init__(self, entries: dict[str, bytes]) -> None:
        super().__init__(entries)
        self.last, self.requests = inf, 0

    async def read(self, name: str) -> bytes | None:
        await self._request()
        return await super().read(name)

    async def compare_and_swap(self, name: str, old: bytes | None, new: bytes | None) -> bool:
        await self._request()
        return await super().compare_and_swap(name, old, new)

    async def _request(self) -> None:
        self.requests += 1
        if self.requests > self.last:
            await asyncio.Event().wait()


@pytest.mark.parametrize("prefixed", [False, True])
@pytest.mark.parametrize("call", WAITS)
def test_call_ends_in_time_if_a_user_defined_store_stops(call: str, prefixed: bool) -> None:
    async def main(last: int) -> tuple[int, list[BaseException]]:
        store = StoppingKeyValueStore({})
        store.timeout = TIMEOUT
        used = PrefixStore("part", store) if prefixed else store
        await fill(used)
        store.last, store.requests = last, 0
        timed = Timed(TIMEOUT)
        await timed(WAITS[call](used, TIMEOUT))
        for task in store._returning:
            task.cancel()
        return store.requests, timed.failures

    for last in itertools.count():
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            requests, failures = runner.run(main(last))
        assert bool(failures) == (requests > last)
        if not failures:
            assert last >= 1
            break


class StoppedServer:
    """A TCP store server that stops: it replies to no requests, and to no handshakes of new clients."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: dict[int, float] = {}
        self.stopped: set[int] = set()
        answer, greet = Session.message_received, Session._hello_received

        def message_received(session: Session, number: int, word: Any, payload: Any) -> None:
            if self._answers(session, 1):
                answer(session, number, word, payload)

        def hello_received(session: Session, block: bytearray) -> None:
            if self._answers(session, 0):
                greet(session, block)

        monkeypatch.setattr(Session, "message_received", message_received)
        monkeypatch.setattr(Session, "_hello_received", hello_received)

    def _answers(self, session: Session, requests: int) -> bool:
        port = session._owner.port  # type: ignore[attr-defined]
        left = self.left[port] = self.left.get(port, inf) - requests
        answers = left >= 0 if requests else left > 0
        if not answers:
            self.stopped.add(port)
            session.transport.pause_reading()
        return answers


@pytest.fixture
def stopped_server(monkeypatch: pytest.MonkeyPatch) -> StoppedServer:
    return StoppedServer(monkeypatch)


@pytest.mark.parametrize("call", WAITS)
async def test_call_ends_in_time_if_a_tcp_store_stops(call: str, stopped_server: StoppedServer) -> None:
    """Stop the server before its first or second request, with or without an open connection."""

    async def store_stops(last: int, opened: bool) -> None:
        async with TCPStore("127.0.0.1", 0, is_master=True) as master:
            await fill(master)
            async with aclosing_store(TCPStore("127.0.0.1", master.port, timeout=SHORT)) as store:
                if opened:
                    await store
                stopped_server.left[master.port] = last
                timed = Timed(SHORT)
                await timed(WAITS[call](store, SHORT))
                assert bool(timed.failures) == (last == 0)
            stopped_server.left[master.port] = inf

    await asyncio.gather(*(store_stops(last, opened) for last in (0, 1) for opened in (False, True)))


@asynccontextmanager
async def aclosing_store(store: Any) -> AsyncIterator[Any]:
    yield store
    await Timed(0.0)(store.aclose())


async def test_open_of_a_tcp_store_ends_in_time_if_its_server_stops(stopped_server: StoppedServer) -> None:
    async with TCPStore("127.0.0.1", 0, is_master=True) as master:
        stopped_server.left[master.port] = 0
        timed = Timed(SHORT)
        await timed(TCPStore("127.0.0.1", master.port, timeout=SHORT).open())
        assert len(timed.failures) == 1
        stopped_server.left[master.port] = inf


async def test_ranks_end_in_time_if_the_store_of_their_meeting_stops(stopped_server: StoppedServer) -> None:
    """Let two ranks and a newcomer join a meeting whose store stops at various requests."""

    async def meeting_stops(last: int) -> None:
        async with Meeting(2) as meeting:
            timed = Timed(3 * SHORT)
            port = meeting.ticket().port
            stopped_server.left[port] = last
            tickets = [meeting.ticket(0), meeting.ticket(1), meeting.newcomer()]
            groups = await asyncio.gather(*(timed(_open_group(each.join(timeout=3 * SHORT))) for each in tickets))
            await asyncio.gather(*map(close_group, groups))
            assert groups[2] is None, "the newcomer has joined a group"
            assert last > 9 or groups == [None] * 3
            assert last < 99 or None not in groups[:2]
            stopped_server.left[port] = inf

    await asyncio.gather(*map(meeting_stops, [*range(9), 12, 16, 20, 24, 1000]))


@pytest.fixture
def locked_files(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Return a dictionary: for each file path, how often the file can be locked before locking always fails."""
    left: dict[str, float] = {}
    try_lock = LogFile.try_lock

    def try_limited_lock(log: LogFile) -> bool:
        left[log.path] = left.get(log.path, inf) - 1
        return left[log.path] >= 0 and try_lock(log)

    monkeypatch.setattr(LogFile, "try_lock", try_limited_lock)
    return left


@pytest.mark.parametrize("call", WAITS)
async def test_call_ends_in_time_if_the_lock_of_a_file_store_is_held(
    call: str, tmp_path: Path, locked_files: dict[str, float]
) -> None:
    path = str(tmp_path / "store")
    store = FileStore(path, timeout=SHORT)
    await fill(store)
    locked_files[path] = 0
    timed = Timed(SHORT)
    await timed(WAITS[call](store, SHORT))
    assert bool(timed.failures) == (call in ("queue_pop", "set"))  # calls other than these two take no lock
    await Timed(0.0)(store.aclose())


async def test_rendezvous_ends_in_time_if_the_lock_of_its_file_is_held(
    tmp_path: Path, locked_files: dict[str, float]
) -> None:
    """Simulate another process that takes the lock for good, after various numbers of lock operations."""

    async def lock_is_held(last: int) -> list[BaseException]:
        path = str(tmp_path / str(last))
        locked_files[path] = last
        timed = Timed(2 * SHORT)

        async def rank(number: int) -> None:
            made = new_group(init_method=f"file://{path}", rank=number, world_size=2, timeout=2 * SHORT)
            await close_group(await timed(_open_group(made)))

        await asyncio.gather(*map(rank, range(2)))
        return timed.failures

    failures = await asyncio.gather(*map(lock_is_held, [0, 1, 2, 3, 5, 8, 13, 1000]))
    assert len(failures[0]) == 2
    assert not failures[-1]


@pytest.mark.parametrize("call", WAITS)
async def test_call_ends_in_time_if_a_redis_server_never_replies(call: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        store = RedisStore(f"redis://127.0.0.1:{silent.getsockname()[1]}", timeout=SHORT)
        timed = Timed(SHORT)
        await timed(WAITS[call](store, SHORT))
        assert len(timed.failures) == 1
        await store.aclose()


@pytest.mark.parametrize("last", [0, 3])
def test_blocking_call_ends_in_time_if_its_store_stops(last: int) -> None:
    store = StoppingStore()
    store.stop_at(last)
    with pytest.raises(RendezvousError, match="StoppingStore does not answer"):
        BlockingGroup(store=store, rank=0, world_size=1, timeout=SHORT)


# -- all calls


#: Public calls with a timeout that these tests do not cover, each with the reason.
_ELSEWHERE = {
    "(Work).wait": "it waits for a collective, from another thread",
    "aiocoll.HashStore": "it is in the process of its users, so it cannot stop",
    "aiocoll.Store": "the base of all others",
    "aiocoll.loops.Started": "it waits for a call on a loop in another thread, which has a timeout of its own",
    "aiocoll.testing.run_processes": "its store is in this process; TimeoutError, with the stacks of all ranks",
    "aiocoll.testing.run_ranks": "it ends with TimeoutError, with the stacks of all ranks: see below",
    "aiocoll.testing.run_virtual": "run_ranks on another loop",
    "aiocoll.testing.spawn_ranks": "its store is in this process; TimeoutError, with the stacks of all ranks",
}
_OF_STORES = {"aiocoll.FileStore", "aiocoll.RedisStore", "aiocoll.TCPStore", "aiocoll.store.KeyValueStore"}
_EXERCISED = {
    "(ProcessGroup).grow",
    "(ProcessGroup).merge_remote_group",
    "aiocoll.distributed.init_process_group",
    "aiocoll.elastic",
    "aiocoll.new_group",
    *_OF_STORES,
    *(f"{store}.{call}" for store in {*_OF_STORES, "aiocoll.PrefixStore"} for call in WAITS),
    *(f"({cls}).{call}" for cls in ("ProcessGroup", "CartesianGroup") for call in GROUP_CALLS),
    *(f"aiocoll.{call}" for call in GROUP_CALLS),
}


def _with_timeout() -> Iterator[str]:
    for line in public_names():
        name, _, arguments = line.partition("(") if line[0] != "(" else line[1:].partition("(")
        if re.search(r"\b(\w*timeout|wait)=", arguments):
            yield name if line[0] != "(" else f"({name}"


def test_stopped_store_tests_cover_every_public_call_with_a_timeout() -> None:
    found = [*_with_timeout()]
    assert len(found) > 100
    for name in found:
        home, _, call = name.rpartition(".")
        if home == "aiocoll.BlockingGroup":  # each method waits for the awaitable call of the group
            assert getattr(BlockingGroup, call).__wrapped__ is getattr(ProcessGroup, call)
            name = f"(ProcessGroup).{call}"
        assert name in _EXERCISED or name in _ELSEWHERE or home in _ELSEWHERE, f"no test stops the store of {name}"


@pytest.mark.parametrize("last", [0, 4])
def test_run_ranks_ends_in_time_if_its_store_stops(last: int) -> None:
    async def rank(pg: ProcessGroup) -> None:
        await pg.barrier()

    async def main() -> None:
        store = StoppingStore()
        store.stop_at(last)
        loop = asyncio.get_running_loop()
        with pytest.raises(TimeoutError, match="ranks 0 and 1 of 2 did not end within 5 s"):
            await run_ranks(2, rank, store=store, timeout=TIMEOUT)
        assert loop.time() <= TIMEOUT + SOON

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())
