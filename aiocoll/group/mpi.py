"""The calls of a group that programs know from MPI: splitting by colour, grids, plans, probes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import ParamSpec, Self, TypeVar

from aiocoll.engine.matching.probe import Envelope
from aiocoll.group.cartesian import CartesianGroup, make_cartesian
from aiocoll.group.dispatch.dispatcher import Dispatcher, Timeout
from aiocoll.group.lifetime import Lifetime
from aiocoll.group.messages import Messages
from aiocoll.group.plans import CallPlan, make_plan
from aiocoll.group.reconfigurer import Reconfigurer
from aiocoll.work import Work

__all__ = ["MpiCalls"]

P = ParamSpec("P")
T = TypeVar("T")


class MpiCalls:
    """A part of `ProcessGroup`, which has them.

    Args:
        dispatcher: of the group, as the other parts.
        messages: its messages.
        reconfigurer: makes groups from it.
        lifetime: knows whether it ends.
    """

    def __init__(
        self, dispatcher: Dispatcher, messages: Messages, reconfigurer: Reconfigurer, lifetime: Lifetime
    ) -> None:
        self._dispatcher = dispatcher
        self._messages = messages
        self._reconfigurer = reconfigurer
        self._lifetime = lifetime

    # -- messages

    def probe(self, source: int | None = None, tag: int = 0, *, timeout: Timeout = None) -> Work[Envelope]:
        """Wait for a message that could be received, and tell what it is, without receiving it.

            envelope = await pg.probe(tag=3)
            x = np.empty(envelope.count, envelope.dtype)
            await pg.recv(x, envelope.source, tag=3)

        The next receive from that source with that tag gets the message. A receive that was posted earlier, and fits,
        takes it first: a probe does not see it. Several probes see the same message, until a receive or `incoming`
        takes it; tasks that take messages of one tag from each other use `incoming`. Cancelling a probe loses nothing.

        Args:
            source: a rank of the group, or `PROC_NULL`; None is any rank.
            tag: that of the send.
            timeout: seconds; None is the group's.

        Returns:
            Work that yields the `Envelope`: source, tag, length and dtype of the oldest such message.

        Raises:
            TypeError, ValueError: `source` or `tag` is wrong.
            GroupError: no such message comes in time, or the group fails, see `ProcessGroup`.

        Cost: none of its own.
        """
        return self._messages.probe(source, tag, timeout)

    def iprobe(self, source: int | None = None, tag: int = 0) -> Envelope | None:
        """Tell what the next message is, if there is one now; otherwise as `probe`.

        It looks at what has come meanwhile, but connections are opened, and long computations of the loop go on, only
        while the program awaits something: a loop that only calls this, without an await, may wait for ever.

        Args:
            source: a rank of the group, or `PROC_NULL`; None is any rank.
            tag: that of the send.

        Returns:
            The `Envelope`; None if there is no such message.

        Raises:
            TypeError, ValueError: `source` or `tag` is wrong.
            GroupError: the group is closed or has failed.

        Cost: none of its own.
        """
        return self._messages.iprobe(source, tag)

    # -- calls that are made again and again

    def plan(self, call: Callable[P, Work[T]], /, *args: P.args, **kwargs: P.kwargs) -> CallPlan[T]:
        """Check a call once, to start it many times.

            plan = pg.plan(pg.allreduce, gradients, ReduceOp.AVG)
            for batch in batches:
                gradients[:] = ...
                await plan.start()

        The arguments are checked here, and nothing starts. The plan holds the arrays: each start takes what is in them
        then, and leaves its result there. A start takes its place among the calls of the group as the call itself
        would. Calls on contiguous arrays of the host are cheaper to start than to make; any other call is made anew.

        Args:
            call: a method of this group: any collective, send or receive, of arrays or objects, or `batch`.
            args: its arguments.
            kwargs: likewise.

        Returns:
            A plan; its `start` returns what the call returns.

        Raises:
            TypeError: `call` is no such method of this group; or what the call raises.
            ValueError: what the call raises.
            GroupError: the group is closed or has failed.

        Cost: that of the call, at each start.
        """
        return make_plan(self._dispatcher, call, args, kwargs)

    # -- other groups

    async def split(self, color: int | str | None, key: int = 0) -> Self | None:
        """Make a group of the ranks that give the same colour, for each colour.

        All ranks of this group call it, in the same order as other calls; unlike for `split_group`, a rank need not
        know what the others give. The new group shares all connections with this one, as one that `split_group` makes.

        Args:
            color: of the group that this rank is to be in: any number or text. None: of none.
            key: ranks of the new group are numbered by their keys, and ranks with the same key as in this group.

        Returns:
            The group this rank is in; None if it has given no colour.

        Raises:
            TypeError: `color` or `key` is of another type.
            GroupError: the operation fails, see `ProcessGroup`.

        Cost: that of `allgather_object`.
        """
        group: Self | None = await self._reconfigurer.split_by_color(color, key, lambda: self._lifetime.is_ending)
        return group

    def cart(self, dims: Sequence[int], periods: bool | Sequence[bool] | None = None) -> CartesianGroup[Self] | None:
        """Make a group of the first ranks whose ranks form a grid.

            cart = pg.cart([0, 0], periods=[True, False])  # a cylinder
            below, above = cart.shift(axis=0)
            await cart.halo(u)

        All ranks of this group call it, in the same order as other calls that make groups, and with the same
        arguments; it is local and sends nothing. Ranks are numbered along the last axis first, and keep their order.

        Args:
            dims: number of ranks along each axis. Those that are 0 are chosen so that all ranks are in the grid, as
                equal as possible, the largest first.
            periods: whether each axis goes round, its last rank next to its first; None: none does.

        Returns:
            The `CartesianGroup`; None on ranks beyond the grid.

        Raises:
            TypeError, ValueError: `dims` are more ranks than there are, no multiple of the ranks can have the lengths
                that are given, or an argument is no list of ints or bools.
            GroupError: the group is closed or has failed.

        Cost: nothing is sent.
        """
        made: CartesianGroup[Self] | None = make_cartesian(self, self._dispatcher.size, dims, periods)
        return made


# What Python says of a missing argument names the class that users know.
for _name, _call in list(vars(MpiCalls).items()):
    if inspect.isfunction(_call) and not _name.startswith("_"):
        _call.__qualname__ = f"ProcessGroup.{_name}"
