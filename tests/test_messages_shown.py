"""The pages on failures show what the errors say: those that ranks of one process can run into are made here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import aiocoll
from aiocoll import CollectiveTimeoutError, GroupError, ProcessGroup, ReduceOp
from aiocoll.store import HashStore
from aiocoll.testing import run_virtual

from .pages import code, is_shown
from .ranks import run_ranks

PAGE = "docs/reliability.md"
HANGS = "docs/when-something-hangs.md"


@pytest.mark.ranks(2)
async def test_mismatch_message_is_the_one_shown(pg: ProcessGroup) -> None:
    await pg.barrier()
    with pytest.raises(GroupError) as caught:
        await pg.allreduce(np.ones(4 if pg.rank() else 6))
    assert is_shown(code(PAGE, "What you see", language="text"), str(caught.value))


async def be_late(pg: ProcessGroup) -> str:
    await pg.barrier()
    if pg.rank() == 2:
        return str(await pg.wait_revoked())
    with pytest.raises(GroupError) as caught:
        await pg.allreduce(np.ones((2, 3)), timeout=1)
    return str(caught.value)


def test_late_rank_message_is_the_one_shown() -> None:
    for said in run_virtual(3, be_late):
        assert is_shown(code(PAGE, "What you see", 2, "text"), said)


async def leave(pg: ProcessGroup) -> str:
    if pg.rank() == 2:
        return ""
    with pytest.raises(GroupError) as caught:
        await pg.allreduce(np.ones(2))
    return str(caught.value)


async def test_left_rank_message_is_the_one_shown() -> None:
    *_, shown = code(PAGE, "What you see", 3, "text").splitlines()
    assert is_shown(shown, (await run_ranks(3, leave))[0])


@pytest.mark.ranks(2)
async def test_abort_message_is_the_one_shown(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        pg.abort("the user pressed stop")
    await pg.wait_revoked()
    with pytest.raises(GroupError) as caught:
        pg.barrier()
    assert is_shown(code(PAGE, "What you see", 4, "text"), str(caught.value))


async def test_failed_rendezvous_message_is_the_one_shown(tmp_path: Path, port: int) -> None:
    with pytest.raises(aiocoll.RendezvousError) as alone:
        await aiocoll.new_group(store=HashStore(), rank=0, world_size=2, timeout=0.01)
    with pytest.raises(aiocoll.RendezvousError) as elsewhere:
        await aiocoll.new_group(init_method=f"tcp://127.0.0.1:{port}", rank=1, world_size=2, timeout=0.1)
    missing, nothing, *_ = code(PAGE, "What you see", 5, "text").split("\nrank ")
    assert is_shown(missing, str(alone.value))
    assert is_shown(f"rank {nothing}", str(elsewhere.value))
    alone_there, elsewhere_there = code(HANGS, "Ranks do not meet", language="text").split("\nRendezvousError: ")
    assert is_shown(alone_there.split(": ", 1)[1].replace("1, 2 of 3", "1 of 2"), str(alone.value))
    assert is_shown(elsewhere_there, str(elsewhere.value))


async def refused(pg: ProcessGroup) -> list[str]:
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    said = []
    for call in (
        lambda: pg.allgather([np.zeros(2), read_only], np.zeros(2)),
        lambda: pg.allreduce(np.zeros(2, "complex64"), ReduceOp.MAX),
        lambda: pg.allreduce(np.zeros(2, ">f4")),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        said.append(str(caught.value))
    return said


async def test_wrong_input_messages_are_those_shown() -> None:
    said = await run_ranks(2, refused)
    shown = code(PAGE, "Wrong input", language="text").splitlines()
    assert [is_shown(*pair) for pair in zip(shown, said[0], strict=True)] == [True] * 3


async def miss(pg: ProcessGroup) -> str:
    if pg.rank() % 2:
        return str(await pg.wait_revoked())
    with pytest.raises(CollectiveTimeoutError) as caught:
        await pg.monitored_barrier(timeout=1, wait_all_ranks=True)
    return f"CollectiveTimeoutError {caught.value}"


def test_monitored_barrier_message_is_the_one_shown() -> None:
    assert is_shown(code(HANGS, "A barrier that names ranks", language="text"), run_virtual(4, miss)[0])
