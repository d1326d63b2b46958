"""Fuzz tests of `aiocoll trace`: it reads nearly valid flight recorder dumps, or names the invalid file."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from aiocoll import ProcessGroup
from aiocoll.cli.main import main
from aiocoll.errors import CollectiveMismatchError
from aiocoll.testing.virtual import run_virtual

from .budget import fuzz
from .mutation import mutated


@cache
def dumped() -> list[dict[str, Any]]:
    """Return the flight recorder dumps of three ranks whose last calls do not match."""

    async def rank(pg: ProcessGroup) -> dict[str, Any]:
        await pg.allreduce(np.ones(3))
        await pg.allreduce(np.ones(3), key="k")
        await pg.alltoall([np.zeros(2) for _ in range(3)], [np.zeros(2)] * 3)
        async with pg.coalescing():
            pg.allreduce(np.ones(2))
            pg.broadcast(np.ones(4), 0)
        sent = pg.send(np.ones(2), (pg.rank() + 1) % 3)
        await pg.recv(np.ones(2), (pg.rank() - 1) % 3)
        await sent
        with contextlib.suppress(CollectiveMismatchError):
            await pg.allreduce(np.ones(3 + (pg.rank() == 2)))
        return pg.recorder.dump()

    found: list[dict[str, Any]] = json.loads(json.dumps(run_virtual(3, rank)))
    return found


@pytest.mark.slow
@fuzz(mutated(st.deferred(lambda: st.just(dumped()))), examples=150)
def test_trace_command_reads_or_refuses_mutated_recorder_dumps(dumps: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for number, dump in enumerate(dumps if isinstance(dumps, list) else [dumps]):
            path = Path(folder) / f"{number}.json"
            try:
                path.write_text(json.dumps(dump), encoding="ascii")
            except TypeError:
                return  # the value contains bytes, which JSON does not support
            paths.append(str(path))
        if not paths:
            return
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main(["trace", *paths, "--perfetto", str(Path(folder) / "trace")])
        assert code in (0, 1, 2)
        assert out.getvalue()
