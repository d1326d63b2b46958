"""Negotiation of shared memory: after a failure at any step, both ranks use the socket, or both get an error."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import mmap
import os
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import pytest

from aiocoll.errors import ProtocolError
from aiocoll.runtime import Runtime
from aiocoll.transport.shm import dial, transport
from aiocoll.transport.shm.descriptors import recv_fds
from aiocoll.transport.shm.doorbell import Doorbell
from aiocoll.transport.shm.fence import fences
from aiocoll.transport.shm.layout import LinkLayout, OutboxLayout
from aiocoll.transport.shm.link import LinkParts
from aiocoll.transport.shm.outbox import Outbox
from aiocoll.transport.shm.region import PAGE, OwnRegion
from aiocoll.transport.shm.transport import Sharing

from ..descriptors import descriptor_limit
from ..shared_memory import mapped
from .links import sockets

LAYOUT, OUTBOX = LinkLayout(2), OutboxLayout(2)
WARNING = "uses unix sockets instead of shared memory"


def stop_polling(moved: bool) -> bool:
    """Return False, so that a rank stops polling after each poll."""
    return False


class Ends:
    """Two ranks that can negotiate shared memory over a socket between them. Rank 0 dials."""

    def __init__(self, *wanted: bool) -> None:
        runtime = Runtime.of(asyncio.get_running_loop())
        self.socks = sockets("unix")
        self.ranks = [
            Sharing(runtime, rank, 2, stop_polling, wanted=each, single_copy=True)
            for rank, each in enumerate(wanted or (True, True))
        ]

    def propose(self) -> Awaitable[LinkParts | None]:
        return self._close_on_failure(0, self.ranks[0].propose(self.socks[0], 1))

    def accept(self) -> Awaitable[LinkParts | None]:
        return self._close_on_failure(1, self.ranks[1].accept(self.socks[1], 0))

    async def _close_on_failure(self, rank: int, sharing: Awaitable[LinkParts | None]) -> LinkParts | None:
        """Close the socket if the negotiation fails, as the transport does."""
        try:
            return await sharing
        except BaseException:
            self.socks[rank].close()
            raise

    async def negotiate(self) -> list[Any]:
        """Negotiate a link; return for each rank the parts of a link, None (use the socket), or an error."""
        return await asyncio.wait_for(asyncio.gather(self.propose(), self.accept(), return_exceptions=True), 20)

    def end(self, results: list[Any]) -> None:
        for rank, result in zip(self.ranks, results, strict=True):
            if isinstance(result, LinkParts):
                rank.release_parts(result)
        for sock in self.socks:
            sock.close()
        assert mapped() == [], "memory is still mapped"


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Disable garbage collection, which would unmap leaked memory and so hide the leak."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@asynccontextmanager
async def negotiated(*wanted: bool) -> AsyncIterator[tuple[Ends, list[Any]]]:
    ends = Ends(*wanted)
    results = await ends.negotiate()
    try:
        yield ends, results
    finally:
        ends.end(results)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


def are_of_one_kind(results: list[Any]) -> bool:
    """Return whether both ranks have the same kind of result: a shared-memory link, the socket, or an error."""
    kinds = {
        "none" if result is None else "error" if isinstance(result, BaseException) else "pair" for result in results
    }
    return len(kinds) == 1


async def test_both_ends_of_a_link_map_the_same_region() -> None:
    async with negotiated() as (_, (near, far)):
        assert (near.direction, far.direction) == (0, 1)
        assert near.own.layout.directions == far.own.layout.directions
        near.region.memory[PAGE : PAGE + 5] = b"hello"
        assert far.region.memory[PAGE : PAGE + 5] == b"hello"


@pytest.mark.parametrize("wanted", [(False, True), (True, False), (False, False)])
async def test_either_end_of_a_link_can_decline_shared_memory(
    wanted: tuple[bool, bool], caplog: pytest.LogCaptureFixture
) -> None:
    async with negotiated(*wanted) as (ends, results):
        assert results == [None, None]
        assert [rank.trouble is None for rank in ends.ranks] == list(wanted)
        assert_socket_is_empty(ends)
    assert warnings(caplog) == []


def assert_socket_is_empty(ends: Ends) -> None:
    """Assert that no unread bytes of the negotiation are left in the socket."""
    near, far = ends.socks
    near.send(b"from near")
    far.send(b"from far")
    assert (near.recv(100), far.recv(100)) == (b"from far", b"from near")


#: System calls that may fail on either rank: module, function and error number.
FAILURES: dict[str, tuple[Any, str, int]] = {
    "no memfd in the kernel": (os, "memfd_create", errno.ENOSYS),
    "memfd forbidden": (os, "memfd_create", errno.EPERM),
    "file too large": (os, "ftruncate", errno.EFBIG),
    "no descriptor for the doorbell": (os, "eventfd", errno.EMFILE),
    "no address space": (mmap, "mmap", errno.ENOMEM),
    "too many descriptors on the way": (socket, "send_fds", errno.ETOOMANYREFS),
}


class FailingCall:
    """A function whose calls from number `first` on fail `times` times, counted over both ranks."""

    def __init__(self, module: Any, name: str, code: int, first: int, times: int) -> None:
        self.original: Callable[..., Any] = getattr(module, name)
        self.code = code
        self.calls = 0
        self.when = range(first, first + times)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls - 1 in self.when:
            raise OSError(self.code, os.strerror(self.code))
        return self.original(*args, **kwargs)


@pytest.mark.parametrize("times", [1, 1000])
@pytest.mark.parametrize("failure", FAILURES)
async def test_refused_system_call_makes_both_ends_use_the_socket(
    failure: str, times: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Let each system call fail; both ranks must use the socket, and each refusing rank must warn with the reason."""
    module, name, code = FAILURES[failure]
    for first in range(20):
        failing = FailingCall(module, name, code, first, times)
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing)
            async with negotiated() as (ends, results):
                if failing.calls <= first:
                    assert all(isinstance(result, LinkParts) for result in results)
                    break
                assert results == [None, None]
                assert_socket_is_empty(ends)
                troubled = [rank.trouble for rank in ends.ranks if rank.trouble is not None]
                assert len(warnings(caplog)) == len(troubled) >= 1
                assert all(os.strerror(code) in trouble for trouble in troubled)
    assert first >= 1


async def test_rank_without_shared_memory_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "memfd_create", FailingCall(os, "memfd_create", errno.EPERM, 0, 1))
    ends = Ends()
    for _ in range(3):
        assert await ends.negotiate() == [None, None]
    assert len(warnings(caplog)) == 1
    ends.end([None, None])


async def test_lack_of_file_descriptors_at_any_step_makes_both_ends_use_the_socket(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Limit the number of open files: beyond the limit, the kernel drops received descriptors without an error."""
    outcomes = []
    for more in range(40):
        ends = Ends()
        caplog.clear()
        with descriptor_limit(more):
            results = await ends.negotiate()
        ends_well = all(isinstance(result, LinkParts) for result in results)
        outcomes.append(ends_well)
        assert are_of_one_kind(results), (more, results)
        assert not any(isinstance(result, Exception) for result in results), (more, results)
        if not ends_well:
            assert_socket_is_empty(ends)
            assert 1 <= len(warnings(caplog)) <= 2
        ends.end(results)
        if ends_well:
            break
    assert outcomes.count(False) >= 5
    assert outcomes[-1]


async def test_dialler_cancelled_at_any_step_leaves_no_one_sided_link() -> None:
    """Check that the acceptor gets an error, and no link, if the dialler is cancelled before its decision."""
    completed = []
    for turns in range(1, 100):
        ends = Ends()
        tasks = [asyncio.ensure_future(ends.propose()), asyncio.ensure_future(ends.accept())]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[0].cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        completed.append(isinstance(results[0], LinkParts))
        assert are_of_one_kind(results), (turns, results)
        if not completed[-1]:
            assert isinstance(results[1], ConnectionError), (turns, results)
        ends.end(results)
        if completed[-1]:
            break
    assert completed == sorted(completed)
    assert completed.count(False) >= 3
    assert completed[-1]


async def test_dialler_whose_timeout_expires_in_a_blocked_loop_has_no_link() -> None:
    """Let the reply and the timeout reach the dialler in the same loop iteration; neither rank may get a link."""
    ends = Ends()
    tasks = [asyncio.ensure_future(ends.propose()), asyncio.ensure_future(ends.accept())]
    cancelled = asyncio.Event()
    asyncio.get_running_loop().call_soon(cancel_when_readable, ends.socks[0], tasks[0], cancelled)
    await cancelled.wait()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(results[1], ConnectionError)
    ends.end(results)


def cancel_when_readable(sock: socket.socket, task: asyncio.Future[Any], cancelled: asyncio.Event) -> None:
    """Cancel `task` in the same loop iteration in which its socket becomes readable."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        asyncio.get_running_loop().call_soon(cancel_when_readable, sock, task, cancelled)
    else:
        task.cancel()
        cancelled.set()


async def wait_until_readable(sock: socket.socket) -> None:
    """Wait until the socket is readable, without reading its data."""
    loop = asyncio.get_running_loop()
    became_readable = asyncio.Event()
    loop.add_reader(sock.fileno(), became_readable.set)
    await became_readable.wait()
    loop.remove_reader(sock.fileno())


def is_closed(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_acceptor_cancelled_at_any_step_leaves_no_one_sided_link() -> None:
    """Check that the dialler gets an error, or after its decision a link whose socket is closed."""
    completed = []
    for turns in range(1, 100):
        ends = Ends()
        tasks = [asyncio.ensure_future(ends.propose()), asyncio.ensure_future(ends.accept())]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[1].cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        completed.append(isinstance(results[1], LinkParts))
        if not completed[-1]:
            assert isinstance(results[1], asyncio.CancelledError)
            if isinstance(results[0], LinkParts):
                assert is_closed(ends.socks[0])
            else:
                assert isinstance(results[0], ConnectionError)
        ends.end(results)
        if completed[-1]:
            break
    assert completed[-1]
    assert len(completed) > 3


@pytest.mark.parametrize("silent", [0, 1])
async def test_socket_closed_during_negotiation_raises_an_error_at_the_peer(silent: int) -> None:
    ends = Ends()
    ends.socks[silent].close()
    with pytest.raises(ConnectionError) as raised:
        await (ends.accept() if silent == 0 else ends.propose())
    ends.end([raised.value, None])


async def test_busy_thread_pool_does_not_delay_a_shared_memory_link() -> None:
    """Use a default executor without threads, since the negotiation must not need any thread."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadlessExecutor())
    async with negotiated() as (_, results):
        assert all(isinstance(result, LinkParts) for result in results)


async def test_abandoned_shared_memory_link_returns_its_lane() -> None:
    """Abandon more links than an outbox has lanes; each abandoned link must return its lane."""
    ends = Ends()
    kept, socks = await ends.negotiate(), ends.socks  # keep this link, which keeps the outboxes open
    for _ in range(OutboxLayout(2).lanes + 1):
        ends.socks = sockets("unix")
        results = await ends.negotiate()
        assert all(isinstance(result, LinkParts) for result in results)
        for rank, result in zip(ends.ranks, results, strict=True):
            rank.release_parts(result)
        for sock in ends.socks:
            sock.close()
    ends.socks = socks
    ends.end(kept)


class ThreadlessExecutor(ThreadPoolExecutor):
    def submit(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("can't start new thread")


# -- malformed offers: the offer of a faulty peer must leave no descriptor and no memory open


def message(offered: int = 1, ranks: int = 2, lane: int = 0) -> bytes:
    return dial._MESSAGE.pack(offered, False, False, ranks, lane, 0, 0)


def null_device(_: int) -> int:
    return os.open("/dev/null", os.O_RDWR | os.O_NONBLOCK)


def unsealed_memory(nbytes: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd


def eventfd(_: int) -> int:
    return os.eventfd(0, os.EFD_NONBLOCK)


def full_eventfd(_: int) -> int:
    fd = eventfd(0)
    os.eventfd_write(fd, 2**64 - 2)
    return fd


def blocking_eventfd(_: int) -> int:
    return os.eventfd(2**32 - 1)


def pipe(_: int) -> int:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.close(reader)
    return writer


def regular_file(nbytes: int) -> int:
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR | os.O_NONBLOCK)
    os.ftruncate(fd, nbytes)
    return fd


def closed_stream(_: int) -> int:
    ends = socket.socketpair()
    ends[1].close()
    ends[0].setblocking(False)
    return ends[0].detach()


def epoll_descriptor(_: int) -> int:
    with select.epoll() as epoll:
        os.set_blocking(epoll.fileno(), False)
        return os.dup(epoll.fileno())


def memory_with_seals(nbytes: int, seals: int, flags: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def sealed_memory(nbytes: int) -> int:
    fd = memory_with_seals(nbytes, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    os.posix_fallocate(fd, 0, nbytes)
    return fd


def smaller_memory(nbytes: int) -> int:
    return sealed_memory(nbytes - 1)


def larger_memory(nbytes: int) -> int:
    return sealed_memory(nbytes + 1)


def unwritable_memory(nbytes: int) -> int:
    return memory_with_seals(nbytes, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)


def read_only_memory(nbytes: int) -> int:
    fd = sealed_memory(nbytes)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


def own_memory(nbytes: int) -> int:
    """Return the descriptor of memory that only its owner can write."""
    region = OwnRegion(nbytes, (0, PAGE))
    fd = os.dup(region.fd)
    region.close()
    return fd


#: Functions that make invalid doorbells: other descriptors than an eventfd, or an eventfd that blocks its writer.
DOORBELLS = [blocking_eventfd, pipe, regular_file, closed_stream, epoll_descriptor, null_device, sealed_memory]
#: Functions that make invalid link regions: other descriptors than sealed, writable memory of the correct size.
MEMORIES = [
    unsealed_memory,
    smaller_memory,
    larger_memory,
    unwritable_memory,
    read_only_memory,
    regular_file,
    null_device,
    pipe,
    eventfd,
]
#: Functions that make invalid outboxes: other descriptors than memory that only its owner can write.
OUTBOXES = [unsealed_memory, smaller_memory, larger_memory, regular_file, null_device, pipe, eventfd]


OFFERS: dict[str, tuple[bytes, list[Callable[[int], int]], type[Exception] | None]] = {
    "closed connection": (b"", [], ConnectionResetError),
    "half a message": (message()[:5], [], ConnectionResetError),
    "refusal with descriptors": (message(0), [sealed_memory, sealed_memory, eventfd], None),
    "memory smaller than announced": (message(), [smaller_memory, sealed_memory, eventfd], ProtocolError),
    "memory larger than announced": (message(), [larger_memory, sealed_memory, eventfd], ProtocolError),
    "memory for another host": (message(ranks=1000), [sealed_memory, sealed_memory, eventfd], ProtocolError),
    "missing lane": (message(lane=OUTBOX.lanes), [sealed_memory, sealed_memory, eventfd], ProtocolError),
    "outbox too small": (message(), [sealed_memory, smaller_memory, eventfd], ProtocolError),
    "unsealed memory": (message(), [unsealed_memory, sealed_memory, eventfd], ProtocolError),
    "unsealed outbox": (message(), [sealed_memory, unsealed_memory, eventfd], ProtocolError),
    "device instead of memory": (message(), [null_device, sealed_memory, eventfd], ProtocolError),
    "device instead of an outbox": (message(), [sealed_memory, null_device, eventfd], ProtocolError),
    **{f"{each.__name__} for memory": (message(), [each, sealed_memory, eventfd], ProtocolError) for each in MEMORIES},
    **{
        f"{each.__name__} for an outbox": (message(), [sealed_memory, each, eventfd], ProtocolError)
        for each in OUTBOXES
    },
    **{
        f"{each.__name__} for a doorbell": (message(), [sealed_memory, sealed_memory, each], ProtocolError)
        for each in DOORBELLS
    },
}


@pytest.mark.parametrize("offer", OFFERS)
async def test_malformed_offer_of_shared_memory_is_refused(offer: str) -> None:
    data, makers, expected = OFFERS[offer]
    ends = Ends()
    fds = [make(OUTBOX.nbytes if number == 1 else LAYOUT.nbytes) for number, make in enumerate(makers)]
    if data:
        socket.send_fds(ends.socks[0], [data], fds)
    for fd in fds:
        os.close(fd)
    ends.socks[0].shutdown(socket.SHUT_WR)
    result = None
    if expected is None:
        assert await ends.accept() is None
    else:
        with pytest.raises(expected) as raised:
            await ends.accept()
        result = raised.value
    assert ends.ranks[1].trouble is None
    ends.end([None, result])


@pytest.mark.parametrize(
    ("data", "makers", "expected"),
    [
        (message(ranks=3), [own_memory, eventfd], ProtocolError),
        (message(lane=OUTBOX.lanes), [own_memory, eventfd], ProtocolError),
        (message(), [own_memory, eventfd, eventfd], LinkParts),  # the kernel drops the third, surplus descriptor
        (message(), [sealed_memory, eventfd], LinkParts),  # memory as from a kernel without F_SEAL_FUTURE_WRITE
        (message(), [unsealed_memory, eventfd], ProtocolError),
        (message(), [null_device, eventfd], ProtocolError),
        *((message(), [each, eventfd], ProtocolError) for each in OUTBOXES),
        *((message(), [sealed_memory, each], ProtocolError) for each in DOORBELLS),
    ],
)
async def test_malformed_reply_to_a_shared_memory_offer_is_refused(
    data: bytes, makers: list[Callable[[int], int]], expected: type
) -> None:
    ends = Ends()
    task = asyncio.ensure_future(ends.propose())
    await wait_until_readable(ends.socks[1])
    _, fds = recv_fds(ends.socks[1], dial._MESSAGE.size, 3)
    dial._close(fds)
    fds = [make(OUTBOX.nbytes) for make in makers]
    socket.send_fds(ends.socks[1], [data], fds)
    dial._close(fds)
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, expected)
    assert ends.ranks[0].trouble is None
    ends.end([result, None])


async def test_full_doorbell_of_a_peer_does_not_block_the_link() -> None:
    """Fill the peer's doorbell: a ring would block, and is not needed, since a full doorbell wakes the peer anyway."""
    ends = Ends()
    task = asyncio.ensure_future(ends.propose())
    await wait_until_readable(ends.socks[1])
    _, fds = recv_fds(ends.socks[1], dial._MESSAGE.size, 3)
    dial._close(fds)
    outbox = OwnRegion(OUTBOX.nbytes, (0, PAGE))
    outbox.memory[0] = 1
    fds = [os.dup(outbox.fd), full_eventfd(0)]
    socket.send_fds(ends.socks[1], [message()], fds)
    dial._close(fds)
    pair = await task
    assert isinstance(pair, LinkParts)
    pair.peer.doorbell.ring()
    await asyncio.sleep(0)
    outbox.close()
    ends.end([pair, None])


async def test_link_uses_the_socket_if_descriptors_cannot_be_checked_without_proc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "readlink", FailingCall(os, "readlink", errno.ENOENT, 0, 1))
    async with negotiated() as (ends, results):
        assert results == [None, None]
        assert any(os.strerror(errno.ENOENT) in str(rank.trouble) for rank in ends.ranks)
        assert_socket_is_empty(ends)


async def test_refusal_that_contains_file_descriptors_is_accepted() -> None:
    ends = Ends()
    task = asyncio.ensure_future(ends.propose())
    await wait_until_readable(ends.socks[1])
    _, fds = recv_fds(ends.socks[1], dial._MESSAGE.size, 3)
    socket.send_fds(ends.socks[1], [message(0)], fds[:2])
    dial._close(fds)
    assert await task is None
    ends.end([None, None])


# -- this machine


@pytest.mark.parametrize(
    ("function", "found", "reason"), [("fences", None, "libatomic"), ("has_atomic_stores", False, "in two steps")]
)
async def test_machine_without_fences_or_atomic_stores_uses_the_socket(
    function: str, found: bool | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Simulate a machine without memory fences, and a process that writes 64-bit words in two steps."""
    monkeypatch.setattr(transport, function, lambda: found)
    async with negotiated() as (ends, results):
        assert results == [None, None]
        assert all(reason in str(rank.trouble) for rank in ends.ranks)


async def test_python_without_memfd_uses_the_socket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Remove `os.memfd_create`, which is missing if Python was built for an old system."""
    monkeypatch.delattr(os, "memfd_create")
    async with negotiated() as (ends, results):
        assert results == [None, None]
        assert all("memfd" in str(rank.trouble) for rank in ends.ranks)
        assert_socket_is_empty(ends)
    assert len(warnings(caplog)) <= 2


async def test_doorbell_is_closed_with_the_last_shared_memory_link() -> None:
    ends = Ends()
    results = await ends.negotiate()
    doorbell = results[0].own.doorbell
    again = sockets("unix")
    second = await asyncio.gather(ends.ranks[0].propose(again[0], 1), ends.ranks[1].accept(again[1], 0))
    assert second[0] is not None
    assert second[0].own.doorbell is doorbell
    for rank, pair in zip(ends.ranks, results, strict=True):
        rank.release_parts(pair)
    assert not doorbell.closed
    ends.end(second)
    assert doorbell.closed
    ends.ranks[0].catch_up()
    for sock in again:
        sock.close()


async def test_lane_of_an_abandoned_shared_memory_link_is_reused() -> None:
    """Keep the outbox open with another link, so that lanes would run out if abandoned links kept their lanes."""
    ends = Ends()
    first = await ends.negotiate()
    lanes = [first[0].own.lane.number]
    for _ in range(OUTBOX.lanes):
        pairs = await ends.negotiate()
        lane = pairs[0].own.lane
        lanes.append(lane.number)
        lane.connect(pairs[0].peer.outbox.words)
        for rank, pair in zip(ends.ranks, pairs, strict=True):
            rank.release_parts(pair)
        assert not lane.is_linked
    assert lanes == [1] + [2] * OUTBOX.lanes, "the spare lane of the abandoned link was not reused"
    pairs.clear()
    del lane, pair
    ends.end(first)


async def test_doorbell_that_cannot_be_registered_leaves_no_open_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    known = fences()
    assert known is not None
    monkeypatch.setattr(os, "eventfd", FailingCall(os, "eventfd", errno.EMFILE, 0, 1))
    with pytest.raises(OSError, match="Too many open files") as raised:
        Doorbell(Runtime.of(asyncio.get_running_loop()), known, stop_polling, Outbox(OUTBOX, known))
    assert mapped() == [], raised
