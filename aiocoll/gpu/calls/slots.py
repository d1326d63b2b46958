"""Slots: positions of one group's NCCL calls among the calls of other groups on the same devices.

A slot is the place of a call in the order of a device (`aiocoll.gpu.launch_order`). On each rank, the slot has the
number of the call. From the message "shared" on, each NCCL call has a slot. Slot 0 belongs to the creation of the
communicator:

crowded         a rank's device has calls of another group ->
shared                                     -> from this number on, each call has a slot
slot            rank 0 requests proposals ->          <- with `clock`: the proposal          -> with `at`: its time

A proposal may not arrive in time: for example, another group on the device is not shared yet, because a rank makes its
call of that group only after the call of this group ends. The call is then staged on all ranks, which needs no slot.
`at` is then 0.
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

#: Maximum seconds for which a call waits for its slot's logical time before it is staged.
MAX_WAIT = 0.02
#: Number of the slot in which the group creates its NCCL communicator.
INITIAL = 0
_KINDS = ("crowded", "shared", "slot")


class _Slot:
    """Rank 0's record of a slot that has no logical time yet.

    Attributes:
        numbers: numbers of the call, by rank that takes part.
        clocks: proposed times, by rank.
        timer: stages the call when it expires.
    """

    def __init__(self, numbers: Mapping[int, int]) -> None:
        self.numbers = numbers
        self.clocks: dict[int, int] = {}
        self.timer: TimerHandle | None = None


class Slots:
    """The slots of one group's NCCL calls, as known to one rank.

    Args:
        comm: this rank's part in the group.
        order: launch order of this rank's device.
        number: as rank 0, assigns the next number on every rank.
        hold: calls a function once everything with a lower number has started; see `DeviceState.hold`.
        gather: as rank 0, calls a function once every call launched without a slot is certain to start on all ranks.
        moved: called when a call may start.
        can_stage: whether calls are staged if they wait too long.

    Attributes:
        is_shared: whether each NCCL call that starts from now on has a slot.
        is_given: as rank 0, whether each NCCL call that is numbered from now on gets a slot.
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
        self._lane = order.join(comm.id, self._report_crowded_device)
        self._number = number
        self._hold = hold
        self._gather = gather
        self._moved = moved
        self._can_stage = can_stage
        #: Logical time of each slot, by slot number: None while unknown, 0 if the call must be staged.
        self._times: dict[int, int | None] = {}
        #: Numbers of the slots whose calls may start on the device now.
        self._begun: set[int] = set()
        #: Numbers of the slots that wait for earlier calls on the device.
        self._entered: set[int] = set()
        self._make: Callable[[], None] | None = None
        #: Used on rank 0: whether a rank has reported that another group uses its device.
        self._is_asked = False
        #: Used on rank 0: slots without a logical time, in the order of their numbers.
        self._row: deque[_Slot] = deque()
        #: Used on rank 0: the slots in `_row`, by rank and slot number.
        self._asked: dict[tuple[int, int], _Slot] = {}
        #: Used on rank 0: the last slot number, by rank.
        self._numbered: dict[int, int] = {}
        #: Used on rank 0: the last logical time assigned to a slot.
        self._last = 0

    def share(self) -> None:
        """Require a slot for each NCCL call from now on, because another group uses the same device."""
        self.is_shared = self.is_given = True
        self._lane.share()

    def _report_crowded_device(self) -> None:
        """Report to rank 0 that another group uses this rank's device."""
        if not self._lane.is_shared:
            self._send(0, {"crowded": True})

    def make(self, make: Callable[[], None]) -> None:
        """Create the group's NCCL communicator in slot 0, by calling `make`."""
        self._make = make
        if self._comm.rank == 0:
            self.open(dict.fromkeys(range(len(self._comm.ranks)), INITIAL))

    def turn(self, number: int) -> bool | None:
        """Return False if a call may start in its slot, True if it must be staged, None if it must wait.

        After None, the caller tries again when `moved` is called.
        """
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

    def on_departure(self, rank: int) -> None:
        """Handle a rank that closed the group; if it is rank 0, stage all calls that have no logical time."""
        if rank == 0:
            for number in [number for number, time in self._times.items() if time is None]:
                self._stamp(number, 0)
            self._lane.share()

    def end(self) -> None:
        """Leave the device's launch order, because the group has ended."""
        for slot in self._row:
            self._stop(slot)
        self._row.clear()
        self._asked.clear()
        self._times.clear()
        self._lane.leave()

    # -- messages

    @staticmethod
    def is_own_message(message: dict[str, Any]) -> bool:
        """Return whether `message` is one of this class's messages, about slots."""
        return any(kind in message for kind in _KINDS)

    def handle(self, peer: int, message: dict[str, Any]) -> None:
        """Handle another rank's message about slots.

        Raises:
            ValueError: the message is invalid from that rank, or for this rank; also TypeError and KeyError.
        """
        is_for_rank_0 = "crowded" in message or "clock" in message
        if (self._comm.rank if is_for_rank_0 else peer) != 0:
            raise ValueError("slots: only rank 0 may assign slots")
        if "crowded" in message:
            if not self._is_asked and not self.is_shared:
                self._is_asked = True
                self._gather(self._share_slots)
        elif "shared" in message:
            self._hold(index(message["shared"]), lambda _: self.share(), False)
        elif "clock" in message:
            self._on_proposal(peer, index(message["slot"]), index(message["clock"]))
        elif "at" in message:
            self._stamp(index(message["slot"]), index(message["at"]))
        else:
            self._propose(index(message["slot"]))

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        comm = self._comm
        if rank == comm.rank:
            self.handle(rank, message)
        else:
            comm.channels[rank].send_control({"t": DEVICE, "g": comm.id, **message})

    # -- as any rank

    def _propose(self, number: int) -> None:
        if number in self._times:
            raise ValueError(f"slot {number} has already been requested")
        self._times[number] = None
        self._lane.propose(number, lambda clock: self._answer(number, clock))

    def _answer(self, number: int, clock: int) -> None:
        if number in self._times and self._times[number] is None:
            self._send(0, {"slot": number, "clock": clock})

    def _stamp(self, number: int, time: int) -> None:
        if self._times[number] is not None:
            raise ValueError(f"slot {number} already has a logical time")
        self._times[number] = time
        if time == 0:
            self._lane.withdraw(number)
        else:
            self._lane.settle(number, time)
            if number == INITIAL:
                self._lane.begin(number, self._make_now)
        self._moved()

    def _begin(self, number: int) -> None:
        """Start the call in slot `number`, because all earlier calls on the device have started."""
        self._entered.discard(number)
        self._begun.add(number)
        self._moved()
        self._begun.discard(number)

    def _make_now(self) -> None:
        del self._times[INITIAL]
        assert self._make is not None
        self._make()

    # -- as rank 0

    def _share_slots(self) -> None:
        numbers = self._number()
        self.is_given = True
        for rank, number in numbers.items():
            self._send(rank, {"shared": number})

    def open(self, numbers: Mapping[int, int]) -> None:
        """Request all ranks' proposals for a new slot's logical time; only rank 0 calls this."""
        slot = _Slot(numbers)
        self._row.append(slot)
        self._asked |= dict.fromkeys(numbers.items(), slot)
        self._numbered |= numbers
        if self._can_stage and numbers[min(numbers)] != INITIAL:
            slot.timer = self._comm.call_later(MAX_WAIT, partial(self._stage, slot))
        for rank, number in numbers.items():
            self._send(rank, {"slot": number})

    def _on_proposal(self, rank: int, number: int, clock: int) -> None:
        slot = self._asked.get((rank, number))
        if slot is None and number <= self._numbered[rank]:
            return  # the call has been staged
        if slot is None or clock < 1:
            raise ValueError(f"slot {number} was not requested, or {clock} is not a logical time (1 or later)")
        slot.clocks[rank] = clock
        while self._row and len(self._row[0].clocks) == len(self._row[0].numbers):
            first = self._row.popleft()
            # Logical times must increase in the order of the slot numbers, which is the same on all ranks.
            self._last = max(self._last + 1, *first.clocks.values())
            self._close(first, self._last)

    def _stage(self, slot: _Slot) -> None:
        """Send a call through host memory, because its slot's logical time has not come soon enough."""
        self._row.remove(slot)
        self._close(slot, 0)

    def _close(self, slot: _Slot, time: int) -> None:
        self._stop(slot)
        for each in slot.numbers.items():
            del self._asked[each]
        for rank, number in slot.numbers.items():
            self._send(rank, {"slot": number, "at": time})

    def _stop(self, slot: _Slot) -> None:
        if slot.timer is not None:
            slot.timer.cancel()
