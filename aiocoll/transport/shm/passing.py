"""How two processes establish shared memory: the last step of opening a link over a unix socket.

    dialler                                          acceptor
    makes the region
    offer, [region, outbox, eventfd]  --->           maps both, reads the word
                                      <---           answer, [outbox, eventfd]
    maps it, reads the word
    agreement                         --->

Offer and answer say where in the process a secret word lies, and which one; answer and agreement, whether the other's
could be read there (`process_memory`).

Each of these may be a refusal, and then the socket itself is the link. The dialler sends the last message, as in the
handshake: until then it may give up and dial again, and no end has a link that the other has not.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import NamedTuple

from aiocoll.errors import ProtocolError
from aiocoll.native import core
from aiocoll.transport.shm.descriptors import check_eventfd, recv_fds
from aiocoll.transport.shm.doorbell import PeerDoorbell
from aiocoll.transport.shm.link import Own, Pair, Peer
from aiocoll.transport.shm.outbox import PeerOutbox
from aiocoll.transport.shm.process_memory import OwnMemory, PeerMemory, peer_memory
from aiocoll.transport.shm.region import SharedRegion, open_readable

__all__ = ["NotSharedError", "accept", "decline", "propose"]

_MESSAGE = struct.Struct("<???xIIQQ")
_OFFERED_FDS = 3
_ANSWERED_FDS = 2


class _Message(NamedTuple):
    """What is said.

    Attributes:
        agreed: whether there is something.
        reads: whether the memory of the other process can be read.
        native: whether this process runs the accelerator, which decides the size of chunks.
        ranks: number of ranks that the layouts are made for.
        lane: number of the lane for the peer in the outbox.
        address: of the secret word; 0 if the memory shall not be read.
        word: which it is.
    """

    agreed: bool
    reads: bool = False
    native: bool = core is not None
    ranks: int = 0
    lane: int = 0
    address: int = 0
    word: int = 0


class NotSharedError(Exception):
    """This rank cannot share memory, and has told its peer."""


def decline(sock: socket.socket) -> None:
    """Refuse."""
    sock.send(_MESSAGE.pack(*_Message(agreed=False)))


async def propose(sock: socket.socket, own: Own) -> Pair | None:
    """Offer shared memory; None if the peer declines.

    Args:
        sock: connected to the peer.
        own: what this rank brings.

    Raises:
        NotSharedError: there is none to offer, or what the peer passes cannot be taken.
        OSError: the peer closed the connection.
        ProtocolError: what it passed is no outbox or no doorbell.
    """
    layout = own.layout
    with _declining(sock):
        fd, region = await SharedRegion.create(layout.nbytes, layout.directions[0].first())
    found = None
    try:
        with _declining(sock):
            _offer(sock, fd, own)
        found = await _agree(sock, own)
    finally:
        if found is None:
            region.close()  # a traceback may keep the rest
    return None if found is None else Pair(region, 0, own, *found)


async def _agree(sock: socket.socket, own: Own) -> tuple[Peer, PeerMemory | None, bool, bool] | None:
    """Take the answer and send the last message; return the last four of a `Pair`."""
    answer, fds = await _receive(sock, _ANSWERED_FDS)
    if not answer.agreed:
        _close(fds)
        decline(sock)
        return None
    with _declining(sock):
        peer = _peer(fds, answer, own)
    try:
        memory_there = _prove(sock, own.memory, answer)
        sock.send(_MESSAGE.pack(*_Message(agreed=True, reads=memory_there is not None)))
    except BaseException:
        peer.close()
        raise
    return peer, memory_there, answer.reads, _are_both_native(answer)


def _offered(own: Own, *, reads: bool) -> _Message:
    """Return the message about what this rank brings."""
    address, word = (0, 0) if own.memory is None else (own.memory.address, own.memory.word)
    return _Message(True, reads, ranks=own.layout.ranks, lane=own.lane.number, address=address, word=word)


def _are_both_native(said: _Message) -> bool:
    return said.native and core is not None


def _prove(sock: socket.socket, memory: OwnMemory | None, said: _Message) -> PeerMemory | None:
    """Read the secret word of the peer; None if it is not there, or not for us."""
    return peer_memory(sock, said.address, said.word) if memory is not None and said.address else None


def _offer(sock: socket.socket, fd: int, own: Own) -> None:
    """Send the offer, and close the region's `fd`."""
    try:
        offer = _offered(own, reads=False)
        socket.send_fds(sock, [_MESSAGE.pack(*offer)], [fd, own.doorbell.outbox.fd, own.doorbell.eventfd])
    finally:
        os.close(fd)


@contextmanager
def _declining(sock: socket.socket) -> Iterator[None]:
    """Refuse, and raise `NotSharedError`, where the kernel refuses; an error of the connection is raised as it is."""
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        decline(sock)
        raise NotSharedError(str(error)) from error


async def accept(sock: socket.socket, own: Own | None) -> Pair | None:
    """Take what the peer offers; None if it offers nothing, or (with `own` None) this rank wants nothing.

    Args:
        sock: connected to the peer.
        own: what this rank brings.

    Raises:
        NotSharedError: it cannot be taken.
        OSError: the peer closed the connection.
        ProtocolError: it is not what it should be.
    """
    offer, fds = await _receive(sock, _OFFERED_FDS)
    if not offer.agreed:
        _close(fds)
        return None
    if own is None:
        _close(fds)
        decline(sock)
        await _receive_last(sock)
        return None
    async with _declining_offer(sock):
        region, peer = _map(fds, offer, own)
    last = _Message(agreed=False)
    try:
        memory_there = _prove(sock, own.memory, offer)
        answer = _offered(own, reads=memory_there is not None)
        async with _declining_offer(sock):
            socket.send_fds(sock, [_MESSAGE.pack(*answer)], [own.doorbell.outbox.fd, own.doorbell.eventfd])
        last = await _receive_last(sock)
    finally:
        if not last.agreed:
            peer.close()
            region.close()
    return Pair(region, 1, own, peer, memory_there, last.reads, _are_both_native(offer)) if last.agreed else None


@asynccontextmanager
async def _declining_offer(sock: socket.socket) -> AsyncIterator[None]:
    """As `_declining`, and wait for what the dialler says to that."""
    try:
        with _declining(sock):
            yield
    except NotSharedError:
        await _receive_last(sock)
        raise


async def _receive_last(sock: socket.socket) -> _Message:
    """Wait for the dialler's last message."""
    last, fds = await _receive(sock, 0)
    _close(fds)
    return last


def _map(fds: list[int], offer: _Message, own: Own) -> tuple[SharedRegion, Peer]:
    if len(fds) != _OFFERED_FDS:
        raise _lost(fds)
    layout = own.layout
    fd, *others = fds
    try:
        region = SharedRegion.open(fd, layout.nbytes, layout.directions[1].first())
    except BaseException:
        _close(others)
        raise
    try:
        return region, _peer(others, offer, own)
    except BaseException:
        region.close()  # a traceback may keep the rest
        raise


def _peer(fds: Sequence[int], said: _Message, own: Own) -> Peer:
    if len(fds) != _ANSWERED_FDS:
        raise _lost(fds)
    fd, eventfd = fds
    doorbell = own.doorbell
    layout = doorbell.outbox.layout
    try:
        if said.ranks != layout.ranks:
            os.close(fd)
            raise ProtocolError(f"rank {own.peer} shares memory for {said.ranks} ranks, not for {layout.ranks}")
        memory = open_readable(fd, layout.nbytes)
        try:
            check_eventfd(eventfd)
            outbox = PeerOutbox(memory, layout, said.lane, own.lane, own.peer, doorbell.fences)
        except BaseException:
            memory.close()
            raise
    except BaseException:
        os.close(eventfd)
        raise
    return Peer(PeerDoorbell(eventfd, outbox.status, doorbell), outbox)


def _lost(fds: Sequence[int]) -> OSError:
    """The kernel leaves out what a process that has too many open files could not take."""
    _close(fds)
    return OSError(errno.EMFILE, "descriptors were lost on the way: too many open files")


async def _receive(sock: socket.socket, most: int) -> tuple[_Message, list[int]]:
    loop = asyncio.get_running_loop()
    while True:
        readable = loop.create_future()
        loop.add_reader(sock.fileno(), _set, readable)
        try:
            await readable
        finally:
            loop.remove_reader(sock.fileno())
        try:
            data, fds = recv_fds(sock, _MESSAGE.size, most)
            break
        except BlockingIOError:
            continue
    if len(data) != _MESSAGE.size:
        _close(fds)
        raise ConnectionResetError("it closed the connection before memory was shared")
    return _Message(*_MESSAGE.unpack(data)), fds


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
