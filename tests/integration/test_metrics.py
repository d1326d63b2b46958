"""Metrics of several processes on one host, exported as docs/metrics.md shows."""

from __future__ import annotations

from pathlib import Path

from tests.integration import metrics_job
from tests.integration.conftest import LIMIT, Ranks
from tests.pages import code, commands
from tests.ports import free_ports

PAGE = "docs/metrics.md"

#: Code that the test appends to the page's program: each rank scrapes the metrics of all ranks.
PROGRAM = """
import asyncio, urllib.request
import aiocoll

async def main():
    async with aiocoll.new_group() as pg:
        await pg.barrier()
        for number in range(pg.size()):
            url = f"http://127.0.0.1:{FIRST + number}/metrics"
            text = (await asyncio.to_thread(urllib.request.urlopen, url)).read().decode()
            shown = {line.partition("}")[0] for line in text.splitlines() if line.startswith("aiocoll_pending")}
            assert shown == {f'aiocoll_pending_operations{{group="world:0",rank="{number}"'}
        await pg.barrier()
    server.shutdown()
    server.server_close()
    thread.join()
    collector.close()

asyncio.run(main())
"""


def test_each_rank_serves_metrics_on_a_separate_port(ranks: Ranks, tmp_path: Path) -> None:
    first = free_ports(2)
    program = tmp_path / "ports.py"
    program.write_text(f"FIRST = {first}\n{code(PAGE, 'Prometheus').replace('9464', str(first))}\n{PROGRAM}")
    run(ranks, "-n", "2", str(program))


def test_metrics_scrape_contains_all_processes_and_the_counts_of_a_replaced_rank(ranks: Ranks, tmp_path: Path) -> None:
    (command,) = commands(PAGE)
    assert command == "PROMETHEUS_MULTIPROC_DIR=$(mktemp -d) aiocoll run -n 2 program.py\n"
    directory = tmp_path / "metrics"
    directory.mkdir()
    run(ranks, "-n", "2", "--max-restarts", "1", metrics_job.__file__, directory=directory)
    steps = metrics_job.STEPS
    assert metrics_job.allreduces(str(directory)) == {("world:0", "0"): steps, ("world:0", "1"): steps}


def run(ranks: Ranks, *arguments: str, directory: Path | None = None) -> None:
    env = {} if directory is None else {"PROMETHEUS_MULTIPROC_DIR": str(directory)}
    job = ranks.start("-m", "aiocoll", "run", *arguments, env=env)
    out, err = job.communicate(timeout=LIMIT)
    assert (job.returncode, out) == (0, ""), err
