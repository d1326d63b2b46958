"""The exchange of faces between neighbours in a grid, axis by axis, so that corners come from the neighbours' own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from aiocoll.elements.buffers import view
from aiocoll.engine.operations.signature import P2P
from aiocoll.group.dispatch.call import Call, Recorder
from aiocoll.group.dispatch.dispatcher import PROC_NULL, Dispatcher, Timeout
from aiocoll.group.messages import Messages
from aiocoll.work import AT_ONCE, Work

__all__ = ["TAGS", "Axis", "check_array", "exchange"]

#: Tags from this on are those of exchanges, in the group of a grid.
TAGS = 2**29


class Axis(NamedTuple):
    """One step of an exchange.

    Attributes:
        axis: of the array.
        width: ghost cells on either side.
        below, above: the neighbours, or `PROC_NULL`.
    """

    axis: int
    width: int
    below: int
    above: int


class _Part(Work[Any]):
    """A message of an exchange, which reports what becomes of it."""

    __slots__ = ()

    def __init__(self, whole: Work[Any], ended: Any) -> None:
        self._be_part_of(whole)
        self._call_back(ended, AT_ONCE)


class _Exchange:
    """An exchange under way.

    Args:
        dispatcher: of the group of the grid.
        messages: of that group.
        array: with ghost cells on each axis.
        axes: the steps that are left.
        tag: the first of two for each axis.
        timeout: of each message.
    """

    def __init__(
        self, dispatcher: Dispatcher, messages: Messages, array: Any, axes: Sequence[Axis], tag: int, timeout: Timeout
    ) -> None:
        self._dispatcher = dispatcher
        self._messages = messages
        self._array = array
        self._axes = list(axes)
        self._tag = tag
        self._timeout = timeout
        self._left = 0
        self._error: BaseException | None = None
        self._interceptor = dispatcher.interceptor_here()
        # The user's call is three frames away.
        self.work: Work[Any] = Work(dispatcher.endpoint, "HALO", None, None, dispatcher.group, 4)
        self.work._expect((), dispatcher.limit(timeout), array)

    def go_on(self) -> None:
        """Take steps until one has to wait."""
        while not self._left:
            if self._error is not None or not self._axes:
                self._end()
                return
            calls = self._calls(self._axes.pop(0))
            self._left = len(calls) + 1
            for call in calls:
                self._start(call)
            self._left -= 1

    def start(self) -> Work[Any]:
        """Take the first steps."""
        self._dispatcher.in_steps[self.work] = None
        try:
            self.go_on()
        except BaseException:
            self._dispatcher.in_steps.pop(self.work, None)
            raise
        return self.work

    def _calls(self, step: Axis) -> list[Call]:
        """Return the messages of a step: down with the first tag, and up with the second, both to one rank perhaps."""
        axis, width, below, above = step
        array, tag = self._array, self._tag + 2 * axis
        length = array.shape[axis]

        def cells(start: int, stop: int) -> Any:
            return array[(slice(None),) * axis + (slice(start, stop),)]

        low, high = cells(width, 2 * width), cells(length - 2 * width, length - width)
        ghosts_low, ghosts_high = cells(0, width), cells(length - width, length)
        if below == above == self._dispatcher.rank:
            ghosts_low[...], ghosts_high[...] = high, low
            return []
        send, recv, timeout = self._messages.send_call, self._messages.recv_call, self._timeout
        calls = []
        if above != PROC_NULL:
            calls.append(recv(view(ghosts_high, name="array"), above, tag, timeout))
        if below != PROC_NULL:
            calls.append(recv(view(ghosts_low, name="array"), below, tag + 1, timeout))
            calls.append(send(below, tag, view(low, name="array", writable=False), timeout))
        if above != PROC_NULL:
            calls.append(send(above, tag + 1, view(high, name="array", writable=False), timeout))
        return calls

    def _start(self, call: Call) -> None:
        """Start a message, or let it go where calls went when this exchange was started."""
        if self._interceptor is not None:
            work = self._interceptor.take(call)
            if work.done():
                self._ended(work)
            else:
                work._note_await()
                work._call_back(self._ended, AT_ONCE)
            return
        part = _Part(self.work, self._ended)
        call.expect(part)
        self._dispatcher.comm.enter(call.make(P2P, part))

    def _ended(self, part: Work[Any]) -> None:
        if part._exception is not None and self._error is None:
            self._error = part._exception
        self._left -= 1
        try:
            self.go_on()
        except Exception as error:
            self._error = self._error or error
            self._end()

    def _end(self) -> None:
        self._dispatcher.in_steps.pop(self.work, None)
        if not self.work.done():
            self.work._finish(self._array, self._error)


def exchange(
    dispatcher: Dispatcher, messages: Messages, array: Any, axes: Sequence[Axis], tag: int, timeout: Timeout
) -> Work[Any]:
    """Start an exchange; for the arguments see `_Exchange`."""
    dispatcher.check()
    if isinstance(dispatcher.block_here(), Recorder):
        raise RuntimeError("halo() takes several steps, which a coalescing block cannot record: call it outside")
    return _Exchange(dispatcher, messages, array, axes, tag, timeout).start()


def check_array(array: Any, axes: Sequence[Axis], dims: int) -> None:
    """Refuse an array that has no such ghost cells, or whose slices do not share its memory."""
    shape = getattr(array, "shape", None)
    is_array = hasattr(array, "__array__") or hasattr(array, "__cuda_array_interface__")
    # JAX's and pandas' slices are copies.
    if shape is None or not is_array or hasattr(array, "at"):
        raise TypeError(f"array must be an array whose slices share its memory, not {type(array).__name__}")
    if len(shape) < dims:
        raise ValueError(f"array has {len(shape)} axes, the grid has {dims}: its first axes are those of the grid")
    for axis, width, _, _ in axes:
        if shape[axis] < 3 * width:
            raise ValueError(
                f"array has {shape[axis]} cells on axis {axis}: it needs {3 * width} at least, {width} on either side "
                f"for the neighbours and {width} of its own"
            )
    view(array[(slice(0, 1),) * dims], name="array")
