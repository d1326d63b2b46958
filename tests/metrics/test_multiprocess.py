"""Metrics in the multiprocess mode of prometheus_client, tested within one process.

`tests/integration/test_metrics.py` tests several processes.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import prometheus_client
import pytest
from prometheus_client import values

from aiocoll import ProcessGroup
from aiocoll.metrics.prometheus import GroupCollector
from aiocoll.testing import run_ranks

from ..pages import code
from ..ranks import wait_until
from .test_prometheus import Samples, key, samples

#: A process id that no process can have: it is above the largest process id of Linux.
DEAD = 1 << 23


@pytest.fixture
def directory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Enable the multiprocess mode in the imported prometheus_client; yield the directory of the metric files."""
    value_class: Any = values.MultiProcessValue(getattr(request, "param", os.getpid))
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    monkeypatch.setattr(values, "ValueClass", value_class)
    yield tmp_path
    value_class.close_all_files()


@pytest.fixture
def registry(directory: Path) -> Any:
    """Return the prometheus_client registry in which the fixture `collector` registers."""
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def collector(registry: Any) -> Iterator[GroupCollector]:
    collector = GroupCollector(registry)
    yield collector
    collector.close()


def written() -> Samples:
    """Return the samples in the metric files of all processes, read by the example of docs/metrics.md."""
    names: dict[str, Any] = {}
    # prometheus_client cannot read the length of a file that was created a moment ago.
    with suppress(struct.error):
        exec(code("docs/metrics.md", "Several processes behind one port"), names)
        return samples(names["text"].decode())
    return {}


def scraped(registry: Any) -> Samples:
    """Return the samples that a scrape of this process contains."""
    return samples(prometheus_client.generate_latest(registry).decode())


@pytest.mark.usefixtures("collector")
async def test_metric_files_contain_the_samples_of_a_scrape(registry: Any) -> None:
    async def rank(pg: ProcessGroup) -> None:
        pending = pg.recv(np.ones(1), 1 - pg.rank())
        for count in (1, 2, 5):
            await pg.allreduce(np.ones(count))
        await pg.barrier()
        if pg.rank() == 0:
            await wait_until(lambda: written() != {} and stable(written()) == pytest.approx(stable(scraped(registry))))
            assert len(written()) == len(scraped(registry)) > 60
            assert written()[key("aiocoll_pending_operations", group=pg.group_name, rank=0)] == 1
            assert written()[key("aiocoll_oldest_pending_seconds", group=pg.group_name, rank=0)] > 0
        await pg.barrier(key="compared")
        await pg.send(np.ones(1), 1 - pg.rank())
        await pending

    def stable(found: Samples) -> Samples:
        return {each: value for each, value in found.items() if each[0] != "aiocoll_oldest_pending_seconds"}

    await run_ranks(2, rank)
    # Closing a group writes its last counts to the metric files, with no pending operation.
    for number in range(2):
        this = {"group": "world:0", "rank": number}
        kind = {**this, "op": "SEND", "algorithm": "", "transport": "memory"}
        assert written()[key("aiocoll_operations_total", **kind, outcome="completed")] == 1
        assert written()[key("aiocoll_pending_operations", **this)] == 0
        assert written()[key("aiocoll_oldest_pending_seconds", **this)] == 0
    assert scraped(registry) == {}


async def test_counters_in_a_metric_file_never_decrease(directory: Path) -> None:
    """Remove a group and add it again; then continue with the metric file of an ended process."""
    kind = {"group": "a", "rank": 0, "op": "ALLREDUCE", "algorithm": "alone", "transport": "", "outcome": "completed"}
    calls = key("aiocoll_operations_total", **kind)
    count = key("aiocoll_operation_seconds_count", **{name: kind[name] for name in kind if name != "outcome"})

    async def rank(pg: ProcessGroup, before: int) -> None:
        collector = GroupCollector(prometheus_client.CollectorRegistry())
        assert collector._files is not None
        async with await pg.split(0, 0) as part:
            collector.add(part, name="a")
            await part.allreduce(1)
        assert (written()[calls], written()[count]) == (before + 1, before + 1)
        collector.add(pg, name="a")
        await pg.allreduce(1)
        collector._files.write()
        assert (written()[calls], written()[count]) == (before + 2, before + 2)
        collector.remove(pg)
        collector._files.write()
        assert (written()[calls], written()[count]) == (before + 2, before + 2)
        collector.add(pg, name="a")
        await pg.allreduce(1)
        collector._files.write()
        assert (written()[calls], written()[count]) == (before + 3, before + 3)
        await asyncio.to_thread(collector.close)

    await run_ranks(1, rank, 0)
    await run_ranks(1, rank, 3)


@pytest.mark.usefixtures("collector")
async def test_metric_files_with_gauges_of_ended_processes_are_removed(directory: Path) -> None:
    gone = directory / f"gauge_livesum_{DEAD}.db"
    mine = directory / f"gauge_livesum_{os.getpid()}.db"

    async def rank(pg: ProcessGroup) -> None:
        await wait_until(mine.exists)
        for name in (gone.name, f"counter_{DEAD}.db", f"gauge_livesum_{os.getppid()}.db"):
            shutil.copyfile(mine, directory / name)
        await wait_until(lambda: not gone.exists())
        assert (directory / f"counter_{DEAD}.db").exists()
        assert (directory / f"gauge_livesum_{os.getppid()}.db").exists()

    await run_ranks(1, rank)


@pytest.mark.parametrize("directory", [lambda: 7], indirect=True, ids=["worker 7"])
async def test_metric_files_not_named_by_process_ids_are_kept(directory: Path, collector: GroupCollector) -> None:
    assert collector._files is not None

    async def rank(pg: ProcessGroup) -> None:
        await wait_until((directory / "gauge_livesum_7.db").exists)
        kept = shutil.copyfile(directory / "gauge_livesum_7.db", directory / f"gauge_livesum_{DEAD}.db")
        collector._files._mark_dead_processes()
        assert kept.exists()

    await run_ranks(1, rank)


@pytest.mark.usefixtures("collector")
async def test_group_works_after_the_metrics_directory_is_deleted(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(directory)

    async def rank(pg: ProcessGroup) -> None:
        assert await pg.allreduce(1) == 1

    await run_ranks(1, rank)
    # The thread that writes metric files may log its failure a moment after the group has ended.
    await wait_until(lambda: any(each.name == "aiocoll" for each in caplog.records))
    (record,) = [each for each in caplog.records if each.name == "aiocoll"]
    assert record.getMessage().startswith(f"cannot write metrics to PROMETHEUS_MULTIPROC_DIR={directory}: ")


@pytest.mark.usefixtures("collector")
async def test_group_is_created_although_the_metrics_thread_cannot_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def rank(pg: ProcessGroup) -> None:
        assert await pg.allreduce(1) == 1

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        await run_ranks(1, rank)
    (record,) = [each for each in caplog.records if each.name == "aiocoll"]
    assert record.getMessage().endswith(": can't start new thread")


@pytest.mark.usefixtures("directory")
def test_missing_metrics_directory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    registry = prometheus_client.CollectorRegistry()
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"none' is not a directory; create it before the program starts"):
        GroupCollector(registry)
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    GroupCollector(registry).close()


def test_prometheus_multiproc_dir_set_after_the_import_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    GroupCollector(prometheus_client.CollectorRegistry()).close()
    (record,) = caplog.records
    assert (
        "was set after prometheus_client was imported, so this process writes no metrics there" in record.getMessage()
    )
