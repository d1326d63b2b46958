"""Benchmark calls of aiocoll, Gloo and MPI on one rank, with the same arrays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter, perf_counter_ns
from typing import Any, Literal, NamedTuple

from inflight import calls_of

from aiocoll.cli.calls import call_of, combine_of
from aiocoll.cli.measure import Combine, Times, times_of
from aiocoll.cli.workload import Workload


@dataclass(frozen=True)
class Library:
    """A library as one rank uses it: the rank, the world size, a timer of calls, and a reduction of figures."""

    rank: int
    world_size: int
    times: Callable[[Sequence[Workload]], Times]
    combine: Combine


#: Seconds for which mode "spin" tests a request before it yields to the event loop.
SPIN = 50e-6
#: A function that is called with a library on this rank, after the library's initialization.
Run = Callable[[Library], Awaitable[None]]


def _method(config: dict[str, Any]) -> str:
    """Return the init method: the configured one, or a file in the working directory, which all ranks share."""
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


def gloo(config: dict[str, Any], rank: int, run: Run) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = config["interface"]
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=_method(config), rank=rank, world_size=config["world_size"])

    async def combine(values: Any, how: Literal["sum", "max"]) -> None:
        dist.all_reduce(torch.from_numpy(values), dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX)

    def times(loads: Sequence[Workload]) -> Times:
        starts = [_gloo_call(load) for load in loads]
        match config["mode"]:
            case "future":
                return times_of(calls_of([lambda start=start: _future_of(start(True)) for start in starts]))
            case "thread":
                thread = Thread()
                return times_of(calls_of([lambda start=start: thread.run(start(True).wait) for start in starts]))
        (start,) = starts
        return _blocking(lambda: start(False))

    _run_on_loop(run(Library(rank, config["world_size"], times, combine)))
    dist.destroy_process_group()


class Thread:
    """A thread that makes blocking calls, one after another, for the running event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._executor = ThreadPoolExecutor(1)

    def run(self, call: Callable[[], object]) -> Awaitable[object]:
        return self._loop.run_in_executor(self._executor, call)


def _future_of(work: Any) -> asyncio.Future[None]:
    """Return an asyncio future that is done when a work of torch.distributed has ended."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()
    work.get_future().add_done_callback(lambda _: loop.call_soon_threadsafe(future.set_result, None))
    return future


def _gloo_call(load: Workload) -> Callable[[bool], Any]:
    """Return a function that makes Gloo's call for a workload; its argument is `async_op`."""
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
            return lambda async_op: dist.gather(source, targets, dst=0, async_op=async_op)
        case "scatter":
            sources = tensors(load.inputs, load.outputs)
            return lambda async_op: dist.scatter(target, sources, src=0, async_op=async_op)
    return {
        "allreduce": lambda async_op: dist.all_reduce(x, async_op=async_op),
        "broadcast": lambda async_op: dist.broadcast(x, 0, async_op=async_op),
        "reduce": lambda async_op: dist.reduce(x, 0, async_op=async_op),
        "barrier": lambda async_op: dist.barrier(async_op=async_op),
        "allgather": lambda async_op: dist.all_gather_single(target, source, async_op=async_op),
        "reduce_scatter": lambda async_op: dist.reduce_scatter_single(target, source, async_op=async_op),
        "alltoall": lambda async_op: dist.all_to_all_single(target, source, async_op=async_op),
    }[load.case.kind]


def mpi(config: dict[str, Any], run: Run) -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD

    async def combine(values: Any, how: Literal["sum", "max"]) -> None:
        comm.Allreduce(MPI.IN_PLACE, values, MPI.SUM if how == "sum" else MPI.MAX)

    def times(loads: Sequence[Workload]) -> Times:
        calls = [_mpi_call(comm, MPI, load) for load in loads]
        match config["mode"]:
            case "test" | "spin":
                spin = SPIN if config["mode"] == "spin" else 0.0
                return times_of(calls_of([lambda call=call: _poll_request(call.start(), spin) for call in calls]))
            case "thread":
                thread = Thread()
                return times_of(calls_of([lambda call=call: thread.run(call.block) for call in calls]))
        (call,) = calls
        return _blocking(call.block)

    assert comm.size == config["world_size"]
    _run_on_loop(run(Library(comm.rank, comm.size, times, combine)))


async def _poll_request(request: Any, spin: float) -> None:
    """Wait for an MPI request: test it for `spin` seconds, then once per loop iteration."""
    deadline = perf_counter() + spin
    while not request.Test():
        if perf_counter() >= deadline:
            await asyncio.sleep(0)


class MpiCall(NamedTuple):
    """The two forms of an MPI call: `block` returns when the call has ended, `start` returns its request."""

    block: Callable[[], object]
    start: Callable[[], Any]


def _mpi_call(comm: Any, MPI: Any, load: Workload) -> MpiCall:
    x, source, target = load.inplace, load.inputs, load.outputs
    reduced = (MPI.IN_PLACE, x) if comm.rank == 0 else (x, None)
    name, arguments = {
        "allreduce": ("Allreduce", (MPI.IN_PLACE, x)),
        "broadcast": ("Bcast", (x, 0)),
        "reduce": ("Reduce", (*reduced, MPI.SUM, 0)),
        "scan": ("Scan", (MPI.IN_PLACE, x)),
        "barrier": ("Barrier", ()),
        "allgather": ("Allgather", (source, target)),
        "reduce_scatter": ("Reduce_scatter_block", (source, target)),
        "alltoall": ("Alltoall", (source, target)),
        "gather": ("Gather", (source, target, 0)),
        "scatter": ("Scatter", (source, target, 0)),
    }[load.case.kind]
    return MpiCall(partial(getattr(comm, name), *arguments), partial(getattr(comm, f"I{name.lower()}"), *arguments))


def _run_on_loop(main: Coroutine[Any, Any, None]) -> None:
    """Run `main` on uvloop if it is installed, else on asyncio's loop."""
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


def _blocking(call: Callable[[], object]) -> Times:
    async def times(rounds: int) -> list[int]:
        taken = []
        for _ in range(rounds):
            start = perf_counter_ns()
            call()
            taken.append(perf_counter_ns() - start)
        return taken

    return times
