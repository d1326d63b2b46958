"""`Team`: the processes of all ranks, for `run_processes` and for test cases that keep their processes.

The ranks of a `run_processes` carry out one job and end. Persistent ranks serve many calls. They keep their group from
call to call, and make a new one after a call that failed or left an operation pending.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from typing import Any, Self

from aiocoll.options import GroupOptions
from aiocoll.security.keys import KEY_SIZE
from aiocoll.store import StoreServer
from aiocoll.testing.child import ChildJob, RemoteCall
from aiocoll.testing.children import GRACE, Child
from aiocoll.testing.deaths import Death, check_deaths, describe_expected
from aiocoll.testing.ranks import check_world_size
from aiocoll.testing.report import first_failure, format_ranks, unretrieved

__all__ = ["Team", "pickled"]

#: Seconds in which ranks may end by themselves after a rank has failed; an unreachable rank is detected after 6 s.
RELEASE = 6.0


class Team:
    """A context manager of processes, one per rank. No process is left after the block.

    Args:
        world_size: number of ranks.
        source: a function or class of the module that each rank must be able to import by its name.
        loop: see `aiocoll.testing.loops.loop_factory`.
        options, expect_death, allow_unretrieved: as for `run_processes`.
    """

    def __init__(
        self,
        world_size: int,
        source: Any,
        *,
        loop: str | bytes,
        options: GroupOptions | None = None,
        expect_death: Mapping[int, Death] | None = None,
        allow_unretrieved: bool = False,
    ) -> None:
        check_world_size(world_size)
        key = secrets.token_bytes(KEY_SIZE)
        self._name = secrets.token_hex(8)
        self._job = ChildJob.of(source, replace(options or GroupOptions(), job_key=key), loop)
        self._server = StoreServer(key=key, job=self._name, world_size=world_size)
        self._world_size = world_size
        self._allow_unretrieved = allow_unretrieved
        self._deaths = check_deaths(expect_death, world_size)
        self._children: list[Child] = []
        self._calls = 0

    @property
    def intact(self) -> bool:
        """Return whether all processes still run."""
        return all(child.process.poll() is None for child in self._children)

    async def __aenter__(self) -> Self:
        host, port = self._server.start()
        try:
            for rank in range(self._world_size):
                environment = _environment(rank, self._world_size, host, port, self._name)
                self._children.append(Child(rank, self._world_size, environment, self._deaths.get(rank)))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            await child.ended()
            await child.aclose()
        await self._server.aclose()

    async def start_persistent(self) -> None:
        """Send each persistent rank its job, so that the rank waits for calls."""
        for child in self._children:
            await child.send_job(self._job)

    async def stop(self) -> None:
        """Let the persistent ranks leave their group and end."""
        for child in self._children:
            child.send("stop")
        await asyncio.wait([asyncio.create_task(child.ended()) for child in self._children], timeout=GRACE)

    async def call(self, call: bytes, limit: float) -> list[Any]:
        """Make a call on all persistent ranks; return or raise as `run_processes` does."""
        fresh = not all(child.clean for child in self._children)
        self._calls += fresh
        results = await self._results(lambda child: child.call(RemoteCall(call, self._calls)), limit)
        found = self._unretrieved()
        if not all(child.clean for child in self._children):
            # Operations that the call has left pending may still fail. Leave the group on all ranks, to end them now.
            await self._results(lambda child: child.call(RemoteCall(None, self._calls)), limit)
            for rank, texts in self._unretrieved().items():
                found[rank] = found.get(rank, []) + texts
        return self._check_results(results, found)

    async def carry_out(self, call: bytes, limit: float) -> list[Any]:
        """Make a single call on all ranks, whose processes end after the call."""
        job = self._job._replace(call=call)
        results = await self._results(lambda child: child.carry_out(job), limit)
        return self._check_results(results, self._unretrieved())

    def _check_results(self, results: list[Any], found: dict[int, list[str]]) -> list[Any]:
        if found:
            raise unretrieved(found, self._world_size)
        return results

    def _unretrieved(self) -> dict[int, list[str]]:
        """Return the unretrieved failures of the ranks that have returned."""
        if self._allow_unretrieved:
            return {}
        return {child.rank: child.unretrieved for child in self._children if child.unretrieved}

    async def _results(self, make_call: Callable[[Child], Coroutine[Any, Any, Any]], limit: float) -> list[Any]:
        failures: dict[int, BaseException] = {}
        cut_off: list[int] = []
        tasks = [
            asyncio.create_task(_record_failure(child.rank, make_call(child), failures), name=f"rank {child.rank}")
            for child in self._children
        ]
        try:
            await asyncio.wait(
                tasks, timeout=None if limit == float("inf") else limit, return_when=asyncio.FIRST_EXCEPTION
            )
            if failures:
                await asyncio.wait(tasks, timeout=RELEASE)
                failures = dict(sorted(failures.items(), key=self._failure_time))
                cut_off = [child.rank for child in self._find_late(tasks)]
            elif not all(task.done() for task in tasks):
                raise TimeoutError(await self._report(tasks, limit))
        finally:
            await self._end_calls(tasks)
        if failures:
            raise first_failure(failures, self._world_size, cut_off, self._unretrieved())
        return [task.result() for task in tasks]

    def _failure_time(self, failure: tuple[int, BaseException]) -> float:
        """Return the time of a rank's failure (0 if it died), to sort failures whose reports arrived out of order."""
        return self._children[failure[0]].failed

    def _find_late(self, tasks: list[asyncio.Task[Any]]) -> list[Child]:
        return [child for child, task in zip(self._children, tasks, strict=True) if not task.done()]

    async def _report(self, tasks: list[asyncio.Task[Any]], limit: float) -> str:
        late = self._find_late(tasks)
        lines = [
            f"{format_ranks([child.rank for child in late])} of {self._world_size} did not end within {limit:g} s\n"
        ]
        for child, words in zip(late, await asyncio.gather(*(child.report() for child in late)), strict=True):
            death = self._deaths.get(child.rank)
            expected = "" if death is None else f", which was expected to {describe_expected(death)}"
            lines.append(f"rank {child.rank} (process {child.process.pid}){expected}\n{words}")
        return "".join(lines)

    async def _end_calls(self, tasks: list[asyncio.Task[Any]]) -> None:
        """End the calls that still run: let persistent ranks cancel the call, and kill ranks that do not end it."""
        late = self._find_late(tasks)
        if late and self._calls:
            for child in late:
                child.send("cancel")
            await asyncio.wait(tasks, timeout=GRACE)
        if not all(task.done() for task in tasks):
            for child in self._children:
                child.kill()
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.exception()  # retrieved, so that asyncio does not log it


async def _record_failure(rank: int, call: Coroutine[Any, Any, Any], failures: dict[int, BaseException]) -> Any:
    try:
        return await call
    except BaseException as error:
        failures.setdefault(rank, error)
        raise


def pickled(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """Pickle a call of `fn` for another process."""
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise TypeError(
            f"fn and its arguments are pickled for other processes, but they cannot be: {error}; fn must be "
            "importable, a function at the top of a module"
        ) from error


def _environment(rank: int, world_size: int, host: str, port: int, job: str) -> dict[str, str]:
    """Return a rank's environment variables, as `aiocoll run` sets them, without the keys of this process's own job."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AIOCOLL_JOB_KEY")}
    return kept | {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "GROUP_RANK": "0",
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "AIOCOLL_JOB_ID": job,
        "AIOCOLL_STORE": "launcher",
        "AIOCOLL_STORE_PORT": str(port),
    }
