"""How each library is called on one rank: the peers of aiocoll, on the same arrays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Literal

from inflight import calls_of

from aiocoll.cli.calls import call_of, combine_of
from aiocoll.cli.measure import Combine, Times, times_of
from aiocoll.cli.workload import Workload


@dataclass(frozen=True)
class Library:
    """What a rank needs to measure: its place, how calls are timed, how figures come together."""

    rank: int
    world_size: int
    times: Callable[[Sequence[Workload]], Times]
    combine: Combine


#: What is done with a library once it is there.
Run = Callable[[Library], Awaitable[None]]


def _method(config: dict[str, Any]) -> str:
    """Return the address where ranks meet; they have been started in a folder that all of them see."""
    return config["method"] or f"file://{os.getcwd()}/store"


def aiocoll(config: dict[str, Any], rank: int, run: Run) -> None:
    import uvloop

    from aiocoll import GroupOptions, new_group

    async def main() -> None:
        async with new_group(
            init_method=_method(config),
            rank=rank,
            world_size=config["world_size"],
            options=GroupOptions(
                transport=config["transport"], job_key=config["job_key"], encryption=config["encryption"]
            ),
        ) as pg:

            def times(loads: Sequence[Workload]) -> Times:
                return times_of(calls_of([call_of(pg, load) for load in loads]))

            await run(Library(pg.rank(), pg.size(), times, combine_of(pg)))

    uvloop.run(main())


def gloo(config: dict[str, Any], rank: int, run: Run, awaited: bool = False) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = config["interface"]
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=_method(config), rank=rank, world_size=config["world_size"])

    async def combine(values: Any, how: Literal["sum", "max"]) -> None:
        dist.all_reduce(torch.from_numpy(values), dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)

    def times(loads: Sequence[Workload]) -> Times:
        starts = [_gloo_call(load) for load in loads]
        if not awaited:
            (start,) = starts
            return _blocking(lambda: start(False))
        loop = asyncio.get_running_loop()

        def begin(start: Callable[[bool], Any]) -> asyncio.Future[None]:
            future = loop.create_future()
            done = start(True).get_future()
            done.add_done_callback(lambda _: loop.call_soon_threadsafe(future.set_result, None))
            return future

        return times_of(calls_of([lambda start=start: begin(start) for start in starts]))

    library = Library(rank, config["world_size"], times, combine)
    if awaited:
        import uvloop

        uvloop.run(run(library))
    else:
        asyncio.run(run(library))
    dist.destroy_process_group()


def gloo_awaited(config: dict[str, Any], rank: int, run: Run) -> None:
    gloo(config, rank, run, awaited=True)


def _gloo_call(load: Workload) -> Callable[[bool], Any]:
    """Return a function that calls; its argument is `async_op`."""
    import torch
    import torch.distributed as dist

    def tensor(array: Any) -> Any:
        return None if array is None else torch.from_numpy(array)

    def tensors(array: Any, block: Any) -> Any:
        return None if array is None else [torch.from_numpy(each) for each in array.reshape(-1, block.size)]

    x, source, target = tensor(load.inplace), tensor(load.inputs), tensor(load.outputs)
    match load.case.kind:
        case "gather":
            targets = tensors(load.outputs, load.inputs)
            return lambda later: dist.gather(source, targets, dst=0, async_op=later)
        case "scatter":
            sources = tensors(load.inputs, load.outputs)
            return lambda later: dist.scatter(target, sources, src=0, async_op=later)
    return {
        "allreduce": lambda later: dist.all_reduce(x, async_op=later),
        "broadcast": lambda later: dist.broadcast(x, 0, async_op=later),
        "reduce": lambda later: dist.reduce(x, 0, async_op=later),
        "barrier": lambda later: dist.barrier(async_op=later),
        "allgather": lambda later: dist.all_gather_single(target, source, async_op=later),
        "reduce_scatter": lambda later: dist.reduce_scatter_single(target, source, async_op=later),
        "alltoall": lambda later: dist.all_to_all_single(target, source, async_op=later),
    }[load.case.kind]


def mpi(config: dict[str, Any], run: Run) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    async def combine(values: Any, how: Literal["sum", "max"]) -> None:
        comm.Allreduce(MPI.IN_PLACE, values, MPI.SUM if how == "sum" else MPI.MAX)

    def times(loads: Sequence[Workload]) -> Times:
        (load,) = loads
        return _blocking(_mpi_call(comm, MPI, load))

    assert comm.size == config["world_size"]
    asyncio.run(run(Library(comm.rank, comm.size, times, combine)))


def _mpi_call(comm: Any, MPI: Any, load: Workload) -> Callable[[], object]:
    x, source, target = load.inplace, load.inputs, load.outputs
    root = comm.rank == 0
    return {
        "allreduce": lambda: comm.Allreduce(MPI.IN_PLACE, x),
        "broadcast": lambda: comm.Bcast(x, 0),
        "reduce": lambda: comm.Reduce(MPI.IN_PLACE if root else x, x if root else None, root=0),
        "scan": lambda: comm.Scan(MPI.IN_PLACE, x),
        "barrier": lambda: comm.Barrier(),
        "allgather": lambda: comm.Allgather(source, target),
        "reduce_scatter": lambda: comm.Reduce_scatter_block(source, target),
        "alltoall": lambda: comm.Alltoall(source, target),
        "gather": lambda: comm.Gather(source, target, 0),
        "scatter": lambda: comm.Scatter(source, target, 0),
    }[load.case.kind]


def _blocking(call: Callable[[], object]) -> Times:
    async def times(rounds: int) -> list[int]:
        taken = []
        for _ in range(rounds):
            start = perf_counter_ns()
            call()
            taken.append(perf_counter_ns() - start)
        return taken

    return times
