"""The code examples on docs/metrics.md, run and compared with the shown output."""

from __future__ import annotations

from typing import Any

import numpy as np
import prometheus_client
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider

from aiocoll import ProcessGroup
from aiocoll.testing import run_ranks

from ..pages import ROOT, code, execute, without_numbers


async def test_metrics_page_shows_the_output_of_its_stats_examples(capsys: pytest.CaptureFixture[str]) -> None:
    async def work_for_a_while(pg: ProcessGroup) -> None:
        await pg.allreduce(np.ones(100))

    async def rank(pg: ProcessGroup) -> None:
        await work_for_a_while(pg)
        if pg.rank():
            await execute(code("docs/metrics.md", "Metrics", 2), pg=pg, work_for_a_while=work_for_a_while)
            return
        await execute(code("docs/metrics.md", "Metrics"), pg=pg)
        names = await execute(code("docs/metrics.md", "Metrics", 2), pg=pg, work_for_a_while=work_for_a_while)
        assert names["after"].nbytes - names["before"].nbytes == 800
        assert names["rate"] > 0
        await execute(code("docs/metrics.md", "Who is waited for"), pg=pg)

    await run_ranks(2, rank)
    output = capsys.readouterr().out.splitlines()
    shown = code("docs/metrics.md", "Metrics", language="text").splitlines()
    assert [line.split() for line in (output[1], output[3])] == [line.split() for line in (shown[1], shown[6])]
    assert without_numbers(output[0]) == without_numbers(shown[0])
    assert without_numbers(output[-1]) == "rank #: waited for # times, #"


async def test_prometheus_example_of_the_metrics_page_works(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    """Run the example with one rank; `tests/integration/test_metrics.py` runs it in several processes."""
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setattr("aiocoll.metrics.prometheus.REGISTRY", registry)
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    async def rank(pg: ProcessGroup) -> dict[str, Any]:
        names = await execute(code("docs/metrics.md", "Prometheus").replace("9464", str(port)))
        await pg.barrier()
        assert b"aiocoll_operations_total{" in prometheus_client.generate_latest(registry)
        return names

    (names,) = await run_ranks(1, rank)
    assert names["port"] == port
    names["collector"].close()
    names["server"].shutdown()
    names["server"].server_close()
    names["thread"].join()


@pytest.mark.ranks(1)
async def test_opentelemetry_example_of_the_metrics_page_works(pg: ProcessGroup) -> None:
    reader = InMemoryMetricReader()
    meter_provider, tracer_provider = MeterProvider([reader]), TracerProvider()
    program = code("docs/metrics.md", "OpenTelemetry")
    names = await execute(program, meter_provider=meter_provider, tracer_provider=tracer_provider)
    await pg.barrier()
    data = reader.get_metrics_data()
    assert data is not None
    shown = {metric.name for metric in data.resource_metrics[0].scope_metrics[0].metrics}
    page = (ROOT / "docs/metrics.md").read_text()
    assert {name for name in shown if f"`{name}`" not in page} == set()
    names["meter"].close()
