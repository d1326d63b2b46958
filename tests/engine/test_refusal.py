"""Malformed messages and failing handlers: all groups of the faulty rank fail with an error that names the rank."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from aiocoll import GroupError, GroupRevokedError, ProcessGroup, ProtocolError
from aiocoll.engine.failure.stall_inspector import StallInspector
from aiocoll.engine.job.ids import group_id
from aiocoll.engine.links.channel import Channel
from aiocoll.engine.matching.matching import Matching
from aiocoll.engine.matching.outbound import OutboundMessage
from aiocoll.engine.matching.posted import PostedReceive
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.signature import P2P
from aiocoll.engine.operations.slot_program import SlotProgram
from aiocoll.errors import PeerProtocolError
from aiocoll.testing import run_processes
from aiocoll.transport.base import Link
from aiocoll.transport.frame import EAGER, HEADER, FrameKind

from ..internals import (
    comm_of,
    group_of,
    make_calls_fail,
    make_methods_fail,
    observe_methods,
    unmade_groups,
)
from ..ranks import LINKS, options, parametrize_transports, run_ranks, wait_until

#: A function that sends a malformed message, given the group of all ranks and the group of ranks 0 and 1.
Misuse = Callable[[ProcessGroup, ProcessGroup], Any]

CAUSE = {"kind": "GroupError", "text": "x", "op": None, "seq": None, "group": None, "ranks": [], "how": None}
REPORT = {"upto": 0, "missing": [], "keyed": []}
#: Seconds within which every rank must get the error (contract), and the limit in seconds for tests with large sends.
SOON, OVER = 1.0, 10.0


def control_link(pg: ProcessGroup, rank: int) -> Link:
    return comm_of(pg).endpoint.control._links[rank]


def data_link(pg: ProcessGroup, rank: int) -> Link:
    link = comm_of(pg).channels[rank].link
    assert link is not None
    return link


def send_frame(link: Link, *header: int, payload: bytes = b"") -> None:
    link.write(HEADER.pack(*header, len(payload), len(payload)), memoryview(payload) if payload else None)


def send_control_message(link: Link, what: Any) -> None:
    body = what if isinstance(what, bytes) else msgpack.packb(what)
    send_frame(link, FrameKind.CONTROL, 0, 0, 0, 0, 0, 0, payload=body)


def control_message(**what: Any) -> Misuse:
    """Return a function that sends the hub a control message about the group that contains all ranks."""
    return lambda pg, _: send_control_message(control_link(pg, 0), {"g": comm_of(pg).id, **what})


def agreement_message(**what: Any) -> Misuse:
    return control_message(t="shrink", ranks=[0, 1, 2], **what)


def nested(depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"t": "waits"}
    for _ in range(depth):
        found = {"t": "relayed", "from": 1, "note": found}
    return found


def send_future_revocation(pg: ProcessGroup, pair: ProcessGroup) -> None:
    send_control_message(control_link(pg, 0), {"t": "revoke", "g": 77, "cause": {"kind": [], "text": 3}})


MISUSES: dict[str, Misuse] = {
    "a message of an unknown dtype": lambda pg, _: send_frame(
        data_link(pg, 0), FrameKind.DATA, EAGER, 0, comm_of(pg).id, P2P | 5 << 32 | 1, 200, 0, payload=b"x"
    ),
    "a message of half an element": lambda pg, _: send_frame(
        data_link(pg, 0), FrameKind.DATA, EAGER, 0, comm_of(pg).id, P2P | 5 << 32 | 1, 11, 0, payload=b"xyz"
    ),
    "more window bytes returned than sent": lambda pg, _: send_frame(
        data_link(pg, 0), FrameKind.WINDOW, 0, 0, 0, 0, 0, 1 << 30
    ),
    "bytes without a grant": lambda pg, _: send_frame(
        data_link(pg, 0), FrameKind.DATA, 0, 0, comm_of(pg).id, 1000, 0, 0, payload=b"x"
    ),
    "a frame other than CONTROL on a control link": lambda pg, _: send_frame(
        control_link(pg, 0), FrameKind.GRANT, 0, 0, comm_of(pg).id, 1, 0, 0
    ),
    "a frame of an unknown kind": lambda pg, _: send_frame(control_link(pg, 0), 9, 0, 0, 0, 0, 0, 0),
    "an invalid control message on a data link": lambda pg, _: send_control_message(data_link(pg, 0), b"\xc1"),
    "an invalid control message on a control link": lambda pg, _: send_control_message(control_link(pg, 0), b"\xc1"),
    "a control message that is a number": lambda pg, _: send_control_message(control_link(pg, 0), 3),
    "a control message of an unknown kind": control_message(t="sings"),
    "a control message whose kind is a list": control_message(t=[]),
    "a report whose description is a number": control_message(t="report", op=1, mine=3),
    "a report without an operation": control_message(t="report", mine=None),
    "a report with a field too many": control_message(t="report", op=1, mine=None, more=1),
    "a report in the name of another rank": control_message(
        t="report", op=1, mine={"rank": 1, "op": "BARRIER", "seq": 1, "key": None}
    ),
    "control messages nested 990 times": lambda pg, _: send_control_message(control_link(pg, 0), nested(990)),
    "control messages nested twice": lambda pg, _: send_control_message(control_link(pg, 0), nested(2)),
    "a relayed message to an unknown rank": lambda pg, _: send_control_message(
        control_link(pg, 0), {"t": "relay", "to": 7, "note": {}}
    ),
    "a relayed message with invalid fields": lambda pg, _: send_control_message(
        control_link(pg, 0), {"t": "relay", "to": 1, "note": {"t": "revoke", "g": 5, "cause": 5}}
    ),
    "a vote of numbers": agreement_message(what="vote", ballot=0, exclude=3, completed=3, accepted=3, dead=3),
    "a vote without a ballot": agreement_message(what="vote", exclude=[], completed=REPORT, accepted=None, dead=[]),
    "a vote for the ballot of another coordinator": agreement_message(
        what="vote", ballot=1, exclude=[], completed=REPORT, accepted=None, dead=[]
    ),
    "a decision that is a number": agreement_message(what="decided", outcome=3),
    "a decision without members": agreement_message(
        what="decided", outcome={"members": [], "excluded": [], "everywhere": REPORT, "somewhere": REPORT}
    ),
    "an empty proposal": agreement_message(what="propose", ballot=2, outcome={}),
    "an invalid revocation of an unknown group": send_future_revocation,
    "a notice that all ranks have ended": lambda pg, _: send_control_message(
        control_link(pg, 0), {"t": "ended", "ranks": [[0, []], [1, []], [2, []]]}
    ),
    "a notice of an end without links": lambda pg, _: send_control_message(control_link(pg, 0), {"t": "end"}),
    "a notice that all ranks have joined": lambda pg, _: send_control_message(control_link(pg, 0), {"t": "formed"}),
    "the death of an unknown rank": lambda pg, _: send_control_message(
        control_link(pg, 0), {"t": "died", "rank": 3, "detail": "", "how": "killed"}
    ),
    "a device card that is a number": control_message(t="device", card=3),
    "a member list of endless length": control_message(
        t="differ",
        one={
            "rank": 2,
            "op": "FLUSH",
            "seq": 1,
            "key": None,
            "members": {"size": 1 << 60, "listed": 1 << 60, "rest": 0, "runs": [{"op": "X", "count": 1 << 60}]},
        },
        two=None,
    ),
}


async def open_links(pg: ProcessGroup) -> None:
    """Open the links between all ranks."""
    await pg.alltoall([np.zeros(1) for _ in range(pg.size())], [np.zeros(1)] * pg.size())


async def check_failure(pg: ProcessGroup, work: Any, words: str) -> None:
    """Check that `work` fails with an error that names rank 2, and that no operation stays pending."""
    with pytest.raises(PeerProtocolError) as failure:
        async with asyncio.timeout(SOON):
            await work
    assert failure.value.ranks == ((0,) if pg.rank() == 2 else (2,))
    assert "rank 2" in str(failure.value)
    assert words in str(failure.value)
    assert isinstance(failure.value, ProtocolError)
    assert not pg.pending()
    with pytest.raises(GroupRevokedError) as later:
        pg.barrier()
    assert isinstance(later.value.__cause__, PeerProtocolError)


@pytest.mark.parametrize("transport", LINKS)
async def test_group_ignores_frames_of_ranks_outside_the_group(transport: str) -> None:
    """Let rank 2 send frames with the id of a group without rank 2, since another group may have the same id."""

    async def rank(pg: ProcessGroup) -> None:
        await open_links(pg)
        pair = await pg.split_group([0, 1] if pg.rank() < 2 else [2])
        await pg.barrier()
        if pg.rank() == 2:
            identity = group_id(f"{comm_of(pg).id}\0split\0{(comm_of(pg).id, 0, None, (0, 1))}")
            send_frame(data_link(pg, 0), FrameKind.DATA, EAGER, 0, identity, 1, 0, 0, payload=b"x")
            for message in ({"t": "revoke"}, {"t": "bye", "linked": False}):
                send_control_message(control_link(pg, 0), {**message, "g": identity, "cause": CAUSE})
        await pg.barrier()
        if pg.rank() == 0:
            await wait_until(lambda: len(unmade_groups(pg)) == 1)
        await pg.barrier()
        assert await pair.allreduce(1) == pair.size()

    await run_ranks(3, rank, transport=transport)


@pytest.mark.slow
@pytest.mark.parametrize("what", MISUSES)
@pytest.mark.parametrize("transport", LINKS)
async def test_malformed_message_fails_its_groups_with_an_error_that_names_the_rank(transport: str, what: str) -> None:
    waiting: list[int] = []

    async def rank(pg: ProcessGroup) -> None:
        await open_links(pg)
        pair = await pg.split_group([0, 1] if pg.rank() < 2 else [2])
        work = pg.recv(np.zeros(1), (pg.rank() + 1) % 3, tag=1)
        if pair.size() == 2:
            await pair.allreduce(np.ones(1))
            waiting.append(pg.rank())
        else:
            await wait_until(lambda: len(waiting) == 2)
            named = comm_of(pg).endpoint.group_id  # the group of ranks 0 and 1, which this rank has not made
            identity = named(f"{comm_of(pg).id}\0split\0{(comm_of(pg).id, 0, None, (0, 1))}")
            MISUSES[what](pg, _GroupId(identity))  # type: ignore[arg-type]
        await check_failure(pg, work, "")
        if pair.size() == 2:  # a group without rank 2 is not affected
            assert (await pair.allreduce(np.ones(1))).tolist() == [2.0]

    await run_ranks(3, rank, transport=transport)


class _GroupId:
    """A stand-in for a group that has only a group id."""

    def __init__(self, identity: int) -> None:
        self._comm = self
        self.id = identity


@pytest.mark.parametrize("error", [MemoryError, KeyError, RecursionError, OSError])
@pytest.mark.parametrize("transport", LINKS)
async def test_exception_in_a_frame_handler_fails_its_groups_with_an_error_that_names_the_rank(
    transport: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []

    def refuse(matching: Matching, channel: Channel, peer: int, *_: Any) -> None:
        if matching.group.rank == 0 and peer == 2:
            raise error(12, "no memory")

    async def rank(pg: ProcessGroup) -> None:
        await open_links(pg)
        pair = await pg.split_group([0, 1] if pg.rank() < 2 else [2])
        work = pg.recv(np.zeros(1), 1 if pg.rank() == 0 else 0)
        waiting.append(pg.rank())
        await wait_until(lambda: len(waiting) == 3)
        if pg.rank() == 2:
            observe_methods(monkeypatch, Matching, deliver=refuse)
            pg.send(np.zeros(1), 0).add_done_callback(lambda _: None)
        await check_failure(pg, work, error.__name__)
        if pair.size() == 2:
            assert (await pair.allreduce(np.ones(1))).tolist() == [2.0]

    await run_ranks(3, rank, transport=transport)


@pytest.mark.parametrize("transport", LINKS)
async def test_exception_in_a_control_message_handler_fails_its_groups_and_names_the_sender(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that the error names the rank that wrote the relayed message, not the rank that relayed it."""

    def refuse(stalls: StallInspector, peer: int, _: dict[str, Any]) -> None:
        if group_of(stalls).rank == 1 and peer == 2:
            raise MemoryError("no memory")

    async def rank(pg: ProcessGroup) -> None:
        pair = await pg.split_group([0, 1] if pg.rank() < 2 else [2])
        await open_links(pg)
        work = pg.recv(np.zeros(1), 0 if pg.rank() else 1)
        if pg.rank() == 2:
            what = {"t": "query", "g": comm_of(pg).id, "op": 9}
            send_control_message(control_link(pg, 0), {"t": "relay", "to": 1, "note": what})
        with pytest.raises(PeerProtocolError, match="could not handle control message 'query' of rank 2: MemoryErr"):
            async with asyncio.timeout(SOON):
                await work
        if pair.size() == 2:
            assert (await pair.allreduce(np.ones(1))).tolist() == [2.0]

    observe_methods(monkeypatch, StallInspector, handle=refuse)
    await run_ranks(3, rank, transport=transport)


@pytest.mark.slow
@pytest.mark.ranks(2, 4, 7)
@parametrize_transports(*LINKS)
async def test_refused_rank_receives_the_reason_of_the_refusal(pg: ProcessGroup) -> None:
    """Let rank 0, the hub, send an invalid message while large transfers from and to rank 0 are in flight."""
    await open_links(pg)
    last = pg.size() - 1
    big = np.ones(500_000)
    works = [pg.allreduce(big.copy(), key=str(each)) for each in range(2)] if pg.rank() in (0, last) else []
    work = pg.recv(np.zeros(1), (pg.rank() + 1) % pg.size())
    if pg.rank() == 0:
        send_control_message(control_link(pg, last), {"t": "nonsense"})
    with pytest.raises(
        PeerProtocolError, match=r"rank 0 sent an invalid control message on a control link: .* kind 'nonsense'"
    ):
        async with asyncio.timeout(OVER):
            await work
    for each in works:
        with pytest.raises(PeerProtocolError):
            await each


async def error_of_failing_handler(pg: ProcessGroup) -> str:
    """Let rank 0 fail while it handles a frame of rank 1; return the error text that this rank gets."""
    await open_links(pg)
    work = pg.recv(np.zeros(1), 1 - pg.rank(), tag=1)
    if pg.rank() == 0:

        def deliver(*_: Any) -> bool:
            raise MemoryError("no memory")

        comm_of(pg).matching.deliver = deliver  # type: ignore[method-assign]
    try:
        async with asyncio.timeout(OVER):
            await pg.barrier()
            if pg.rank():
                pg.send(np.zeros(1), 0).add_done_callback(lambda _: None)
            await work
    except PeerProtocolError as error:
        work.add_done_callback(lambda _: None)
        return str(error)
    return "no error"


@pytest.mark.slow
@pytest.mark.parametrize("transport", LINKS[1:])
async def test_exception_in_a_frame_handler_is_reported_to_ranks_in_other_processes(transport: str) -> None:
    errors = await run_processes(2, error_of_failing_handler, options=options(transport))
    assert all("could not handle a frame of rank 1, a DATA frame" in each and "MemoryError" in each for each in errors)


# -- errors in timers and operations

#: Functions that make a timer callback fail: the stall report, or the reply to stall requests.
CALLBACKS: dict[str, Callable[[pytest.MonkeyPatch, Exception], None]] = {
    "a report": lambda patch, error: make_methods_fail(patch, error, StallInspector, "report"),
    "an answer": lambda patch, error: make_calls_fail(patch, error, "answer_stall_requests"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("where", CALLBACKS)
async def test_exception_in_a_timer_fails_the_group_with_an_error_that_names_the_rank(
    pg: ProcessGroup, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await pg.barrier()
    CALLBACKS[where](monkeypatch, LookupError("planted"))
    work: Any = pg.recv(np.zeros(1), 0) if pg.rank() == 2 else pg.allreduce(np.ones(1))
    with pytest.raises(GroupError, match=r"failed on rank ., where the library raised LookupError: planted"):
        async with asyncio.timeout(2 * SOON):
            await work


#: Steps of an operation: the class and the method that fail, and a user's call that runs this method.
STEPS: dict[str, tuple[type, str, Callable[[ProcessGroup], Any]]] = {
    "at the call": (PostedReceive, "enter", lambda pg: pg.recv(np.zeros(1), 0)),
    "as bytes leave": (OutboundMessage, "sent", lambda pg: pg.send(np.zeros(1), 0)),
    "as it looks into shared memory": (SlotProgram, "look", lambda pg: pg.allreduce(np.zeros(1))),
}


@pytest.mark.parametrize(
    ("transport", "step"),
    [(transport, step) for transport in LINKS for step in STEPS if transport == "shm" or "shared" not in step],
)
async def test_exception_in_an_operation_fails_the_group_with_an_error_that_names_the_rank(
    transport: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, method, start = STEPS[step]

    def broken(operation: Operation, *_: Any) -> None:
        if operation.comm.rank == 1:
            raise LookupError("planted")

    async def rank(pg: ProcessGroup) -> None:
        await open_links(pg)
        work = pg.recv(np.zeros(1), 0, tag=5) if pg.rank() == 2 else None
        await pg.barrier()
        if pg.rank() == 1:
            observe_methods(monkeypatch, owner, **{method: broken})
        with pytest.raises(GroupError, match="failed on rank 1, where the library raised LookupError: planted"):
            async with asyncio.timeout(SOON):
                await (work or (start(pg) if pg.rank() == 1 else pg.recv(np.zeros(1), 2, tag=5)))
        assert not pg.pending()

    await run_ranks(3, rank, transport=transport)


#: Frame lengths in bytes for a broadcast of 800 bytes, and a pattern of the error text about the last frame.
TOO_MUCH: dict[str, tuple[list[int], str]] = {
    "a frame beyond the end": ([792, 16], "more than the 800 bytes"),
    "a frame without bytes": ([0], "sent an empty frame for a message of 800 bytes"),
    "a part of an element": ([796], "could not handle .* ValueError"),
}


@pytest.mark.parametrize("what", TOO_MUCH)
@pytest.mark.parametrize("transport", ["memory", "tcp"])
async def test_data_beyond_the_end_of_a_message_is_refused(transport: str, what: str) -> None:
    lengths, words = TOO_MUCH[what]
    waiting: list[int] = []

    async def rank(pg: ProcessGroup) -> None:
        await open_links(pg)
        if pg.rank() == 0:
            work = pg.broadcast(np.zeros(100), 1)
            waiting.append(comm_of(pg).entered)
        else:
            await wait_until(lambda: waiting)
            work = pg.recv(np.zeros(1), 0)
            pg.broadcast(np.zeros(100), 1, key="other").add_done_callback(lambda _: None)
            signature = comm_of(pg).journal.last().signature  # type: ignore[union-attr]
            at = 0
            for length in lengths:
                header = HEADER.pack(
                    FrameKind.DATA, EAGER, 0, comm_of(pg).id, waiting[0], signature.fingerprint(), at, length, 800
                )
                data_link(pg, 0).write(header, memoryview(bytes(length)) if length else None)
                at += length
        with pytest.raises(PeerProtocolError, match=words):
            async with asyncio.timeout(OVER):
                await work

    await run_ranks(2, rank, transport=transport)
