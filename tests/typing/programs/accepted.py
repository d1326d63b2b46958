"""Valid programs for type checkers; comments have the expected types. This file is never run."""

from __future__ import annotations

import array
import asyncio
from typing import TypeVar, reveal_type

import cupy
import jax
import numpy as np
import torch
from numpy.typing import NDArray

import aiocoll
import aiocoll.distributed as dist
from aiocoll import ProcessGroup, Recv, ReduceOp, Send, Work
from aiocoll.testing import run_processes, run_ranks, run_virtual
from aiocoll.typing import Array

Doubles = NDArray[np.float64]
A = TypeVar("A", bound=Array)


class Config:
    """A stand-in for a class that a user defines."""


async def all_kinds(pg: ProcessGroup, t: torch.Tensor, c: cupy.ndarray, j: jax.Array) -> None:
    reveal_type(await pg.allreduce(t, ReduceOp.MAX, timeout=3.0))  # Tensor
    reveal_type(await pg.allreduce(c))  # ndarray
    reveal_type(await pg.allreduce(j))  # Array
    reveal_type(await pg.allreduce(bytearray(8)))  # bytearray
    reveal_type(await pg.allreduce(memoryview(bytearray(8))))  # memoryview[int]
    reveal_type(await pg.allreduce(array.array("d", [1.0])))  # array[float]


async def arrays(pg: ProcessGroup, x: Doubles, y: Doubles, t: torch.Tensor) -> None:
    reveal_type(pg.allreduce(x))  # Work[ndarray[tuple[Any, ...], dtype[float64]]]
    reveal_type(await pg.allreduce(x))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(await pg.allreduce(np.zeros(3)))  # ndarray[tuple[int], dtype[float64]]
    reveal_type(await pg.reduce(x, 0))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(await pg.broadcast(t, root=0))  # Tensor
    reveal_type(await pg.scan(x))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(await pg.exscan(x, key="here"))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(await pg.allgather([x, y], x))  # list[ndarray[tuple[Any, ...], dtype[float64]]]
    reveal_type(await pg.allgather(None, x))  # list[ndarray[tuple[Any, ...], dtype[float64]]]
    reveal_type(await pg.allgather(None, np.zeros(3)))  # list[ndarray[tuple[Any, ...], dtype[float64]]]
    reveal_type(await pg.allgather(None, t))  # list[Any]
    reveal_type(await pg.allgather_into_tensor(t, x))  # Tensor
    reveal_type(await pg.gather(None, x, 0))  # list[ndarray[tuple[Any, ...], dtype[float64]]] | None
    reveal_type(await pg.gather([t, t] if pg.rank() == 0 else None, x, 0))  # list[Tensor] | None
    reveal_type(await pg.scatter(x, [x, y], 0))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(await pg.reduce_scatter(t, [x, y]))  # Tensor
    reveal_type(await pg.reduce_scatter_tensor(x, y))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(await pg.alltoall([x, y], [t, t]))  # list[ndarray[tuple[Any, ...], dtype[float64]]]
    reveal_type(await pg.alltoall_base(x, y, [1, 2], None))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(await pg.allreduce_coalesced([t, t]))  # list[Tensor]
    reveal_type(await pg.allgather_into_tensor_coalesced([x], [t]))  # list[ndarray[tuple[Any, ...], dtype[float64]]]
    reveal_type(await pg.reduce_scatter_tensor_coalesced([t], [x]))  # list[Tensor]
    reveal_type(await pg.empty(3, np.float64))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(await pg.empty((3, 4), "bfloat16"))  # ndarray[tuple[Any, ...], dtype[Any]]
    await pg.allreduce_coalesced([x, t])  # arrays of different types
    async with pg.coalescing() as batch:
        reveal_type(batch.seq)  # int | None
    with pg.time_estimator() as estimate:
        reveal_type(estimate.seconds)  # float
    reveal_type(estimate.calls[0].algorithm)  # str | None


async def numbers(pg: ProcessGroup) -> None:
    reveal_type(await pg.allreduce(1))  # int
    reveal_type(await pg.allreduce(1.5))  # float
    reveal_type(await pg.allreduce(1j))  # complex
    reveal_type(await pg.reduce(True, 0))  # bool
    reveal_type(await pg.broadcast(np.float64(3), 0))  # float64
    reveal_type(await pg.exscan(2))  # int


async def messages(pg: ProcessGroup, x: Doubles, t: torch.Tensor) -> None:
    reveal_type(await pg.send(x, 1))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(await pg.recv(t, 1, tag=3))  # Tensor
    reveal_type(await pg.recv_anysource(x))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(pg.recv(t, 1).source_rank())  # int
    reveal_type(await pg.batch([Send(t, 1), Recv(t, None)]))  # list[Tensor]
    await pg.batch([Send(t, 1), Recv(x, 1)])  # arrays of different types
    reveal_type(Send(t, 1).tensor)  # Tensor
    reveal_type(await pg.send_object("hello", 1))  # None
    reveal_type(await pg.recv_object(1))  # Any
    reveal_type(await pg.probe(tag=3))  # Envelope
    reveal_type(pg.iprobe(aiocoll.PROC_NULL))  # Envelope | None
    reveal_type((await pg.probe()).count)  # int
    async for source, message in pg.incoming():
        reveal_type(source)  # int
        reveal_type(message)  # Any


async def objects(pg: ProcessGroup, config: Config, names: list[str] | None) -> None:
    reveal_type(await pg.broadcast_object(config))  # Config
    reveal_type(await pg.broadcast_object({"a": 1}, root=1))  # dict[str, int]
    reveal_type(await pg.broadcast_object(None, 0))  # Any
    reveal_type(await pg.broadcast_object())  # Any
    reveal_type(await pg.allgather_object(f"rank {pg.rank()}"))  # list[str]
    reveal_type(await pg.gather_object(config, 0))  # list[Config] | None
    reveal_type(await pg.scatter_object(["a", "b"]))  # str
    reveal_type(await pg.scatter_object(names))  # str
    reveal_type(await pg.alltoall_object([config, config]))  # list[Config]


async def works(pg: ProcessGroup, t: torch.Tensor) -> None:
    work = pg.allreduce(t)
    reveal_type(work)  # Work[Tensor]
    reveal_type(work.result())  # Tensor
    reveal_type(work.wait(timeout=3))  # Tensor
    reveal_type(work.exception())  # BaseException | None
    reveal_type(work.get_future())  # Future[Tensor]
    reveal_type(await work.join())  # Tensor
    reveal_type(await work.on_stream())  # Tensor
    reveal_type(await asyncio.create_task(work.join()))  # Tensor
    work.add_done_callback(lambda done: print(done.result()))
    reveal_type(work.op)  # str
    reveal_type(work.seq)  # int | None
    reveal_type(work.key)  # str | None
    reveal_type(await pg.barrier())  # None
    reveal_type(await pg.monitored_barrier())  # None
    several: list[Work[object]] = [work, pg.barrier(), pg.allreduce(3)]
    reveal_type(several)  # list[Work[object]]


async def plans(pg: ProcessGroup, x: Doubles, t: torch.Tensor) -> None:
    reveal_type(pg.plan(pg.send, t, 1, tag=3))  # CallPlan[Tensor]
    reveal_type(await pg.plan(pg.allreduce, x, ReduceOp.MAX).start())  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(pg.plan(pg.barrier).start())  # Work[None]


async def grids(pg: ProcessGroup, x: Doubles, t: torch.Tensor) -> None:
    cart = pg.cart([0, 2], [True, False])
    reveal_type(cart)  # CartesianGroup[ProcessGroup] | None
    assert cart is not None
    reveal_type(cart.group)  # ProcessGroup
    reveal_type(cart.coords())  # tuple[int, ...]
    reveal_type(cart.shift(0))  # tuple[int, int]
    reveal_type(cart.sub([0]))  # CartesianGroup[ProcessGroup]
    reveal_type(await cart.halo(x))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(await cart.halo(t, [1, 2]))  # Tensor


async def groups(pg: ProcessGroup, store: aiocoll.Store) -> None:
    reveal_type(pg.group_name)  # str
    reveal_type(pg.group_desc)  # str
    reveal_type(pg.timeout)  # float
    reveal_type(pg.global_ranks)  # tuple[int, ...]
    reveal_type(pg.pending())  # list[Work[Any]]
    reveal_type(pg.rank() + pg.size())  # int
    reveal_type(await pg.split_group([0, 1]))  # ProcessGroup | None
    reveal_type(await pg.split("a", key=3))  # ProcessGroup | None
    reveal_type(await pg.shrink(assume_dead=[2]))  # ProcessGroup
    reveal_type(await pg.grow(2))  # ProcessGroup
    reveal_type(await pg.merge_remote_group(store, 8))  # ProcessGroup
    reveal_type(await aiocoll.new_group(store=store, rank=0, world_size=1))  # ProcessGroup
    async with aiocoll.new_group() as group:
        reveal_type(group)  # ProcessGroup
    with aiocoll.process_group(pg) as current:
        reveal_type(current)  # ProcessGroup
    reveal_type(aiocoll.current_process_group())  # ProcessGroup | None
    reveal_type(await pg.wait_revoked())  # GroupError
    reveal_type(pg.recorder.dump())  # dict[str, Any]
    reveal_type(await store.get("key"))  # bytes
    reveal_type(await store.add("key", 1))  # int
    reveal_type(await aiocoll.PrefixStore("a", store).list_keys())  # list[str]


async def body(pg: ProcessGroup, factor: float, name: str = "") -> list[str]:
    return [name] * pg.size()


async def generic(pg: ProcessGroup, x: A) -> A:
    """Call collectives in a function that is generic in the array type."""
    return await pg.allreduce(await pg.broadcast(x, 0))


async def testing() -> None:
    reveal_type(await run_ranks(4, body, 2.5))  # list[list[str]]
    reveal_type(await run_processes(2, body, 2.5, "name", loop="uvloop"))  # list[list[str]]
    reveal_type(run_virtual(2, body, 2.5, seed=3))  # list[list[str]]


async def ported(x: Doubles, t: torch.Tensor, pg: ProcessGroup) -> None:
    reveal_type(await dist.all_reduce(t))  # Tensor
    reveal_type(await dist.all_reduce(3.0))  # float
    reveal_type(await dist.all_reduce_coalesced([t, t]))  # list[Tensor]
    reveal_type(await dist.reduce(x, 0))  # ndarray[tuple[Any, ...], dtype[float64]]
    reveal_type(await dist.broadcast(t, src=0))  # Tensor
    reveal_type(await dist.all_gather([t, t], x))  # list[Tensor]
    reveal_type(await dist.all_gather_into_tensor(t, x))  # Tensor
    reveal_type(await dist.all_gather_coalesced([[t], [t]], [x]))  # list[list[Tensor]]
    reveal_type(await dist.gather(x, [t, t]))  # list[Tensor] | None
    reveal_type(await dist.gather(x))  # None
    reveal_type(await dist.scatter(t, [x, x]))  # Tensor
    reveal_type(await dist.scatter(t))  # Tensor
    reveal_type(await dist.reduce_scatter(t, [x, x]))  # Tensor
    reveal_type(await dist.reduce_scatter_tensor(t, x))  # Tensor
    reveal_type(await dist.all_to_all([t, t], [x, x]))  # list[Tensor]
    reveal_type(await dist.all_to_all_single(t, x))  # Tensor
    reveal_type(await dist.barrier())  # None
    reveal_type(await dist.isend(t, 1))  # Tensor
    reveal_type(await dist.irecv(t, 1))  # Tensor
    reveal_type(await dist.recv(t))  # int
    requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, t, 1), dist.P2POp(dist.irecv, t, 1)])
    reveal_type(requests[0])  # Work[Tensor]
    reveal_type(await requests)  # list[Tensor]
    reveal_type(await dist.all_gather_object([None, None], "name"))  # list[str]
    reveal_type(await dist.broadcast_object_list(["a", "b"]))  # list[str]
    reveal_type(await dist.gather_object(3, [None, None]))  # list[int] | None
    reveal_type(await dist.scatter_object_list([""], ["a", "b"]))  # list[str]
    reveal_type(await dist.recv_object_list([None]))  # int
    reveal_type(await dist.new_group([0, 1]))  # ProcessGroup | int
    reveal_type(await dist.split_group(pg, [[0], [1]]))  # ProcessGroup | None
    reveal_type(await dist.shrink_group([1]))  # ProcessGroup
    reveal_type(dist.get_rank())  # int
    async with dist.coalescing_manager() as batch:
        reveal_type(batch.seq)  # int | None
    with dist.time_estimator() as estimate:
        reveal_type(estimate.seconds)  # float
