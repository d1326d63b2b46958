"""The common launch order of all groups on a device, with delayed messages and with groups that end."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest

from aiocoll.gpu.launch_order import Lane, LaunchOrder


class World:
    """Simulated devices whose messages are delivered in random order, but in order between any two ranks.

    Attributes:
        begun: by device, the group and number of each started call, in order.
    """

    def __init__(self, seed: int, devices: int) -> None:
        self._random = random.Random(seed)
        self.orders = [LaunchOrder() for _ in range(devices)]
        self.begun: list[list[tuple[int, int]]] = [[] for _ in range(devices)]
        self._ways: dict[tuple[int, ...], list[Callable[[], object]]] = {}

    def send(self, way: tuple[int, ...], message: Callable[[], object]) -> None:
        self._ways.setdefault(way, []).append(message)

    def run(self) -> None:
        while ways := [way for way, messages in self._ways.items() if messages]:
            self._ways[self._random.choice(ways)].pop(0)()


class Calls:
    """A group whose first rank collects clock values from all ranks and assigns the launch time of each call."""

    def __init__(self, world: World, group: int, ranks: list[int]) -> None:
        self.world, self.group, self.ranks = world, group, ranks
        self.lanes = {rank: world.orders[rank].join(group, lambda: None) for rank in ranks}
        self._clocks: dict[int, dict[int, int]] = {}
        self._last = 0

    def call(self, number: int) -> None:
        self._clocks[number] = {}
        for rank in self.ranks:
            self.world.send((self.group, 0, rank), lambda rank=rank: self._propose(rank, number))

    def _propose(self, rank: int, number: int) -> None:
        self.lanes[rank].propose(
            number,
            lambda clock: self.world.send((self.group, rank, 0), lambda: self._collect(rank, number, clock)),
        )

    def _collect(self, rank: int, number: int, clock: int) -> None:
        clocks = self._clocks[number]
        clocks[rank] = clock
        if len(clocks) == len(self.ranks):
            self._last = time = max(self._last + 1, *clocks.values())
            for each in self.ranks:
                self.world.send((self.group, 0, each), lambda each=each: self._settle(each, number, time))

    def _settle(self, rank: int, number: int, time: int) -> None:
        self.lanes[rank].settle(number, time)
        self.lanes[rank].begin(number, lambda: self.world.begun[rank].append((self.group, number)))


@pytest.mark.parametrize("seed", range(20))
async def test_device_calls_of_overlapping_groups_get_a_common_launch_order_without_cycles(seed: int) -> None:
    chosen = random.Random(seed)
    devices = chosen.randint(2, 6)
    world = World(seed, devices)
    groups = [
        Calls(world, number + 1, sorted(chosen.sample(range(devices), chosen.randint(2, devices))))
        for number in range(5)
    ]
    for group in groups:
        for lane in group.lanes.values():
            lane.share()
    made = [(group, number) for group in groups for number in range(10)]
    for group, number in made:
        group.call(number)
    world.run()
    before: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for rank, begun in enumerate(world.begun):
        assert sorted(begun) == sorted((group.group, number) for group, number in made if rank in group.ranks)
        for one, two in combinations(begun, 2):
            before.setdefault(two, set()).add(one)
    assert not [(one, two) for two, ones in before.items() for one in ones if two in before.get(one, ())]
    # In an order without cycles, some remaining call never has a remaining predecessor.
    left = {(group.group, number) for group, number in made}
    while left:
        first = {each for each in left if not before.get(each, set()) & left}
        assert first
        left -= first


@pytest.fixture
def loops() -> Iterator[list[asyncio.AbstractEventLoop]]:
    """Yield two event loops, each running in its own thread."""
    made = [asyncio.new_event_loop() for _ in range(2)]
    threads = [threading.Thread(target=loop.run_forever) for loop in made]
    for thread in threads:
        thread.start()
    yield made
    for loop, thread in zip(made, threads, strict=True):
        if not loop.is_closed():
            loop.call_soon_threadsafe(loop.stop)
            thread.join(10)
            loop.close()


def result_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], object]) -> object:
    """Return the result of `call`, made in the given event loop."""

    async def body() -> object:
        return call()

    return asyncio.run_coroutine_threadsafe(body(), loop).result(10)


def stop_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Stop and close an event loop that runs in another thread."""
    loop.call_soon_threadsafe(loop.stop)
    while loop.is_running():
        pass
    loop.close()


def lane_of(order: LaunchOrder, loop: asyncio.AbstractEventLoop, group: int) -> Lane:
    lane = result_in_loop(loop, lambda: order.join(group, lambda: None))
    assert isinstance(lane, Lane)
    result_in_loop(loop, lane.share)
    return lane


def propose_time(lane: Lane, number: int) -> list[int]:
    """Propose a launch time for a call in the lane's event loop; return a list that gets the proposed time."""
    found: list[int] = []
    lane.loop.call_soon_threadsafe(lane.propose, number, found.append)
    result_in_loop(lane.loop, lambda: None)
    return found


def test_device_calls_start_in_the_event_loops_of_their_groups(loops: list[asyncio.AbstractEventLoop]) -> None:
    order = LaunchOrder()
    one, two = (lane_of(order, loop, group) for group, loop in enumerate(loops))
    begun: list[tuple[int, asyncio.AbstractEventLoop]] = []
    assert (propose_time(one, 1), propose_time(two, 1)) == ([1], [2])
    done = threading.Event()

    def begin(number: int) -> None:
        begun.append((number, asyncio.get_running_loop()))
        if number == 2:
            done.set()

    result_in_loop(loops[1], lambda: (two.settle(1, 2), two.begin(1, lambda: begin(2))))
    assert not begun  # lane `one` has not set the launch time of its call, which may still be earlier
    result_in_loop(loops[0], lambda: (one.settle(1, 2), one.begin(1, lambda: begin(1))))
    assert done.wait(10)
    assert begun == [(1, loops[0]), (2, loops[1])]


def test_launch_time_proposal_waits_until_all_groups_on_the_device_use_launch_times(
    loops: list[asyncio.AbstractEventLoop],
) -> None:
    order = LaunchOrder()
    notified: list[int] = []
    first = result_in_loop(loops[0], lambda: order.join(1, lambda: notified.append(1)))
    assert isinstance(first, Lane)
    assert order.is_used
    second = lane_of(order, loops[1], 2)
    result_in_loop(loops[0], lambda: None)
    assert notified == [1]
    found = propose_time(second, 1)
    assert not found
    result_in_loop(loops[0], first.share)
    result_in_loop(loops[1], lambda: None)
    assert found == [1]
    result_in_loop(loops[1], lambda: second.withdraw(1))
    result_in_loop(loops[0], first.leave)
    result_in_loop(loops[1], second.leave)
    assert not order.is_used


def test_group_with_a_closed_event_loop_blocks_no_other_group(loops: list[asyncio.AbstractEventLoop]) -> None:
    order = LaunchOrder()
    lost, other = (lane_of(order, loop, group) for group, loop in enumerate(loops))
    assert (propose_time(lost, 1), propose_time(other, 1)) == ([1], [2])
    begun: list[int] = []
    stop_loop(loops[0])
    result_in_loop(loops[1], lambda: (other.settle(1, 2), other.begin(1, lambda: begun.append(1))))
    assert begun == [1]
    assert not lost.call(lambda: None)


def test_event_loop_closed_before_its_group_launches_blocks_no_other_group(
    loops: list[asyncio.AbstractEventLoop],
) -> None:
    """Stop the event loop after the notification that its group may launch a call, and before the launch."""
    order = LaunchOrder()
    lost, other = (lane_of(order, loop, group) for group, loop in enumerate(loops))
    assert (propose_time(lost, 1), propose_time(other, 1)) == ([1], [2])
    begun: list[int] = []
    go_on = threading.Event()

    def block_and_stop() -> None:
        assert go_on.wait(10)
        loops[0].stop()

    loops[0].call_soon_threadsafe(block_and_stop)
    lost.settle(1, 1)
    lost.begin(1, lambda: begun.append(0))  # begin in this thread, so that the other thread is notified
    result_in_loop(loops[1], lambda: (other.settle(1, 2), other.begin(1, lambda: begun.append(1))))
    assert not begun
    go_on.set()
    while loops[0].is_running():
        pass
    loops[0].close()
    result_in_loop(loops[1], other.share)
    assert begun in ([1], [0, 1])


async def test_group_that_leaves_the_device_during_its_launch_lets_the_next_group_launch() -> None:
    order = LaunchOrder()
    one, two = order.join(1, lambda: None), order.join(2, lambda: None)
    begun: list[int] = []
    for lane in (one, two):
        lane.share()
        lane.propose(1, lambda clock: None)
    two.settle(1, 5)
    two.begin(1, lambda: begun.append(2))
    two.propose(2, lambda clock: begun.append(clock))
    assert begun == [6]
    one.settle(1, 1)
    one.begin(1, one.leave)
    assert begun == [6, 2]
    two.settle(2, 6)
    two.leave()
    assert begun == [6, 2]


def test_group_that_left_the_device_before_its_launch_lets_the_next_group_launch(
    loops: list[asyncio.AbstractEventLoop],
) -> None:
    order = LaunchOrder()
    one, two = (lane_of(order, loop, group) for group, loop in enumerate(loops))
    assert (propose_time(one, 1), propose_time(two, 1)) == ([1], [2])
    begun: list[int] = []
    held, go_on = threading.Event(), threading.Event()
    loops[0].call_soon_threadsafe(lambda: (held.set(), go_on.wait(10)))
    assert held.wait(10)
    one.settle(1, 1)
    one.begin(1, lambda: begun.append(1))
    one.leave()
    result_in_loop(loops[1], lambda: (two.settle(1, 2), two.begin(1, lambda: begun.append(2))))
    assert not begun  # the notice for the first call is pending
    go_on.set()
    result_in_loop(loops[0], lambda: None)
    result_in_loop(loops[1], lambda: None)
    assert begun == [2]


def test_event_loop_that_closes_during_a_launch_notification_blocks_no_other_group(
    loops: list[asyncio.AbstractEventLoop],
) -> None:
    class Closing:
        closed = False

        def is_closed(self) -> bool:
            return self.closed

        def call_soon_threadsafe(self, call: object) -> None:
            self.closed = True
            raise RuntimeError("Event loop is closed")

    order = LaunchOrder()
    one, two = (lane_of(order, loop, group) for group, loop in enumerate(loops))
    assert (propose_time(one, 1), propose_time(two, 1)) == ([1], [2])
    one.loop = Closing()  # type: ignore[assignment]
    begun: list[int] = []
    result_in_loop(loops[1], lambda: (two.settle(1, 2), two.begin(1, lambda: begun.append(2))))
    one.settle(1, 1)
    one.begin(1, lambda: begun.append(1))
    result_in_loop(loops[1], lambda: None)
    assert begun == [2]
