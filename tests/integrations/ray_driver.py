"""The driver process of `test_ray.py`: it starts Ray on this host, and calls functions on request."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import time
from typing import Any

import numpy as np
import ray
from ray.util import collective
from ray.util.collective.types import ReduceOp

import aiocoll
from aiocoll.integrations.ray import BlockingMember, Member, group, register
from tests.integrations.engines import held_resources, hello_program, record_leftovers, serve, wait_until
from tests.pages import code, execute

#: The CPUs that Ray reserves for an actor. With a fraction of a CPU, all actors of a test fit on this host.
CPUS = 0.1


# -- actors


def kill_at_step_20(doomed: int, step: int) -> None:
    if step == 20 and os.getpid() == doomed:
        os.kill(doomed, signal.SIGKILL)


class Counter(Member):
    """An actor with a step counter, which rank 0 broadcasts after each change of the group."""

    def __init__(self) -> None:
        self.steps = 0
        self.sizes: list[int] = []

    async def regrouped(self) -> None:
        self.steps = await self.group.broadcast_object(self.steps, 0)
        self.sizes.append(self.group.size())

    async def add(self, value: float, doomed: int = 0) -> list[float]:
        """Make 50 allreduces; the process with the id `doomed` kills itself at step 20."""
        for step in range(50):
            kill_at_step_20(doomed, step)
            x = np.full(3000, value * (self.group.rank() + 1))
            await self.group.allreduce(x)
        self.steps += 1
        return [float(x[0]), self.group.size(), self.steps]

    async def wait_forever(self) -> None:
        await self.group.recv_object((self.group.rank() + 1) % self.group.size())

    async def fail(self) -> None:
        if self.group.rank() == 1:
            raise ValueError("rank 1 does not like it")
        await self.group.barrier()

    async def pid(self) -> int:
        return os.getpid()

    async def leftovers(self) -> list[str]:
        return [each for each in held_resources() if each.startswith(("thread", "memfd"))]


class Waiter(BlockingMember):
    """An actor like `Counter`, but without an event loop."""

    def __init__(self) -> None:
        self.steps = 0

    def regrouped(self) -> None:
        self.steps = self.group.broadcast_object(self.steps, 0)

    def add(self, value: float, doomed: int = 0) -> list[float]:
        for step in range(50):
            kill_at_step_20(doomed, step)
            x = np.full(3000, value * (self.group.rank() + 1))
            self.group.allreduce(x)
        self.steps += 1
        return [float(x[0]), self.group.size(), self.steps]

    def wait_forever(self) -> None:
        self.group.recv_object((self.group.rank() + 1) % self.group.size())

    def fail(self) -> None:
        if self.group.rank() == 1:
            raise ValueError("rank 1 does not like it")
        self.group.barrier()

    def pid(self) -> int:
        return os.getpid()

    def leftovers(self) -> list[str]:
        return [each for each in held_resources() if each.startswith(("thread", "memfd"))]


class Alone(Counter):
    """An actor with a separate host id, as if it ran alone on a host."""

    def __init__(self) -> None:
        super().__init__()
        os.environ["AIOCOLL_HOST_ID"] = f"host of {os.getpid()}"
        os.environ["AIOCOLL_ENCRYPTION"] = "none"


class Plain:
    async def pid(self) -> int:
        return os.getpid()


KINDS = {"async": Counter, "blocking": Waiter, "alone": Alone, "plain": Plain}


def start_actors(kind: str, n: int, **options: Any) -> list[Any]:
    made = ray.remote(num_cpus=CPUS, **options)(KINDS[kind])
    return [made.remote() for _ in range(n)]


def kill_actors(actors: list[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


async def kill(actor: Any) -> None:
    os.kill(await actor.pid.remote(), signal.SIGKILL)


# -- functions that the tests call by name


async def run_hello() -> str:
    names: dict[str, Any] = {}
    exec(hello_program(), names)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        await names["main"]()
    return out.getvalue()


async def say_hello(kind: str) -> Any:
    actors = start_actors(kind, 2)
    async with group(actors) as ranks:
        found = await ranks.call(run_hello)
    kill_actors(actors)
    return found


async def sums(kind: str, n: int) -> Any:
    actors = start_actors(kind, n)
    ranks = await group(actors)
    found = [await ranks.call("add", 1.0), await ranks.call("add", 2.0)]
    await ranks.aclose()
    kill_actors(actors)
    return found


async def lose(kind: str, n: int, victim: int, again: bool) -> Any:
    """Kill an actor during allreduces; Ray restarts the actor if `again` is set, else `replace` starts a new one."""
    actors = start_actors(kind, n, max_restarts=-1 if again else 0)
    replaced_numbers: list[int] = []

    def replace(number: int) -> Any:
        replaced_numbers.append(number)
        return start_actors(kind, 1)[0]

    async with group(actors, replace=replace) as ranks:
        first = await ranks.call("add", 1.0)
        pid = await actors[victim].pid.remote()
        calling = asyncio.create_task(ranks.call("add", 1.0, pid))
        while True:  # repeat until another process answers
            with contextlib.suppress(ray.exceptions.RayActorError):
                if await ranks.actors[victim].pid.remote() != pid:
                    break
            await asyncio.sleep(0.02)
        restarted = time.monotonic()
        second = await calling
        mended = time.monotonic()
        third = await ranks.call("add", 2.0)
        kill_actors(ranks.actors)
    return first, second, third, mended - restarted, replaced_numbers


async def reduce_through_a_loss() -> list[float]:
    """Repeat allreduces in an elastic group that loses a rank, until its second group has made 100 steps."""
    state = {"groups": 0, "step": 0, "end": 0}
    async for pg in aiocoll.elastic(state=state):
        state["groups"] += 1
        state["end"] = state["step"] + 100
        with contextlib.suppress(aiocoll.GroupError):
            while state["groups"] < 2 or state["step"] < state["end"]:
                x = await pg.allreduce(np.full(3000, pg.rank() + 1.0))
                state["step"] += 1
    return [float(x[0]), pg.size(), state["groups"]]


async def lose_in_program(kind: str) -> Any:
    actors = start_actors(kind, 3, max_restarts=-1)
    async with group(actors) as ranks:
        pid = await actors[1].pid.remote()
        calling = asyncio.create_task(ranks.call(reduce_through_a_loss))
        await asyncio.sleep(1)
        os.kill(pid, signal.SIGKILL)
        found = await calling, await ranks.call("add", 1.0)
    kill_actors(actors)
    return found


async def lose_between_calls(kind: str) -> Any:
    actors = start_actors(kind, 3, max_restarts=-1)
    async with group(actors) as ranks:
        await ranks.call("add", 1.0)
        await kill(actors[0])
        await kill(actors[2])
        found = await ranks.call("add", 1.0)
        kill_actors(actors)
    return found


async def lose_all() -> Any:
    actors = start_actors("async", 2, max_restarts=-1)
    async with group(actors) as ranks:
        await ranks.call("add", 1.0)
        for actor in actors:
            await kill(actor)
        found = await ranks.call("add", 1.0)
        kill_actors(actors)
    return found


async def lose_for_good() -> Any:
    """Kill an actor that is not replaced; return the sums, and the number of remaining actors."""
    actors = start_actors("async", 3)
    async with group(actors) as ranks:
        await ranks.call("add", 1.0)
        await kill(actors[1])
        found = await ranks.call("add", 1.0), len(ranks.actors)
        kill_actors(ranks.actors)
    return found


async def group_with_a_dead_actor() -> Any:
    actors = start_actors("async", 2)
    await kill(actors[1])
    try:
        await group(actors)
    except RuntimeError as error:
        message = str(error)
    kill_actors(actors[:1])
    return message


async def fail(kind: str) -> Any:
    actors = start_actors(kind, 3)
    async with group(actors) as ranks:
        try:
            await ranks.call("fail")
        except ValueError as error:
            message = str(error.cause)  # type: ignore[attr-defined]
        found = await ranks.call("add", 1.0)
    kill_actors(actors)
    return message, found


async def close(kind: str) -> Any:
    """Return the resources before, during and after a group of actors, and the error of a call after its end."""
    actors = start_actors(kind, 2)
    before = [await actor.leftovers.remote() for actor in actors]
    found: list[str] = []
    with record_leftovers(found):
        async with group(actors) as ranks:
            await ranks.call("add", 1.0)
            within = [bool(await actor.leftovers.remote()) for actor in actors]
        try:
            await ranks.call("add", 1.0)
        except aiocoll.GroupClosedError as error:
            message = str(error)
    after = [await actor.leftovers.remote() for actor in actors]
    kill_actors(actors)
    return before, within, after, found, message


async def cancel(kind: str) -> Any:
    actors = start_actors(kind, 2)
    found: list[str] = []
    with record_leftovers(found):
        ranks = await group(actors)
        calling = asyncio.create_task(ranks.call("wait_forever"))
        await asyncio.sleep(0.3)
        calling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await calling
        again = await ranks.call("add", 1.0)
        begun = time.monotonic()
        await ranks.aclose()
        seconds = time.monotonic() - begun
    after = [await actor.leftovers.remote() for actor in actors]
    kill_actors(actors)
    return again, seconds, found, after


async def cancel_early(kind: str) -> Any:
    """Cancel the creation of a group while it waits for an actor that needs more CPUs than Ray has."""
    actors = [*start_actors(kind, 2), ray.remote(num_cpus=100)(KINDS[kind]).remote()]
    found: list[str] = []
    with record_leftovers(found):
        making = asyncio.ensure_future(_make_group(actors))
        await asyncio.sleep(0.5)
        making.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await making
    after = [await actor.leftovers.remote() for actor in actors[:2]]
    kill_actors(actors)
    return found, after


async def _make_group(actors: list[Any]) -> Any:
    return await group(actors)


async def argument_errors() -> Any:
    messages = []
    for actors in ([], start_actors("plain", 1), [3]):
        try:
            group(actors)
        except (TypeError, ValueError) as error:
            messages.append(str(error))
    return messages


# -- ray.util.collective


class Worker:
    def __init__(self, torch: bool) -> None:
        register()
        self.torch = torch

    def begin(self, n: int, rank: int) -> None:
        collective.init_collective_group(n, rank, backend="aiocoll", group_name="sums")

    def array(self, *values: float) -> Any:
        if not self.torch:
            return np.array(values)
        import torch

        return torch.tensor(values)

    def run_every_call(self, name: str) -> list[Any]:
        collective.barrier(name)  # makes a group that the driver has declared
        rank, n = collective.get_rank(name), collective.get_collective_group_size(name)
        found = []
        for op in ReduceOp:
            x = self.array(rank + 1.0, 2.0)
            collective.allreduce(x, name, op)
            found.append(x.tolist())
        x = self.array(rank + 1.0)
        collective.reduce(x, 1, name)
        found.append(x.tolist() if rank == 1 else [])
        x = self.array(rank + 1.0)
        collective.broadcast(x, 1, name)
        found.append(x.tolist())
        parts = [self.array(0.0) for _ in range(n)]
        collective.allgather(parts, self.array(rank + 1.0), name)
        found.append([part.tolist() for part in parts])
        x = self.array(0.0)
        collective.reducescatter(x, [self.array(float(each)) for each in range(n)], name)
        found.append(x.tolist())
        if rank == 0:
            collective.send(self.array(7.0), 1, name)
        elif rank == 1:
            x = self.array(0.0)
            collective.recv(x, 0, name)
            found.append(x.tolist())
        collective.barrier(name)
        collective.destroy_collective_group(name)
        return found

    def leftovers(self) -> list[str]:
        return [each for each in held_resources() if each.startswith(("thread", "memfd"))]


async def backend(torch: bool, declared: bool) -> Any:
    register()
    workers = [ray.remote(num_cpus=CPUS)(Worker).remote(torch) for _ in range(3)]
    name = "declared" if declared else "sums"
    if declared:
        await asyncio.gather(*(worker.__ray_ready__.remote() for worker in workers))
        await asyncio.to_thread(collective.create_collective_group, workers, 3, [0, 1, 2], "aiocoll", name)
    else:
        await asyncio.gather(*(worker.begin.remote(3, rank) for rank, worker in enumerate(workers)))
    found = await asyncio.gather(*(worker.run_every_call.remote(name) for worker in workers))
    kept = await asyncio.gather(*(worker.leftovers.remote() for worker in workers))
    await wait_until(lambda: not has_actor(f"aiocoll meeting of {name}"))  # the meeting ends with the last rank
    kill_actors(workers)
    return found, kept


def has_actor(name: str) -> bool:
    with contextlib.suppress(ValueError):
        ray.get_actor(name)
        return True
    return False


async def page() -> Any:
    names = await execute(code("docs/ray.md", "In short"))
    totals = names["totals"]
    for block in (code("docs/ray.md", "Actors"), code("docs/ray.md", "An actor is lost", 2)):
        names |= await execute(block, **names)
    made = names["Blocking"].remote, names["Counter"].remote, names["Worker"].remote
    blocking, counters, actors = ([make() for _ in range(2)] for make in made)
    found = []
    for each, call in ((blocking, ("total", 2.0)), (counters, ("step",))):
        async with group(each) as ranks:
            found.append(await ranks.call(*call))
    replaced = code("docs/ray.md", "An actor is lost").replace("...", 'sums = await ranks.call("total", 1.0)')
    ray.kill(actors[1])  # this actor is not restarted
    found.append((await execute(replaced, **{**names, "actors": actors}))["sums"])
    async with group(blocking) as ranks:
        found.append((await execute(code("docs/ray.md", "Programs"), **{**names, "ranks": ranks}))["totals"])
    names |= await execute(code("docs/ray.md", "ray.util.collective"), **names)
    reducers = [names["Reducer"].remote(2, rank) for rank in range(2)]
    found.append([x.tolist() for x in await asyncio.gather(*(each.total.remote(np.ones(2)) for each in reducers))])
    kill_actors([*blocking, *counters, *reducers])
    return totals, found


async def main() -> None:
    ray.init(
        num_cpus=4, _node_ip_address="127.0.0.1", include_dashboard=False, object_store_memory=80 * 2**20,
        log_to_driver=False, logging_level="warning",
    )  # fmt: skip
    try:
        await serve({name: each for name, each in globals().items() if asyncio.iscoroutinefunction(each)})
    finally:
        ray.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
