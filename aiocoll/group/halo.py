"""Exchange of ghost cells between neighbours in a grid, axis by axis, so that corners are filled, too."""

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

#: The first of the message tags that are reserved for ghost-cell exchanges.
TAGS = 2**29


class Axis(NamedTuple):
    """The messages of a ghost-cell exchange along one axis.

    Attributes:
        axis: number of the axis in the array.
        width: number of ghost cells on either side.
        below, above: the neighbours, or `PROC_NULL`.
    """

    axis: int
    width: int
    below: int
    above: int


class _Exchange:
    """A ghost-cell exchange in progress.

    Args:
        dispatcher: dispatcher of the grid's group.
        steps: yields the messages of one axis after the other; it is advanced when the previous messages have ended.
        array: the result.
        timeout: timeout of each message.
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
        """Start the exchange with the messages of the first axis; return the work of the whole exchange."""
        work: Work[Any] = Work(self._completion)
        self._dispatcher.stepped_calls[self._completion] = None
        try:
            self._advance()
        except BaseException:
            self._dispatcher.stepped_calls.pop(self._completion, None)
            raise
        return work

    def _advance(self) -> None:
        """Start the messages of the next axis; continue with further axes as long as all messages end immediately."""
        while not self._left:
            calls = None if self._error is not None else next(self._steps, None)
            if calls is None:
                self._finish()
                return
            self._left = len(calls) + 1
            for call in calls:
                self._start(call)
            self._left -= 1

    def _start(self, call: MessageCall) -> None:
        """Start a message, or pass it to the interceptor that was active when the exchange started."""
        if self._interceptor is not None:
            taken = completion_of(self._interceptor.take(call))
            taken.note_await()
            if taken.done:
                self._on_message_end(None, taken.exception)
            else:
                taken.call_at_end(lambda _: self._on_message_end(None, taken.exception))
            return
        part = ChildCompletion(self._completion, self._on_message_end)
        call.expect(part)
        self._dispatcher.comm.enter(call.operation(self._dispatcher.comm, P2P, part))

    def _on_message_end(self, _: Any, error: BaseException | None) -> None:
        """Handle the end of a message: continue the exchange, or fail it."""
        self._error = self._error or error
        self._left -= 1
        try:
            self._advance()
        except Exception as raised:
            self._error = self._error or raised
            self._finish()

    def _finish(self) -> None:
        self._steps.close()
        self._dispatcher.stepped_calls.pop(self._completion, None)
        if not self._completion.done:
            self._completion.finish(self._array, self._error)


def _steps(
    rank: int, messages: Messages, array: Any, axes: Sequence[Axis], tag: int, timeout: Timeout
) -> Generator[list[MessageCall], None, None]:
    """Yield the messages of each axis. Each direction along an axis has its own tag.

    Both neighbours may be the same rank. If both are this rank, cells are copied.
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
    """Start an exchange of ghost cells with the neighbours.

    Args:
        dispatcher: dispatcher of the grid's group.
        messages: messages of that group.
        array: array with ghost cells on each axis.
        axes: the steps.
        tag: first of the consecutive tags, two per axis.
        timeout: timeout of each message.
    """
    dispatcher.check()
    dispatcher.check_block("halo")
    steps = _steps(dispatcher.rank, messages, array, axes, tag, timeout)
    return _Exchange(dispatcher, steps, array, timeout).start()


def check_array(array: Any, axes: Sequence[Axis], dims: int) -> None:
    """Raise an error if an array is too small for its ghost cells, or if its slices do not share its memory."""
    shape = getattr(array, "shape", None)
    is_array = hasattr(array, "__array__") or adapter_of(array) is not None
    # JAX arrays and pandas objects have an attribute `at`. Their slices are copies.
    if shape is None or not is_array or hasattr(array, "at"):
        raise TypeError(f"array must be an array whose slices share its memory, not {type(array).__name__}")
    if len(shape) < dims:
        raise ValueError(f"array has {len(shape)} axes, but needs at least the {dims} axes of the grid")
    for axis, width, _, _ in axes:
        if shape[axis] < 3 * width:
            raise ValueError(
                f"array has {shape[axis]} cells on axis {axis}, but needs at least {3 * width}: {width} ghost cells on "
                f"either side and {width} cells of its own"
            )
    view(array[(slice(0, 1),) * dims], name="array")
