"""The stream transport: accepted and refused connections, simultaneous dials, and handshake timeouts."""

import asyncio
import gc
import logging
import os
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

import pytest

from aiocoll import users
from aiocoll.elements.nan_fingerprint import nan_fingerprint
from aiocoll.errors import AuthenticationError, GroupClosedError, PeerLostError, RendezvousError
from aiocoll.native import core
from aiocoll.process import this_process
from aiocoll.runtime import Runtime
from aiocoll.security.handshake import (
    CHALLENGE_SIZE,
    CONFIRM_SIZE,
    HANDSHAKE_TIMEOUT,
    HELLO_SIZE,
    PROOF_SIZE,
    VERDICT_SIZE,
    ClientHandshake,
    ConnKind,
    HandshakeRefusedError,
    Identity,
    Peer,
    ServerHandshake,
    Status,
    job_id,
)
from aiocoll.security.loop_timeout import _TURNS
from aiocoll.security.tls import make_own_contexts
from aiocoll.security.unproven_connections import MIN_PLACES
from aiocoll.sockets import UNREACHABLE_AFTER
from aiocoll.transport.base import Card, Header, Link
from aiocoll.transport.byte_stream import ByteStream
from aiocoll.transport.frame import HEADER, SEGMENT, FrameKind
from aiocoll.transport.shm.process_memory import can_read
from aiocoll.transport.stream import addresses as address
from aiocoll.transport.stream.link import StreamLink
from aiocoll.transport.stream.plain_stream import open_plain
from aiocoll.transport.stream.stream_options import StreamOptions
from aiocoll.transport.stream.tls_stream import open_tls
from aiocoll.transport.stream.transport import StreamTransport

from ..internals import socket_of

KEY = b"k" * 32
CONTROL, DATA = ConnKind.CONTROL, ConnKind.DATA
PLAIN = ["unix", "tcp", "tcp6", "shm"]
FLAVOURS = [*PLAIN, "tls"]


class Rank:
    """A transport with its links; receives the frames of all these links."""

    def __init__(self, transport: StreamTransport) -> None:
        self.transport = transport
        self.card: Card = {}
        self.accepted: list[StreamLink] = []
        self.dialled: list[StreamLink] = []
        self.received: list[tuple[int, int]] = []
        self.lost_peers: list[int] = []
        self.changed = asyncio.Event()
        transport.accepted = self.take

    def take(self, link: Link) -> None:
        self.accepted.append(link)
        self.start_link(link)

    def start_link(self, link: Link) -> None:
        link.sink = self
        link.start()
        self.changed.set()

    async def connect(self, other: "Rank", kind: ConnKind | None = None) -> StreamLink | None:
        # Use a data link for shared memory, since control links do not use shared memory.
        kind = kind or (DATA if self.transport._transport == "shm" else CONTROL)
        link = await self.transport.connect(other.transport.rank, other.card, kind)
        if link is not None:
            self.dialled.append(link)
            self.start_link(link)
        return link

    async def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    @property
    def links(self) -> list[StreamLink]:
        return [link for link in self.accepted + self.dialled if not link.closed]

    def close(self) -> None:
        for link in self.links:
            link.close()
        self.changed.set()

    def route(self, link: Link, header: Header) -> memoryview | None:
        return None

    def deliver(self, link: Link, header: Header, payload: memoryview | None) -> None:
        self.received.append((link.peer, header[4]))
        self.changed.set()

    def withdrawn(self, link: Link, header: Header) -> None:
        pass

    def drained(self, link: Link) -> None:
        pass

    def lost(self, link: Link, error: Exception | None) -> None:
        self.lost_peers.append(link.peer)
        self.changed.set()


def send_number(link: Link, number: int) -> None:
    link.write(HEADER.pack(FrameKind.DATA, 0, 0, 0, number, 0, 0, 0, 0))


async def settle(*ranks: Rank) -> None:
    """Wait until these ranks have finished all handshakes of accepted connections."""
    for rank in ranks:
        while waiting := [*rank.transport._serving, *rank.transport._evicted]:
            await asyncio.wait(waiting)


@asynccontextmanager
async def started(world_size: int, flavour: str = "unix", **options: object) -> AsyncIterator[list[Rank]]:
    transport = flavour if flavour in ("unix", "shm") else "tcp"
    options = {"transport": transport, "connect_timeout": 20.0, **options}
    if flavour == "tls":
        options["open_stream"] = partial(open_tls, make_own_contexts())
    runtime = options.pop("runtime", None) or Runtime(asyncio.get_running_loop())
    job, key = options.pop("job", "job"), options.pop("key", KEY)
    chosen = StreamOptions(**options)
    ranks = [Rank(StreamTransport(runtime, r, world_size, job, key, chosen)) for r in range(world_size)]
    try:
        for rank in ranks:
            if transport == "tcp":
                await rank.transport.listen_tcp("::1" if flavour == "tcp6" else "127.0.0.1")
            rank.card = await rank.transport.listen()
        yield ranks
    finally:
        for rank in ranks:
            await rank.transport.aclose()
            rank.close()


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> str:
    if request.param == "tcp6":
        try:
            address.open_tcp("::1").close()
        except RendezvousError:
            pytest.skip("this host has no IPv6 loopback")
    return request.param


@asynccontextmanager
async def stranger(card: Card) -> AsyncIterator[socket.socket]:
    """Yield the socket of an unauthenticated client, connected to the listener of `card`."""
    loop = asyncio.get_running_loop()
    if card["unix"]:
        sock = await address.reach(loop, socket.AF_UNIX, address.unix_address(card["unix"]))
    else:
        host, port = card["tcp"]
        sock = await address.reach(loop, address.family_of(host), (host, port))
    with sock:
        yield sock


@asynccontextmanager
async def stuck_dial(one: Rank, other: Rank) -> AsyncIterator[tuple[asyncio.Task[StreamLink | None], socket.socket]]:
    """Yield a task that dials a listener of the test, and the listener's side of the connection."""
    listener, name = address.open_unix(os.urandom)
    with listener:
        card = {**other.card, "unix": name}
        dial = asyncio.create_task(one.transport.connect(other.transport.rank, card, CONTROL))
        served, _ = await asyncio.get_running_loop().sock_accept(listener)
        with served:
            yield dial, served


async def read(sock: socket.socket, nbytes: int) -> bytes:
    """Return `nbytes` received bytes, or fewer if the peer closes the connection earlier."""
    data = b""
    loop = asyncio.get_running_loop()
    try:
        while len(data) < nbytes and (part := await loop.sock_recv(sock, nbytes - len(data))):
            data += part
    except ConnectionResetError:
        pass
    return data


def make_client(rank: int, world_size: int = 2, **changes: object) -> ClientHandshake:
    fields = {"job_id": job_id("job"), "epoch": 0, "rank": rank, "world_size": world_size, "kind": CONTROL}
    key = changes.pop("key", KEY)
    return ClientHandshake(Identity(**{**fields, **changes}), key, os.urandom)


async def prove_key(sock: socket.socket, client: ClientHandshake) -> Status:
    """Prove the job key, without the last message of the handshake; return the status that the server sends."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, client.hello())
    await loop.sock_sendall(sock, client.prove(await read(sock, CHALLENGE_SIZE)))
    try:
        client.last_word = client.confirm(await read(sock, VERDICT_SIZE))
    except HandshakeRefusedError as error:
        return error.status
    return Status.OK


async def serve(sock: socket.socket, rank: int, decide: Callable[[Peer], Status]) -> tuple[ServerHandshake, bytes]:
    """Receive the proof of a rank that has dialled `sock`; return the server's handshake and its reply."""
    server = ServerHandshake(Identity(job_id("job"), 0, rank, 2, CONTROL), KEY, os.urandom)
    sock.send(server.challenge(await read(sock, HELLO_SIZE)))
    return server, server.verdict(await read(sock, PROOF_SIZE), decide)


async def test_connect_opens_a_link_that_transfers_frames(flavour: str) -> None:
    async with started(2, flavour) as (a, b):
        link = await a.connect(b)
        await b.until(lambda: b.accepted)
        (back,) = b.accepted
        kind = DATA if flavour == "shm" else CONTROL
        assert (link.peer, link.kind, back.peer, back.kind) == (1, kind, 0, kind)
        send_number(link, 7)
        send_number(back, 8)
        await b.until(lambda: b.received)
        await a.until(lambda: a.received)
        assert (a.received, b.received) == ([(1, 8)], [(0, 7)])
        sock = socket_of(link)
        assert sock.gettimeout() == 0
        assert not sock.get_inheritable()
        assert not socket_of(back).get_inheritable()
        if flavour.startswith("tcp"):
            assert all(s.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) for s in (sock, socket_of(back)))


async def test_connect_opens_one_link_per_kind() -> None:
    async with started(2) as (a, b):
        control, data = await asyncio.gather(a.connect(b, CONTROL), a.connect(b, DATA))
        await b.until(lambda: len(b.accepted) == 2)
        assert {link.kind for link in b.accepted} == {CONTROL, DATA}
        assert await b.connect(a, CONTROL) is None
        assert await b.connect(a, DATA) is None
        assert await a.connect(b, DATA) is None
        assert a.links == [control, data]


async def test_closed_link_can_be_replaced(flavour: str) -> None:
    async with started(2, flavour) as (a, b):
        (await a.connect(b)).close()
        assert await b.connect(a) is not None or b.accepted
        await a.until(lambda: a.links or a.accepted)
        for rank in (a, b):
            rank.close()
        assert await a.connect(b) is not None


async def test_sixteen_ranks_can_open_links_between_all_pairs(flavour: str) -> None:
    async with started(16, flavour) as ranks:
        pairs = [(a, b) for a in ranks for b in ranks if a.transport.rank < b.transport.rank]
        links = await asyncio.gather(*(a.connect(b) for a, b in pairs))
        assert None not in links
        await settle(*ranks)
        for rank in ranks:
            assert sorted(link.peer for link in rank.links) == [r for r in range(16) if r != rank.transport.rank]


async def test_simultaneous_dials_make_one_link(flavour: str) -> None:
    """Let both ranks dial with various delays; both must use the same single link, which must transfer frames."""
    chance = random.Random(5)
    async with started(2, flavour) as (a, b):

        async def dial(one: Rank, other: Rank, turns: int) -> StreamLink | None:
            for _ in range(turns):
                await asyncio.sleep(0)
            return await one.connect(other)

        for number in range(1, 65):
            turns = [chance.randrange(chance.choice((1, 12))) for _ in range(2)]
            link_a, link_b = await asyncio.gather(dial(a, b, turns[0]), dial(b, a, turns[1]))
            assert (link_a is None) != (link_b is None)
            await settle(a, b)
            (left,), (right,) = a.links, b.links
            send_number(left, number)
            await b.until(lambda: b.received)
            send_number(right, number)
            await a.until(lambda: a.received)
            assert (a.received, b.received) == ([(1, number)], [(0, number)])
            for rank in (a, b):
                rank.close()
                rank.received.clear()


async def test_simultaneous_dials_of_all_ranks_make_one_link_per_pair(flavour: str) -> None:
    async with started(8, flavour) as ranks:
        made = await asyncio.gather(*(a.connect(b) for a in ranks for b in ranks if a is not b))
        await settle(*ranks)
        assert sum(link is not None for link in made) == 28
        for rank in ranks:
            assert sorted(link.peer for link in rank.links) == [r for r in range(8) if r != rank.transport.rank]


@pytest.mark.parametrize("sent_bytes", [0, HELLO_SIZE, HELLO_SIZE + PROOF_SIZE])
async def test_dial_to_an_unauthenticated_peer_does_not_affect_other_handshakes(sent_bytes: int) -> None:
    """Check that the reply to a client does not depend on the progress of a dial to an unproven peer."""
    async with started(3) as (low, middle, high):
        for rank in (low, high):
            async with stuck_dial(rank, middle) as (dial, served), stranger(rank.card) as sock:
                if sent_bytes:
                    await read(served, HELLO_SIZE)
                    served.send(make_client(0).hello())
                    await read(served, sent_bytes - HELLO_SIZE)
                assert await prove_key(sock, make_client(1, 3)) is Status.OK
                dial.cancel()
                await asyncio.wait([dial])


@pytest.mark.parametrize("sent_bytes", range(4))
async def test_unauthenticated_client_does_not_stop_a_dial(sent_bytes: int) -> None:
    """Let a client send nothing, half a HELLO, a correct HELLO, or also a wrong proof."""
    for rank in range(2):
        async with started(2, connect_timeout=3600.0, handshake_timeout=3600.0) as ranks:
            one, other = ranks[rank], ranks[1 - rank]
            async with stranger(one.card) as sock:
                client = make_client(1 - rank, key=b"x" * 32)
                sock.send((b"", b"aioc", client.hello(), client.hello() + bytes(PROOF_SIZE))[sent_bytes])
                assert await one.connect(other) is not None
            await settle(one, other)
            assert len(one.links) == len(other.links) == 1


async def test_connect_waits_for_an_authenticated_peer() -> None:
    async with started(2) as (a, b), stranger(a.card) as sock, stranger(a.card) as again:
        client = make_client(1)
        assert await prove_key(sock, client) is Status.OK
        dial = asyncio.create_task(a.connect(b))
        for _ in range(5):
            await asyncio.sleep(0)
        assert not dial.done()
        assert await prove_key(again, make_client(1)) is Status.CROSSED, "a rank was promised two links"
        await asyncio.get_running_loop().sock_sendall(sock, client.last_word)
        assert await dial is None
        assert [link.peer for link in a.accepted] == [1]


@pytest.mark.parametrize("word", [b"", bytes(CONFIRM_SIZE)])
async def test_connect_dials_if_the_connection_of_an_authenticated_peer_fails(word: bytes) -> None:
    async with started(2) as (a, b), stranger(a.card) as sock:
        assert await prove_key(sock, make_client(1)) is Status.OK
        dial = asyncio.create_task(a.connect(b))
        await asyncio.sleep(0)
        sock.send(word)
        sock.shutdown(socket.SHUT_WR)
        assert await dial is not None
        assert a.accepted == []


async def test_higher_rank_keeps_the_link_that_it_has_promised() -> None:
    """Check that the higher rank waits for the promised link of the lower rank, even if its own dial is accepted."""
    async with started(2) as (a, b), stuck_dial(b, a) as (dial, served), stranger(b.card) as sock:
        _, verdict = await serve(served, 0, lambda peer: Status.OK)
        client = make_client(0)
        assert await prove_key(sock, client) is Status.OK
        served.send(verdict)
        assert await read(served, 1) == b"", "sent a last message"
        assert not dial.done()
        sock.send(client.last_word)
        assert await dial is None
        assert [link.peer for link in b.links] == [0]


async def test_lower_rank_uses_the_link_that_the_higher_rank_has_promised() -> None:
    async with started(2) as (a, b), stuck_dial(a, b) as (dial, served), stranger(a.card) as sock:
        server, verdict = await serve(served, 1, lambda peer: Status.OK)
        assert await prove_key(sock, make_client(1)) is Status.OK
        served.send(verdict)
        assert server.accept(await read(served, CONFIRM_SIZE)).rank == 0
        link = await dial
        assert link is not None
        link.close()


async def test_accepted_link_cancels_the_dial_of_this_rank() -> None:
    async with (
        started(2, handshake_timeout=3600.0, connect_timeout=3600.0) as (a, b),
        stuck_dial(b, a) as (dial, _),
        stranger(b.card) as sock,
    ):
        client = make_client(0)
        assert await prove_key(sock, client) is Status.OK
        sock.send(client.last_word)
        assert await dial is None
        assert [link.peer for link in b.accepted] == [0]


async def test_close_of_the_transport_cancels_a_dial() -> None:
    async with started(2, handshake_timeout=3600.0) as (a, b), stuck_dial(b, a) as (dial, served):
        assert len(await read(served, HELLO_SIZE)) == HELLO_SIZE
        await b.transport.aclose()
        assert await read(served, 1) == b""
        with pytest.raises(GroupClosedError):
            await dial


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("confirmed_first", [False, True])
async def test_two_final_handshake_replies_in_one_iteration_make_one_link(rank: int, confirmed_first: bool) -> None:
    """Let a faulty peer accept both of two simultaneous connections; only one of them may become a link."""
    async with started(2) as ranks:
        one, other = ranks[rank], ranks[1 - rank]
        async with stranger(one.card) as sock, stuck_dial(one, other) as (dial, served):
            _, verdict = await serve(served, 1 - rank, lambda _: Status.OK)
            client = make_client(1 - rank)
            assert await prove_key(sock, client) is Status.OK
            both = ((sock, client.last_word), (served, verdict))
            for each, message in both if confirmed_first else both[::-1]:
                each.send(message)
            link = await dial
            await settle(one)
            assert (link is not None) + len(one.accepted) == 1
            if link is not None:
                link.close()


async def test_two_clients_that_prove_the_same_rank_make_one_link() -> None:
    async with started(2) as (_, b), stranger(b.card) as first, stranger(b.card) as second:
        client = make_client(0)
        assert await prove_key(first, client) is Status.OK
        assert await prove_key(second, make_client(0)) is Status.CROSSED
        first.send(client.last_word)
        await settle(b)
        assert len(b.accepted) == 1
        assert len(b.links) == 1


async def test_duplicate_connection_is_refused() -> None:
    async with started(2) as (a, b):
        await a.connect(b)
        await settle(b)
        async with stranger(b.card) as sock:
            assert await prove_key(sock, make_client(0)) is Status.DUPLICATE
        async with stranger(b.card) as sock:
            assert await prove_key(sock, make_client(0, kind=DATA)) is Status.OK
        b.close()
        async with stranger(b.card) as sock:
            assert await prove_key(sock, make_client(0)) is Status.OK


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"rank": 1}, Status.REFUSED),
        ({"rank": 2}, Status.REFUSED),
        ({"rank": -1}, Status.REFUSED),
        ({"epoch": 1}, Status.WRONG_EPOCH),
        ({"job_id": job_id("other")}, Status.WRONG_JOB),
        ({"world_size": 3}, Status.WRONG_WORLD_SIZE),
        ({"kind": ConnKind.STORE}, Status.WRONG_KIND),
    ],
)
async def test_client_with_a_wrong_identity_is_refused_with_a_specific_status(changes: dict, status: Status) -> None:
    async with started(2) as (_, b):
        async with stranger(b.card) as sock:
            assert await prove_key(sock, make_client(**{"rank": 0, **changes})) is status
            assert await read(sock, 1) == b""
        assert b.accepted == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"key": b"x" * 32}, "did not prove that it holds this job's key"),
        ({"key": None}, "did not prove that it holds this job's key"),
        ({"job": "other"}, "belongs to job"),
        ({"epoch": 3}, "it is in epoch 0, this process in epoch 3"),
    ],
)
async def test_connect_to_another_job_fails(flavour: str, changes: dict, message: str) -> None:
    async with started(2, flavour) as (_, b), started(2, flavour, **changes) as (a, _):
        with pytest.raises(AuthenticationError, match=message):
            await a.connect(b)
        await settle(b)
        assert b.accepted == []


async def test_connect_to_another_rank_fails() -> None:
    async with started(3) as (a, b, c):
        with pytest.raises(AuthenticationError, match=r"rank 2 answered at unix socket @.* instead of rank 1"):
            await a.transport.connect(1, c.card, CONTROL)
        await settle(b, c)
        assert b.accepted == c.accepted == []


async def test_process_of_another_user_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(2, handshake_timeout=3600.0) as (a, b):
        own_uid = os.geteuid()
        monkeypatch.setattr(users, "peer_uid", lambda _: own_uid + 1)
        async with stranger(b.card) as sock:
            assert await read(sock, 1) == b""
        with pytest.raises(
            AuthenticationError, match=f"unix socket @.* belongs to user {own_uid + 1}, not to this user"
        ):
            await a.connect(b)
        monkeypatch.undo()
        assert await a.connect(b) is not None


class HeldTimers(Runtime):
    """A runtime that holds timers, so that the test decides when each timer fires."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._held: list[tuple[float, asyncio.TimerHandle, Callable[[], object]]] = []
        self.held_one = asyncio.Event()
        self.call_later = self.hold

    @property
    def held(self) -> list[tuple[float, asyncio.TimerHandle, Callable[[], object]]]:
        self._held = [each for each in self._held if not each[1].cancelled()]
        return self._held

    def hold(self, delay: float, callback: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        timer = self.loop.call_later(3600, lambda: None)
        self._held.append((delay, timer, partial(callback, *args)))
        self.held_one.set()
        return timer

    def fire(self) -> float:
        delay, timer, callback = self.held.pop()
        timer.cancel()
        callback()
        return delay


@pytest.mark.parametrize("flavour", PLAIN, indirect=True)
async def test_silent_client_is_disconnected_at_the_handshake_timeout(flavour: str) -> None:
    runtime = HeldTimers(asyncio.get_running_loop())
    async with started(2, flavour, runtime=runtime) as (_, b), stranger(b.card) as sock:
        await runtime.held_one.wait()
        seconds = 0.0
        while runtime.held:
            seconds += runtime.fire()
        assert seconds == pytest.approx(HANDSHAKE_TIMEOUT), "the timeout of a silent client is not HANDSHAKE_TIMEOUT"
        assert await read(sock, 1) == b""
        assert (b.accepted, runtime.held) == ([], [])


@pytest.mark.parametrize("flavour", PLAIN, indirect=True)
async def test_authenticated_client_has_no_handshake_timeout(flavour: str) -> None:
    """Check that the server waits without a timeout for the last handshake message of an authenticated client."""
    runtime = HeldTimers(asyncio.get_running_loop())
    async with started(2, flavour, runtime=runtime) as (_, b), stranger(b.card) as sock:
        client = make_client(0)
        assert await prove_key(sock, client) is Status.OK
        (waiting,) = b.transport._serving
        while runtime.held:
            runtime.fire()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not waiting.done()
        sock.send(client.last_word)
        await b.until(lambda: b.accepted)
        assert [link.peer for link in b.links] == [0]


async def test_authenticated_client_from_another_host_has_tcp_keepalive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check keepalive probes, which alone can detect a lost host while no handshake timeout applies."""
    probed: list[socket.socket] = []
    monkeypatch.setattr("aiocoll.transport.stream.transport.enable_keepalive", probed.append)
    loop = asyncio.get_running_loop()
    async with started(2, "tcp") as (_, b):
        for number, source in enumerate(("127.0.0.1", "127.0.0.2")):
            with socket.socket() as sock:
                sock.setblocking(False)
                sock.bind((source, 0))
                await loop.sock_connect(sock, tuple(b.card["tcp"]))
                assert probed == []
                assert await prove_key(sock, make_client(0)) is Status.OK
                assert [each.getpeername() for each in probed] == [sock.getsockname()] * number
            await settle(b)


@pytest.mark.parametrize("nbytes", [HELLO_SIZE, HELLO_SIZE - 1])
async def test_handshake_timeout_does_not_discard_an_arrived_message(nbytes: int) -> None:
    """Let HELLO, or all but its last byte, arrive before the timers fire that were due during a blocked loop."""
    runtime = HeldTimers(asyncio.get_running_loop())
    async with started(2, runtime=runtime) as (_, b), stranger(b.card) as sock:
        await runtime.held_one.wait()
        await asyncio.sleep(0)  # lets the task start waiting
        sock.send(make_client(0).hello()[:nbytes])
        for _ in range(_TURNS):
            runtime.fire()
        answer = asyncio.create_task(read(sock, CHALLENGE_SIZE))
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(b.transport._serving) == 1
        while runtime.held:
            runtime.fire()
        assert len(await answer) == (CHALLENGE_SIZE if nbytes == HELLO_SIZE else 0)


async def test_unread_messages_extend_the_handshake_timeout_at_most_three_times() -> None:
    runtime = HeldTimers(asyncio.get_running_loop())
    async with started(2, runtime=runtime) as (_, b), stranger(b.card) as sock:
        await runtime.held_one.wait()
        sock.send(bytes(1))
        seconds = 0.0
        while runtime.held:
            seconds += runtime.fire()
        assert HANDSHAKE_TIMEOUT < seconds < 5.0
        assert await read(sock, 1) == b""


@pytest.mark.parametrize("connect_timeout", [3.0, 3600.0])
@pytest.mark.parametrize("last", ["challenge", "verdict"])
async def test_dial_reads_arrived_handshake_messages_when_its_timeout_expires(
    last: str, connect_timeout: float
) -> None:
    """Let a message arrive in a blocked loop, in which the timer of the attempt or of the whole dial is due."""
    runtime = HeldTimers(asyncio.get_running_loop())
    async with (
        started(2, runtime=runtime, connect_timeout=connect_timeout) as (a, b),
        stuck_dial(a, b) as (dial, served),
    ):

        def answer(message: bytes, is_last: bool) -> None:
            served.send(message)
            for _ in range(_TURNS if is_last else 0):
                runtime.fire()

        server = ServerHandshake(Identity(job_id("job"), 0, 1, 2, CONTROL), KEY, os.urandom)
        answer(server.challenge(await read(served, HELLO_SIZE)), last == "challenge")
        answer(server.verdict(await read(served, PROOF_SIZE), lambda _: Status.OK), last == "verdict")
        assert server.accept(await read(served, CONFIRM_SIZE)).rank == 0
        link = await dial
        assert link is not None
        link.close()


async def test_failed_dial_ends_a_connection_inherited_by_a_forked_child() -> None:
    inherited: list[socket.socket] = []

    async def open_and_duplicate(loop: asyncio.AbstractEventLoop, sock: socket.socket, *, dialled: bool) -> ByteStream:
        inherited.append(sock.dup())
        return await open_plain(loop, sock, dialled=dialled)

    async with started(2, open_stream=open_and_duplicate) as (a, b), stuck_dial(a, b) as (dial, served):
        await read(served, HELLO_SIZE)
        dial.cancel()
        await asyncio.wait([dial])
        async with asyncio.timeout(10):
            assert await read(served, 1) == b""
    (each,) = inherited
    each.close()


async def test_handshake_message_that_arrived_while_the_loop_was_blocked_is_in_time() -> None:
    """Let the handshake timeout pass in a blocked loop; a peer that has already replied must get its link."""
    async with started(2, handshake_timeout=0.01) as (_, b), stranger(b.card) as sock:
        client = make_client(0)
        assert await prove_key(sock, client) is Status.OK
        sock.send(client.last_word)
        block(0.02)
        await b.until(lambda: b.accepted)
        assert len(b.links) == 1


async def test_handshake_can_take_several_slow_loop_iterations(flavour: str) -> None:
    """Make loop iterations longer than the handshake timeout, as when many ranks of one loop connect at once."""
    loop, seconds = asyncio.get_running_loop(), 0.01

    def slow_iteration() -> None:
        nonlocal handle
        block(seconds)
        handle = loop.call_soon(slow_iteration)

    async with started(2, flavour, handshake_timeout=seconds) as (a, b):
        handle = loop.call_soon(slow_iteration)
        try:
            assert await a.connect(b) is not None
        finally:
            handle.cancel()


def block(seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


async def test_client_with_a_malformed_hello_is_disconnected_at_once(flavour: str) -> None:
    async with started(2, flavour) as (_, b):
        request = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 8
        for garbage in (request, b"\0" * HELLO_SIZE, b"\x16" * HELLO_SIZE, os.urandom(4096)):
            async with stranger(b.card) as sock:
                sock.send(garbage)
                answer = await read(sock, HELLO_SIZE)
                if flavour == "tls" and answer:  # OpenSSL sends a fatal alert if the first byte is a valid record type
                    assert (answer[0], answer[3:6]) == (21, b"\0\2\2"), answer
                    assert len(answer) == 7
                else:
                    assert answer == b""
        assert b.accepted == []


async def test_unauthenticated_clients_do_not_disturb_ranks(flavour: str) -> None:
    async with started(2, flavour) as (a, b):
        garbage = [await address.reach(*reach_arguments(b.card)) for _ in range(2 * MIN_PLACES)]
        for number, sock in enumerate(garbage):
            if number % 2:
                sock.send(b"\xff" * HELLO_SIZE)
        assert await a.connect(b) is not None
        assert len(b.transport._unproven) <= MIN_PLACES
        for sock in garbage:
            sock.close()
        await settle(b)
        assert [link.peer for link in b.links] == [0]


def reach_arguments(card: Card) -> tuple[asyncio.AbstractEventLoop, int, object]:
    loop = asyncio.get_running_loop()
    if card["unix"]:
        return loop, socket.AF_UNIX, address.unix_address(card["unix"])
    return loop, address.family_of(card["tcp"][0]), tuple(card["tcp"])


async def test_oldest_pending_handshake_is_closed_first() -> None:
    async with started(2) as (_, b):
        loop = asyncio.get_running_loop()
        silent = [await address.reach(*reach_arguments(b.card)) for _ in range(MIN_PLACES + 1)]
        assert await read(silent[0], 1) == b""
        await loop.sock_sendall(silent[1], make_client(0).hello())
        assert len(await read(silent[1], CHALLENGE_SIZE)) == CHALLENGE_SIZE
        for sock in silent:
            sock.close()


class TickingClock(Runtime):
    """A runtime whose clock advances by `seconds` at each reading."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: int = 1) -> None:
        super().__init__(loop)
        self.time = map(float, count(0, seconds)).__next__


async def test_connect_to_an_unreachable_peer_raises_peer_lost_error(flavour: str) -> None:
    runtime = TickingClock(asyncio.get_running_loop())
    async with started(2, flavour, runtime=runtime, connect_timeout=6.0) as (a, b):
        where = "{} port {}".format(*b.card["tcp"]) if b.card["tcp"] else f"unix socket {b.card['unix']}"
        await b.transport.aclose()
        with pytest.raises(PeerLostError) as caught:
            await a.connect(b)
        # The clock advances by a second per reading: further attempts start at seconds 1 to 5, and the timeout is 6 s.
        assert str(caught.value) == f"rank 1 cannot be reached at {where}: Connection refused (tried for 7.0 s)"
        assert caught.value.ranks == (1,)
        assert caught.value.how == "unreachable"


async def test_authenticated_peer_is_not_reported_as_silent() -> None:
    """Keep an authenticated connection open that does not become a link; when it closes, the waiting rank dials."""
    runtime = TickingClock(asyncio.get_running_loop(), 3)
    async with started(2, runtime=runtime, connect_timeout=1000.0, handshake_timeout=0.01) as (a, b):
        b.transport.set_all_met()
        async with stranger(b.card) as sock:
            assert await prove_key(sock, make_client(0)) is Status.OK
            dial = asyncio.create_task(b.connect(a))
            while runtime.time() < 2 * UNREACHABLE_AFTER:
                await asyncio.wait([dial], timeout=0.01)
            assert not dial.done()
        assert await dial is not None


async def test_connect_to_a_silent_peer_raises_peer_lost_error() -> None:
    async with started(2, connect_timeout=0.03, handshake_timeout=0.01) as (a, b):
        silent, name = address.open_unix(os.urandom)
        with silent, pytest.raises(PeerLostError, match="it does not answer"):
            await a.transport.connect(1, {**b.card, "unix": name}, CONTROL)


async def test_peer_that_closes_during_the_handshake_is_dialled_again() -> None:
    async with started(2) as (a, b):
        listener, name = address.open_unix(os.urandom)
        loop = asyncio.get_running_loop()
        dial = asyncio.create_task(a.transport.connect(1, {**b.card, "unix": name}, CONTROL))
        with listener:
            (await loop.sock_accept(listener))[0].close()
            for sent_bytes in (HELLO_SIZE, PROOF_SIZE):
                sock, _ = await loop.sock_accept(listener)
                with sock:
                    await read(sock, HELLO_SIZE)
                    if sent_bytes == PROOF_SIZE:
                        sock.send(make_client(1).hello())  # the dialler cannot verify a challenge alone
                        await read(sock, PROOF_SIZE)
            sock, _ = await loop.sock_accept(listener)
            with sock:
                server, verdict = await serve(sock, 1, lambda _: Status.OK)
                sock.send(verdict)
                link = await dial
                assert server.accept(await read(sock, CONFIRM_SIZE)).rank == 0
                link.close()


async def test_connect_waits_for_a_late_listener() -> None:
    async with started(2) as (a, b):
        listener, name = address.open_unix(os.urandom)
        listener.close()
        b.card = {**b.card, "unix": name}
        dial = asyncio.create_task(a.connect(b))
        await asyncio.sleep(0)
        late = socket.socket(socket.AF_UNIX)
        late.bind(address.unix_address(name))
        late.setblocking(False)
        late.listen()
        b.transport._listeners.add(late)
        assert await dial is not None


async def test_connect_during_another_connect_to_the_peer_is_refused() -> None:
    async with started(2) as (a, b):
        dial = asyncio.create_task(a.connect(b))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match=r"rank 0 is already connecting to rank 1 \(CONTROL\)"):
            await a.connect(b)
        assert await dial is not None


async def test_card_of_a_rank_contains_addresses_and_capabilities() -> None:
    async with started(1, "unix") as (a,), started(1, "tcp") as (b,):
        host, process = address.host_identity(), list(this_process())
        assert a.card == {
            "host": host,
            "unix": a.card["unix"],
            "tcp": None,
            "process": process,
            "piece": 0,
            "reads": False,
            "nans": nan_fingerprint(),
            "native": core is not None,
        }
        assert a.card["unix"].startswith("@aiocoll-")
        assert (b.card["unix"], b.card["tcp"][0]) == (None, "127.0.0.1")
    async with started(1, "shm") as (c,):
        assert c.card["piece"] == SEGMENT // 2
        assert c.card["reads"] == (can_read() is None)


async def test_auto_transport_uses_unix_on_one_host_and_tcp_between_hosts() -> None:
    runtime = Runtime(asyncio.get_running_loop())
    options = [StreamOptions(host_id=host) for host in "aab"]
    ranks = [Rank(StreamTransport(runtime, rank, 3, "job", KEY, each)) for rank, each in enumerate(options)]
    for rank in ranks:
        await rank.transport.listen()
        rank.card = await rank.transport.listen_tcp("127.0.0.1")
    same, other = await asyncio.gather(ranks[0].connect(ranks[1]), ranks[0].connect(ranks[2]))
    assert socket_of(same).family == socket.AF_UNIX
    assert socket_of(other).family == socket.AF_INET
    await settle(*ranks)
    for rank in ranks:
        await rank.transport.aclose()
        rank.close()


@pytest.mark.parametrize("trouble", ["missing", "another user"])
async def test_tcp_is_used_if_the_unix_socket_is_unusable(trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give both ranks the same host id, although the unix socket belongs to another machine or another user."""
    runtime = Runtime(asyncio.get_running_loop())
    ranks = [Rank(StreamTransport(runtime, r, 2, "job", KEY, StreamOptions(host_id="one"))) for r in range(2)]
    for rank in ranks:
        await rank.transport.listen()
        rank.card = await rank.transport.listen_tcp("127.0.0.1")
        if trouble == "missing":
            rank.card = {**rank.card, "unix": "@aiocoll-elsewhere"}
    if trouble == "another user":
        own_uid = os.geteuid()
        monkeypatch.setattr(users, "peer_uid", lambda _: own_uid + 1)
    for kind, (one, other) in ((CONTROL, ranks), (DATA, ranks[::-1])):
        link = await one.connect(other, kind)
        assert link is not None
        assert socket_of(link).family == socket.AF_INET
        carrier, why = one.transport.carrier(other.transport.rank)
        assert carrier == ("tcp" if kind is DATA else "none")
        assert ("Connection refused" if trouble == "missing" else f"belongs to user {os.geteuid() + 1}") in why
    await settle(*ranks)
    for rank in ranks:
        await rank.transport.aclose()
        rank.close()


async def test_connect_without_a_common_transport_fails() -> None:
    async with started(2, "unix", host_id="a") as (a, b), started(2, "tcp", host_id="b") as (c, d):
        with pytest.raises(RendezvousError, match="transport='unix' on rank 0, but rank 1 is on another host"):
            await a.connect(d)
        with pytest.raises(RendezvousError, match="rank 1 is on this host, but has no unix socket"):
            await a.transport.connect(1, {**b.card, "unix": None}, CONTROL)
        with pytest.raises(RendezvousError, match="rank 1 does not listen on any address that rank 0 could use"):
            await c.connect(b)
        with pytest.raises(ValueError, match="transport='unix' opens no TCP listener"):
            await a.transport.listen_tcp("127.0.0.1")


async def test_loopback_address_of_another_host_is_refused() -> None:
    runtime = TickingClock(asyncio.get_running_loop())
    async with started(2, "tcp", host_id="a", runtime=runtime, connect_timeout=3.0) as (a, b):
        b.card = {**b.card, "host": "another"}
        await b.transport.aclose()
        with pytest.raises(PeerLostError, match="which other hosts cannot reach: Connection refused"):
            await a.connect(b)


async def test_connection_to_another_host_requires_a_key() -> None:
    async with started(2, "tcp", key=None) as (a, b):
        with pytest.raises(AuthenticationError, match=r"192\.0\.2\.254 can be reached from .*`aiocoll run`"):
            await a.transport.listen_tcp("192.0.2.254")
        with pytest.raises(AuthenticationError, match=r"192\.0\.2\.254 can be reached from .*job_key="):
            await a.transport.connect(1, {**b.card, "tcp": ["192.0.2.254", 1]}, CONTROL)


async def test_tcp_transport_without_a_job_key_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    async with started(2, "tcp", key=None) as (a, b):
        assert await a.connect(b) is not None
        assert await a.connect(b, DATA) is not None
        await settle(b)
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2  # one from each rank
    assert "rank 0 uses TCP on 127.0.0.1 without a job key" in warnings[0].getMessage()


async def test_unix_transport_without_a_job_key_logs_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    async with started(2, "unix", key=None) as (a, b):
        assert await a.connect(b) is not None
        await settle(b)
        assert len(b.links) == 1
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_listener_on_all_addresses_publishes_one_address() -> None:
    async with started(2, "tcp") as (a, b):
        with pytest.raises(ValueError, match=r"listening on 0\.0\.0\.0 needs advertise="):
            await b.transport.listen_tcp("0.0.0.0")
        b.card = await b.transport.listen_tcp("0.0.0.0", "127.0.0.1")
        assert b.card["tcp"][0] == "127.0.0.1"
        assert await a.connect(b) is not None


@pytest.mark.parametrize("flavour", PLAIN, indirect=True)
async def test_close_of_the_transport_ends_handshakes_and_dials(flavour: str) -> None:
    async with started(3, flavour) as (a, b, c):
        await c.transport.aclose()
        dial = asyncio.create_task(a.connect(c))
        async with stranger(a.card) as silent, stranger(a.card) as halfway:
            assert await prove_key(halfway, make_client(1, 3)) is Status.OK
            waiting = asyncio.create_task(a.connect(b))
            await asyncio.sleep(0)
            await a.transport.aclose()
            assert await read(silent, 1) == await read(halfway, 1) == b""
        for task, peer in ((dial, 2), (waiting, 1)):
            with pytest.raises(GroupClosedError, match=f"rank 0 closed its transport while connecting to rank {peer}"):
                await task
        with pytest.raises(GroupClosedError):
            await a.connect(b)
        assert a.transport.card["unix"] is a.transport.card["tcp"] is None
        await a.transport.aclose()


async def test_open_links_outlive_their_transport() -> None:
    async with started(2) as (a, b):
        link = await a.connect(b)
        await settle(b)
        await a.transport.aclose()
        await b.transport.aclose()
        send_number(link, 3)
        await b.until(lambda: b.received)
        assert b.received == [(0, 3)]


@pytest.mark.parametrize("turns", range(24))
async def test_cancelled_connect_leaves_no_open_sockets(flavour: str, turns: int) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    async with started(2, flavour) as (a, b):
        dial = asyncio.create_task(a.connect(b))
        for _ in range(turns):
            await asyncio.sleep(0)
        dial.cancel()
        await asyncio.wait([dial])
        await settle(b)
        assert await a.connect(b) is not None or not dial.cancelled()
        # The peer must not have had a link: it would have reported the end of the link as a lost rank.
        assert b.lost_peers == []
        del dial  # the traceback of `dial` references the sockets
    del a, b  # a link keeps its mapped memory until it is deleted
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_link_that_the_peer_has_lost_is_replaced(flavour: str) -> None:
    """Let rank 1 miss the end of the link; rank 1 must accept a new link, since rank 0 proves to have none."""
    async with started(2, flavour) as (zero, one):
        for ended in range(3):
            link = await zero.connect(one)
            assert link is not None
            await one.until(lambda: one.links)
            (other,) = one.links
            asyncio.get_running_loop().remove_reader(socket_of(other).fileno())
            link.close()
            assert not other.closed
            await zero.connect(one)
            await one.until(lambda ended=ended: len(one.lost_peers) == ended + 1)
            assert other.closed
            await one.until(lambda: one.links)
            for rank in (zero, one):
                for each in rank.links:
                    each.close()


async def test_earlier_dial_does_not_end_a_newer_link(flavour: str) -> None:
    """Check that the proof of a peer to have lost its link ends only links that were opened before the proof."""
    async with started(2, flavour) as (zero, one):
        kind = DATA if flavour == "shm" else CONTROL
        link = await zero.connect(one)
        assert link is not None
        await one.until(lambda: one.links)
        (other,) = one.links
        one.transport._links.catch_up((0, kind), 0)
        assert not other.closed
        one.transport._links.catch_up((0, kind), 1 << 15)  # an older count of links, sent modulo 65536
        assert not other.closed
        one.transport._links.catch_up((0, kind), 1)
        assert other.closed
        assert one.lost_peers == [0]
