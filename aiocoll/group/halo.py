"""The exchange of faces between neighbours in a grid, axis by axis, so that corners come from the neighbours' own."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, NamedTuple

from aiocoll.completion import Completion
from aiocoll.elements.adapters import adapter_of
from aiocoll.elements.buffers import view
from aiocoll.engine.operations.composite import ChildCompletion
from aiocoll.engine.operations.signature import P2P
from aiocoll.group.dispatch.dispatcher import PROC_NULL, Dispatcher, Timeout
from aiocoll.group.messages import Messages
from aiocoll.group.prepared_call import MessageCall
from aiocoll.work import Work, completion_of

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


class _Exchange:
    """An exchange under way.

    Args:
        dispatcher: of the group of the grid.
        steps: yields the messages of one axis after the other, each time those before have ended.
        array: the result.
        timeout: of each message.
    """

    def __init__(
        self, dispatcher: Dispatcher, steps: Generator[list[MessageCall], None, None], array: Any, timeout: Timeout
    ) -> None:
        self._dispatcher = dispatcher
        self._steps = steps
        self._array = array
        self._left = 0
        self._error: BaseException | None = None
        self._interceptor = dispatcher.interceptor_here()
        self._completion = Completion(dispatcher.endpoint, "HALO", None, None, dispatcher)
        self._completion.expect((), dispatcher.limit(timeout), array)

    def start(self) -> Work[Any]:
        """Take the first steps."""
        work: Work[Any] = Work(self._completion)
        self._dispatcher.in_steps[self._completion] = None
        try:
            self._go_on()
        except BaseException:
            self._dispatcher.in_steps.pop(self._completion, None)
            raise
        return work

    def _go_on(self) -> None:
        """Start the messages of one step after the other, until one has to wait."""
        while not self._left:
            calls = None if self._error is not None else next(self._steps, None)
            if calls is None:
                self._end()
                return
            self._left = len(calls) + 1
            for call in calls:
                self._start(call)
            self._left -= 1

    def _start(self, call: MessageCall) -> None:
        """Start a message, or let it go where calls went when this exchange was started."""
        if self._interceptor is not None:
            taken = completion_of(self._interceptor.take(call))
            taken.note_await()
            if taken.done:
                self._ended(None, taken.exception)
            else:
                taken.call_at_end(lambda _: self._ended(None, taken.exception))
            return
        part = ChildCompletion(self._completion, self._ended)
        call.expect(part)
        self._dispatcher.comm.enter(call.operation(self._dispatcher.comm, P2P, part))

    def _ended(self, _: Any, error: BaseException | None) -> None:
        """One message has ended."""
        self._error = self._error or error
        self._left -= 1
        try:
            self._go_on()
        except Exception as raised:
            self._error = self._error or raised
            self._end()

    def _end(self) -> None:
        self._steps.close()
        self._dispatcher.in_steps.pop(self._completion, None)
        if not self._completion.done:
            self._completion.finish(self._array, self._error)


def _steps(
    rank: int, messages: Messages, array: Any, axes: Sequence[Axis], tag: int, timeout: Timeout
) -> Generator[list[MessageCall], None, None]:
    """Yield the messages of each axis: down with the first of its two tags, and up with the second.

    Both neighbours may be the same rank; where they are this one, cells are copied.
    """
    send, recv = messages.send_call, messages.recv_call
    for axis, width, below, above in axes:
        length, down, up = array.shape[axis], tag + 2 * axis, tag + 2 * axis + 1
        low, high = _cells(array, axis, width, 2 * width), _cells(array, axis, length - 2 * width, length - width)
        ghosts_low, ghosts_high = _cells(array, axis, 0, width), _cells(array, axis, length - width, length)
        if below == above == rank:
            ghosts_low[...], ghosts_high[...] = high, low
            continue
        calls = []
        if above != PROC_NULL:
            calls.append(recv(view(ghosts_high, name="array"), above, down, timeout))
        if below != PROC_NULL:
            calls.append(recv(view(ghosts_low, name="array"), below, up, timeout))
            calls.append(send(below, down, view(low, name="array", writable=False), timeout))
        if above != PROC_NULL:
            calls.append(send(above, up, view(high, name="array", writable=False), timeout))
        yield calls


def _cells(array: Any, axis: int, start: int, stop: int) -> Any:
    return array[(slice(None),) * axis + (slice(start, stop),)]


def exchange(
    dispatcher: Dispatcher, messages: Messages, array: Any, axes: Sequence[Axis], tag: int, timeout: Timeout
) -> Work[Any]:
    """Start an exchange.

    Args:
        dispatcher: of the group of the grid.
        messages: of that group.
        array: with ghost cells on each axis.
        axes: the steps.
        tag: the first of two for each axis.
        timeout: of each message.
    """
    dispatcher.check()
    dispatcher.check_block("halo")
    steps = _steps(dispatcher.rank, messages, array, axes, tag, timeout)
    return _Exchange(dispatcher, steps, array, timeout).start()


def check_array(array: Any, axes: Sequence[Axis], dims: int) -> None:
    """Refuse an array that has no such ghost cells, or whose slices do not share its memory."""
    shape = getattr(array, "shape", None)
    is_array = hasattr(array, "__array__") or adapter_of(array) is not None
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
