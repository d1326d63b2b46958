"""Groups of Ray actors: the driver's code that forms, calls and repairs a group."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, Self

from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util import get_node_ip_address

from aiocoll.errors import GroupClosedError, GroupError
from aiocoll.integrations.membership import Memberships, State, wait_for_all
from aiocoll.integrations.programs import RankLostError, Ranks
from aiocoll.integrations.ray.calls import call_actor, cause_of, check_actor, is_loss
from aiocoll.log import logger
from aiocoll.rendezvous.tickets import Meeting, Ticket

__all__ = ["group"]

#: Seconds between two attempts to reach an actor that Ray restarts.
AGAIN = 0.1
#: Maximum seconds to wait until all actors have left the group.
END = 5.0


class group:
    """Make Ray actors the ranks of a group; to be awaited, or used in ``async with``, which closes the group.

        @ray.remote(max_restarts=-1)
        class Worker(aiocoll.integrations.ray.Member):
            async def total(self, x):
                return await self.group.allreduce(x)

        async with aiocoll.integrations.ray.group([Worker.remote() for _ in range(4)]) as ranks:
            totals = await ranks.call("total", 1.5)

    Args:
        actors: handles of actors whose classes derive from `Member`, or from `BlockingMember` if they have no async
            methods. The first actor becomes rank 0.
        replace: called with the number of an actor that has died permanently. It returns the handle of a new actor, or
            None. Without `replace` the group continues without that actor. Ray restarts actors with `max_restarts`.
        wait: seconds within which all actors must be ranks, at first and after a death.
        **meeting: arguments of `aiocoll.Meeting`: `host`, by default the address of this node, and `encryption`.

    Raises:
        TypeError, ValueError: an argument is wrong, or an actor is of another class.
        TimeoutError: not all actors were ranks in time.
        RuntimeError: an actor has died permanently, and no actor is left.
    """

    def __init__(
        self,
        actors: Sequence[Any],
        *,
        replace: Callable[[int], Any] | None = None,
        wait: float = 60.0,
        **meeting: Any,
    ) -> None:
        if not actors:
            raise ValueError("actors is empty; pass at least one actor")
        self._actors = {number: check_actor(actor, f"actors[{number}]") for number, actor in enumerate(actors)}
        self._replace = replace
        self._wait = wait
        self._given = {"host": get_node_ip_address(), **meeting}
        self._memberships = Memberships(self._join, self._abort, self._given)
        self._closed = False

    def __await__(self) -> Generator[Any, None, Self]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> Self:
        try:
            await self._mend()
        except BaseException:
            await self.aclose()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    @property
    def actors(self) -> list[Any]:
        """Handles of the actors, in the rank order of the first group; a replacement has the handle of a new actor."""
        return list(self._actors.values())

    async def call(self, what: str | Callable[..., Any], *args: Any) -> list[Any]:
        """Call a method of all actors, or run a function on all actors.

        If an actor is lost during a method call, the group is repaired, with a new actor in its place. Then the method
        is called again on all actors. The results of the first call are dropped.

        Args:
            what: name of a method of the actors; or a function, async or not, which runs on each actor. In it,
                `new_group` and `elastic` need no arguments to find the other actors. If an actor is lost, `elastic`
                continues with the new actor, and the function is not called again on the others.
            *args: arguments of the method or function.

        Returns:
            The results, in the order of the actors.

        Raises:
            RayError: the exception of an actor, unless its reason was a lost rank. The group has been repaired.
            TimeoutError: the group could not be repaired in time.
            GroupClosedError: the group was closed.
        """
        while True:
            if self._closed:
                raise GroupClosedError("the group of actors was closed")
            try:
                return await (self._call(what, args) if isinstance(what, str) else self._run(what, args))
            except RayError as error:
                await self._mend()
                if not is_loss(error):
                    raise

    async def aclose(self) -> None:
        """Close the group: all actors leave the group, and continue to run."""
        self._closed = True
        members = [self._actors[number] for number in self._memberships.joined if number in self._actors]
        await self._memberships.end()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(END):
                await asyncio.gather(*(call_actor(actor, "aiocoll_leave") for actor in members), return_exceptions=True)

    # -- calls

    async def _call(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        try:
            calls = (self._call_one(number, method, args) for number in self._actors)
            results = await asyncio.gather(*calls, return_exceptions=True)
        except asyncio.CancelledError:
            for number in self._memberships.joined:
                self._memberships.report(number, "the driver cancelled the call")
            raise
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            losses = [error for error in errors if is_loss(error)]
            raise (losses or [error for error in errors if not isinstance(cause_of(error), GroupError)] or errors)[0]
        return results

    async def _call_one(self, number: int, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method of one actor; if it fails, report a death or abort the group, so that no actor waits."""
        try:
            return await call_actor(self._actors[number], method, *args)
        except RayActorError as error:
            self._memberships.report(number, error)
            raise
        except RayError as error:
            if not is_loss(error):
                with contextlib.suppress(RayActorError):
                    await self._abort(number, f"{method} raised {cause_of(error)!r}")
            raise

    async def _run(self, program: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        numbers = list(self._actors)

        async def run(rank: int, ticket: Ticket) -> Any:
            await self._state(numbers[rank])  # waits until Ray has restarted the actor, if it died
            if numbers[rank] not in self._actors:
                await asyncio.get_running_loop().create_future()  # waits until the other ranks have ended
            try:
                return await call_actor(self._actors[numbers[rank]], "aiocoll_run", ticket, program, args)
            except RayActorError as error:
                raise RankLostError(str(error)) from error

        async with Meeting(len(numbers), **self._given) as meeting:
            ranks = Ranks(meeting, run)
            results = await ranks.results()
        if ranks.losses:
            await self._mend()
        return results

    # -- repairing the group

    async def _mend(self) -> None:
        """Make actors outside the group join it, and wait until all actors are in one group."""
        async with asyncio.timeout(self._wait):
            while True:
                try:
                    if await self._ensure_one_group():
                        return await wait_for_all(call_actor(actor, "regrouped") for actor in self.actors)
                except (GroupError, RayActorError) as error:
                    logger.info("the group of actors could not be completed; trying again: %s", error)
                await asyncio.sleep(AGAIN)

    async def _ensure_one_group(self) -> bool:
        numbers = list(self._actors)
        states = zip(numbers, await asyncio.gather(*map(self._state, numbers)), strict=True)
        return await self._memberships.ensure_one_group(
            {number: state for number, state in states if number in self._actors}
        )

    async def _join(self, number: int, ticket: Ticket) -> None:
        await call_actor(self._actors[number], "aiocoll_join", ticket)

    async def _abort(self, number: int, reason: str) -> None:
        await call_actor(self._actors[number], "aiocoll_abort", reason)

    async def _state(self, number: int) -> State | None:
        """Return an actor's report about its group; None if the actor died permanently without a replacement."""
        while number in self._actors:
            try:
                state: State | None = await call_actor(self._actors[number], "aiocoll_state")
                return state
            except ActorUnavailableError:
                await asyncio.sleep(AGAIN)
            except RayActorError as error:
                self._memberships.report(number, error)
                self._substitute(number, error)
        return None

    def _substitute(self, number: int, error: Exception) -> None:
        """Replace an actor that has died permanently; without a replacement, remove the actor."""
        actor = None if self._replace is None else self._replace(number)
        if actor is not None:
            self._actors[number] = check_actor(actor, f"replace({number})")
        elif not self._memberships.has_meeting or len(self._actors) == 1:
            raise RuntimeError(
                f"actor {number} has died and has no replacement: {error}; pass replace=, or set max_restarts"
            ) from error
        else:
            logger.warning(
                "actor %d has died and has no replacement; the group continues without it: %s", number, error
            )
            del self._actors[number]
