"""Error messages that the documentation shows, compared with the messages of real errors."""

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
async def test_mismatch_error_equals_the_documented_message(pg: ProcessGroup) -> None:
    await pg.barrier()
    with pytest.raises(GroupError) as caught:
        await pg.allreduce(np.ones(4 if pg.rank() else 6))
    assert is_shown(code(PAGE, "What you see", language="text"), str(caught.value))


async def time_out_on_a_late_rank(pg: ProcessGroup) -> str:
    await pg.barrier()
    if pg.rank() == 2:
        return str(await pg.wait_revoked())
    with pytest.raises(GroupError) as caught:
        await pg.allreduce(np.ones((2, 3)), timeout=1)
    return str(caught.value)


def test_late_rank_warning_equals_the_documented_message() -> None:
    for message in run_virtual(3, time_out_on_a_late_rank):
        assert is_shown(code(PAGE, "What you see", 2, "text"), message)


async def lose_a_left_rank(pg: ProcessGroup) -> str:
    if pg.rank() == 2:
        return ""
    with pytest.raises(GroupError) as caught:
        await pg.allreduce(np.ones(2))
    return str(caught.value)


async def test_error_about_a_rank_that_has_left_equals_the_documented_message() -> None:
    *_, shown = code(PAGE, "What you see", 3, "text").splitlines()
    assert is_shown(shown, (await run_ranks(3, lose_a_left_rank))[0])


@pytest.mark.ranks(2)
async def test_abort_error_equals_the_documented_message(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        pg.abort("the user pressed stop")
    await pg.wait_revoked()
    with pytest.raises(GroupError) as caught:
        pg.barrier()
    assert is_shown(code(PAGE, "What you see", 4, "text"), str(caught.value))


async def test_rendezvous_error_equals_the_documented_message(tmp_path: Path, port: int) -> None:
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


async def input_errors(pg: ProcessGroup) -> list[str]:
    read_only = np.zeros(2)
    read_only.flags.writeable = False
    messages = []
    for call in (
        lambda: pg.allgather([np.zeros(2), read_only], np.zeros(2)),
        lambda: pg.allreduce(np.zeros(2, "complex64"), ReduceOp.MAX),
        lambda: pg.allreduce(np.zeros(2, ">f4")),
    ):
        with pytest.raises((TypeError, ValueError)) as caught:
            call()
        messages.append(str(caught.value))
    return messages


async def test_argument_errors_equal_the_documented_messages() -> None:
    messages = await run_ranks(2, input_errors)
    shown = code(PAGE, "Wrong input", language="text").splitlines()
    assert [is_shown(*pair) for pair in zip(shown, messages[0], strict=True)] == [True] * 3


async def time_out_in_monitored_barrier(pg: ProcessGroup) -> str:
    if pg.rank() % 2:
        return str(await pg.wait_revoked())
    with pytest.raises(CollectiveTimeoutError) as caught:
        await pg.monitored_barrier(timeout=1, wait_all_ranks=True)
    return f"CollectiveTimeoutError {caught.value}"


def test_monitored_barrier_error_equals_the_documented_message() -> None:
    assert is_shown(
        code(HANGS, "A barrier that names ranks", language="text"), run_virtual(4, time_out_in_monitored_barrier)[0]
    )
