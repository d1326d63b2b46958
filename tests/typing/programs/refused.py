"""Invalid programs: a type checker must refuse the lines with the comment `refused`, and no other lines."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

import aiocoll
import aiocoll.distributed as dist
from aiocoll import ProcessGroup, Recv, ReduceOp, Send
from aiocoll.testing import run_ranks


async def no_arrays(pg: ProcessGroup, x: NDArray[np.float64]) -> None:
    await pg.allreduce("abc")  # refused
    await pg.allreduce(b"abc")  # refused
    await pg.allreduce([1.0, 2.0])  # refused
    await pg.allreduce(None)  # refused
    await pg.broadcast(b"abc", 0)  # refused
    await pg.reduce("abc", 0)  # refused
    await pg.scan({1: 2})  # refused
    await pg.send(b"abc", 1)  # refused
    await pg.recv("abc", 1)  # refused
    await pg.send(3.0, 1)  # refused
    await pg.allgather(None, b"abc")  # refused
    await pg.allgather("abc", x)  # refused
    await pg.allgather(x, x)  # refused
    await pg.allgather_into_tensor(x, b"abc")  # refused
    await pg.gather(None, "abc", 0)  # refused
    await pg.scatter(x, ["a", "b"], 0)  # refused
    await pg.alltoall([b"a"], [x])  # refused
    await pg.allreduce_coalesced([x, b"abc"])  # refused
    await pg.allreduce_coalesced("abc")  # refused
    await pg.batch([Send(b"abc", 1)])  # refused
    await pg.batch([x])  # refused
    Recv("abc", None)  # refused
    await dist.all_reduce(b"abc")  # refused
    await dist.all_gather(["a"], x)  # refused
    await dist.send("abc", 1)  # refused


async def other_arguments(pg: ProcessGroup, x: NDArray[np.float64]) -> None:
    await pg.reduce(x, "0")  # refused
    await pg.reduce(x)  # refused
    await pg.broadcast(x, None)  # refused
    await pg.allreduce(x, "sum")  # refused
    ReduceOp.PREMUL_SUM("2")  # refused
    await pg.allreduce(x, timeout="3")  # refused
    await pg.allreduce(x, key=3)  # refused
    await pg.recv(x, None)  # refused
    await pg.plan(pg.allreduce, "text").start()  # refused
    pg.plan(pg.send, x)  # refused
    await pg.split([0, 1])  # refused
    pg.cart(2)  # refused
    aiocoll.new_group(rank="0")  # refused
    aiocoll.GroupOptions(transport=3)  # refused


async def results(pg: ProcessGroup, x: NDArray[np.float64]) -> None:
    await pg  # refused
    await pg.rank()  # refused
    await pg.coalescing()  # refused
    count: int = await pg.allreduce(1.5)  # refused
    names: list[int] = await pg.allgather_object("name")  # refused
    group: ProcessGroup = await pg.split_group([0])  # refused
    gathered: list[NDArray[np.float64]] = await pg.gather(None, x, 0)  # refused
    print(pg.allreduce(x) + 1, count, names, group, gathered)  # refused
    with pg.coalescing():  # refused
        pass


async def body(pg: ProcessGroup, factor: float) -> None:
    print(factor)


async def runs() -> None:
    await run_ranks(2, body, "factor")  # refused
    await run_ranks(2, body)  # refused
