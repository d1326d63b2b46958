"""One group's calls of NCCL among those of other groups on the same devices: its messages about their slots.

A slot is the place of a call in the order of a device, `aiocoll.gpu.launch_order`; on each rank it has the number of
the call there. Once the group is shared, each call of NCCL has one, and the making of the communicator has slot 0:

crowded         a rank's device has calls of another group ->
shared                                     -> from this number on, each call has a slot
slot            rank 0 asks for a proposal ->          <- with `clock`: the proposal          -> with `at`: its time

If proposals do not come, as where another group is not shared yet, since a rank makes a call of that group only when
the one of this group is done, the call is staged on all ranks: that needs no slot. `at` is then 0.
"""

from __future__ import annotations

from asyncio import TimerHandle
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from operator import index
from typing import Any

from aiocoll.engine.communicator import Communicator
from aiocoll.engine.control.messages import DEVICE
from aiocoll.gpu.launch_order import LaunchOrder

__all__ = ["INITIAL", "Slots"]

#: Seconds that a call waits for its time before it is staged.
PATIENCE = 0.02
#: The slot in which the communicator is made.
INITIAL = 0
_KINDS = ("crowded", "shared", "slot")


class _Slot:
    """As rank 0: a slot without a time.

    Attributes:
        numbers: of the call on each rank that takes part.
        clocks: proposals.
        timer: until it is staged.
    """

    def __init__(self, numbers: Mapping[int, int]) -> None:
        self.numbers = numbers
        self.clocks: dict[int, int] = {}
        self.timer: TimerHandle | None = None


class Slots:
    """One rank's part in them.

    Args:
        comm: this rank's part in the group.
        order: that of the device of this rank.
        number: as rank 0, assigns the next number on every rank.
        hold: calls something when everything with a lower number has been called; see `DeviceState.hold`.
        gather: as rank 0, calls something when what any rank has launched without a slot will be on all of them.
        moved: called when a call may start.
        can_stage: calls that wait too long are staged.

    Attributes:
        is_shared: each call of NCCL that starts from now on has a slot.
        is_given: as rank 0: each call of NCCL that gets a number from now on gets one.
    """

    def __init__(
        self,
        comm: Communicator,
        order: LaunchOrder,
        number: Callable[[], dict[int, int]],
        hold: Callable[[int, Callable[[bool], None], bool], None],
        gather: Callable[[Callable[[], None]], None],
        moved: Callable[[], None],
        *,
        can_stage: bool,
    ) -> None:
        self.is_shared = self.is_given = False
        self._comm = comm
        self._lane = order.join(comm.id, self._crowded)
        self._number = number
        self._hold = hold
        self._gather = gather
        self._moved = moved
        self._can_stage = can_stage
        #: Times of slots; None without. Those whose turn it is.
        self._times: dict[int, int | None] = {}
        self._begun: set[int] = set()
        self._entered: set[int] = set()
        self._make: Callable[[], None] | None = None
        #: As rank 0: whether a rank has asked to share; slots without a time, in the order of numbers, and by each of
        #: their numbers; the last number of each rank that has one; and the last time.
        self._is_asked = False
        self._row: deque[_Slot] = deque()
        self._asked: dict[tuple[int, int], _Slot] = {}
        self._numbered: dict[int, int] = {}
        self._last = 0

    def share(self) -> None:
        """From now on, each call has a slot."""
        self.is_shared = self.is_given = True
        self._lane.share()

    def _crowded(self) -> None:
        """The device has calls of another group."""
        if not self._lane.is_shared:
            self._tell(0, {"crowded": True})

    def make(self, make: Callable[[], None]) -> None:
        """Call `make` in the initial slot."""
        self._make = make
        if self._comm.rank == 0:
            self.open(dict.fromkeys(range(len(self._comm.ranks)), INITIAL))

    def turn(self, number: int) -> bool | None:
        """Return whether a call has to be staged, if it may start now; None if it has to wait, see `moved`."""
        time = self._times.get(number)
        if time is None:
            return None
        if time == 0:
            del self._times[number]
            return True
        if number in self._begun:
            del self._times[number]
            return False
        if number not in self._entered:
            self._entered.add(number)
            self._lane.begin(number, partial(self._begin, number))
        return None

    def departed(self, rank: int) -> None:
        """A rank has closed the group: without rank 0, what has no time is staged, and nothing more is launched."""
        if rank == 0:
            for number in [number for number, time in self._times.items() if time is None]:
                self._stamp(number, 0)
            self._lane.share()

    def end(self) -> None:
        """The group has ended."""
        for slot in self._row:
            self._stop(slot)
        self._row.clear()
        self._asked.clear()
        self._times.clear()
        self._lane.leave()

    # -- messages

    @staticmethod
    def is_meant(message: dict[str, Any]) -> bool:
        """Whether a message is one of these."""
        return any(kind in message for kind in _KINDS)

    def handle(self, peer: int, message: dict[str, Any]) -> None:
        """Handle a message of a rank.

        Raises:
            ValueError: it is invalid from that rank, or for this rank; also TypeError and KeyError.
        """
        is_for_rank_0 = "crowded" in message or "clock" in message
        if (self._comm.rank if is_for_rank_0 else peer) != 0:
            raise ValueError("only rank 0 gives out slots")
        if "crowded" in message:
            if not self._is_asked and not self.is_shared:
                self._is_asked = True
                self._gather(self._let_share)
        elif "shared" in message:
            self._hold(index(message["shared"]), lambda _: self.share(), False)
        elif "clock" in message:
            self._proposed(peer, index(message["slot"]), index(message["clock"]))
        elif "at" in message:
            self._stamp(index(message["slot"]), index(message["at"]))
        else:
            self._propose(index(message["slot"]))

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        comm = self._comm
        if rank == comm.rank:
            self.handle(rank, message)
        else:
            comm.channels[rank].send_control({"t": DEVICE, "g": comm.id, **message})

    # -- as any rank

    def _propose(self, number: int) -> None:
        if number in self._times:
            raise ValueError(f"slot {number} has been asked for before")
        self._times[number] = None
        self._lane.propose(number, lambda clock: self._answer(number, clock))

    def _answer(self, number: int, clock: int) -> None:
        if number in self._times and self._times[number] is None:
            self._tell(0, {"slot": number, "clock": clock})

    def _stamp(self, number: int, time: int) -> None:
        if self._times[number] is not None or time < 0:
            raise ValueError(f"slot {number} has a time")
        self._times[number] = time
        if time == 0:
            self._lane.withdraw(number)
        else:
            self._lane.settle(number, time)
            if number == INITIAL:
                self._lane.begin(number, self._make_now)
        self._moved()

    def _begin(self, number: int) -> None:
        """It is the turn of a call on the device."""
        self._entered.discard(number)
        self._begun.add(number)
        self._moved()
        self._begun.discard(number)

    def _make_now(self) -> None:
        del self._times[INITIAL]
        assert self._make is not None
        self._make()

    # -- as rank 0

    def _let_share(self) -> None:
        numbers = self._number()
        self.is_given = True
        for rank, number in numbers.items():
            self._tell(rank, {"shared": number})

    def open(self, numbers: Mapping[int, int]) -> None:
        """Ask for the time of a call that has just been numbered."""
        slot = _Slot(numbers)
        self._row.append(slot)
        self._asked |= dict.fromkeys(numbers.items(), slot)
        self._numbered |= numbers
        if self._can_stage and numbers[min(numbers)] != INITIAL:
            slot.timer = self._comm.call_later(PATIENCE, partial(self._stage, slot))
        for rank, number in numbers.items():
            self._tell(rank, {"slot": number})

    def _proposed(self, rank: int, number: int, clock: int) -> None:
        slot = self._asked.get((rank, number))
        if slot is None and number <= self._numbered[rank]:
            return  # it has been staged
        if slot is None or clock < 1:
            raise ValueError(f"nobody has asked for slot {number}, or {clock} is no time")
        slot.clocks[rank] = clock
        while self._row and len(self._row[0].clocks) == len(self._row[0].numbers):
            first = self._row.popleft()
            # In the order of numbers on all ranks.
            self._last = max(self._last + 1, *first.clocks.values())
            self._close(first, self._last)

    def _stage(self, slot: _Slot) -> None:
        """A call has waited for too long."""
        self._row.remove(slot)
        self._close(slot, 0)

    def _close(self, slot: _Slot, time: int) -> None:
        self._stop(slot)
        for each in slot.numbers.items():
            del self._asked[each]
        for rank, number in slot.numbers.items():
            self._tell(rank, {"slot": number, "at": time})

    def _stop(self, slot: _Slot) -> None:
        if slot.timer is not None:
            slot.timer.cancel()
