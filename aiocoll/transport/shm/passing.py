"""How two processes establish shared memory: the last step of opening a link over a unix socket.

    dialler                                          acceptor
    makes the region
    offer, [region, page, eventfd]  --->             maps the region
                                    <---             answer, [page, eventfd]
    agreement                       --->

Each of these may be a refusal, and then the socket itself is the link. The dialler sends the last message, as in the
handshake: until then it may give up and dial again, and no end has a link that the other has not.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
from collections.abc import Sequence

from aiocoll.transport.shm.descriptors import check_eventfd, recv_fds
from aiocoll.transport.shm.doorbell import Doorbell, PeerDoorbell
from aiocoll.transport.shm.layout import LinkLayout
from aiocoll.transport.shm.link import Pair
from aiocoll.transport.shm.region import PAGE, SharedRegion, open_region

__all__ = ["NotSharedError", "accept", "decline", "propose"]

#: Whether there is something, and the number of ranks that the layout is made for.
_MESSAGE = struct.Struct("<?3xI")
_NO = _MESSAGE.pack(False, 0)
_YES = _MESSAGE.pack(True, 0)
_OFFERED_FDS = 3
_ANSWERED_FDS = 2


class NotSharedError(Exception):
    """This rank cannot share memory, and has told its peer."""


def decline(sock: socket.socket) -> None:
    """Refuse."""
    sock.send(_NO)


async def propose(sock: socket.socket, layout: LinkLayout, doorbell: Doorbell) -> Pair | None:
    """Offer shared memory; None if the peer declines.

    Raises:
        NotSharedError: there is none to offer, or the peer's doorbell cannot be taken.
        OSError: the peer closed the connection.
        ProtocolError: what it passed is no doorbell.
    """
    region = await _offer(sock, layout, doorbell)
    peer_doorbell = None
    try:
        peer_doorbell = await _agree(sock, doorbell)
    finally:
        if peer_doorbell is None:
            region.close()  # a traceback may keep the rest
    return None if peer_doorbell is None else Pair(region, layout, 0, doorbell, peer_doorbell)


async def _agree(sock: socket.socket, doorbell: Doorbell) -> PeerDoorbell | None:
    """Take the answer and send the last message."""
    (agreed, _), fds = await _receive(sock, _ANSWERED_FDS)
    if not agreed:
        _close(fds)
        decline(sock)
        return None
    try:
        peer_doorbell = _peer_doorbell(fds, doorbell)
    except OSError as error:
        decline(sock)
        raise NotSharedError(str(error)) from error
    try:
        sock.send(_YES)
    except BaseException:
        peer_doorbell.close()
        raise
    return peer_doorbell


async def _offer(sock: socket.socket, layout: LinkLayout, doorbell: Doorbell) -> SharedRegion:
    try:
        fd, region = await SharedRegion.create(layout.nbytes, layout.directions[0].first())
        try:
            socket.send_fds(sock, [_MESSAGE.pack(True, layout.ranks)], [fd, doorbell.page, doorbell.eventfd])
        finally:
            os.close(fd)
    except ConnectionError:
        raise
    except OSError as error:
        decline(sock)
        raise NotSharedError(str(error)) from error
    return region


async def accept(sock: socket.socket, doorbell: Doorbell | None) -> Pair | None:
    """Take what the peer offers; None if it offers nothing, or (with `doorbell` None) this rank wants nothing.

    Raises:
        NotSharedError: it cannot be taken.
        OSError: the peer closed the connection.
        ProtocolError: it is not what it should be.
    """
    (offered, ranks), fds = await _receive(sock, _OFFERED_FDS)
    if not offered:
        _close(fds)
        return None
    if doorbell is None:
        _close(fds)
        decline(sock)
        await _is_agreed(sock)
        return None
    layout = LinkLayout(ranks)
    try:
        region, peer_doorbell = _map(fds, layout, doorbell)
    except OSError as error:
        decline(sock)
        await _is_agreed(sock)
        raise NotSharedError(str(error)) from error
    agreed = False
    try:
        agreed = await _answer(sock, doorbell)
    finally:
        if not agreed:
            peer_doorbell.close()
            region.close()
    return Pair(region, layout, 1, doorbell, peer_doorbell) if agreed else None


async def _answer(sock: socket.socket, doorbell: Doorbell) -> bool:
    try:
        socket.send_fds(sock, [_YES], [doorbell.page, doorbell.eventfd])
    except ConnectionError:
        raise
    except OSError as error:
        decline(sock)
        await _is_agreed(sock)
        raise NotSharedError(str(error)) from error
    return await _is_agreed(sock)


async def _is_agreed(sock: socket.socket) -> bool:
    """Wait for the dialler's last message."""
    (agreed, _), fds = await _receive(sock, 0)
    _close(fds)
    return agreed


def _map(fds: list[int], layout: LinkLayout, doorbell: Doorbell) -> tuple[SharedRegion, PeerDoorbell]:
    if len(fds) != _OFFERED_FDS:
        raise _lost(fds)
    fd, *others = fds
    try:
        region = SharedRegion.open(fd, layout.nbytes, layout.directions[1].first())
    except BaseException:
        _close(others)
        raise
    try:
        return region, _peer_doorbell(others, doorbell)
    except BaseException:
        region.close()  # a traceback may keep the rest
        raise


def _peer_doorbell(fds: Sequence[int], doorbell: Doorbell) -> PeerDoorbell:
    if len(fds) != _ANSWERED_FDS:
        raise _lost(fds)
    page, eventfd = fds
    try:
        memory = open_region(page, PAGE)
        try:
            check_eventfd(eventfd)
        except BaseException:
            memory.close()
            raise
    except BaseException:
        os.close(eventfd)
        raise
    return PeerDoorbell(eventfd, memory, doorbell)


def _lost(fds: Sequence[int]) -> OSError:
    """The kernel leaves out what a process that has too many open files could not take."""
    _close(fds)
    return OSError(errno.EMFILE, "descriptors were lost on the way: too many open files")


async def _receive(sock: socket.socket, most: int) -> tuple[tuple[bool, int], list[int]]:
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
    return _MESSAGE.unpack(data), fds


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
