"""`run`: run a program as the ranks of a job on the workers of a Dask cluster."""

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

#: Maximum seconds to wait until the program of a cancelled rank has ended.
END = 5.0


async def run(client: Client, program: Callable[..., Any], n: int, *args: Any, **meeting: Any) -> list[Any]:
    """Run a program as the `n` ranks of a job, each on a different Dask worker.

        async def program(x):
            async with aiocoll.new_group() as pg:  # the other workers
                return await pg.allreduce(x)

        totals = await aiocoll.integrations.dask.run(client, program, 4, 1.5)

    A worker that dies, or that Dask removes, is reported to the other ranks (`Meeting.report_death`). The program then
    starts as a newcomer on a free worker, a new or a spare one. A program that iterates over the groups of
    `aiocoll.elastic` continues with the newcomer. Any other program fails with the `PeerLostError` of its group. After
    the first rank has returned, lost ranks are not replaced.

    Args:
        client: client of the cluster; synchronous or not.
        program: a coroutine function, which runs on an event loop in a thread of its worker; or a function, which can
            use `BlockingGroup`. In both, `new_group` and `elastic` need no arguments to find the other ranks.
        n: number of ranks. The call waits until there are as many workers.
        *args: arguments of the program.
        **meeting: arguments of `Meeting`, such as `host` and `encryption`. By default `host` is the address by which
            this machine reaches the scheduler.

    Returns:
        The results of the ranks, in the order of the first group. A newcomer has the place of the rank that it
        replaces. The list is shorter if a lost rank was not replaced.

    Raises:
        TypeError, ValueError: an argument is wrong.
        BaseException: the exception of the program on a rank: the first one that is not a `GroupError`, if any.
    """
    if not callable(program):
        raise TypeError(f"program must be a function, not {type(program).__name__}")
    n = to_int(n, "n")
    if n < 1:
        raise ValueError(f"n={n}: must be positive")
    address = client.scheduler.address
    # Use a separate Dask client for this job, because closing this client then ends all tasks of the job.
    async with (
        Meeting(n, **{"host": _own_host(address), **meeting}) as held,
        Client(address, security=client.security, asynchronous=True, set_as_default=False) as own,
    ):
        workers = _Workers(own)
        await workers.follow()
        await own.wait_for_workers(n)

        async def work(number: int, ticket: Ticket) -> Any:
            async with workers.reserve() as worker:
                return await workers.run(worker, ticket, program, args)

        return await Ranks(held, work).results()


class _Workers:
    """The Dask workers that the scheduler reports, and the subset that is running a rank."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._present: set[str] = set()
        self._busy: set[str] = set()
        self._changed = asyncio.Event()
        self._is_subscribed = False

    async def follow(self) -> None:
        """Subscribe to the scheduler's events about added and removed workers."""
        self._client.subscribe_topic("all", self._on_event)
        while not self._is_subscribed:
            await self._client.log_event("all", {"action": "aiocoll"})
            await asyncio.sleep(0.01)
        self._present |= set((await self._client.scheduler.identity(n_workers=-1))["workers"])

    def _on_event(self, event: tuple[float, Any]) -> None:
        _, content = event
        action = content.get("action") if isinstance(content, dict) else None
        self._is_subscribed = True
        if action == "add-worker":
            self._present.add(content["worker"])
            self._notify()
        elif action == "remove-worker":
            self._present.discard(content["worker"])
            self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    @contextlib.asynccontextmanager
    async def reserve(self) -> AsyncIterator[str]:
        """Wait for a free worker, and reserve the worker until the context exits."""
        while not (free := self._present - self._busy):
            await self._changed.wait()
        worker = min(free)
        self._busy.add(worker)
        try:
            yield worker
        finally:
            self._busy.discard(worker)
            self._notify()

    async def run(self, worker: str, ticket: Ticket, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a program on a Dask worker as the rank that `ticket` stands for; return the program's result.

        Raises:
            RankLostError: Dask has removed the worker.
        """
        key = f"aiocoll-{ticket.job}-{ticket.holder}"
        future = self._client.submit(_work, ticket, program, args, key=key, workers=[worker], pure=False)
        ending = asyncio.ensure_future(_ended(future))
        try:
            await self._wait_until_lost(worker, ending)
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

    async def _wait_until_lost(self, worker: str, ending: asyncio.Future[Any]) -> None:
        while not ending.done():
            if worker not in self._present:
                raise RankLostError(f"Dask has removed the worker {worker}, which ran a rank")
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
            raise ConnectionError(
                "Dask has cancelled the task of a rank; check that the Dask scheduler is running"
            ) from None
        raise


def _own_host(scheduler: str) -> str:
    """Return the local address that this machine uses for connections to the Dask scheduler."""
    if scheduler.startswith("inproc:"):
        return "127.0.0.1"
    host = get_address_host(scheduler)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends no packet
        found: str = probe.getsockname()[0]
    return found


# -- on the workers

#: Event loop and task of each program that runs on this worker, by the holder name in its ticket.
_running: dict[str, tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = {}


def _work(ticket: Ticket, program: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """Run a program in this worker thread, as the rank that `ticket` stands for; return the program's result."""

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
    """Cancel the program that runs on this worker with the ticket of `holder`."""
    if holder in _running:
        loop, task = _running[holder]
        loop.call_soon_threadsafe(task.cancel)
