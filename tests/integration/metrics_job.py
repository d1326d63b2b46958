"""A rank of a job that exports metrics with prometheus_client's multiprocess mode; a newcomer replaces rank 1."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prometheus_client.multiprocess import MultiProcessCollector

import aiocoll
from aiocoll.metrics.prometheus import GroupCollector

STEPS, KILLED_AFTER = 8, 3


def allreduces(directory: str | None = None) -> dict[tuple[str, str], float]:
    """Return the number of completed allreduces in a metrics scrape, by group and rank."""
    families: list[Any] = []
    with contextlib.suppress(struct.error):  # another process may have just created a metric file, which is still empty
        families += MultiProcessCollector(None, directory).collect()
    return {
        (sample.labels["group"], sample.labels["rank"]): sample.value
        for family in families
        for sample in family.samples
        if sample.name == "aiocoll_operations_total"
        and (sample.labels["op"], sample.labels["outcome"]) == ("ALLREDUCE", "completed")
    }


async def until(condition: Callable[[], bool]) -> None:
    """Poll until `condition` is true, which can take a second: processes write their metrics once a second."""
    while not condition():  # noqa: ASYNC110 (other processes change the condition)
        await asyncio.sleep(0.01)


def gauge_processes() -> set[int]:
    """Return the ids of the processes whose gauges are in a metrics scrape."""
    return {int(path.stem.rpartition("_")[2]) for path in Path(os.environ["PROMETHEUS_MULTIPROC_DIR"]).glob("gauge_*")}


async def main() -> None:
    collector = GroupCollector()
    state = {"step": 0}
    async for pg in aiocoll.elastic(state=state):
        with contextlib.suppress(aiocoll.GroupError):
            while state["step"] < STEPS:
                if (pg.group_name, pg.rank(), state["step"]) == ("world:0", 1, KILLED_AFTER):
                    await until(lambda: allreduces().get(("world:0", "1")) == KILLED_AFTER)
                    os.kill(os.getpid(), signal.SIGKILL)
                await pg.allreduce(1)
                state["step"] += 1
            live = set(await pg.allgather_object(os.getpid()))
            await until(lambda live=live: gauge_processes() == live)
            await pg.barrier()
    collector.close()


if __name__ == "__main__":
    asyncio.run(main())
