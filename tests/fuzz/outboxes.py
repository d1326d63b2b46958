"""Shared-memory jobs for fuzzing: the outbox of the last rank is overwritten at random while calls are in flight."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from hypothesis import strategies as st

from aiocoll import AiocollError, GroupError, HashStore, ProcessGroup, new_group
from aiocoll.transport.shm import transport
from aiocoll.transport.shm.fence import Fences, fences
from aiocoll.transport.shm.layout import (
    COMMON_CONSUMED,
    COMMON_NAMED,
    CORE,
    LANE_CONSUMED,
    LANE_NAMED,
    LINE,
    POSTS,
    SLOTS,
    STATUS,
    OutboxLayout,
)
from aiocoll.transport.shm.slots import CommonWriter

from ..internals import comm_of, use_same_slots
from ..ranks import options

#: Timeouts in seconds: TIMEOUT for one call, and OVER for all jobs together, enough for a busy machine.
TIMEOUT, OVER = 0.3, 30.0
#: The number of moments at which a memory word may change. Each event loop iteration and memory fence is a moment.
MOMENTS = 150

#: Offsets of 64-bit words in an outbox, by name. RANK has words per rank, LANE per lane, ROWS per slot, and FIELDS has
#: words in the line that describes a slot.
RANK = {"status": STATUS, "core": CORE}
LANE = {"posts": POSTS}
ROWS = {
    "common_named": COMMON_NAMED,
    "lane_named": LANE_NAMED,
    "common_consumed": COMMON_CONSUMED,
    "lane_consumed": LANE_CONSUMED,
}
FIELDS = {"identity": 0, "group": 1, "length": 2, "fingerprint": 3}
KINDS = (*RANK, *LANE, *ROWS, *(f"{lane}_{field}" for lane in ("common", "lane") for field in FIELDS))


class Write(NamedTuple):
    """A planned change of one 64-bit word in the broken rank's outbox.

    Attributes:
        moment: the number of the moment at which the word changes.
        kind: the name of the word, one of `KINDS`.
        reader: the rank in whose lane the word is.
        slot: the slot of the word; None for all slots.
        value: the value to store, or to add to the word.
        adds: whether the value is added, once.
        lasts: the number of moments in which a stored value is stored again, whatever the rank itself writes.
    """

    moment: int
    kind: str
    reader: int
    slot: int | None
    value: int
    adds: bool
    lasts: int


class Attack(NamedTuple):
    """A job to fuzz: its world size, its calls, and the changes to the broken rank's outbox."""

    world_size: int
    calls: list[tuple[str, int]]
    writes: list[Write]


Call = Callable[[ProcessGroup, int], Awaitable[bool]]


async def _allreduce(pg: ProcessGroup, count: int) -> bool:
    array = np.full(count, 2.0 ** pg.rank())
    await pg.allreduce(array, timeout=TIMEOUT)
    return bool((array == 2 ** pg.size() - 1).all())


async def _broadcast(pg: ProcessGroup, count: int) -> bool:
    root = count % pg.size()
    array = np.full(count, float(pg.rank()))
    await pg.broadcast(array, root, timeout=TIMEOUT)
    return bool((array == root).all())


async def _allgather(pg: ProcessGroup, count: int) -> bool:
    arrays = [np.empty(count) for _ in range(pg.size())]
    await pg.allgather(arrays, np.full(count, float(pg.rank())), timeout=TIMEOUT)
    return all((array == rank).all() for rank, array in enumerate(arrays))


async def _alltoall(pg: ProcessGroup, count: int) -> bool:
    arrays = [np.empty(count) for _ in range(pg.size())]
    await pg.alltoall(arrays, [np.full(count, pg.rank() + 10.0 * to) for to in range(pg.size())], timeout=TIMEOUT)
    return all((array == rank + 10 * pg.rank()).all() for rank, array in enumerate(arrays))


async def _gather(pg: ProcessGroup, count: int) -> bool:
    arrays = [np.empty(count) for _ in range(pg.size())] if pg.rank() == 0 else None
    await pg.gather(arrays, np.full(count, float(pg.rank())), 0, timeout=TIMEOUT)
    return arrays is None or all((array == rank).all() for rank, array in enumerate(arrays))


async def _lengths(pg: ProcessGroup, count: int) -> bool:
    """Gather arrays of unequal lengths; skip the check of the last array, whose length the broken rank may falsify."""
    found = await pg.gather(None, np.full(count + pg.rank(), float(pg.rank())), 0, timeout=TIMEOUT)
    known = () if found is None else found[:-1]
    return all(len(array) == count + rank and (array == rank).all() for rank, array in enumerate(known))


async def _reduce_scatter(pg: ProcessGroup, count: int) -> bool:
    array = np.empty(count)
    await pg.reduce_scatter(array, [np.full(count, 2.0 ** pg.rank() + to) for to in range(pg.size())], timeout=TIMEOUT)
    return bool((array == 2 ** pg.size() - 1 + pg.size() * pg.rank()).all())


async def _objects(pg: ProcessGroup, count: int) -> bool:
    found = await pg.allgather_object([pg.rank(), "x" * count], timeout=TIMEOUT)
    return bool(found == [[rank, "x" * count] for rank in range(pg.size())])


async def _barrier(pg: ProcessGroup, count: int) -> bool:
    await pg.barrier(timeout=TIMEOUT)
    return True


CALLS: dict[str, Call] = {
    "allreduce": _allreduce,
    "broadcast": _broadcast,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "gather": _gather,
    "lengths": _lengths,
    "reduce_scatter": _reduce_scatter,
    "objects": _objects,
    "barrier": _barrier,
}

values = st.sampled_from([0, 1, 2, 3, 7, 32, 33, 4096, 4097, 1 << 31, 1 << 32, 1 << 62, 1 << 63, (1 << 64) - 1])
writes = st.builds(
    Write,
    moment=st.integers(0, MOMENTS),
    kind=st.sampled_from(KINDS),
    reader=st.integers(0, 1),
    # Draw slots 0 to 9 and the last four often, since the first calls use them for small and larger arrays.
    slot=st.one_of(st.none(), st.integers(0, 9), st.integers(SLOTS - 4, SLOTS - 1), st.integers(0, SLOTS - 1)),
    value=st.one_of(values, st.integers(0, (1 << 64) - 1), st.sampled_from([1, 4, 128, (1 << 64) - 1])),
    adds=st.booleans(),
    lasts=st.sampled_from([0, 10, 50, 10_000]),
)
names, counts = st.sampled_from(sorted(CALLS)), st.sampled_from([1, 3, 100, 513, 1500])
attacks = st.builds(
    Attack,
    world_size=st.sampled_from([2, 3]),
    # Draw a random function for each call, or the same function for all calls.
    calls=st.one_of(
        st.lists(st.tuples(names, counts), min_size=3, max_size=10),
        names.flatmap(lambda name: st.lists(st.tuples(st.just(name), counts), min_size=3, max_size=10)),
    ),
    writes=st.lists(writes, min_size=1, max_size=30),
)


class _Outbox:
    """The broken rank's outbox, and the planned changes of its memory words."""

    def __init__(self, attack: Attack) -> None:
        self.layout = OutboxLayout(attack.world_size)
        self.lane_numbers: list[int] = []
        self.words: memoryview | None = None
        self._left = sorted(attack.writes, key=lambda write: -write.moment)
        self._lasting: list[Write] = []
        self._moment = itertools.count()

    def open(self, pg: ProcessGroup) -> None:
        """Keep a view of the broken rank's outbox memory, so that `make_changes` can overwrite its words."""
        links = [channel.shared for channel in comm_of(pg).channels if channel.shared is not None]
        writer = links[0].common_writer
        assert isinstance(writer, CommonWriter)
        self.lane_numbers = [link.lane_writer.number for link in links]  # type: ignore[attr-defined]
        self.words = memoryview(writer._region.memory).cast("Q")

    def close(self) -> None:
        """Drop the view of the outbox memory, so that `make_changes` does nothing."""
        self.words = None

    def make_changes(self) -> None:
        """Overwrite the memory words whose planned changes are due at this moment."""
        if self.words is not None:
            moment = next(self._moment)
            while self._left and self._left[-1].moment <= moment:
                self._lasting.append(self._left.pop())
            for write in self._lasting:
                self._write(write)
            self._lasting = [each for each in self._lasting if not each.adds and moment < each.moment + each.lasts]

    def _write(self, write: Write) -> None:
        words = self.words
        assert words is not None
        first, stride = self._row(write)
        slots = range(1) if not stride else range(SLOTS) if write.slot is None else (write.slot,)
        for slot in slots:
            place = first + slot * stride
            words[place] = (write.value + (words[place] if write.adds else 0)) % (1 << 64)

    def _row(self, write: Write) -> tuple[int, int]:
        """Return the word's index in slot 0, and the number of words from slot to slot (0 for words without slots)."""
        kind = write.kind
        if kind in RANK:
            return RANK[kind], 0
        lane = self.layout.lane_span(self.lane_numbers[write.reader % len(self.lane_numbers)])[0] // 8
        if kind in LANE:
            return lane + LANE[kind], 0
        if kind in ROWS:
            return lane + ROWS[kind], 1
        where, field = kind.split("_")
        lines = self.layout.common.lines // 8 if where == "common" else lane + self.layout.lane.lines // 8
        return lines + FIELDS[field], LINE // 8


_broken: ContextVar[_Outbox] = ContextVar("broken")


def _changing_fences() -> Fences:
    """Return memory fences that also call `make_changes`, so that words change between any two fenced accesses."""
    known, outbox = fences(), _broken.get()
    assert known is not None

    def full() -> None:
        outbox.make_changes()
        known.full()

    return Fences(outbox.make_changes, full)


def run_jobs(attacked: list[Attack]) -> None:
    """Run all jobs concurrently, since most wait for timeouts; check that each call succeeds or raises AiocollError."""
    raised: list[dict[str, Any]] = []

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: raised.append(context))
        async with asyncio.timeout(OVER):
            await asyncio.gather(*(asyncio.create_task(_job(attack)) for attack in attacked))

    with mock.patch.object(transport, "fences", _changing_fences):
        asyncio.run(run())
    assert not raised, raised


async def _job(attack: Attack) -> None:
    outbox = _Outbox(attack)
    _broken.set(outbox)
    store, size = HashStore(), attack.world_size
    pgs = await asyncio.gather(
        *(new_group(store=store, rank=rank, world_size=size, options=options("shm")) for rank in range(size))
    )
    await asyncio.gather(*(pg.allgather(None, np.zeros(1)) for pg in pgs))
    for pg in pgs:
        use_same_slots(pg)
    outbox.open(pgs[-1])
    turning = asyncio.ensure_future(_change_every_iteration(outbox))
    try:
        await asyncio.gather(*(_rank(pg, attack.calls) for pg in pgs))
    finally:
        outbox.close()
        await turning
        for pg in pgs:
            pg.abort("end of the job")
        await asyncio.gather(*(pg.shutdown() for pg in pgs))
        await store.aclose()


async def _change_every_iteration(outbox: _Outbox) -> None:
    while outbox.words is not None:
        outbox.make_changes()
        await asyncio.sleep(0)


async def _rank(pg: ProcessGroup, calls: list[tuple[str, int]]) -> None:
    for name, count in calls:
        try:
            assert await CALLS[name](pg, count), f"{name} of {count} is wrong on rank {pg.rank()}"
        except AiocollError as error:
            for each in _chain(error):
                assert isinstance(each, AiocollError), f"{name} of {count} failed on rank {pg.rank()}: {each!r}"
                assert not re.search(r"library raised (?!ProtocolError)", str(each)), str(each)
            if isinstance(error, GroupError):
                return


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__
