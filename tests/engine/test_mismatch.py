"""Mismatched calls: every rank reports the same error within a second of the last call, and no array changes."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from itertools import pairwise, product
from typing import Any, NamedTuple

import numpy as np
import pytest

from aiocoll import (
    CollectiveMismatchError,
    CollectiveTimeoutError,
    GroupRevokedError,
    ProcessGroup,
    Recv,
    ReduceOp,
    Send,
    Work,
)
from aiocoll.algorithms.select import RULES
from aiocoll.engine.failure.stall_inspector import StallInspector
from aiocoll.testing.virtual import run_virtual

from ..internals import group_of, wrap_methods

#: Shortest and longest latency of a frame in seconds, if the ranks have links in memory.
LATENCY = (0.0005, 0.02)
#: Guard elements on either side of each array, which no call may write.
GUARD = 64
#: Fill byte of the odd rank's arrays. In every dtype, an element of such bytes exceeds all sums of other ranks' values.
MARK = 0x7E
#: Seconds after the last call within which every rank must report a mismatch (contract).
SOON = 1.0

Call = Callable[[ProcessGroup, "Memory"], Work[Any] | list[Work[Any]]]
#: A function (rank, time) that returns the end of a period in which the rank handles no messages, or None.
Silent = Callable[[int, float], float | None]


class Memory:
    """The arrays of one rank, each between guard elements, with a check that no call has changed them."""

    def __init__(self, rank: int, odd: bool) -> None:
        self._value = MARK if odd else rank + 1
        self._odd = odd
        self._made: list[tuple[np.ndarray, np.ndarray]] = []

    def array(self, count: int, dtype: str = "float64") -> np.ndarray:
        whole = np.full(count + 2 * GUARD, self._value, dtype)
        if self._odd:
            whole.view("uint8")[:] = MARK
        self._made.append((whole, whole.copy()))
        return whole[GUARD:-GUARD]

    def check(self, alone: bool) -> None:
        """Check that arrays are unchanged; without `alone`, ranks with equal calls may have reduced their arrays."""
        for whole, before in self._made:
            assert whole[:GUARD].tobytes() == before[:GUARD].tobytes()
            assert whole[-GUARD:].tobytes() == before[-GUARD:].tobytes()
            if self._odd or alone:
                assert np.array_equal(whole.view("uint8"), before.view("uint8"))
            else:
                assert (np.abs(whole) < MARK).all()


def blocks(pg: ProcessGroup, m: Memory, count: int = 10, dtype: str = "float64") -> list[np.ndarray]:
    return [m.array(count, dtype) for _ in range(pg.size())]


#: One call of each kind. All roots exist in a group of two ranks.
KINDS: dict[str, Call] = {
    "allreduce": lambda pg, m: pg.allreduce(m.array(10)),
    "reduce": lambda pg, m: pg.reduce(m.array(10), 0),
    "broadcast": lambda pg, m: pg.broadcast(m.array(10), 0),
    "scan": lambda pg, m: pg.scan(m.array(10)),
    "exscan": lambda pg, m: pg.exscan(m.array(10)),
    "barrier": lambda pg, m: pg.barrier(),
    "monitored_barrier": lambda pg, m: pg.monitored_barrier(),
    "allgather": lambda pg, m: pg.allgather(blocks(pg, m), m.array(10)),
    "gather": lambda pg, m: pg.gather(blocks(pg, m) if pg.rank() == 0 else None, m.array(10), 0),
    "scatter": lambda pg, m: pg.scatter(m.array(10), blocks(pg, m) if pg.rank() == 0 else None, 0),
    "reduce_scatter": lambda pg, m: pg.reduce_scatter(m.array(10), blocks(pg, m)),
    "alltoall": lambda pg, m: pg.alltoall(blocks(pg, m), blocks(pg, m)),
    "broadcast_object": lambda pg, m: pg.broadcast_object("a", 0),
    "allgather_object": lambda pg, m: pg.allgather_object("a"),
    "gather_object": lambda pg, m: pg.gather_object("a", 0),
    "scatter_object": lambda pg, m: pg.scatter_object(["a"] * pg.size(), 0),
    "alltoall_object": lambda pg, m: pg.alltoall_object(["a"] * pg.size()),
}


class Case(NamedTuple):
    """A mismatch case: the call of most ranks, the call of the odd rank, and the fields that the error names."""

    name: str
    fields: str
    most: Call
    odd: Call


def add_one(a: Any, b: Any, out: Any) -> None:
    np.add(a, b, out)


def subtract(a: Any, b: Any, out: Any) -> None:
    np.subtract(a, b, out)


def reducing(op: ReduceOp, key: str | None = None) -> Call:
    return lambda pg, m: pg.allreduce(m.array(10), op, key=key)


def in_order(*counts: int) -> Call:
    return lambda pg, m: [pg.allreduce(m.array(count)) for count in counts]


def counting(kind: str, count: int, dtype: str = "float64", key: str | None = None) -> Call:
    """Return a call of `kind` with `count` elements."""
    calls: dict[str, Call] = {
        "allreduce": lambda pg, m: pg.allreduce(m.array(count, dtype), key=key),
        "reduce": lambda pg, m: pg.reduce(m.array(count, dtype), 1, key=key),
        "broadcast": lambda pg, m: pg.broadcast(m.array(count, dtype), 1, key=key),
        "scan": lambda pg, m: pg.scan(m.array(count, dtype), key=key),
        "exscan": lambda pg, m: pg.exscan(m.array(count, dtype), key=key),
        "allgather": lambda pg, m: pg.allgather(blocks(pg, m, count, dtype), m.array(count, dtype), key=key),
        "gather": lambda pg, m: pg.gather(
            blocks(pg, m, count, dtype) if pg.rank() == 1 else None, m.array(count, dtype), 1, key=key
        ),
        "scatter": lambda pg, m: pg.scatter(
            m.array(count, dtype), blocks(pg, m, count, dtype) if pg.rank() == 1 else None, 1, key=key
        ),
        "reduce_scatter": lambda pg, m: pg.reduce_scatter(m.array(count, dtype), blocks(pg, m, count, dtype), key=key),
        "alltoall": lambda pg, m: pg.alltoall(blocks(pg, m, count, dtype), blocks(pg, m, count, dtype), key=key),
    }
    return calls[kind]


SIZED = ("allreduce", "reduce", "broadcast", "scan", "exscan", "allgather", "reduce_scatter")
#: Kinds of calls in which only the sender and the receiver know the length of a transfer.
PRIVATE = ("gather", "scatter", "alltoall")
ROOTED: dict[str, Callable[[int], Call]] = {
    "reduce": lambda root: lambda pg, m: pg.reduce(m.array(10), root),
    "broadcast": lambda root: lambda pg, m: pg.broadcast(m.array(10), root),
    "gather": lambda root: lambda pg, m: pg.gather(blocks(pg, m) if pg.rank() == root else None, m.array(10), root),
    "scatter": lambda root: lambda pg, m: pg.scatter(m.array(10), blocks(pg, m) if pg.rank() == root else None, root),
    "broadcast_object": lambda root: lambda pg, m: pg.broadcast_object("a", root),
    "gather_object": lambda root: lambda pg, m: pg.gather_object("a", root),
    "scatter_object": lambda root: lambda pg, m: pg.scatter_object(["a"] * pg.size(), root),
}

TABLE = [
    *(Case(f"{a}-{b}", "op", KINDS[a], KINDS[b]) for a, b in pairwise([*KINDS, "allreduce"])),
    *(Case(f"dtype-{kind}", "dtype", counting(kind, 10), counting(kind, 10, "int64")) for kind in (*SIZED, *PRIVATE)),
    *(Case(f"count-{kind}", "counts, shape", counting(kind, 10), counting(kind, 9)) for kind in (*SIZED, *PRIVATE)),
    *(Case(f"more-{kind}", "counts, shape", counting(kind, 10), counting(kind, 11)) for kind in (*SIZED, *PRIVATE)),
    *(Case(f"empty-{kind}", "counts, shape", counting(kind, 10), counting(kind, 0)) for kind in (*SIZED, *PRIVATE)),
    *(Case(f"full-{kind}", "counts, shape", counting(kind, 0), counting(kind, 10)) for kind in (*SIZED, *PRIVATE)),
    # Counts large enough for data to be received directly into the caller's array.
    *(Case(f"short-{kind}", "counts, shape", counting(kind, 100_000), counting(kind, 90_000)) for kind in PRIVATE),
    *(Case(f"long-{kind}", "counts, shape", counting(kind, 90_000), counting(kind, 100_000)) for kind in PRIVATE),
    *(Case(f"root-{kind}", "root", call(0), call(1)) for kind, call in ROOTED.items()),
    Case("reduce-op", "reduce", reducing(ReduceOp.SUM), reducing(ReduceOp.MAX)),
    Case("average", "reduce", reducing(ReduceOp.SUM), reducing(ReduceOp.AVG)),
    Case("factor", "reduce", reducing(ReduceOp.SUM), reducing(ReduceOp.PREMUL_SUM(1.0))),
    Case("custom", "reduce", reducing(ReduceOp.custom(add_one)), reducing(ReduceOp.custom(subtract))),
    Case("custom-sum", "reduce", reducing(ReduceOp.SUM), reducing(ReduceOp.custom(add_one))),
    Case(
        "custom-order",
        "reduce",
        reducing(ReduceOp.custom(add_one)),
        reducing(ReduceOp.custom(add_one, commutative=False)),
    ),
    Case("order", "counts, shape", in_order(10, 20), in_order(20, 10)),
    Case(
        "order-of-kinds",
        "op",
        lambda pg, m: [pg.barrier(), pg.allreduce(m.array(10))],
        lambda pg, m: [pg.allreduce(m.array(10)), pg.barrier()],
    ),
    Case("key", "reduce", reducing(ReduceOp.SUM, "k"), reducing(ReduceOp.MAX, "k")),
    *(
        Case(f"key-{kind}", "counts, shape", counting(kind, 10, key="k"), counting(kind, 9, key="k"))
        for kind in (*SIZED, *PRIVATE)
    ),
    *(
        Case(f"key-empty-{kind}", "counts, shape", counting(kind, 10, key="k"), counting(kind, 0, key="k"))
        for kind in (*SIZED, *PRIVATE)
    ),
    Case("object-array", "op, dtype", lambda pg, m: pg.broadcast_object("a", 1), counting("broadcast", 10)),
]


class CaseReport(NamedTuple):
    """The mismatch report of one rank: text and ranks of the error, and the times of the call and of the error."""

    text: str
    ranks: tuple[int, ...]
    called: float
    failed: float


async def disagree(pg: ProcessGroup, case: Case, odd: int, delays: tuple[float, float]) -> CaseReport:
    """Make this rank's calls of `case` after its delay; return the report of the mismatch that ends the group."""
    is_odd = pg.rank() == odd
    memory = Memory(pg.rank(), is_odd)
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(delays[is_odd])
    works: list[Work[Any]] = []
    try:
        made = (case.odd if is_odd else case.most)(pg, memory)
        works = made if isinstance(made, list) else [made]
    except GroupRevokedError:
        pass  # another rank found the mismatch before this call
    called = clock()
    done = [work.done() for work in works]
    cause = await pg.wait_revoked()
    failed = clock()
    assert isinstance(cause, CollectiveMismatchError)
    for work, early in zip(works, done, strict=True):
        assert work.done()
        if (error := work.exception()) is not None and not early:
            assert isinstance(error, CollectiveMismatchError)
            assert str(error) == str(cause)
    with pytest.raises(GroupRevokedError) as raised:
        pg.barrier()
    assert raised.value.__cause__ is cause
    assert pg.pending() == []
    # Let the frames in flight arrive: even late frames must not write to the arrays.
    await asyncio.sleep(0)
    memory.check(alone=pg.size() == 2)
    return CaseReport(str(cause), cause.ranks, called, failed)


def check(case: Case, odd: int, world_size: int, reports: list[CaseReport]) -> None:
    """Check that all ranks have got the same mismatch report in time."""
    assert {each.text for each in reports} == {reports[0].text}
    text, ranks, *_ = reports[0]
    assert len(ranks) == 2
    assert odd in ranks
    one, two = sorted(ranks)
    assert re.match(rf"Collectives differ in the following: {case.fields}[a-z, ]*\. Group ", text), text
    arguments = r"(shape=\[[\d, ]*\], dtype=\w+, device=\w+, |shape=\[\], device=cpu, )"
    call = rf"[A-Z_]+\({arguments}[^;]*SequenceNumber=\d+(, key=k)?\)"
    assert re.search(rf": rank {one} called {call}; rank {two} called {call}$", text), text
    assert max(each.failed for each in reports) <= max(each.called for each in reports) + SOON
    assert world_size > max(ranks)


def run(case: Case, world_size: int, odd: int, delays: tuple[float, float], latency: Any, seed: int = 0) -> None:
    # In cases with several calls, the test does not await all failing works.
    reports = run_virtual(world_size, disagree, case, odd, delays, seed=seed, latency=latency, allow_unretrieved=True)
    check(case, odd, world_size, reports)


#: Seconds that most ranks wait before their calls, and seconds that the odd rank waits.
DELAYS = {"together": (0.0, 0.0), "odd-late": (0.0, 10.0), "odd-early": (10.0, 0.0)}
PLACES = [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2), (4, 0), (4, 2), (4, 3)]


#: Combinations of a frame latency (None: the ranks use shared memory) and an order of the calls.
TERMS = [(latency, order) for latency in (None, LATENCY) for order in DELAYS]


def run_with_terms(case: Case, place: tuple[int, int], terms: tuple[Any, str]) -> None:
    try:
        run(case, *place, DELAYS[terms[1]], terms[0])
    except BaseException as error:
        error.add_note(f"world size and odd rank {place}, latency and order {terms}")
        raise


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(TABLE)), ids=lambda number: TABLE[number].name)
def test_mismatch_error_is_raised_on_every_rank(number: int) -> None:
    """Check one call order and one latency per odd rank; the soak test below checks all combinations."""
    for index, place in enumerate(PLACES):
        run_with_terms(TABLE[number], place, TERMS[(number + index) % len(TERMS)])


@pytest.mark.soak
@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.name)
def test_mismatch_error_is_raised_on_every_rank_in_all_orders_and_latencies(case: Case) -> None:
    for place, terms in product(PLACES, TERMS):
        run_with_terms(case, place, terms)


def limits(kind: str, world_size: int) -> list[int]:
    """Return the array sizes in bytes at which the selection rules of `kind` change the algorithm."""
    found = set()
    for rule in RULES[kind]:
        limit = min(rule.max_nbytes, rule.max_chunk * world_size, rule.max_volume / (world_size - 1))
        if limit < float("inf"):
            found.add(int(limit))
    return sorted(found)


@pytest.mark.parametrize("kind", SIZED)
def test_sizes_on_both_sides_of_an_algorithm_limit_are_reported_as_a_mismatch(kind: str) -> None:
    for world_size, odd in ((2, 0), (3, 1), (4, 3)):
        share = world_size if kind in ("allgather", "reduce_scatter") else 1
        for limit in limits(kind, world_size):
            below, above = counting(kind, limit // share, "uint8"), counting(kind, limit // share + 1, "uint8")
            for most, other in ((below, above), (above, below)):
                run(Case(kind, "counts, shape", most, other), world_size, odd, DELAYS["together"], LATENCY)


@pytest.mark.parametrize(("kind", "odd"), [("allreduce", 0), ("barrier", 7), ("alltoall_object", 15)])
def test_mismatched_call_of_one_rank_fails_all_sixteen_ranks(kind: str, odd: int) -> None:
    case = Case(kind, "op", KINDS[kind], KINDS["broadcast"])
    for latency in (None, LATENCY):
        run(case, 16, odd, DELAYS["odd-late"], latency)


@pytest.mark.parametrize("seed", range(8))
def test_mismatch_report_is_the_same_on_all_ranks(seed: int) -> None:
    """Let ranks make three different calls, so that several pairs of ranks find a mismatch at the same time."""

    async def rank(pg: ProcessGroup) -> str:
        kinds = [ReduceOp.SUM, ReduceOp.MAX, ReduceOp.MIN]
        # GroupRevokedError: another rank found the mismatch before this call.
        with pytest.raises((CollectiveMismatchError, GroupRevokedError)):
            await pg.allreduce(np.zeros(1000), kinds[pg.rank() % 3])
        return str(await pg.wait_revoked())

    assert len(set(run_virtual(6, rank, seed=seed, latency=LATENCY))) == 1


# -- point-to-point

P2P_TABLE = [
    (lambda pg, m: pg.send(m.array(3), 1), lambda pg, m: pg.recv(m.array(4), 0), r"counts, shape"),
    (lambda pg, m: pg.send(m.array(4), 1), lambda pg, m: pg.recv(m.array(3), 0), r"counts, shape"),
    (lambda pg, m: pg.send(m.array(3), 1), lambda pg, m: pg.recv(m.array(3, "int64"), 0), r"dtype"),
    (lambda pg, m: pg.send(m.array(0), 1), lambda pg, m: pg.recv(m.array(1), 0), r"counts, shape"),
    (lambda pg, m: pg.send(m.array(1), 1), lambda pg, m: pg.recv(m.array(0), 0), r"counts, shape"),
    (lambda pg, m: pg.send(m.array(200_000), 1), lambda pg, m: pg.recv(m.array(1), 0), r"counts, shape"),
    (lambda pg, m: pg.send(m.array(1), 1), lambda pg, m: pg.recv(m.array(200_000), 0), r"counts, shape"),
    (lambda pg, m: pg.send(m.array(200_000), 1), lambda pg, m: pg.recv(m.array(200_000, "int64"), 0), r"dtype"),
    (lambda pg, m: pg.send(m.array(3), 1), lambda pg, m: pg.recv_anysource(m.array(4)), r"counts, shape"),
    (lambda pg, m: pg.send_object([1], 1), lambda pg, m: pg.recv(m.array(3), 0), r"dtype, counts, shape"),
    (lambda pg, m: pg.send(m.array(3), 1), lambda pg, m: pg.recv_object(0), r"dtype, counts, shape"),
    (
        lambda pg, m: pg.batch([Send(m.array(3), 1), Recv(m.array(1), 1)]),
        lambda pg, m: pg.batch([Send(m.array(1), 0), Recv(m.array(4), 0)]),
        r"counts, shape",
    ),
]


async def misfit(pg: ProcessGroup, send: Call, receive: Call, fields: str, delay: float) -> str:
    """Let rank 0 send rank 1 a message that does not fit its array; return the error text, which all ranks get."""
    memory = Memory(pg.rank(), odd=True)
    clock = asyncio.get_running_loop().time
    await asyncio.sleep(delay if pg.rank() == 0 else 0)
    last = clock() + (0 if pg.rank() == 0 else delay)
    work: Any = (send, receive, lambda pg, m: pg.barrier())[pg.rank()](pg, memory)
    cause = await pg.wait_revoked()
    assert clock() - last <= SOON
    assert isinstance(cause, CollectiveMismatchError)
    assert cause.ranks == (0, 1)
    assert work.done()
    assert isinstance(work.exception(), CollectiveMismatchError) or pg.rank() == 0
    call = r"\(shape=\[\d*\], dtype=\w+, device=cpu, [^;]*tag=0, SequenceNumber=\d\)"
    both = f"rank 0 called SEND{call}; rank 1 called RECV{call}"
    assert re.match(rf"Collectives differ in the following: {fields}\. Group .*: {both}$", str(cause)), cause
    memory.check(alone=True)
    return str(cause)


@pytest.mark.parametrize("delay", [0.0, 10.0], ids=["together", "sender-late"])
@pytest.mark.parametrize("latency", [None, LATENCY], ids=["next-turn", "links"])
@pytest.mark.parametrize(("send", "receive", "fields"), P2P_TABLE)
def test_message_of_another_size_is_reported_as_a_mismatch_at_both_ends(
    send: Call, receive: Call, fields: str, latency: Any, delay: float
) -> None:
    assert len(set(run_virtual(3, misfit, send, receive, fields, delay, latency=latency))) == 1


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda pg: pg.recv(np.zeros(4), 0, 7), r"RECV\(shape=\[4\], .*src=0, tag=7"),
        (lambda pg: pg.recv_anysource(np.zeros(4)), r"RECV\(shape=\[4\], .*tag=0"),
        (lambda pg: pg.send(np.zeros(100_000), 0, 3), r"SEND\(shape=\[100000\], .*dst=0, tag=3"),
    ],
    ids=["recv", "recv_anysource", "send"],
)
def test_timeout_of_a_collective_names_a_rank_that_waits_in_a_send_or_receive(call: Any, named: str) -> None:
    """Check that the ranks wait until the timeout, since another task of a rank may still make the matching call."""

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            with pytest.raises(CollectiveTimeoutError, match=rf"rank 1 \(waiting in {named}") as raised:
                await pg.allreduce(np.zeros(4), timeout=5)
            assert raised.value.ranks == (1,)
        else:
            with pytest.raises(CollectiveTimeoutError, match=named):
                await call(pg)

    run_virtual(2, rank, latency=LATENCY)


# -- conditions that must not hide a mismatch


def test_silent_coordinator_does_not_delay_a_mismatch_report(monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(original: Any, stalls: StallInspector, *message: Any) -> None:
        if group_of(stalls).rank != 0:
            original(stalls, *message)

    wrap_methods(monkeypatch, StallInspector, handle=handle)

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            await pg.wait_revoked()
            return
        started = asyncio.get_running_loop().time()
        with pytest.raises(CollectiveMismatchError, match=r"rank 1 called ALLREDUCE.*rank 2 called BARRIER"):
            await (pg.allreduce(np.zeros(10)) if pg.rank() == 1 else pg.barrier())
        assert asyncio.get_running_loop().time() - started <= SOON

    run_virtual(3, rank, latency=LATENCY)


def test_late_stall_report_does_not_mark_an_answering_rank_slow(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Let rank 0 answer after three silent seconds; an older stall report about rank 0 then arrives from rank 1."""

    def handle(original: Any, stalls: StallInspector, peer: int, message: Any) -> None:
        here = (group_of(stalls).rank, peer)
        late = {(0, 1): 3 - loop().time(), (0, 2): 3 - loop().time(), (1, 0): 0.9}.get(here, 0.0)
        if late > 0:
            loop().call_later(late, original, stalls, peer, message)
        else:
            original(stalls, peer, message)

    loop = asyncio.get_running_loop
    wrap_methods(monkeypatch, StallInspector, handle=handle)

    async def rank(pg: ProcessGroup) -> None:
        await asyncio.sleep(0 if pg.rank() else 6)
        await pg.barrier()

    with caplog.at_level(logging.INFO, logger="aiocoll"):
        run_virtual(3, rank, latency=LATENCY)
    texts = [each.getMessage().partition("rank 2: rank 0 ")[2] for each in caplog.records]
    slow, again = filter(None, texts)
    assert slow.startswith("is slow: it has not answered for 1.0 s")
    assert again == "answers again"


def slow_warnings(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, silent: Silent) -> list[str]:
    """Let ranks 0 and 3 wait for ranks 1 and 2, which pause as `silent` defines; return the log messages of rank 3."""

    def handle(original: Any, stalls: StallInspector, peer: int, message: Any) -> None:
        loop = asyncio.get_running_loop()
        again = silent(group_of(stalls).rank, loop.time())
        if again is not None:
            loop.call_later(again - loop.time(), original, stalls, peer, message)
        else:
            original(stalls, peer, message)

    async def rank(pg: ProcessGroup) -> None:
        await asyncio.sleep(9 if pg.rank() in (1, 2) else 0)
        await pg.barrier()

    wrap_methods(monkeypatch, StallInspector, handle=handle)
    with caplog.at_level(logging.INFO, logger="aiocoll"):
        run_virtual(4, rank, latency=LATENCY)
    return [each.getMessage().partition("rank 3: ")[2] for each in caplog.records if "rank 3: " in each.getMessage()]


def test_several_slow_ranks_are_reported_in_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow, *more = slow_warnings(monkeypatch, caplog, lambda rank, now: 7.0 if rank in (1, 2) and now < 7.0 else None)
    assert re.fullmatch(r"(rank [12] is slow: it has not answered for 1.0 s; ){2}BARRIER.* waits for it", slow), slow
    assert more == ["rank 1 answers again", "rank 2 answers again"]


def test_rank_that_is_soon_slow_again_is_logged_only_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def silent(rank: int, now: float) -> float | None:
        return next((end for end in (3.0, 7.0) if rank == 1 and end - 3.0 <= now < end), None)

    texts = slow_warnings(monkeypatch, caplog, silent)
    assert [re.sub(r": it .*", "", text) for text in texts] == ["rank 1 is slow", "rank 1 answers again"]


def test_next_rank_becomes_coordinator_after_the_lowest_rank_has_left() -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            await asyncio.sleep(10)
            return
        await asyncio.sleep(20 * (pg.rank() - 1))
        started = asyncio.get_running_loop().time()
        with pytest.raises(
            CollectiveMismatchError, match=r"rank 1 called BROADCAST.*rank 2 called BROADCAST"
        ) as raised:
            await pg.broadcast(np.zeros(10), 3 - pg.rank())
        assert raised.value.ranks == (1, 2)
        assert pg.rank() == 1 or asyncio.get_running_loop().time() - started <= SOON

    run_virtual(3, rank, latency=LATENCY)


def test_long_receives_do_not_hide_a_mismatched_collective() -> None:
    async def rank(pg: ProcessGroup) -> None:
        receives = [pg.recv(np.zeros(1), 1 - pg.rank(), tag) for tag in range(200)]
        with pytest.raises(CollectiveMismatchError, match=r"root=1.*root=0"):
            await pg.broadcast(np.zeros(10), 1 - pg.rank())
        assert asyncio.get_running_loop().time() <= SOON
        assert all(isinstance(work.exception(), CollectiveMismatchError) for work in receives)

    run_virtual(2, rank, latency=LATENCY)


def test_mismatch_with_a_call_older_than_the_history_is_still_reported() -> None:
    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            works = [pg.broadcast(np.zeros(1), 0) for _ in range(1500)]
            assert isinstance(await pg.wait_revoked(), CollectiveMismatchError)
            await asyncio.gather(*works, return_exceptions=True)
        else:
            await asyncio.sleep(5)
            with pytest.raises(CollectiveMismatchError, match=r"rank 0 called AN OPERATION.*rank 1 called ALLREDUCE\("):
                await pg.allreduce(np.zeros(1))

    run_virtual(2, rank, latency=LATENCY)


def test_late_message_for_a_finished_keyed_call_is_reported_as_a_mismatch() -> None:
    """Use a gather whose root expects no elements and therefore finishes before the message arrives."""

    async def rank(pg: ProcessGroup) -> None:
        await asyncio.sleep(5 * pg.rank())
        outputs = [np.zeros(0), np.zeros(0)] if pg.rank() == 0 else None
        work = pg.gather(outputs, np.zeros(3 * pg.rank()), 0, key="k")
        cause = await pg.wait_revoked()
        await asyncio.gather(work, return_exceptions=True)
        assert re.search(r"rank 0 called GATHER.*receives=\[0, 0\].*rank 1 called GATHER.*sends=\[3, 0\]", str(cause))

    run_virtual(2, rank, latency=LATENCY)


@pytest.mark.ranks(2)
async def test_block_of_wrong_size_that_a_rank_sends_to_itself_is_refused(pg: ProcessGroup) -> None:
    outputs = [np.zeros(3), np.zeros(3)]
    outputs[pg.rank()] = np.zeros(2)
    with pytest.raises(ValueError, match=rf"output part of rank {pg.rank()} has 2 elements, the input part has 3"):
        pg.alltoall(outputs, [np.ones(3), np.ones(3)])
    with pytest.raises(ValueError, match=rf"output part of rank {pg.rank()} has \d elements, the input part has \d"):
        pg.alltoall_base(np.zeros(5), np.ones(5), [2, 3], [3, 2])
    await pg.barrier()


def test_premul_sum_factors_can_differ_between_ranks() -> None:
    async def rank(pg: ProcessGroup) -> None:
        assert await pg.allreduce(1.0, ReduceOp.PREMUL_SUM(pg.rank() + 1.0)) == 6

    run_virtual(3, rank, latency=LATENCY)
