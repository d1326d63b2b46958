"""How two ranks come to share memory, or agree that they do not, whatever goes wrong on the way."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import mmap
import os
import resource
import select
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
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

from ..shared_memory import mapped
from .links import sockets

LAYOUT, OUTBOX = LinkLayout(2), OutboxLayout(2)
WARNING = "uses unix sockets instead of shared memory"


@contextmanager
def limited(more: int) -> Iterator[None]:
    """Let this process open `more` files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = os.dup(0)
    os.close(limit)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    # Descriptors are numbers below the limit, and the lowest free one is taken.
    while more:
        more -= limit not in used
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def rest(moved: bool) -> bool:
    """Poll no longer than needed."""
    return False


class Ends:
    """Two ranks with a socket between them, the first of which has dialled."""

    def __init__(self, *wanted: bool) -> None:
        runtime = Runtime.of(asyncio.get_running_loop())
        self.socks = sockets("unix")
        self.ranks = [
            Sharing(runtime, rank, 2, rest, wanted=each, single_copy=True)
            for rank, each in enumerate(wanted or (True, True))
        ]

    def propose(self) -> Awaitable[LinkParts | None]:
        return self._closing(0, self.ranks[0].propose(self.socks[0], 1))

    def accept(self) -> Awaitable[LinkParts | None]:
        return self._closing(1, self.ranks[1].accept(self.socks[1], 0))

    async def _closing(self, rank: int, sharing: Awaitable[LinkParts | None]) -> LinkParts | None:
        """As the transport does: whoever fails closes."""
        try:
            return await sharing
        except BaseException:
            self.socks[rank].close()
            raise

    async def meet(self) -> list[Any]:
        """Return what each has come to: a pair, None, or an error."""
        return await asyncio.wait_for(asyncio.gather(self.propose(), self.accept(), return_exceptions=True), 20)

    def end(self, results: list[Any]) -> None:
        for rank, result in zip(self.ranks, results, strict=True):
            if isinstance(result, LinkParts):
                rank.release_parts(result)
        for sock in self.socks:
            sock.close()
        assert mapped() == [], "whoever keeps the errors in `results` keeps no memory"


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Let nobody else unmap what was left."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@asynccontextmanager
async def meeting(*wanted: bool) -> AsyncIterator[tuple[Ends, list[Any]]]:
    ends = Ends(*wanted)
    results = await ends.meet()
    try:
        yield ends, results
    finally:
        ends.end(results)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if WARNING in record.getMessage()]


def agree(results: list[Any]) -> bool:
    """Whether both ends have come to the same: both share, both use the socket, or both have no link."""
    kinds = {
        "none" if result is None else "error" if isinstance(result, BaseException) else "pair" for result in results
    }
    return len(kinds) == 1


async def test_both_ends_map_one_region() -> None:
    async with meeting() as (_, (near, far)):
        assert (near.direction, far.direction) == (0, 1)
        assert near.own.layout.directions == far.own.layout.directions
        near.region.memory[PAGE : PAGE + 5] = b"hello"
        assert far.region.memory[PAGE : PAGE + 5] == b"hello"


@pytest.mark.parametrize("wanted", [(False, True), (True, False), (False, False)])
async def test_either_end_may_decline_shared_memory(
    wanted: tuple[bool, bool], caplog: pytest.LogCaptureFixture
) -> None:
    async with meeting(*wanted) as (ends, results):
        assert results == [None, None]
        assert [rank.trouble is None for rank in ends.ranks] == list(wanted)
        assert_the_socket_is_fresh(ends)
    assert warnings(caplog) == []


def assert_the_socket_is_fresh(ends: Ends) -> None:
    """Nothing of the negotiation is left in it."""
    near, far = ends.socks
    near.send(b"from near")
    far.send(b"from far")
    assert (near.recv(100), far.recv(100)) == (b"from far", b"from near")


#: What may fail in either end, and where: module, name, error.
FAILURES: dict[str, tuple[Any, str, int]] = {
    "no memfd in the kernel": (os, "memfd_create", errno.ENOSYS),
    "memfd forbidden": (os, "memfd_create", errno.EPERM),
    "file too large": (os, "ftruncate", errno.EFBIG),
    "no descriptor for the doorbell": (os, "eventfd", errno.EMFILE),
    "no address space": (mmap, "mmap", errno.ENOMEM),
    "too many descriptors on the way": (socket, "send_fds", errno.ETOOMANYREFS),
}


class Failing:
    """Calls fail from the `first` on, counted over both ends; for `times` calls."""

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
    """Whichever call it is, both ends use the socket; whose call it was warns, once, with the reason."""
    module, name, code = FAILURES[failure]
    for first in range(20):
        failing = Failing(module, name, code, first, times)
        caplog.clear()
        with monkeypatch.context() as patch:
            patch.setattr(module, name, failing)
            async with meeting() as (ends, results):
                if failing.calls <= first:
                    assert all(isinstance(result, LinkParts) for result in results)
                    break
                assert results == [None, None]
                assert_the_socket_is_fresh(ends)
                troubled = [rank.trouble for rank in ends.ranks if rank.trouble is not None]
                assert len(warnings(caplog)) == len(troubled) >= 1
                assert all(os.strerror(code) in trouble for trouble in troubled)
    assert first >= 1


async def test_rank_without_shared_memory_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "memfd_create", Failing(os, "memfd_create", errno.EPERM, 0, 1))
    ends = Ends()
    for _ in range(3):
        assert await ends.meet() == [None, None]
    assert len(warnings(caplog)) == 1
    ends.end([None, None])


async def test_lack_of_descriptors_at_every_step_makes_both_ends_use_the_socket(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Those that a process has no room for are lost on the way, without an error."""
    outcomes = []
    for more in range(40):
        ends = Ends()
        caplog.clear()
        with limited(more):
            results = await ends.meet()
        ends_well = all(isinstance(result, LinkParts) for result in results)
        outcomes.append(ends_well)
        assert agree(results), (more, results)
        assert not any(isinstance(result, Exception) for result in results), (more, results)
        if not ends_well:
            assert_the_socket_is_fresh(ends)
            assert 1 <= len(warnings(caplog)) <= 2
        ends.end(results)
        if ends_well:
            break
    assert outcomes.count(False) >= 5
    assert outcomes[-1]


async def test_dialler_cancelled_at_every_step_leaves_no_half_link() -> None:
    """It is the dialler that decides: no acceptor believes in a link that the dialler has given up."""
    completed = []
    for turns in range(1, 100):
        ends = Ends()
        tasks = [asyncio.ensure_future(ends.propose()), asyncio.ensure_future(ends.accept())]
        for _ in range(turns):
            await asyncio.sleep(0)
        tasks[0].cancel()
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        completed.append(isinstance(results[0], LinkParts))
        assert agree(results), (turns, results)
        if not completed[-1]:
            assert isinstance(results[1], ConnectionError), (turns, results)
        ends.end(results)
        if completed[-1]:
            break
    assert completed == sorted(completed)
    assert completed.count(False) >= 3
    assert completed[-1]


async def test_blocked_dialler_whose_time_ends_has_no_link() -> None:
    """Its answer has come and its time is over in one turn of the loop: then neither has a link."""
    ends = Ends()
    tasks = [asyncio.ensure_future(ends.propose()), asyncio.ensure_future(ends.accept())]
    turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(poll, ends.socks[0], tasks[0], turn)
    await turn.wait()
    results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
    assert isinstance(results[0], asyncio.CancelledError)
    assert isinstance(results[1], ConnectionError)
    ends.end(results)


def poll(sock: socket.socket, task: asyncio.Future[Any], turn: asyncio.Event) -> None:
    """Cancel `task` in the turn in which there is something to read for it."""
    try:
        sock.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        asyncio.get_running_loop().call_soon(poll, sock, task, turn)
    else:
        task.cancel()
        turn.set()


async def readable(sock: socket.socket) -> None:
    """Wait until there is something to read, and leave it there."""
    loop = asyncio.get_running_loop()
    come = asyncio.Event()
    loop.add_reader(sock.fileno(), come.set)
    await come.wait()
    loop.remove_reader(sock.fileno())


def is_over(sock: socket.socket) -> bool:
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


async def test_acceptor_cancelled_at_every_step_leaves_no_half_link() -> None:
    """Until the dialler has spoken, it learns of that; afterwards it has a link, whose socket says that it is over."""
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
                assert is_over(ends.socks[0])
            else:
                assert isinstance(results[0], ConnectionError)
        ends.end(results)
        if completed[-1]:
            break
    assert completed[-1]
    assert len(completed) > 3


@pytest.mark.parametrize("silent", [0, 1])
async def test_closed_end_raises_an_error_at_the_other(silent: int) -> None:
    ends = Ends()
    ends.socks[silent].close()
    with pytest.raises(ConnectionError) as raised:
        await (ends.accept() if silent == 0 else ends.propose())
    ends.end([raised.value, None])


async def test_busy_thread_pool_does_not_delay_a_link() -> None:
    """The program's own threads, or that there can be none, are no matter of ours."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(NoThreads())
    async with meeting() as (_, results):
        assert all(isinstance(result, LinkParts) for result in results)


async def test_abandoned_link_returns_its_lane() -> None:
    """An outbox has a lane for each rank, and some for links of which one is given up."""
    ends = Ends()
    kept, socks = await ends.meet(), ends.socks  # the outboxes stay
    for _ in range(OutboxLayout(2).lanes + 1):
        ends.socks = sockets("unix")
        results = await ends.meet()
        assert all(isinstance(result, LinkParts) for result in results)
        for rank, result in zip(ends.ranks, results, strict=True):
            rank.release_parts(result)
        for sock in ends.socks:
            sock.close()
    ends.socks = socks
    ends.end(kept)


class NoThreads(ThreadPoolExecutor):
    def submit(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("can't start new thread")


# -- garbage: from a peer that has the key, so a mistake, but no reason to leave anything open


def message(offered: int = 1, ranks: int = 2, lane: int = 0) -> bytes:
    return dial._MESSAGE.pack(offered, False, False, ranks, lane, 0, 0)


def plain(_: int) -> int:
    return os.open("/dev/null", os.O_RDWR | os.O_NONBLOCK)


def unsealed(nbytes: int) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, nbytes)
    return fd


def eventfd(_: int) -> int:
    return os.eventfd(0, os.EFD_NONBLOCK)


def full(_: int) -> int:
    fd = eventfd(0)
    os.eventfd_write(fd, 2**64 - 2)
    return fd


def blocking(_: int) -> int:
    return os.eventfd(2**32 - 1)


def pipe(_: int) -> int:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    os.close(reader)
    return writer


def regular(nbytes: int) -> int:
    fd = os.open("/tmp", os.O_TMPFILE | os.O_RDWR | os.O_NONBLOCK)
    os.ftruncate(fd, nbytes)
    return fd


def stream(_: int) -> int:
    ends = socket.socketpair()
    ends[1].close()
    ends[0].setblocking(False)
    return ends[0].detach()


def poller(_: int) -> int:
    with select.epoll() as epoll:
        os.set_blocking(epoll.fileno(), False)
        return os.dup(epoll.fileno())


def with_seals(nbytes: int, seals: int, flags: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def sealed(nbytes: int) -> int:
    fd = with_seals(nbytes, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    os.posix_fallocate(fd, 0, nbytes)
    return fd


def smaller(nbytes: int) -> int:
    return sealed(nbytes - 1)


def larger(nbytes: int) -> int:
    return sealed(nbytes + 1)


def unwritable(nbytes: int) -> int:
    return with_seals(nbytes, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)


def readable_only(nbytes: int) -> int:
    fd = sealed(nbytes)
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


def own(nbytes: int) -> int:
    """Make what only its owner can write."""
    region = OwnRegion(nbytes, (0, PAGE))
    fd = os.dup(region.fd)
    region.close()
    return fd


#: What is no doorbell, or one that blocks who rings it.
DOORBELLS = [blocking, pipe, regular, stream, poller, plain, sealed]
#: What is no memory of the right size that both may write and nobody can take away.
MEMORIES = [unsealed, smaller, larger, unwritable, readable_only, regular, plain, pipe, eventfd]
#: What is no outbox: only its owner need be able to write it.
OUTBOXES = [unsealed, smaller, larger, regular, plain, pipe, eventfd]


OFFERS: dict[str, tuple[bytes, list[Callable[[int], int]], type[Exception] | None]] = {
    "nothing": (b"", [], ConnectionResetError),
    "half a message": (message()[:5], [], ConnectionResetError),
    "no, with descriptors": (message(0), [sealed, sealed, eventfd], None),
    "less than it says": (message(), [smaller, sealed, eventfd], ProtocolError),
    "more than it says": (message(), [larger, sealed, eventfd], ProtocolError),
    "memory for another host": (message(ranks=1000), [sealed, sealed, eventfd], ProtocolError),
    "a lane that is not there": (message(lane=OUTBOX.lanes), [sealed, sealed, eventfd], ProtocolError),
    "an outbox too small": (message(), [sealed, smaller, eventfd], ProtocolError),
    "unsealed memory": (message(), [unsealed, sealed, eventfd], ProtocolError),
    "an unsealed outbox": (message(), [sealed, unsealed, eventfd], ProtocolError),
    "no memory at all": (message(), [plain, sealed, eventfd], ProtocolError),
    "no outbox at all": (message(), [sealed, plain, eventfd], ProtocolError),
    **{f"{each.__name__} for memory": (message(), [each, sealed, eventfd], ProtocolError) for each in MEMORIES},
    **{f"{each.__name__} for an outbox": (message(), [sealed, each, eventfd], ProtocolError) for each in OUTBOXES},
    **{f"{each.__name__} for a doorbell": (message(), [sealed, sealed, each], ProtocolError) for each in DOORBELLS},
}


@pytest.mark.parametrize("offer", OFFERS)
async def test_malformed_offer_is_refused(offer: str) -> None:
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
        (message(ranks=3), [own, eventfd], ProtocolError),
        (message(lane=OUTBOX.lanes), [own, eventfd], ProtocolError),
        (message(), [own, eventfd, eventfd], LinkParts),  # the third finds no room and is dropped
        (message(), [sealed, eventfd], LinkParts),  # of a kernel that does not keep others from writing
        (message(), [unsealed, eventfd], ProtocolError),
        (message(), [plain, eventfd], ProtocolError),
        *((message(), [each, eventfd], ProtocolError) for each in OUTBOXES),
        *((message(), [sealed, each], ProtocolError) for each in DOORBELLS),
    ],
)
async def test_malformed_answer_is_refused(data: bytes, makers: list[Callable[[int], int]], expected: type) -> None:
    ends = Ends()
    task = asyncio.ensure_future(ends.propose())
    await readable(ends.socks[1])
    _, fds = recv_fds(ends.socks[1], dial._MESSAGE.size, 3)
    dial._close(fds)
    fds = [make(OUTBOX.nbytes) for make in makers]
    socket.send_fds(ends.socks[1], [data], fds)
    dial._close(fds)
    (result,) = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(result, expected)
    assert ends.ranks[0].trouble is None
    ends.end([result, None])


async def test_full_doorbell_does_not_block_a_link() -> None:
    """It is its owner's, who has been told often enough."""
    ends = Ends()
    task = asyncio.ensure_future(ends.propose())
    await readable(ends.socks[1])
    _, fds = recv_fds(ends.socks[1], dial._MESSAGE.size, 3)
    dial._close(fds)
    outbox = OwnRegion(OUTBOX.nbytes, (0, PAGE))
    outbox.memory[0] = 1
    fds = [os.dup(outbox.fd), full(0)]
    socket.send_fds(ends.socks[1], [message()], fds)
    dial._close(fds)
    pair = await task
    assert isinstance(pair, LinkParts)
    pair.peer.doorbell.ring()
    await asyncio.sleep(0)
    outbox.close()
    ends.end([pair, None])


async def test_descriptor_check_without_proc_uses_the_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "readlink", Failing(os, "readlink", errno.ENOENT, 0, 1))
    async with meeting() as (ends, results):
        assert results == [None, None]
        assert any(os.strerror(errno.ENOENT) in str(rank.trouble) for rank in ends.ranks)
        assert_the_socket_is_fresh(ends)


async def test_refusal_with_descriptors_is_accepted() -> None:
    ends = Ends()
    task = asyncio.ensure_future(ends.propose())
    await readable(ends.socks[1])
    _, fds = recv_fds(ends.socks[1], dial._MESSAGE.size, 3)
    socket.send_fds(ends.socks[1], [message(0)], fds[:2])
    dial._close(fds)
    assert await task is None
    ends.end([None, None])


# -- this machine


async def test_machine_without_fences_uses_the_socket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport, "fences", lambda: None)
    async with meeting() as (ends, results):
        assert results == [None, None]
        assert all("libatomic" in str(rank.trouble) for rank in ends.ranks)


async def test_process_whose_words_may_tear_uses_sockets(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transport, "has_atomic_stores", lambda: False)
    async with meeting() as (ends, results):
        assert results == [None, None]
        assert all("in two steps" in str(rank.trouble) for rank in ends.ranks)


async def test_python_without_memfd_uses_the_socket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Built for old systems, it has no `os.memfd_create`."""
    monkeypatch.delattr(os, "memfd_create")
    async with meeting() as (ends, results):
        assert results == [None, None]
        assert all("memfd" in str(rank.trouble) for rank in ends.ranks)
        assert_the_socket_is_fresh(ends)
    assert len(warnings(caplog)) <= 2


async def test_doorbell_is_closed_with_the_last_link() -> None:
    ends = Ends()
    results = await ends.meet()
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


async def test_lane_of_an_abandoned_link_is_reused() -> None:
    """Another link keeps the outbox, so that lanes that stay open would run out."""
    ends = Ends()
    first = await ends.meet()
    lanes = [first[0].own.lane.number]
    for _ in range(OUTBOX.lanes):
        pairs = await ends.meet()
        lane = pairs[0].own.lane
        lanes.append(lane.number)
        lane.connect(pairs[0].peer.outbox.words)
        for rank, pair in zip(ends.ranks, pairs, strict=True):
            rank.release_parts(pair)
        assert not lane.is_linked
    assert lanes == [1] + [2] * OUTBOX.lanes, "its own lane, and the first of those for links beside it"
    pairs.clear()
    del lane, pair
    ends.end(first)


async def test_doorbell_that_fails_to_register_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    known = fences()
    assert known is not None
    monkeypatch.setattr(os, "eventfd", Failing(os, "eventfd", errno.EMFILE, 0, 1))
    with pytest.raises(OSError, match="Too many open files") as raised:
        Doorbell(Runtime.of(asyncio.get_running_loop()), known, rest, Outbox(OUTBOX, known))
    assert mapped() == [], raised
