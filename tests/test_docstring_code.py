"""The code blocks in public docstrings, run with predefined names and the required other ranks."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import re
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any, NewType, TypeVar

import numpy as np
import pytest

import aiocoll
from aiocoll import ProcessGroup
from aiocoll.loops import LoopThread
from aiocoll.store import HashStore

from .pages import execute
from .public_names import MODULES
from .ranks import run_ranks


def snippets() -> dict[str, str]:
    """Return the Python block before the sections of each public docstring, by object name."""
    found = {}
    for name, owner in documented():
        head = re.split(
            r"^(?:Attributes|Args|Returns|Yields|Raises):$", inspect.getdoc(owner) or "", flags=re.MULTILINE
        )
        for block in re.findall(r"\n\n((?: {4}.*\n|\n)+)", f"{head[0]}\n"):
            text = textwrap.dedent(block).strip("\n")
            with contextlib.suppress(SyntaxError):
                compile(text, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                assert not text or found.setdefault(name, text) == text, f"{name} has two Python blocks"
    return found


def documented() -> Iterator[tuple[str, Any]]:
    """Yield (name, object) of public modules, exported objects and their methods, each object once."""
    seen = set()
    for module in map(importlib.import_module, MODULES):
        yield module.__name__, module
        for name in module.__all__:
            owner = getattr(module, name)
            if isinstance(owner, NewType):  # its docstring is the one of `NewType` itself
                continue
            for path, each in [(name, owner), *((f"{name}.{key}", method) for key, method in methods(owner))]:
                if id(each) not in seen and getattr(each, "__module__", "").startswith("aiocoll"):
                    seen.add(id(each))
                    yield f"{module.__name__}.{path}", each


def methods(owner: Any) -> list[tuple[str, Any]]:
    functions = inspect.getmembers(owner, inspect.isfunction) if inspect.isclass(owner) else []
    return [(name, each) for name, each in functions if not name.startswith("_")]


CODE = snippets()


async def run_blocking_group() -> None:
    """Run the code block of `BlockingGroup` in a group of one rank."""
    block = CODE["aiocoll.BlockingGroup"].replace("BlockingGroup()", "BlockingGroup(store=store, rank=0, world_size=1)")
    names = {"aiocoll": aiocoll, "store": HashStore(), "x": np.ones(2), "y": np.ones(3)}
    await asyncio.to_thread(exec, block, names)
    assert names["total"] is names["x"]
    assert names["later"].result() is names["y"]


async def run_meeting() -> None:
    """Run the code block of `Meeting` with a thread pool instead of the process pool."""
    found: list[int] = []

    def work(ticket: aiocoll.Ticket) -> None:
        async def join() -> None:
            async with await ticket.join() as pg:
                found.append(await pg.allreduce(1))

        asyncio.run(join())

    def start(function: Callable[[aiocoll.Ticket], None], ticket: aiocoll.Ticket) -> None:
        threads.append(threading.Thread(target=function, args=(ticket,)))
        threads[-1].start()
        if len(threads) == 4:  # wait for all threads here, since the meeting ends with its block
            for thread in threads:
                thread.join()

    threads: list[threading.Thread] = []
    await asyncio.to_thread(exec, CODE["aiocoll.Meeting"], {"aiocoll": aiocoll, "start": start, "work": work})
    assert found == [4] * 4


async def run_coalescing() -> None:
    async def body(pg: ProcessGroup) -> None:
        gradients = [np.ones(2), np.ones(3)]
        await execute(CODE["aiocoll.ProcessGroup.coalescing"], pg=pg, gradients=gradients)
        assert [each.tolist() for each in gradients] == [[2.0] * 2, [2.0] * 3]

    await run_ranks(2, body)


async def run_time_estimator() -> None:
    async def body(pg: ProcessGroup) -> Any:
        gradients = np.ones(1000)
        names = await execute(CODE["aiocoll.ProcessGroup.time_estimator"], pg=pg, gradients=gradients)
        assert (gradients == 1).all()
        return names["estimate"]

    for estimate in await run_ranks(2, body):
        assert [each.op for each in estimate.calls] == ["ALLREDUCE", "BARRIER"]
        assert estimate.seconds > 0


async def run_elastic() -> None:
    """Run the code block of `elastic` in a group of one rank, with one failing step."""
    groups = []

    async def step(pg: ProcessGroup, state: dict[str, Any]) -> None:
        groups.append(pg)
        if len(groups) == 2:
            pg.abort("for this test")
        state["weights"] += await pg.allreduce(np.ones(2))
        state["step"] += 1

    block = CODE["aiocoll.elastic"].replace("state=state", "state=state, store=store, rank=0, world_size=1")
    names = {"aiocoll": aiocoll, "contextlib": contextlib, "STEPS": 3, "step": step, "store": HashStore()}
    state = (await execute(block, weights=np.zeros(2), **names))["state"]
    assert (state["step"], state["weights"].tolist()) == (3, [3.0, 3.0])
    assert len(set(groups)) == 2


async def run_hooks() -> None:
    handle = (await execute(CODE["aiocoll.hooks"], aiocoll=aiocoll))["handle"]
    handle.remove()


async def run_cart() -> None:
    async def body(pg: ProcessGroup) -> None:
        u = np.full((3, 3), float(pg.rank()))
        names = await execute(CODE["aiocoll.ProcessGroup.cart"], pg=pg, u=u)
        assert names["cart"].dims == (2, 1)
        assert (names["below"], names["above"]) == (1 - pg.rank(), 1 - pg.rank())
        assert u[:, 1].tolist() == [1.0 - pg.rank(), pg.rank(), 1.0 - pg.rank()]

    await run_ranks(2, body)


async def run_plan() -> None:
    async def body(pg: ProcessGroup) -> None:
        gradients = np.zeros(2)
        block = CODE["aiocoll.ProcessGroup.plan"].replace("= ...", "= batch + pg.rank()")
        await execute(block, pg=pg, ReduceOp=aiocoll.ReduceOp, gradients=gradients, batches=[1.0, 2.0])
        assert gradients.tolist() == [2.5, 2.5]

    await run_ranks(2, body)


async def run_probe() -> None:
    async def body(pg: ProcessGroup) -> None:
        if pg.rank():
            await pg.send(np.arange(3.0), 0, tag=3)
        else:
            assert (await execute(CODE["aiocoll.ProcessGroup.probe"], pg=pg, np=np))["x"].tolist() == [0.0, 1.0, 2.0]

    await run_ranks(2, body)


async def run_prometheus() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    from aiocoll.metrics import prometheus  # the program also has this import

    async def body(pg: ProcessGroup) -> None:
        names = await execute(CODE["aiocoll.metrics.prometheus"], aiocoll=aiocoll, pg=pg)
        assert b"aiocoll" in prometheus_client.generate_latest(prometheus_client.REGISTRY)
        prometheus_client.REGISTRY.unregister(names["collector"])

    assert aiocoll.metrics.prometheus is prometheus
    await run_ranks(1, body)


async def run_opentelemetry() -> None:
    pytest.importorskip("opentelemetry.metrics")
    from aiocoll.metrics import opentelemetry  # the program also has this import

    async def body(pg: ProcessGroup) -> None:
        names = await execute(CODE["aiocoll.metrics.opentelemetry"], aiocoll=aiocoll, pg=pg)
        assert isinstance(names["meter"], opentelemetry.GroupMeter)

    await run_ranks(1, body)


async def run_loop_thread() -> None:
    async def make_group() -> ProcessGroup:
        return await aiocoll.new_group(store=HashStore(), rank=0, world_size=1)

    x = np.ones(3)
    names = await execute(CODE["aiocoll.loops.LoopThread"], LoopThread=LoopThread, make_group=make_group, x=x)
    assert names["total"] is x
    names["thread"].run(names["pg"].shutdown())
    names["thread"].close()


async def run_typing() -> None:
    mean = (await execute(CODE["aiocoll.typing"], aiocoll=aiocoll, TypeVar=TypeVar))["mean"]

    async def body(pg: ProcessGroup) -> Any:
        return (await mean(pg, np.full(2, float(pg.rank())))).tolist()

    assert await run_ranks(2, body) == [[0.5, 0.5]] * 2


RUN = {
    "aiocoll.BlockingGroup": run_blocking_group,
    "aiocoll.Meeting": run_meeting,
    "aiocoll.ProcessGroup.cart": run_cart,
    "aiocoll.ProcessGroup.coalescing": run_coalescing,
    "aiocoll.ProcessGroup.plan": run_plan,
    "aiocoll.ProcessGroup.probe": run_probe,
    "aiocoll.ProcessGroup.time_estimator": run_time_estimator,
    "aiocoll.elastic": run_elastic,
    "aiocoll.hooks": run_hooks,
    "aiocoll.loops.LoopThread": run_loop_thread,
    "aiocoll.metrics.opentelemetry": run_opentelemetry,
    "aiocoll.metrics.prometheus": run_prometheus,
    "aiocoll.typing": run_typing,
}


@pytest.mark.parametrize("name", RUN)
async def test_code_block_of_a_docstring_runs(name: str) -> None:
    await RUN[name]()


def test_every_docstring_with_code_is_tested() -> None:
    """Exempt two blocks: the package's first program (see `tests/test_readme.py`) and `BlockingGroup.probe`."""
    assert CODE.keys() == RUN.keys() | {"aiocoll", "aiocoll.BlockingGroup.probe"}
