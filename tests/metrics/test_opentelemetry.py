"""OpenTelemetry metrics and spans of groups, as in-memory exporters receive them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from aiocoll import CollectiveTimeoutError, GroupOptions, ProcessGroup
from aiocoll.metrics.opentelemetry import GroupMeter
from aiocoll.testing import run_ranks

from ..internals import comm_of

Points = Mapping[tuple[str, frozenset[tuple[str, Any]]], float]


def points(reader: InMemoryMetricReader) -> Points:
    data = reader.get_metrics_data()
    return (
        {}
        if data is None
        else {
            (metric.name, frozenset(point.attributes.items())): point.value
            for resource in data.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
            for point in metric.data.data_points
        }
    )


def key(name: str, **attributes: Any) -> tuple[str, frozenset[tuple[str, Any]]]:
    return f"aiocoll.{name}", frozenset((f"aiocoll.{label}", value) for label, value in attributes.items())


async def test_opentelemetry_exports_the_metrics_of_a_group() -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    meter = GroupMeter(provider)

    async def rank(pg: ProcessGroup) -> None:
        meter.add(pg)
        for _ in range(4):
            await pg.allreduce(np.ones(3, np.float32), key="a key of the user's")
        with pytest.raises(CollectiveTimeoutError):
            await pg.recv(np.ones(1), 1 - pg.rank(), tag=77, timeout=0.01)
        if pg.rank() == 0:
            pending = pg.recv(np.ones(1), 1)
            found, stats = points(reader), pg.stats()
            this: dict[str, Any] = {"group": pg.group_name, "rank": 0}
            kind = {**this, "op": "ALLREDUCE", "algorithm": "exchange", "transport": "memory"}
            assert found[key("operations", **kind, outcome="completed")] == 4
            assert found[key("operations", **kind, outcome="failed")] == 0
            assert found[key("operation.io", **kind)] == 48
            reduced = next(each for each in stats.operations if each.op == "ALLREDUCE")
            assert found[key("operation.time", **kind)] == reduced.seconds
            received = {**this, "op": "RECV", "algorithm": "", "transport": "memory", "outcome": "failed"}
            assert found[key("operations", **received)] == 1
            (peer,) = stats.peers
            assert found[key("waits", **this, peer=1)] == peer.times
            assert found[key("wait.time", **this, peer=1)] == peer.seconds
            assert found[key("missing", **this, peer=1)] == 0
            assert found[key("operations.pending", **this)] == 1
            assert found[key("operations.oldest", **this)] > 0
            labels = {f"aiocoll.{name}" for name in (*kind, "outcome", "peer")}
            assert {label for _, attributes in found for label, _ in attributes} == labels
            await pg.barrier()
            await pending
        else:
            await pg.barrier()
            await pg.send(np.ones(1), 0)

    await run_ranks(2, rank)
    assert points(reader) == {}
    meter.close()
    await asyncio.to_thread(provider.shutdown)


@pytest.mark.parametrize("debug", ["off", "detail"])
async def test_opentelemetry_makes_one_span_per_operation(debug: Any) -> None:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("a test")
    reader = InMemoryMetricReader()
    meters = MeterProvider([reader])

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank():
            for _ in range(2):
                await pg.allreduce(np.ones(3, np.float32), key="grad")
            await pg.barrier()
            return
        meter = GroupMeter(meters, provider, spans=True)
        with tracer.start_as_current_span("job") as job:
            meter.add(pg)
        before = comm_of(pg).runtime.wall()
        for _ in range(2):
            await pg.allreduce(np.ones(3, np.float32), key="grad")
        after = comm_of(pg).runtime.wall()
        with pytest.raises(CollectiveTimeoutError):
            await pg.recv(np.ones(1), 1, timeout=0.01)
        first, second, failed = [span for span in exporter.get_finished_spans() if span.name != "job"]
        for seq, span in ((1, first), (2, second)):
            assert span.name == "ALLREDUCE"
            assert span.parent is not None
            assert span.parent.span_id == job.get_span_context().span_id
            assert span.attributes is not None
            assert dict(span.attributes) == {
                "aiocoll.group": pg.group_name,
                "aiocoll.rank": 0,
                "aiocoll.op": "ALLREDUCE",
                "aiocoll.algorithm": "exchange",
                "aiocoll.transport": "memory",
                "aiocoll.key": "grad",
                "aiocoll.seq": seq,
                "aiocoll.nbytes": 12,
                "aiocoll.dtype": "float32",
            }
            assert span.start_time is not None
            assert span.end_time is not None
            assert before * 1e9 - 1e4 <= span.start_time <= span.end_time <= after * 1e9 + 1e4
            assert span.status.status_code == StatusCode.UNSET
        assert failed.status.status_code == StatusCode.ERROR
        assert (failed.status.description or "").startswith("CollectiveTimeoutError: rank 0 of group")
        assert [event.name for event in failed.events] == ["exception"]
        meter.remove(pg)
        await pg.barrier()
        assert len(exporter.get_finished_spans()) == 4
        meter.close()

    await run_ranks(2, rank, options=GroupOptions(debug=debug))
    provider.shutdown()
    await asyncio.to_thread(meters.shutdown)


async def test_opentelemetry_exports_a_replacement_group_under_the_name_of_its_predecessor() -> None:
    """Check that the name is the same, that counters never decrease, and that spans have the same parent."""
    reader, exporter = InMemoryMetricReader(), InMemorySpanExporter()
    meters, tracers = MeterProvider([reader]), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = tracers.get_tracer("a test")

    async def rank(pg: ProcessGroup) -> None:
        meter = GroupMeter(meters, tracers, spans=True)
        kind = {"op": "ALLREDUCE", "algorithm": "alone", "transport": "", "outcome": "completed"}
        calls = key("operations", group="world:0", rank=0, **kind)
        with tracer.start_as_current_span("job") as job:
            meter.add(pg)
        await pg.allreduce(1)
        assert points(reader)[calls] == 1
        async with await pg.shrink() as successor:
            await pg.shutdown()
            await successor.allreduce(1)
            assert points(reader)[calls] == 2
        assert points(reader) == {}
        spans = [span for span in exporter.get_finished_spans() if span.name == "ALLREDUCE"]
        parents = [span.parent.span_id for span in spans if span.parent is not None]
        assert parents == [job.get_span_context().span_id] * 2
        meter.close()

    await run_ranks(1, rank)
    tracers.shutdown()
    await asyncio.to_thread(meters.shutdown)


@pytest.mark.ranks(1)
async def test_opentelemetry_without_an_sdk_does_nothing(pg: ProcessGroup) -> None:
    meter = GroupMeter(spans=True)
    meter.add(pg)
    assert await pg.allreduce(1) == 1
