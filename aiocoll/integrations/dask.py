"""Ranks on the workers of a Dask cluster: `await run(client, program, n)`."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

from aiocoll.errors import BackendUnavailableError
from aiocoll.integrations.programs import RankLostError, Ranks
from aiocoll.numerals import to_int
from aiocoll.rendezvous.tickets import Meeting, Ticket

try:
    from distributed import Client, Future
    from distributed.comm import get_address_host
except ImportError as error:
    raise BackendUnavailableError("aiocoll.integrations.dask needs Dask: pip install 'aiocoll[dask]'") from error

__all__ = ["run"]

#: Seconds that ranks have to end when they are told to.
END = 5.0


async def run(client: Client, program: Callable[..., Any], n: int, *args: Any, **meeting: Any) -> list[Any]:
    """Run a program as `n` ranks, each on a worker of its own.

        async def program(x):
            async with aiocoll.new_group() as pg:  # the other workers
                return await pg.allreduce(x)

        totals = await aiocoll.integrations.dask.run(client, program, 4, 1.5)

    A worker that dies, or that Dask removes, is reported to the other ranks (`Meeting.report_death`). Then the program
    is started as a newcomer on a worker that has no rank: a new one, or one to spare. A program takes it in if it goes
    through the groups of `aiocoll.elastic`; any other one fails with the `PeerLostError` of its group. Once a rank has
    returned, lost ones are not replaced.

    Args:
        client: of the cluster; synchronous or not.
        program: a coroutine function, which has an event loop in a thread of its worker, or a function, for which there
            is `BlockingGroup`. In both `new_group` and `elastic` find the others without arguments.
        n: number of ranks. It waits until there are as many workers.
        *args: of the program.
        **meeting: arguments of `Meeting`, such as `host` and `encryption`. By default `host` is the address by which
            this machine reaches the scheduler.

    Returns:
        What the ranks have returned, in the order of the first group, newcomers in the place of those that they
        replace. It is shorter if a rank was lost and nobody has taken its place.

    Raises:
        TypeError, ValueError: an argument is wrong.
        What the program raises on a rank: the first error that is not about another rank, if there is one.
    """
    if not callable(program):
        raise TypeError(f"program must be a function, not {type(program).__name__}")
    n = to_int(n, "n")
    if n < 1:
        raise ValueError(f"n={n}: must be positive")
    address = client.scheduler.address
    # A client of our own: whatever it has started ends with it.
    async with (
        Meeting(n, **{"host": _own_host(address), **meeting}) as held,
        Client(address, security=client.security, asynchronous=True, set_as_default=False) as own,
    ):
        workers = _Workers(own)
        await workers.follow()
        await own.wait_for_workers(n)

        async def work(number: int, ticket: Ticket) -> Any:
            async with workers.one() as worker:
                return await workers.run(worker, ticket, program, args)

        return await Ranks(held, work).results()


class _Workers:
    """The workers of the cluster, as the scheduler tells of them, and which of them have no rank."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._there: set[str] = set()
        self._taken: set[str] = set()
        self._changed = asyncio.Event()
        self._heard = False

    async def follow(self) -> None:
        """Begin to hear of workers that come and go."""
        self._client.subscribe_topic("all", self._hear)
        while not self._heard:
            await self._client.log_event("all", {"action": "aiocoll"})
            await asyncio.sleep(0.01)
        self._there |= set((await self._client.scheduler.identity(n_workers=-1))["workers"])

    def _hear(self, event: tuple[float, Any]) -> None:
        _, told = event
        action = told.get("action") if isinstance(told, dict) else None
        self._heard = True
        if action == "add-worker":
            self._there.add(told["worker"])
            self._change()
        elif action == "remove-worker":
            self._there.discard(told["worker"])
            self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def one(self) -> AsyncIterator[str]:
        """Wait for a worker that has no rank; in the block it has one."""
        while not (free := self._there - self._taken):
            await self._changed.wait()
        worker = min(free)
        self._taken.add(worker)
        try:
            yield worker
        finally:
            self._taken.discard(worker)
            self._change()

    async def run(self, worker: str, ticket: Ticket, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a program as a rank on a worker; return the result.

        Raises:
            RankLostError: the worker is gone.
        """
        key = f"aiocoll-{ticket.job}-{ticket.holder}"
        future = self._client.submit(_work, ticket, program, args, key=key, workers=[worker], pure=False)
        ending = asyncio.ensure_future(_ended(future))
        try:
            await self._until_lost(worker, ending)
            return ending.result()
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(END):
                    await self._client.run(_stop, ticket.holder, workers=[worker], on_error="ignore")
                    await asyncio.wait([ending])
            raise
        finally:
            ending.cancel()
            await asyncio.wait([ending])
            await future.cancel()

    async def _until_lost(self, worker: str, ending: asyncio.Future[Any]) -> None:
        while not ending.done():
            if worker not in self._there:
                raise RankLostError(f"Dask has removed the worker {worker}")
            changed = asyncio.ensure_future(self._changed.wait())
            try:
                await asyncio.wait([ending, changed], return_when=asyncio.FIRST_COMPLETED)
            finally:
                changed.cancel()


async def _ended(future: Future) -> Any:
    try:
        return await future
    except asyncio.CancelledError:
        if future.cancelled():
            raise ConnectionError("Dask has dropped the task of a rank: is its scheduler gone?") from None
        raise


def _own_host(scheduler: str) -> str:
    """Return the address of this machine from which a scheduler is reached."""
    if scheduler.startswith("inproc:"):
        return "127.0.0.1"
    host = get_address_host(scheduler)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing
        found: str = probe.getsockname()[0]
    return found


# -- on the workers

#: What runs here, by ticket.
_running: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = {}


def _work(ticket: Ticket, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a program as one rank, in this thread."""

    async def main() -> Any:
        task = asyncio.ensure_future(made)
        _running[ticket.holder] = asyncio.get_running_loop(), task
        try:
            await asyncio.wait([task])
            return None if task.cancelled() else task.result()
        finally:
            del _running[ticket.holder]

    with ticket.as_default():
        made = program(*args)
        return asyncio.run(main()) if inspect.isawaitable(made) else made


def _stop(holder: str) -> None:
    """Cancel a program that runs here."""
    if holder in _running:
        loop, task = _running[holder]
        loop.call_soon_threadsafe(task.cancel)
