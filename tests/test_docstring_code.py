"""The code that docstrings show, and so the site, runs in surroundings that it takes for granted."""

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
    """Return the indented blocks of public docstrings that are Python, by what they belong to; tables are none."""
    found = {}
    for name, thing in documented():
        head = re.split(
            r"^(?:Attributes|Args|Returns|Yields|Raises):$", inspect.getdoc(thing) or "", flags=re.MULTILINE
        )
        for block in re.findall(r"\n\n((?: {4}.*\n|\n)+)", f"{head[0]}\n"):
            text = textwrap.dedent(block).strip("\n")
            with contextlib.suppress(SyntaxError):
                compile(text, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
                assert not text or found.setdefault(name, text) == text, f"{name} has two"
    return found


def documented() -> Iterator[tuple[str, Any]]:
    """Yield modules, what they export, and the methods of that, each once: under the first name that it has."""
    seen = set()
    for module in map(importlib.import_module, MODULES):
        yield module.__name__, module
        for name in module.__all__:
            thing = getattr(module, name)
            if isinstance(thing, NewType):  # whose docstring is that of `NewType`
                continue
            for path, each in [(name, thing), *((f"{name}.{key}", method) for key, method in methods(thing))]:
                if id(each) not in seen and getattr(each, "__module__", "").startswith("aiocoll"):
                    seen.add(id(each))
                    yield f"{module.__name__}.{path}", each


def methods(thing: Any) -> list[tuple[str, Any]]:
    functions = inspect.getmembers(thing, inspect.isfunction) if inspect.isclass(thing) else []
    return [(name, each) for name, each in functions if not name.startswith("_")]


CODE = snippets()


async def of_blocking_group() -> None:
    """As the only rank."""
    block = CODE["aiocoll.BlockingGroup"].replace("BlockingGroup()", "BlockingGroup(store=store, rank=0, world_size=1)")
    names = {"aiocoll": aiocoll, "store": HashStore(), "x": np.ones(2), "y": np.ones(3)}
    await asyncio.to_thread(exec, block, names)
    assert names["total"] is names["x"]
    assert names["later"].result() is names["y"]


async def of_meeting() -> None:
    """Replace the process pool by a thread pool."""
    found: list[int] = []

    def work(ticket: aiocoll.Ticket) -> None:
        async def join() -> None:
            async with await ticket.join() as pg:
                found.append(await pg.allreduce(1))

        asyncio.run(join())

    def start(function: Callable[[aiocoll.Ticket], None], ticket: aiocoll.Ticket) -> None:
        threads.append(threading.Thread(target=function, args=(ticket,)))
        threads[-1].start()
        if len(threads) == 4:  # the meeting ends with its block
            for thread in threads:
                thread.join()

    threads: list[threading.Thread] = []
    await asyncio.to_thread(exec, CODE["aiocoll.Meeting"], {"aiocoll": aiocoll, "start": start, "work": work})
    assert found == [4] * 4


async def of_coalescing() -> None:
    async def body(pg: ProcessGroup) -> None:
        gradients = [np.ones(2), np.ones(3)]
        await execute(CODE["aiocoll.ProcessGroup.coalescing"], pg=pg, gradients=gradients)
        assert [each.tolist() for each in gradients] == [[2.0] * 2, [2.0] * 3]

    await run_ranks(2, body)


async def of_time_estimator() -> None:
    async def body(pg: ProcessGroup) -> Any:
        gradients = np.ones(1000)
        names = await execute(CODE["aiocoll.ProcessGroup.time_estimator"], pg=pg, gradients=gradients)
        assert (gradients == 1).all()
        return names["estimate"]

    for estimate in await run_ranks(2, body):
        assert [each.op for each in estimate.calls] == ["ALLREDUCE", "BARRIER"]
        assert estimate.seconds > 0


async def of_elastic() -> None:
    """As the only rank, which fails once."""
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


async def of_hooks() -> None:
    handle = (await execute(CODE["aiocoll.hooks"], aiocoll=aiocoll))["handle"]
    handle.remove()


async def of_cart() -> None:
    async def body(pg: ProcessGroup) -> None:
        u = np.full((3, 3), float(pg.rank()))
        names = await execute(CODE["aiocoll.ProcessGroup.cart"], pg=pg, u=u)
        assert names["cart"].dims == (2, 1)
        assert (names["below"], names["above"]) == (1 - pg.rank(), 1 - pg.rank())
        assert u[:, 1].tolist() == [1.0 - pg.rank(), pg.rank(), 1.0 - pg.rank()]

    await run_ranks(2, body)


async def of_plan() -> None:
    async def body(pg: ProcessGroup) -> None:
        gradients = np.zeros(2)
        block = CODE["aiocoll.ProcessGroup.plan"].replace("= ...", "= batch + pg.rank()")
        await execute(block, pg=pg, ReduceOp=aiocoll.ReduceOp, gradients=gradients, batches=[1.0, 2.0])
        assert gradients.tolist() == [2.5, 2.5]

    await run_ranks(2, body)


async def of_probe() -> None:
    async def body(pg: ProcessGroup) -> None:
        if pg.rank():
            await pg.send(np.arange(3.0), 0, tag=3)
        else:
            assert (await execute(CODE["aiocoll.ProcessGroup.probe"], pg=pg, np=np))["x"].tolist() == [0.0, 1.0, 2.0]

    await run_ranks(2, body)


async def of_prometheus() -> None:
    prometheus_client = pytest.importorskip("prometheus_client")
    from aiocoll.metrics import prometheus  # imported by the program, too

    async def body(pg: ProcessGroup) -> None:
        names = await execute(CODE["aiocoll.metrics.prometheus"], aiocoll=aiocoll, pg=pg)
        assert b"aiocoll" in prometheus_client.generate_latest(prometheus_client.REGISTRY)
        prometheus_client.REGISTRY.unregister(names["collector"])

    assert aiocoll.metrics.prometheus is prometheus
    await run_ranks(1, body)


async def of_opentelemetry() -> None:
    pytest.importorskip("opentelemetry.metrics")
    from aiocoll.metrics import opentelemetry  # imported by the program, too

    async def body(pg: ProcessGroup) -> None:
        names = await execute(CODE["aiocoll.metrics.opentelemetry"], aiocoll=aiocoll, pg=pg)
        assert isinstance(names["meter"], opentelemetry.GroupMeter)

    await run_ranks(1, body)


async def of_loop_thread() -> None:
    async def make_group() -> ProcessGroup:
        return await aiocoll.new_group(store=HashStore(), rank=0, world_size=1)

    x = np.ones(3)
    names = await execute(CODE["aiocoll.loops.LoopThread"], LoopThread=LoopThread, make_group=make_group, x=x)
    assert names["total"] is x
    names["thread"].run(names["pg"].shutdown())
    names["thread"].close()


async def of_typing() -> None:
    mean = (await execute(CODE["aiocoll.typing"], aiocoll=aiocoll, TypeVar=TypeVar))["mean"]

    async def body(pg: ProcessGroup) -> Any:
        return (await mean(pg, np.full(2, float(pg.rank())))).tolist()

    assert await run_ranks(2, body) == [[0.5, 0.5]] * 2


RUN = {
    "aiocoll.BlockingGroup": of_blocking_group,
    "aiocoll.Meeting": of_meeting,
    "aiocoll.ProcessGroup.cart": of_cart,
    "aiocoll.ProcessGroup.coalescing": of_coalescing,
    "aiocoll.ProcessGroup.plan": of_plan,
    "aiocoll.ProcessGroup.probe": of_probe,
    "aiocoll.ProcessGroup.time_estimator": of_time_estimator,
    "aiocoll.elastic": of_elastic,
    "aiocoll.hooks": of_hooks,
    "aiocoll.loops.LoopThread": of_loop_thread,
    "aiocoll.metrics.opentelemetry": of_opentelemetry,
    "aiocoll.metrics.prometheus": of_prometheus,
    "aiocoll.typing": of_typing,
}


@pytest.mark.parametrize("name", RUN)
async def test_docstring_code_runs(name: str) -> None:
    await RUN[name]()


def test_docstring_code_is_tested_everywhere() -> None:
    """But for the program of the README, which `tests/test_readme.py` compares, and the same method for threads."""
    assert CODE.keys() == RUN.keys() | {"aiocoll", "aiocoll.BlockingGroup.probe"}
