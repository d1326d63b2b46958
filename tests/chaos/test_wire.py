"""Connections that are cut, stalled or garbled at every byte of their first frames.

Whatever happens to a connection, every rank ends with the right result or with an error of the library, in time, and
nothing is left. Covered are all bytes of the handshakes of control, data and store connections, all bytes of the first
frames of control and store connections, and of the first data frames every byte for cuts and stalls, the headers for
garbling: nothing but TCP's own checksum protects the payload of a data frame on a plain connection.

A stall is over at the deadline of the handshake, of the rendezvous, or of the operation; here these are short. The
suite takes steps over the offsets, and others for each kind of fault; `make soak` takes all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from aiocoll import AiocollError, GroupOptions, new_group
from aiocoll.security.handshake import CHALLENGE_SIZE, CONFIRM_SIZE, HELLO_SIZE, PROOF_SIZE, VERDICT_SIZE, ConnKind
from aiocoll.store import HashStore, Store, StoreServer, TCPStore
from aiocoll.transport.frame import HEADER, HEADER_SIZE
from aiocoll.transport.stream.stream_options import StreamOptions
from tests.chaos.proxy import Detour, Fault, Proxy, overheard  # noqa: F401

from ..internals import Limits

KEY = b"k" * 32
CONTROL, DATA, STORE = ConnKind.CONTROL, ConnKind.DATA, ConnKind.STORE
#: Elements of the allreduces: the last two go beyond a look-ahead, and beyond what travels unasked.
COUNTS = (1, 300, 10_000, 40_000)
#: Bytes of the handshake of the end that dials, and of the other.
GREETING = {True: HELLO_SIZE + PROOF_SIZE + CONFIRM_SIZE, False: CHALLENGE_SIZE + VERDICT_SIZE}
#: Bytes of it before the last word of the end that dials: up to here a link that fails is dialled again.
UNDECIDED = {True: HELLO_SIZE + PROOF_SIZE, False: CHALLENGE_SIZE + VERDICT_SIZE}
#: Bytes after the handshake that faults happen to: more than the control frames there are, and some data frames.
BEYOND = 200
#: Seconds for the ranks to meet, and for each operation; a trial that stalls takes as long.
DEADLINE = 3.0
#: Seconds within which a trial is over: meeting, an operation, and parting.
OVER = 20.0
#: Trials at a time: most of their time they wait.
TOGETHER = 100
#: Bits that are wrong in a garbled byte; with the first, a DATA frame becomes one of another kind.
FLIPS = (0x04, 0x01, 0x80, 0xFF)


pytestmark = pytest.mark.usefixtures("overheard")


@pytest.fixture(autouse=True)
def _impatience(monkeypatch: pytest.MonkeyPatch, limits: Limits) -> None:
    """Deadlines of seconds become shorter ones: ranks whose links are stalled wait for them."""
    impatient = (*StreamOptions.__init__.__defaults__[:5], 1.0, *StreamOptions.__init__.__defaults__[6:])
    monkeypatch.setattr(StreamOptions.__init__, "__defaults__", impatient)
    limits(store_handshake=1.0, control_parting=0.3, linger=0.3)


async def work(store: Store, rank: int, flavour: str) -> str:
    options = GroupOptions(transport=flavour, job_key=KEY)
    async with new_group(store=store, rank=rank, world_size=2, timeout=DEADLINE, options=options) as pg:
        for count in COUNTS:
            got = await pg.allreduce(np.arange(float(count)) + rank)
            np.testing.assert_array_equal(got, 2 * np.arange(float(count)) + 1)
    return "right"


async def outcomes(*ranks: Any) -> list[Any]:
    async with asyncio.timeout(OVER):
        return await asyncio.gather(*ranks, return_exceptions=True)


async def links(fault: Fault | None, flavour: str) -> tuple[list[Any], Detour]:
    """Run two ranks whose links go through proxies."""
    detour = Detour(HashStore(), fault)
    try:
        return await outcomes(*(work(detour, rank, flavour) for rank in range(2))), detour
    finally:
        await detour.aclose()


async def stores(fault: Fault | None) -> tuple[list[Any], Proxy]:
    """Run two ranks of which rank 1 reaches the store through a proxy."""
    server = StoreServer(key=KEY)
    there = server.start()
    async with Proxy.tcp(there, fault) as proxy:
        clients = [TCPStore(*where, timeout=DEADLINE, key=KEY) for where in (there, proxy.endpoint)]
        try:
            return await outcomes(*(work(store, rank, "unix") for rank, store in enumerate(clients))), proxy
        finally:
            for store in clients:
                await store.aclose()
            await server.aclose()


def header_bytes(said: bytes, start: int) -> set[int]:
    """Return where the headers of the frames are that begin at `start`, as far as `said` goes."""
    found: set[int] = set()
    while start + HEADER_SIZE <= len(said):
        found.update(range(start, start + HEADER_SIZE))
        start += HEADER_SIZE + HEADER.unpack_from(said, start)[7]
    return found


async def offsets(kind: ConnKind, upstream: bool) -> tuple[set[int], set[int]]:
    """Return the bytes to cut or stall at, and those to garble."""
    if kind is STORE:
        results, proxy = await stores(None)
        said = proxy.said[kind, upstream]
    else:
        results, detour = await links(None, "unix")
        said = next(proxy.said[kind, upstream] for proxy in detour.proxies.values() if (kind, upstream) in proxy.said)
    assert results == ["right", "right"]
    greeting = GREETING[upstream]
    every = set(range(min(len(said), greeting + BEYOND)))
    if kind is not DATA:
        return every, every
    return every, set(range(greeting)) | {at for at in header_bytes(bytes(said), greeting) if at in every}


async def faults(whats: Iterable[str], kinds: Iterable[ConnKind], step: int) -> list[Fault]:
    """Return faults at every `step`-th offset, starting elsewhere for each kind of connection and of fault.

    With step 1, all bytes are garbled in all ways.
    """
    found: list[Fault] = []
    for kind in kinds:
        for upstream in (True, False):
            every, garbled = await offsets(kind, upstream)
            for what in whats:
                start = len(found) % step
                for number, at in enumerate(sorted(garbled if what == "garble" else every)[start::step]):
                    flips = FLIPS[:1] if what != "garble" else FLIPS if step == 1 else (FLIPS[number % len(FLIPS)],)
                    found += [Fault(what, kind, upstream, at, flip=flip) for flip in flips]
    return found


def judge(fault: Fault, results: list[Any]) -> None:
    for rank, result in enumerate(results):
        if result != "right" and not isinstance(result, AiocollError):
            raise AssertionError(f"{fault}: rank {rank} ended with {result!r}") from result
    # A store says at once that the other end does not hold the key; a rank looks again whether it is so.
    cured = ("cut",) if fault.kind is STORE else ("cut", "garble")
    if fault.what in cured and fault.offset < UNDECIDED[fault.upstream]:
        assert results == ["right", "right"], f"{fault}: nobody dialled again"


async def try_links(what: str, step: int) -> None:
    trials = list(enumerate(await faults([what], (CONTROL, DATA), step)))
    for start in range(0, len(trials), TOGETHER):
        some = trials[start : start + TOGETHER]
        # Not over shared memory: nothing is between the ranks that could lose or change a byte.
        ended = await asyncio.gather(*(links(fault, ("unix", "tcp")[number % 2]) for number, fault in some))
        for (_, fault), (results, detour) in zip(some, ended, strict=True):
            # What the ranks say when they part depends on who is first.
            assert detour.hits or fault.offset >= GREETING[fault.upstream], f"{fault} did not happen: {results}"
            judge(fault, results)


async def try_stores(whats: Iterable[str], step: int) -> None:
    trials = await faults(whats, (STORE,), step)
    for start in range(0, len(trials), TOGETHER):
        some = trials[start : start + TOGETHER]
        for fault, (results, proxy) in zip(some, await asyncio.gather(*map(stores, some)), strict=True):
            assert proxy.hits or fault.offset >= GREETING[fault.upstream], f"{fault} did not happen: {results}"
            judge(fault, results)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["cut", "stall", "garble"])
async def test_disturbed_links_recover_or_fail_with_a_named_error(what: str) -> None:
    await try_links(what, 29)


@pytest.mark.slow
async def test_disturbed_store_connections_recover_or_fail_with_a_named_error() -> None:
    await try_stores(["cut", "stall", "garble"], 59)


@pytest.mark.soak
@pytest.mark.parametrize("what", ["cut", "stall", "garble"])
async def test_links_disturbed_at_every_byte_recover_or_fail(what: str) -> None:
    await try_links(what, 1)


@pytest.mark.soak
@pytest.mark.parametrize("what", ["cut", "stall", "garble"])
async def test_store_connections_disturbed_at_every_byte_recover_or_fail(what: str) -> None:
    await try_stores([what], 1)
