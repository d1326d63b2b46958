"""Prometheus metrics of groups, as an HTTP scrape of prometheus_client's server shows them."""

from __future__ import annotations

import asyncio
import sys
import urllib.request
from collections.abc import Mapping
from typing import Any

import numpy as np
import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from aiocoll import (
    BackendUnavailableError,
    CollectiveTimeoutError,
    GroupClosedError,
    GroupOptions,
    HashStore,
    ProcessGroup,
    new_group,
)
from aiocoll.metrics.prometheus import GroupCollector
from aiocoll.metrics.watched import MOST
from aiocoll.testing import run_ranks, run_virtual

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


def samples(text: str) -> Samples:
    """Parse the text of a scrape; check that no sample occurs twice, and return the samples."""
    found = [
        ((sample.name, frozenset(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    ]
    assert len(dict(found)) == len(found)
    return dict(found)


def key(name: str, **labels: Any) -> tuple[str, frozenset[tuple[str, str]]]:
    return name, frozenset((label, str(value)) for label, value in labels.items())


async def scrape(port: int) -> Samples:
    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return str(answer.read().decode())

    return samples(await asyncio.to_thread(get))


async def test_prometheus_scrape_contains_the_counters_of_a_group() -> None:
    registry = prometheus_client.CollectorRegistry()
    collector = GroupCollector(registry)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)

    async def rank(pg: ProcessGroup) -> None:
        collector.add(pg)
        collector.add(pg)
        for _ in range(5):
            await pg.allreduce(np.ones(3), key="a key of the user's")
        await pg.barrier()
        if pg.rank() == 0:
            with pytest.raises(CollectiveTimeoutError):
                await pg.recv(np.ones(1), 1, tag=77, timeout=0.01)
            pending = pg.recv(np.ones(1), 1)
            found = await scrape(server.server_port)
            stats = pg.stats()
            this: dict[str, Any] = {"group": pg.group_name, "rank": 0}
            kind = {**this, "op": "ALLREDUCE", "algorithm": "exchange", "transport": "memory"}
            assert found[key("aiocoll_operations_total", **kind, outcome="completed")] == 5
            assert found[key("aiocoll_operations_total", **kind, outcome="failed")] == 0
            assert found[key("aiocoll_operation_bytes_total", **kind)] == 120
            assert found[key("aiocoll_operation_seconds_count", **kind)] == 5
            (reduced,) = [each for each in stats.operations if each.op == "ALLREDUCE"]
            assert found[key("aiocoll_operation_seconds_sum", **kind)] == reduced.seconds
            assert found[key("aiocoll_operation_seconds_bucket", **kind, le="+Inf")] == 5
            before = 0.0
            for limit in (2.0**exponent for exponent in range(-18, 7, 2)):
                calls = found[key("aiocoll_operation_seconds_bucket", **kind, le=limit)]
                assert calls == sum(calls for bound, calls in reduced.histogram if bound <= limit)
                assert calls >= before
                before = calls
            received = {**this, "op": "RECV", "algorithm": "", "transport": "memory", "outcome": "failed"}
            assert found[key("aiocoll_operations_total", **received)] == 1
            (peer,) = stats.peers
            assert found[key("aiocoll_waits_total", **this, peer=1)] == peer.times
            assert found[key("aiocoll_wait_seconds_total", **this, peer=1)] == peer.seconds
            assert found[key("aiocoll_missing", **this, peer=1)] == 0
            assert found[key("aiocoll_pending_operations", **this)] == 1
            assert found[key("aiocoll_oldest_pending_seconds", **this)] > 0
            assert {dict(labels)["rank"] for _, labels in found} == {"0", "1"}
            allowed = {"group", "rank", "op", "algorithm", "transport", "outcome", "peer", "le"}
            assert {label for _, labels in found for label, _ in labels} == allowed
            assert not {value for _, labels in found for _, value in labels} & {"a key of the user's", "77"}
            await pg.barrier()
            await pending
        else:
            await pg.barrier()
            await pg.send(np.ones(1), 0)

    await run_ranks(2, rank)
    assert await scrape(server.server_port) == {}  # after the groups are closed, nothing is exported
    await asyncio.to_thread(server.shutdown)
    server.server_close()
    thread.join()
    collector.close()
    GroupCollector(registry).close()


def test_prometheus_scrape_shows_which_rank_a_collective_waits_for() -> None:
    registry = prometheus_client.CollectorRegistry()
    collector = GroupCollector(registry)

    async def rank(pg: ProcessGroup) -> None:
        collector.add(pg)
        if pg.rank() == 2:
            await asyncio.sleep(5)
        work = pg.barrier()
        await asyncio.sleep(2)
        if pg.rank() == 0:
            found = samples(prometheus_client.generate_latest(registry).decode())
            assert found[key("aiocoll_missing", group=pg.group_name, rank=0, peer=2)] == 1
            assert found[key("aiocoll_missing", group=pg.group_name, rank=1, peer=2)] == 1
        await work

    run_virtual(3, rank)


async def single_rank_group(**given: Any) -> ProcessGroup:
    return await new_group(store=HashStore(), rank=0, world_size=1, **given)


async def test_prometheus_refuses_wrong_arguments() -> None:
    registry = prometheus_client.CollectorRegistry()
    collector = GroupCollector(registry)
    with pytest.raises(ValueError, match="Duplicated timeseries"):
        GroupCollector(registry)
    with pytest.raises(TypeError, match="pg must be a ProcessGroup, not str"):
        collector.add("group")  # type: ignore[arg-type]
    async with await single_rank_group(options=GroupOptions(stats=False)) as silent:
        with pytest.raises(RuntimeError, match="does not count"):
            collector.add(silent)
    pg = await single_rank_group(name="a")
    await pg.shutdown()
    with pytest.raises(GroupClosedError):
        collector.add(pg)
    assert samples(prometheus_client.generate_latest(registry).decode()) == {}


async def test_revoked_group_is_exported_until_the_group_is_closed() -> None:
    registry = prometheus_client.CollectorRegistry()
    collector = GroupCollector(registry)
    pg = await single_rank_group(name="a")
    collector.add(pg)
    pg.abort("the end")
    assert samples(prometheus_client.generate_latest(registry).decode())
    await pg.shutdown()
    assert samples(prometheus_client.generate_latest(registry).decode()) == {}
    again = await single_rank_group(name="a")
    collector.add(again)
    await again.shutdown()


@pytest.mark.parametrize(
    ("name", "package", "extra"),
    [("prometheus", "prometheus_client", "prometheus"), ("opentelemetry", "opentelemetry", "otel")],
)
def test_error_for_a_missing_metrics_package_names_the_extra(
    name: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib

    monkeypatch.delitem(sys.modules, f"aiocoll.metrics.{name}", raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(BackendUnavailableError, match=rf"pip install 'aiocoll\[{extra}\]'"):
        importlib.import_module(f"aiocoll.metrics.{name}")


async def test_consecutive_groups_can_share_an_exported_name() -> None:
    """Check also that the exporter refuses a new name for each group, since the number of names is limited."""
    collector = GroupCollector(prometheus_client.CollectorRegistry())

    async def rank(pg: ProcessGroup) -> None:
        for _ in range(5):
            async with await pg.split(0, 0) as part:
                collector.add(part, name="part")
                collector.add(part)  # adding it again has no effect
                await part.allreduce(1)
                assert found() == {"part"}
        assert found() == set()
        collector.add(pg)
        *others, second = [await pg.split(0, 0) for _ in range(MOST - 1)]
        for other in others:
            collector.add(other)
        with pytest.raises(ValueError, match=rf"{MOST} group names .* share a name: add\(pg, name='workers'\)"):
            collector.add(second)
        with pytest.raises(TypeError, match="name must be a str or None, not int"):
            collector.add(second, name=1)
        collector.add(second, name="part")
        assert len(found()) == MOST

    def found() -> set[str]:
        return {sample.labels["group"] for family in collector.collect() for sample in family.samples}

    await run_ranks(1, rank)
    collector.close()
