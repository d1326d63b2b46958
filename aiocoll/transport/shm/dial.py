"""Set-up of shared memory between two processes: the last step of opening a link over a unix socket.

    dialler                                          acceptor
    makes the region
    offer, [region, outbox, eventfd]  --->           maps both, reads the word
                                      <---           answer, [outbox, eventfd]
    maps it, reads the word
    agreement                         --->

Offer and answer contain the address and the value of a secret word in the sender's process. Answer and agreement report
whether their sender could read the peer's word at that address (`process_memory`).

Each of the three messages may be a refusal. The socket itself is then the link. The dialler sends the last message, as
in the handshake: until then it may give up and dial again, and neither end has a link that the other end lacks.
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
from aiocoll.transport.shm.link import LinkParts, OwnPart, PeerPart
from aiocoll.transport.shm.outbox import PeerOutbox
from aiocoll.transport.shm.process_memory import OwnMemory, PeerMemory, peer_memory
from aiocoll.transport.shm.region import SharedRegion, open_readable

__all__ = ["NotSharedError", "accept", "decline", "propose"]

_MESSAGE = struct.Struct("<???xIIQQ")
_OFFERED_FDS = 3
_ANSWERED_FDS = 2


class _Message(NamedTuple):
    """A message that two ranks exchange to set up shared memory.

    Attributes:
        agreed: whether the sender agrees to share memory.
        reads: whether the sender can read the memory of the other process.
        native: whether the sender runs the accelerator, which decides the size of chunks.
        ranks: number of ranks that the layouts are made for.
        lane: number of the lane for the receiver in the sender's outbox.
        address: address of the secret word; 0 if the receiver must not read the memory.
        word: value of the secret word.
    """

    agreed: bool
    reads: bool = False
    native: bool = core is not None
    ranks: int = 0
    lane: int = 0
    address: int = 0
    word: int = 0


class NotSharedError(Exception):
    """Raised when this rank cannot share memory, and has reported that to its peer."""


def decline(sock: socket.socket) -> None:
    """Send the peer a message that this rank does not share memory."""
    sock.send(_MESSAGE.pack(*_Message(agreed=False)))


async def propose(sock: socket.socket, own: OwnPart) -> LinkParts | None:
    """Offer shared memory to the peer; return None if the peer declines.

    Args:
        sock: connected to the peer.
        own: this rank's part.

    Raises:
        NotSharedError: this rank cannot make the memory, or cannot map the peer's.
        OSError: the peer closed the connection.
        ProtocolError: a descriptor from the peer is not an outbox or not an eventfd.
    """
    layout = own.layout
    with _refuse_on_error(sock):
        fd, region = await SharedRegion.create(layout.nbytes, layout.directions[0].first())
    found = None
    try:
        with _refuse_on_error(sock):
            _offer(sock, fd, own)
        found = await _agree(sock, own)
    finally:
        if found is None:
            region.close()  # close it explicitly, because a traceback may keep its owner alive
    return None if found is None else LinkParts(region, 0, own, *found)


async def _agree(sock: socket.socket, own: OwnPart) -> tuple[PeerPart, PeerMemory | None, bool, bool] | None:
    """Receive the peer's answer and send the last message; return the last four fields of a `LinkParts`."""
    answer, fds = await _receive(sock, _ANSWERED_FDS)
    if not answer.agreed:
        _close(fds)
        decline(sock)
        return None
    with _refuse_on_error(sock):
        peer = _map_peer(fds, answer, own)
    try:
        remote_memory = _read_secret_word(sock, own.memory, answer)
        sock.send(_MESSAGE.pack(*_Message(agreed=True, reads=remote_memory is not None)))
    except BaseException:
        peer.close()
        raise
    return peer, remote_memory, answer.reads, _are_both_native(answer)


def _make_message(own: OwnPart, *, reads: bool) -> _Message:
    """Return the message that describes this rank's part of the link."""
    address, word = (0, 0) if own.memory is None else (own.memory.address, own.memory.word)
    return _Message(True, reads, ranks=own.layout.ranks, lane=own.lane.number, address=address, word=word)


def _are_both_native(message: _Message) -> bool:
    return message.native and core is not None


def _read_secret_word(sock: socket.socket, memory: OwnMemory | None, message: _Message) -> PeerMemory | None:
    """Read the peer's secret word from its memory; return None if that is impossible or not permitted."""
    return peer_memory(sock, message.address, message.word) if memory is not None and message.address else None


def _offer(sock: socket.socket, fd: int, own: OwnPart) -> None:
    """Send the offer of shared memory, and close the region's descriptor `fd`."""
    try:
        offer = _make_message(own, reads=False)
        socket.send_fds(sock, [_MESSAGE.pack(*offer)], [fd, own.doorbell.outbox.fd, own.doorbell.eventfd])
    finally:
        os.close(fd)


@contextmanager
def _refuse_on_error(sock: socket.socket) -> Iterator[None]:
    """If the kernel refuses shared memory, decline and raise `NotSharedError`. Do not change connection errors."""
    try:
        yield
    except ConnectionError:
        raise
    except OSError as error:
        decline(sock)
        raise NotSharedError(str(error)) from error


async def accept(sock: socket.socket, own: OwnPart | None) -> LinkParts | None:
    """Answer the peer's offer of shared memory. Return None if there is no offer, or if `own` is None: then decline.

    Args:
        sock: connected to the peer.
        own: this rank's part.

    Raises:
        NotSharedError: this rank cannot map the peer's memory.
        OSError: the peer closed the connection.
        ProtocolError: a descriptor from the peer is not the expected memory or eventfd.
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
    async with _refuse_offer_on_error(sock):
        region, peer = _map_offer(fds, offer, own)
    last = _Message(agreed=False)
    try:
        remote_memory = _read_secret_word(sock, own.memory, offer)
        answer = _make_message(own, reads=remote_memory is not None)
        async with _refuse_offer_on_error(sock):
            socket.send_fds(sock, [_MESSAGE.pack(*answer)], [own.doorbell.outbox.fd, own.doorbell.eventfd])
        last = await _receive_last(sock)
    finally:
        if not last.agreed:
            peer.close()
            region.close()
    return LinkParts(region, 1, own, peer, remote_memory, last.reads, _are_both_native(offer)) if last.agreed else None


@asynccontextmanager
async def _refuse_offer_on_error(sock: socket.socket) -> AsyncIterator[None]:
    """Handle errors like `_refuse_on_error`, and then wait for the dialling rank's last message."""
    try:
        with _refuse_on_error(sock):
            yield
    except NotSharedError:
        await _receive_last(sock)
        raise


async def _receive_last(sock: socket.socket) -> _Message:
    """Wait for the last message of the dialling rank."""
    last, fds = await _receive(sock, 0)
    _close(fds)
    return last


def _map_offer(fds: list[int], offer: _Message, own: OwnPart) -> tuple[SharedRegion, PeerPart]:
    if len(fds) != _OFFERED_FDS:
        raise _make_lost_error(fds)
    layout = own.layout
    fd, *others = fds
    try:
        region = SharedRegion.open(fd, layout.nbytes, layout.directions[1].first())
    except BaseException:
        _close(others)
        raise
    try:
        return region, _map_peer(others, offer, own)
    except BaseException:
        region.close()  # close it explicitly, because a traceback may keep its owner alive
        raise


def _map_peer(fds: Sequence[int], message: _Message, own: OwnPart) -> PeerPart:
    if len(fds) != _ANSWERED_FDS:
        raise _make_lost_error(fds)
    fd, eventfd = fds
    doorbell = own.doorbell
    layout = doorbell.outbox.layout
    try:
        if message.ranks != layout.ranks:
            os.close(fd)
            raise ProtocolError(f"rank {own.peer} has shared memory for {message.ranks} ranks, not for {layout.ranks}")
        memory = open_readable(fd, layout.nbytes)
        try:
            check_eventfd(eventfd)
            outbox = PeerOutbox(memory, layout, message.lane, own.lane, own.peer, doorbell.fences)
        except BaseException:
            memory.close()
            raise
    except BaseException:
        os.close(eventfd)
        raise
    return PeerPart(PeerDoorbell(eventfd, outbox.status, doorbell), outbox)


def _make_lost_error(fds: Sequence[int]) -> OSError:
    """Return the error for missing descriptors, which the kernel drops if this process has too many open files."""
    _close(fds)
    return OSError(errno.EMFILE, "the kernel dropped descriptors from a peer: too many open files; raise `ulimit -n`")


async def _receive(sock: socket.socket, most: int) -> tuple[_Message, list[int]]:
    loop = asyncio.get_running_loop()
    while True:
        readable = loop.create_future()
        loop.add_reader(sock.fileno(), _resolve, readable)
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
        raise ConnectionResetError("the peer closed the connection before memory was shared")
    return _Message(*_MESSAGE.unpack(data)), fds


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
