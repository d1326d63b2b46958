"""What docs/metrics.md shows."""

from __future__ import annotations

import numpy as np
import pytest

from aiocoll import ProcessGroup
from aiocoll.testing import run_ranks

from ..pages import code, execute, without_numbers


async def test_stats_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
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
    said = capsys.readouterr().out.splitlines()
    shown = code("docs/metrics.md", "Metrics", language="text").splitlines()
    assert [line.split() for line in (said[1], said[3])] == [line.split() for line in (shown[1], shown[6])]
    assert without_numbers(said[0]) == without_numbers(shown[0])
    assert without_numbers(said[-1]) == "rank #: waited for # times, #"
