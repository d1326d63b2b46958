"""Memory that a link's other end may read: offered, taken, pointed to, given back."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from aiocoll.errors import ProtocolError
from aiocoll.transport.shm import lending
from aiocoll.transport.shm.commons import Commons, Plot
from aiocoll.transport.shm.lending import _ENDED, _MESSAGE, _OFFER, _TAKEN
from aiocoll.transport.shm.link import ShmLink
from aiocoll.transport.shm.region import PAGE, create

from ..ranks import until
from .links import linked

NBYTES = 4 * PAGE
FLOAT = np.dtype(np.float64)


class Ends:
    """Both ends of a link, and what the near one lends."""

    def __init__(self, near: ShmLink, far: ShmLink) -> None:
        self.near, self.far = near, far
        self.commons = Commons(asyncio.get_running_loop())

    async def lend(self) -> tuple[Any, Plot]:
        """Make an array of ascending numbers and let the far end map it."""
        array, plot = await self.make()
        await until(lambda: self.near.lending.lends(plot))
        return array, plot

    async def make(self) -> tuple[Any, Plot]:
        array = (await self.commons.make(NBYTES)).view(FLOAT)
        array[:] = np.arange(len(array))
        found = self.commons.find(array)
        assert found is not None
        return array, found[0]

    def seen(self, plot: Plot, offset: int = 0, count: int = 1) -> Any:
        return self.far.lending.read(plot.number, offset, FLOAT, count)


def fill(sock: socket.socket) -> None:
    """Send what is ignored until nothing more can be sent."""
    with suppress(BlockingIOError):
        while True:
            sock.send(_MESSAGE.pack(_ENDED, 77, 0))


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with linked("shm") as (near, far):
        near.start(), far.start()
        both = Ends(near, far)
        yield both
        both.commons.close()
    del near, far
    vars(both).clear()  # it is kept for a while


async def test_what_is_taken_can_be_read_until_it_has_ended(ends: Ends) -> None:
    array, plot = await ends.lend()
    assert np.array_equal(ends.seen(plot, 80, 10), array[10:20])
    array[10] = -1
    assert ends.seen(plot, 80)[0] == -1
    del array
    await until(lambda: ends.seen(plot) is None)
    assert plot.fd == -1
    assert not ends.far.sink.losses


async def test_nothing_is_read_beyond_its_end(ends: Ends) -> None:
    _array, plot = await ends.lend()
    assert len(ends.seen(plot, NBYTES - 16, 2)) == 2
    assert ends.seen(plot, NBYTES - 16, 3) is None
    assert ends.seen(plot, NBYTES, 1) is None


async def test_each_plot_is_offered_once(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    send = socket.send_fds
    monkeypatch.setattr(lending.socket, "send_fds", lambda *given: sent.append(given) or send(*given))
    _first, plot = await ends.make()
    assert not any(ends.near.lending.lends(plot) for _ in range(5))
    await until(lambda: ends.near.lending.lends(plot))
    assert len(sent) == 1


async def test_what_does_not_fit_in_the_socket_is_said_later(ends: Ends) -> None:
    """Both an offer, which is made again, and that a plot has ended."""
    plots = [await ends.lend() for _ in range(3)]
    _array, late = await ends.make()
    fill(ends.near._sock)
    assert not ends.near.lending.lends(late)
    assert not late.readers
    numbers = [plot for _, plot in plots]
    plots.clear()
    for plot in numbers:
        ends.near.lending.withdraw(plot.number)
    await until(lambda: not any(ends.seen(plot) is not None for plot in numbers))
    await until(lambda: ends.near.lending.lends(late))


async def test_a_link_may_close_with_words_unsaid(ends: Ends) -> None:
    _array, plot = await ends.lend()
    fill(ends.near._sock)
    ends.near.lending.withdraw(plot.number)
    ends.near.close()
    await until(lambda: ends.far.sink.losses)
    ends.near.lending.withdraw(plot.number)  # of a link that is gone


async def test_a_descriptor_that_was_lost_on_the_way_is_no_harm(ends: Ends) -> None:
    _array, plot = await ends.make()
    ends.near._sock.send(_MESSAGE.pack(_OFFER, plot.number, plot.nbytes))
    ends.near.lending._offered.add(plot.number)
    _other, other = await ends.lend()
    assert ends.seen(plot) is None
    assert not ends.near.lending.lends(plot)
    assert ends.seen(other) is not None


async def test_what_cannot_be_mapped_is_no_harm(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int, nbytes: int) -> Any:
        os.close(fd)
        raise OSError("no memory")

    _array, plot = await ends.make()
    with monkeypatch.context() as patch:
        patch.setattr(lending, "open_region", refuse)
        ends.near.lending.lends(plot)
        for _ in range(5):
            await asyncio.sleep(0)
    _other, _ = await ends.lend()
    assert not ends.near.lending.lends(plot)
    assert ends.seen(plot) is None


async def test_an_answer_that_comes_too_late_counts_no_more(ends: Ends) -> None:
    _array, plot = await ends.make()
    ends.near.lending.lends(plot)
    ends.near.lending.withdraw(plot.number)
    ends.far._sock.send(_MESSAGE.pack(_TAKEN, 99, 0))
    _other, _ = await ends.lend()
    assert ends.near.lending._taken.isdisjoint({plot.number, 99})


NONSENSE = {
    "short": (b"x", 0),
    "unknown": (_MESSAGE.pack(9, 1, PAGE), 0),
    "zero": (bytes(_MESSAGE.size), 0),
    "another size": (_MESSAGE.pack(_OFFER, 1, 2 * PAGE), 1),
}


@pytest.mark.parametrize("what", NONSENSE)
async def test_nonsense_ends_the_link(ends: Ends, what: str) -> None:
    message, fds = NONSENSE[what]
    fd, _memory = create(PAGE)
    try:
        socket.send_fds(ends.near._sock, [message], [fd] * fds)
    finally:
        os.close(fd)
    await until(lambda: ends.far.sink.losses)
    assert isinstance(ends.far.sink.losses[0], ProtocolError)


async def test_an_offer_of_what_is_no_sealed_memory_ends_the_link(ends: Ends) -> None:
    zeros = os.open("/dev/zero", os.O_RDWR)
    socket.send_fds(ends.near._sock, [_MESSAGE.pack(_OFFER, 1, PAGE)], [zeros])
    os.close(zeros)
    await until(lambda: ends.far.sink.losses)
    assert isinstance(ends.far.sink.losses[0], ProtocolError)


async def test_no_number_is_offered_twice(ends: Ends) -> None:
    _array, plot = await ends.lend()
    socket.send_fds(ends.near._sock, [_MESSAGE.pack(_OFFER, plot.number, plot.nbytes)], [plot.fd])
    await until(lambda: ends.far.sink.losses)
    assert isinstance(ends.far.sink.losses[0], ProtocolError)


# -- pieces in the lane


def put(ends: Ends, plot: Plot, offset: int, identity: int = 5) -> None:
    assert ends.near.lane_out.point(identity, 7 << 32, plot.number, offset)


async def test_pieces_here_and_there_come_in_order(ends: Ends) -> None:
    array, plot = await ends.lend()
    put(ends, plot, 0)
    assert ends.near.lane_out.put(5, 7 << 32, memoryview(np.full(2, 8.0)).cast("B"))
    put(ends, plot, 16)
    for expected in (array[:2], [8, 8], array[2:4]):
        assert ends.far.lane_in.look(5) == 7 << 32
        assert np.array_equal(ends.far.piece(FLOAT, 2), expected)
        assert not ends.far.lane_in.is_void()
        ends.far.lane_in.free()
    assert ends.near.lane_out.is_taken(3)


@pytest.mark.parametrize(("number", "offset"), [(99, 0), (1, NBYTES), (1, 1 << 63)])
async def test_pointing_to_nowhere_ends_the_link(ends: Ends, number: int, offset: int) -> None:
    _array, _plot = await ends.lend()
    ends.near.lane_out.point(5, 7 << 32, number, offset)
    assert ends.far.piece(FLOAT, 1) is None
    await until(lambda: ends.far.sink.losses)
    with pytest.raises(ProtocolError, match="pointed to memory that it has not shown"):
        raise ends.far.sink.losses[0]


async def test_what_is_void_is_void_before_and_while_it_is_read(ends: Ends) -> None:
    _array, plot = await ends.lend()
    put(ends, plot, 0)
    put(ends, plot, 8, identity=6)
    put(ends, plot, 16)
    assert ends.far.piece(FLOAT, 1) is not None
    ends.near.lane_out.void(5, 7 << 32)
    assert ends.far.lane_in.is_void()
    assert ends.far.piece(FLOAT, 1) is None
    ends.far.lane_in.free()
    assert np.array_equal(ends.far.piece(FLOAT, 1), [1]), "another operation's"
    ends.far.lane_in.free()
    assert ends.far.lane_in.is_void()
    await asyncio.sleep(0)
    assert not ends.far.sink.losses


async def test_the_end_of_a_group_takes_what_is_void_too(ends: Ends) -> None:
    _array, plot = await ends.lend()
    put(ends, plot, 0)
    ends.near.lane_out.void(5, 7 << 32)
    ends.far.lane_in.end(7)
    assert ends.far.lane_in.reclaim() == (True, False)
    assert ends.near.lane_out.is_taken(1)


async def test_who_waits_until_all_is_taken_is_told(ends: Ends) -> None:
    _array, plot = await ends.lend()
    put(ends, plot, 0)
    assert not ends.near.lane_out.is_taken(1)
    assert ends.far.lane_in.free(), "it has to be woken"
    assert ends.near.lane_out.is_taken(1)
