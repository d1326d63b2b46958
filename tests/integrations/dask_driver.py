"""The driver process of `test_dask.py`: it starts a local Dask cluster, and calls functions on request."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import dask
import numpy as np
from distributed import Client, LocalCluster

import aiocoll
from aiocoll import BlockingGroup, GroupOptions, PeerLostError
from aiocoll.integrations import dask as on_dask
from aiocoll.integrations.dask import run
from tests.integrations.engines import held_resources, hello_program, record_leftovers, serve, wait_until
from tests.pages import code, execute

cluster: LocalCluster
client: Client
WORKERS = 3


# -- programs of the ranks


async def run_hello() -> str:
    """Run the program of the README; return its output."""
    names: dict[str, Any] = {}
    exec(hello_program(), names)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        await names["main"]()
    return out.getvalue()


async def reduce_through_a_loss(folder: str, alone: bool = False) -> tuple[int, int, list[float]]:
    """Repeat allreduces in an elastic group that loses a rank, until its second group has made 200 steps."""
    state: dict[str, Any] = {"groups": 0, "step": 0, "end": 0}
    options = GroupOptions(host_id=f"host of {os.getpid()}", encryption="none") if alone else None
    size = 0
    async for pg in aiocoll.elastic(state=state, options=options):
        state["groups"] += 1
        state["end"] = state["step"] + 200
        size = size or pg.size()
        record_start(folder, f"{state['groups']}-{pg.rank()}")
        with contextlib.suppress(aiocoll.GroupError):
            while state["groups"] < 2 or state["step"] < state["end"]:
                x = await pg.allreduce(np.full(3000, 2.0 ** pg.rank()))
                assert (x == 2.0 ** pg.size() - 1).all()
                state["step"] += 1
    return state["groups"], pg.size(), x[:1].tolist()


async def reduce_forever(folder: str) -> None:
    async with aiocoll.new_group() as pg:
        record_start(folder, f"1-{pg.rank()}")
        while True:
            await pg.allreduce(np.ones(3000))


def record_start(folder: str, name: str) -> None:
    """Write the process id of this rank and the current time to a file."""
    file = Path(folder, name)
    file.with_suffix(".new").write_text(f"{os.getpid()} {time.time()}")
    file.with_suffix(".new").rename(file)


def blocking_sum(x: float) -> float:
    with BlockingGroup() as group:
        total: float = group.allreduce(x)
        return total


async def fail_on_rank_1(how: str) -> None:
    async with aiocoll.new_group() as pg:
        await pg.barrier()
        if pg.rank() == 1:
            raise ValueError("rank 1 does not like it")
        await (pg.barrier() if how == "waits" else asyncio.sleep(1000))


async def sleep_forever(folder: str) -> None:
    async with aiocoll.new_group() as pg:
        record_start(folder, f"1-{pg.rank()}")
        await asyncio.sleep(1000)


def block_forever(folder: str) -> None:
    with BlockingGroup() as group:
        record_start(folder, f"1-{group.rank()}")
        if group.rank() == 0:
            group.recv_object(1)
        else:
            group.recv_object(0)


def remaining_objects() -> tuple[list[str], list[str]]:
    """Return the resources and the running programs that earlier ranks have left in this worker process."""
    return sorted(held_resources()), sorted(map(str, on_dask._running))


# -- functions that the tests call by name


async def recorded_starts(folder: str, *names: str) -> dict[str, list[float]]:
    """Wait for the files that `record_start` writes under these names; return their numbers."""
    files = {name: Path(folder, name) for name in names}
    await wait_until(lambda: all(file.exists() for file in files.values()))
    return {name: [float(each) for each in file.read_text().split()] for name, file in files.items()}


def kill(pid: float) -> None:
    os.kill(int(pid), signal.SIGKILL)


async def wait_for_workers() -> list[str]:
    """Wait until all workers of the Dask cluster run; return their addresses."""
    while True:
        workers = (await client.scheduler.identity(n_workers=-1))["workers"]
        if len(workers) == WORKERS and all(each["status"] == "running" for each in workers.values()):
            return sorted(workers)
        await asyncio.sleep(0.05)


async def leftovers() -> list[Any]:
    """Wait up to 5 s for the cleanup on the Dask workers; return the threads and programs that remain."""
    found: Any = None
    for _ in range(50):
        found = list((await client.run(remaining_objects)).values())
        if not any(programs or [each for each in own if each.startswith("thread")] for own, programs in found):
            break
        await asyncio.sleep(0.1)
    return [[each for each in own if each.startswith("thread")] + programs for own, programs in found]


async def say_hello() -> Any:
    await wait_for_workers()
    return await run(client, run_hello, 2)


async def sums(n: int, blocking: bool = False) -> Any:
    await wait_for_workers()
    return await run(client, blocking_sum if blocking else sum_of, n, 1.5)


async def sum_of(x: float) -> float:
    async with aiocoll.new_group() as pg:
        return await pg.allreduce(x)


async def from_another_client() -> Any:
    """Run two ranks through a synchronous Dask client, as most programs do."""
    await wait_for_workers()

    def make() -> Client:
        return Client(cluster.scheduler_address, set_as_default=False)

    other = await asyncio.to_thread(make)
    try:
        return await run(other, sum_of, 2, 2.0)
    finally:
        await asyncio.to_thread(other.close)


async def in_one_process() -> Any:
    async with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=None, asynchronous=True) as threads,
        Client(threads, asynchronous=True, set_as_default=False) as other_client,
    ):
        return await run(other_client, sum_of, 2, 2.0)


async def lose(folder: str, n: int, victim: int, alone: bool) -> Any:
    """Kill one rank's worker; return the results, the seconds from restart to new group, and the restarts."""
    await wait_for_workers()
    restarted: list[float] = []

    def record_restart(event: tuple[float, Any]) -> None:
        if event[1].get("action") == "add-worker":
            restarted.append(time.time())

    client.subscribe_topic("all", record_restart)
    running = asyncio.create_task(run(client, reduce_through_a_loss, n, folder, alone))
    first = await recorded_starts(folder, *(f"1-{rank}" for rank in range(n)))
    await asyncio.sleep(0.3)
    kill(first[f"1-{victim}"][0])
    results = await running
    client.unsubscribe_topic("all")
    begun = [each[1] for each in (await recorded_starts(folder, *(f"2-{rank}" for rank in range(n)))).values()]
    return results, max(begun) - (restarted[0] if restarted else 0.0), len(restarted)


async def lose_a_rank_of_a_plain_program(folder: str) -> Any:
    await wait_for_workers()
    running = asyncio.create_task(run(client, reduce_forever, WORKERS, folder))
    first = await recorded_starts(folder, *(f"1-{rank}" for rank in range(WORKERS)))
    kill(first["1-1"][0])
    try:
        await running
    except PeerLostError as error:
        message = str(error)
    await wait_for_workers()
    return message, await leftovers()


async def fail(how: str) -> Any:
    await wait_for_workers()
    found: list[str] = []
    with record_leftovers(found):
        try:
            await run(client, fail_on_rank_1, WORKERS, how)
        except ValueError as error:
            message = str(error)
    return message, found, await leftovers()


async def cancel(folder: str, blocking: bool) -> Any:
    await wait_for_workers()
    found: list[str] = []
    with record_leftovers(found):
        running = asyncio.create_task(run(client, block_forever if blocking else sleep_forever, 2, folder))
        await recorded_starts(folder, "1-0", "1-1")
        running.cancel()
        begun = time.monotonic()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    return time.monotonic() - begun, found, await leftovers()


async def cancel_early() -> Any:
    """Cancel a run of 100 ranks while it waits for Dask workers that do not exist."""
    await wait_for_workers()
    found: list[str] = []
    with record_leftovers(found):
        running = asyncio.create_task(run(client, sum_of, 100, 1.0))
        await asyncio.sleep(0.5)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    return found


async def grow_until_there_are_enough() -> Any:
    await wait_for_workers()
    running = asyncio.create_task(run(client, sum_of, WORKERS + 1, 1.0))
    cluster.scale(WORKERS + 1)
    results = await running
    cluster.scale(WORKERS)
    await wait_for_workers()
    return results


async def continue_with_fewer_ranks(folder: str) -> Any:
    async for pg in aiocoll.elastic(wait=0.5):
        record_start(folder, f"{pg.size()}-{pg.rank()}")
        with contextlib.suppress(aiocoll.GroupError):
            while pg.size() == WORKERS:
                await pg.allreduce(1)
                await asyncio.sleep(0.01)
            return await pg.allreduce(1)


async def scale_down(folder: str) -> Any:
    await wait_for_workers()
    running = asyncio.create_task(run(client, continue_with_fewer_ranks, WORKERS, folder))
    first = await recorded_starts(folder, *(f"{WORKERS}-{rank}" for rank in range(WORKERS)))
    cluster.scale(WORKERS - 1)
    results = await running
    pids = set((await client.run(os.getpid)).values())
    gone = [int(pid) for pid, _ in first.values() if int(pid) not in pids]
    await wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in gone))
    cluster.scale(WORKERS)
    await wait_for_workers()
    return results, len(gone)


async def argument_errors() -> Any:
    messages = []
    for program, n in ((3, 2), (sum_of, 0), (sum_of, True), (sum_of, "2")):
        try:
            await run(client, program, n)
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


async def page() -> Any:
    await wait_for_workers()
    names = await execute(code("docs/dask.md", "In short"), client=client)
    return names["totals"], (await execute(code("docs/dask.md", "A worker is lost"), **names))["sums"]


async def main() -> None:
    global cluster, client
    # By default, LocalCluster drops a worker that is absent 15 s after its loss, even if the worker was restarted and
    # lost again in that time.
    dask.config.set({"distributed.deploy.lost-worker-timeout": "1h"})
    async with (
        LocalCluster(
            n_workers=WORKERS, threads_per_worker=2, processes=True, host="127.0.0.1", dashboard_address=None,
            memory_limit=0, asynchronous=True,
        ) as cluster,
        Client(cluster, asynchronous=True) as client,
    ):  # fmt: skip
        await serve({name: each for name, each in globals().items() if asyncio.iscoroutinefunction(each)})


if __name__ == "__main__":
    asyncio.run(main())
