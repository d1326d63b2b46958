"""Metrics of successor groups, which continue the series of their predecessors, and the choice of exported groups."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Mapping
from contextlib import aclosing, suppress
from weakref import ref

import numpy as np
import prometheus_client
import pytest

from aiocoll import (
    CollectiveTimeoutError,
    GroupError,
    GroupOptions,
    HashStore,
    Meeting,
    ProcessGroup,
    Ticket,
    elastic,
    new_group,
)
from aiocoll.group.reconfigurer import strip_generation
from aiocoll.metrics.prometheus import GroupCollector
from aiocoll.metrics.watched import MOST
from aiocoll.testing import run_ranks

from ..ranks import run_in_fork, wait_until


def separate_collector() -> GroupCollector:
    return GroupCollector(prometheus_client.CollectorRegistry())


def calls(collector: GroupCollector) -> Mapping[tuple[str, int], float]:
    """Return the exported number of completed allreduces for each (group name, rank)."""
    return {
        (sample.labels["group"], int(sample.labels["rank"])): sample.value
        for family in collector.collect()
        for sample in family.samples
        if sample.name == "aiocoll_operations_total"
        and (sample.labels["op"], sample.labels["outcome"]) == ("ALLREDUCE", "completed")
    }


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("world:0", "world:0"),
        ("world:0~1", "world:0"),
        ("world:0~12/3.0~4", "world:0/3.0"),
        ("a~b", "a~b"),
        ("~1", ""),
        ("a~1b", "a~1b"),
    ],
)
def test_strip_generation_removes_the_successor_number_from_a_group_name(name: str, first: str) -> None:
    assert strip_generation(name) == first


async def test_all_groups_are_exported_until_a_group_is_added_explicitly() -> None:
    """Check groups made before and after the collector; a group without statistics is not exported."""
    collector = separate_collector()

    async def rank(pg: ProcessGroup) -> None:
        late = separate_collector()
        part = await pg.split(0, 0)
        async with new_group(store=HashStore(), rank=0, world_size=1, name="x", options=GroupOptions(stats=False)):
            await pg.allreduce(1)
            await part.allreduce(1)
        for each in (collector, late):
            assert calls(each) == {("world:0", 0): 1, (part.group_name, 0): 1}
        late.add(part)
        assert calls(late) == {(part.group_name, 0): 1}
        async with await pg.split(0, 0) as other:
            await other.allreduce(1)
            assert calls(late) == {(part.group_name, 0): 1}
            assert calls(collector)[other.group_name, 0] == 1
        collector.remove(part)
        assert calls(collector) == {("world:0", 0): 1}
        late.close()
        await pg.split(0, 0)
        assert calls(late) == {}

    await run_ranks(1, rank)
    assert calls(collector) == {}
    collector.close()


@pytest.mark.parametrize("added", [None, "world:0", "workers"])
async def test_successor_group_continues_the_metric_series(added: str | None) -> None:
    collector = separate_collector()

    async def rank(pg: ProcessGroup) -> None:
        if added is not None:
            collector.add(pg, name=None if added == "world:0" else added)
        key = added or "world:0", pg.rank()
        await pg.allreduce(1)
        await pg.allreduce(1)
        second = await pg.shrink()
        assert second.group_name == "world:0~1"
        await second.allreduce(1)
        assert calls(collector)[key] == 3  # both groups are open
        await pg.shutdown()
        assert calls(collector)[key] == 3
        third = await second.shrink()
        await second.shutdown()
        assert calls(collector)[key] == 3
        await third.allreduce(1)
        assert calls(collector)[key] == 4
        await third.shutdown()

    await run_ranks(2, rank)
    assert calls(collector) == {}
    collector.close()


async def test_successor_of_a_group_removed_from_the_exporter_is_not_exported() -> None:
    collector = separate_collector()

    async def rank(pg: ProcessGroup) -> None:
        collector.remove(pg)
        async with await pg.shrink() as successor:
            await successor.allreduce(1)
            assert calls(collector) == {}
            collector.add(successor)
            assert calls(collector) == {("world:0", 0): 1}

    await run_ranks(1, rank)
    collector.close()


async def test_counters_of_groups_with_the_same_name_are_summed() -> None:
    """Check the summed counters while both groups are open, and after one group is closed."""
    registry = prometheus_client.CollectorRegistry()
    collector = GroupCollector(registry)

    async def rank(pg: ProcessGroup) -> None:
        async with await pg.split(0, pg.rank()) as part:
            for each in (pg, part):
                collector.add(each, name="a")
                await each.allreduce(np.ones(4))
                with suppress(CollectiveTimeoutError):
                    await each.recv(np.ones(1), 1 - pg.rank(), timeout=0.001)
            counted = [each.stats() for each in (pg, part)]
            waited = sum(peer.seconds for each in counted for peer in each.peers)
            check(pg, waited)
        check(pg, waited)
        await pg.barrier()

    def check(pg: ProcessGroup, waited: float) -> None:
        def found(name: str, **labels: str) -> float:
            return registry.get_sample_value(name, {"group": "a", "rank": str(pg.rank()), **labels}) or 0.0

        kind = {"op": "ALLREDUCE", "algorithm": "exchange", "transport": "memory"}
        failed = {"op": "RECV", "algorithm": "", "transport": "memory", "outcome": "failed"}
        assert found("aiocoll_operations_total", **kind, outcome="completed") == 2
        assert found("aiocoll_operations_total", **failed) == 2
        assert found("aiocoll_operation_bytes_total", **kind) == 64
        assert found("aiocoll_operation_seconds_bucket", **kind, le="+Inf") == 2
        assert found("aiocoll_wait_seconds_total", peer=str(1 - pg.rank())) == pytest.approx(waited)

    await run_ranks(2, rank)
    collector.close()


async def test_groups_of_an_elastic_program_are_exported_as_one_series() -> None:
    """Let process 1 leave after 3 of 8 steps, and a newcomer become rank 1 in its place."""
    collector = separate_collector()
    steps, left = 8, 3
    found: list[Mapping[tuple[str, int], float]] = []

    async with Meeting(2) as meeting:

        async def process(number: int, ticket: Ticket) -> None:
            state = {"step": 0}
            async with aclosing(elastic(init_method=ticket, state=state)) as groups:
                async for pg in groups:
                    with suppress(GroupError):
                        while state["step"] < steps:
                            if (number, state["step"]) == (1, left):
                                tasks.create_task(process(2, meeting.newcomer()))
                                return
                            await pg.allreduce(1)
                            state["step"] += 1
                        await pg.barrier()
                        found.append(calls(collector))
                        await pg.barrier()

        async with asyncio.TaskGroup() as tasks:
            for rank in range(2):
                tasks.create_task(process(rank, meeting.ticket(rank)))

    assert found == [{("world:0", 0): steps, ("world:0", 1): steps}] * 2
    collector.close()


async def test_groups_beyond_the_limit_of_exported_names_are_not_exported(caplog: pytest.LogCaptureFixture) -> None:
    collector = separate_collector()

    async def rank(pg: ProcessGroup) -> None:
        for _ in range(MOST + 1):
            async with await pg.split(0, 0) as part:
                await part.allreduce(1)
            await pg.allreduce(1)
        assert calls(collector) == {("world:0", 0): MOST + 1}
        collector.add(pg, name="a")  # names of groups that were exported without `add` do not count
        async with await pg.split(0, 0) as part:
            collector.add(part)
            await part.allreduce(1)
            assert calls(collector) == {("a", 0): MOST + 1, (part.group_name, 0): 1}

    with caplog.at_level(logging.WARNING, "aiocoll"):
        await run_ranks(1, rank)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"group 'world:0/{MOST - 1}.0', rank 0: not exported, because {MOST} group names have been exported already; "
        "let short-lived groups share a name: add(pg, name='workers')"
    )
    collector.close()


@pytest.mark.ranks(1)
async def test_garbage_collected_metrics_collector_is_not_notified(pg: ProcessGroup) -> None:
    collector = ref(separate_collector())
    gc.collect()
    assert collector() is None
    async with await pg.split(0, 0) as part:
        await part.allreduce(1)


@pytest.mark.ranks(1)
async def test_forked_child_does_not_export_the_groups_of_its_parent(pg: ProcessGroup) -> None:
    collector = separate_collector()

    def check() -> None:
        assert calls(collector) == {}

    await pg.allreduce(1)
    assert calls(collector) == {("world:0", 0): 1}
    assert run_in_fork(check) == ""
    collector.close()


async def test_metrics_collector_keeps_no_group_alive() -> None:
    collector = separate_collector()
    pg = await new_group(store=HashStore(), rank=0, world_size=1)
    group = ref(pg)
    assert calls(collector) == {}
    await pg.allreduce(1)
    del pg
    with pytest.warns(ResourceWarning, match="was not shut down"):
        gc.collect()
    await wait_until(lambda: group() is None)
    assert calls(collector) == {}
    collector.close()
