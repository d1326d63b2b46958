"""Has a Dask cluster on the loopback, and calls what `test_dask.py` asks for."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
from distributed import Client, LocalCluster

import aiocoll
from aiocoll import BlockingGroup, GroupOptions, PeerLostError
from aiocoll.integrations import dask
from aiocoll.integrations.dask import run
from tests.integrations.engines import held, hello, left_behind, serve, until
from tests.pages import code, execute

cluster: LocalCluster
client: Client
WORKERS = 3


# -- what the ranks run


async def said() -> str:
    """Run the program of the README; return what it has printed."""
    names: dict[str, Any] = {}
    exec(hello(), names)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        await names["main"]()
    return out.getvalue()


async def reduces(folder: str, alone: bool = False) -> tuple[int, int, list[float]]:
    """Reduce until a rank was lost and the group is whole again, and a while longer."""
    state: dict[str, Any] = {"groups": 0, "step": 0, "until": 0}
    options = GroupOptions(host_id=f"host of {os.getpid()}", encryption="none") if alone else None
    size = 0
    async for pg in aiocoll.elastic(state=state, options=options):
        state["groups"] += 1
        state["until"] = state["step"] + 200
        size = size or pg.size()
        note(folder, f"{state['groups']}-{pg.rank()}")
        with contextlib.suppress(aiocoll.GroupError):
            while state["groups"] < 2 or state["step"] < state["until"]:
                x = await pg.allreduce(np.full(3000, 2.0 ** pg.rank()))
                assert (x == 2.0 ** pg.size() - 1).all()
                state["step"] += 1
    return state["groups"], pg.size(), x[:1].tolist()


async def plain(folder: str) -> None:
    async with aiocoll.new_group() as pg:
        note(folder, f"1-{pg.rank()}")
        while True:
            await pg.allreduce(np.ones(3000))


def note(folder: str, name: str) -> None:
    """Write down that a rank is there, its process, and when."""
    file = Path(folder, name)
    file.with_suffix(".new").write_text(f"{os.getpid()} {time.time()}")
    file.with_suffix(".new").rename(file)


def waits(x: float) -> float:
    with BlockingGroup() as group:
        total: float = group.allreduce(x)
        return total


async def fails(how: str) -> None:
    async with aiocoll.new_group() as pg:
        await pg.barrier()
        if pg.rank() == 1:
            raise ValueError("rank 1 does not like it")
        await (pg.barrier() if how == "waits" else asyncio.sleep(1000))


async def sleeps(folder: str) -> None:
    async with aiocoll.new_group() as pg:
        note(folder, f"1-{pg.rank()}")
        await asyncio.sleep(1000)


def blocks(folder: str) -> None:
    with BlockingGroup() as group:
        note(folder, f"1-{group.rank()}")
        if group.rank() == 0:
            group.recv_object(1)
        else:
            group.recv_object(0)


def remains() -> tuple[list[str], list[str]]:
    """Return the objects of earlier ranks that a worker still holds."""
    return sorted(held()), sorted(map(str, dask._running))


# -- what the driver does


async def notes(folder: str, *names: str) -> dict[str, list[float]]:
    """Wait for what the ranks have written; return it by name."""
    files = {name: Path(folder, name) for name in names}
    await until(lambda: all(file.exists() for file in files.values()))
    return {name: [float(each) for each in file.read_text().split()] for name, file in files.items()}


def kill(pid: float) -> None:
    os.kill(int(pid), signal.SIGKILL)


async def whole() -> list[str]:
    """Wait until the cluster has all its workers, and none that is ending; return them."""
    while True:
        workers = (await client.scheduler.identity(n_workers=-1))["workers"]
        if len(workers) == WORKERS and all(each["status"] == "running" for each in workers.values()):
            return sorted(workers)
        await asyncio.sleep(0.05)


async def kept() -> list[Any]:
    """Return what the workers keep, once they have had time to end what they were told to end."""
    found: Any = None
    for _ in range(50):
        found = list((await client.run(remains)).values())
        if not any(programs or [each for each in own if each.startswith("thread")] for own, programs in found):
            break
        await asyncio.sleep(0.1)
    return [[each for each in own if each.startswith("thread")] + programs for own, programs in found]


async def say_hello() -> Any:
    await whole()
    return await run(client, said, 2)


async def sums(n: int, blocking: bool = False) -> Any:
    await whole()
    return await run(client, waits if blocking else summed, n, 1.5)


async def summed(x: float) -> float:
    async with aiocoll.new_group() as pg:
        return await pg.allreduce(x)


async def from_another_client() -> Any:
    """Run the job by a synchronous client, as most programs do."""
    await whole()

    def make() -> Client:
        return Client(cluster.scheduler_address, set_as_default=False)

    other = await asyncio.to_thread(make)
    try:
        return await run(other, summed, 2, 2.0)
    finally:
        await asyncio.to_thread(other.close)


async def in_one_process() -> Any:
    async with (
        LocalCluster(n_workers=2, processes=False, dashboard_address=None, asynchronous=True) as threads,
        Client(threads, asynchronous=True, set_as_default=False) as its,
    ):
        return await run(its, summed, 2, 2.0)


async def lose(folder: str, n: int, victim: int, alone: bool) -> Any:
    """Kill the worker of a rank; return what all ranks say, and the seconds from its restart to the next group."""
    await whole()
    restarted: list[float] = []

    def hear(event: tuple[float, Any]) -> None:
        if event[1].get("action") == "add-worker":
            restarted.append(time.time())

    client.subscribe_topic("all", hear)
    running = asyncio.create_task(run(client, reduces, n, folder, alone))
    first = await notes(folder, *(f"1-{rank}" for rank in range(n)))
    await asyncio.sleep(0.3)
    kill(first[f"1-{victim}"][0])
    results = await running
    client.unsubscribe_topic("all")
    begun = [each[1] for each in (await notes(folder, *(f"2-{rank}" for rank in range(n)))).values()]
    return results, max(begun) - (restarted[0] if restarted else 0.0), len(restarted)


async def lose_a_rank_of_a_plain_program(folder: str) -> Any:
    await whole()
    running = asyncio.create_task(run(client, plain, WORKERS, folder))
    first = await notes(folder, *(f"1-{rank}" for rank in range(WORKERS)))
    kill(first["1-1"][0])
    try:
        await running
    except PeerLostError as error:
        said = str(error)
    await whole()
    return said, await kept()


async def fail(how: str) -> Any:
    await whole()
    found: list[str] = []
    with left_behind(found):
        try:
            await run(client, fails, WORKERS, how)
        except ValueError as error:
            said = str(error)
    return said, found, await kept()


async def cancel(folder: str, blocking: bool) -> Any:
    await whole()
    found: list[str] = []
    with left_behind(found):
        running = asyncio.create_task(run(client, blocks if blocking else sleeps, 2, folder))
        await notes(folder, "1-0", "1-1")
        running.cancel()
        begun = time.monotonic()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    return time.monotonic() - begun, found, await kept()


async def cancel_early() -> Any:
    """While it waits for workers that never come."""
    await whole()
    found: list[str] = []
    with left_behind(found):
        running = asyncio.create_task(run(client, summed, 100, 1.0))
        await asyncio.sleep(0.5)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
    return found


async def grow_until_there_are_enough() -> Any:
    await whole()
    running = asyncio.create_task(run(client, summed, WORKERS + 1, 1.0))
    cluster.scale(WORKERS + 1)
    results = await running
    cluster.scale(WORKERS)
    await whole()
    return results


async def smaller(folder: str) -> Any:
    async for pg in aiocoll.elastic(wait=0.5):
        note(folder, f"{pg.size()}-{pg.rank()}")
        with contextlib.suppress(aiocoll.GroupError):
            while pg.size() == WORKERS:
                await pg.allreduce(1)
                await asyncio.sleep(0.01)
            return await pg.allreduce(1)


async def scale_down(folder: str) -> Any:
    await whole()
    running = asyncio.create_task(run(client, smaller, WORKERS, folder))
    first = await notes(folder, *(f"{WORKERS}-{rank}" for rank in range(WORKERS)))
    cluster.scale(WORKERS - 1)
    results = await running
    pids = set((await client.run(os.getpid)).values())
    gone = [int(pid) for pid, _ in first.values() if int(pid) not in pids]
    await until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in gone))
    cluster.scale(WORKERS)
    await whole()
    return results, len(gone)


async def wrong() -> Any:
    said = []
    for program, n in ((3, 2), (summed, 0), (summed, True), (summed, "2")):
        try:
            await run(client, program, n)
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


async def page() -> Any:
    await whole()
    names = await execute(code("docs/dask.md", "In short"), client=client)
    return names["totals"], (await execute(code("docs/dask.md", "A worker is lost"), **names))["sums"]


async def main() -> None:
    global cluster, client
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
