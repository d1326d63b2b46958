"""Two-level collectives in the engine, with simulated hosts: results, equal bits, and traffic between hosts."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.algorithms.two_level import select as two_level
from aiocoll.transport.frame import HEADER, FrameKind
from aiocoll.transport.memory import MemoryLink

from ..internals import comm_of, observe_methods, plans_of, replace_parts
from ..ranks import run_ranks
from .test_collectives import ROOTED, check

SPLITS = [(0, 0, 1, 1), (0, 0, 0, 1), (0, 1, 0, 1, 1), (0, 1, 2, 2, 2, 2, 2)]
#: Element counts for which allreduce selects each two-level algorithm.
SIZES = {"leaders": 1000, "lanes": 80_000, "lines": 1_000_000}


def set_hosts(pg: ProcessGroup, hosts: tuple[int, ...]) -> None:
    """Simulate that the ranks of `pg` are on the given hosts, without shared memory."""
    comm_of(pg).hosts = hosts
    comm_of(pg).chunk_nbytes = 0


@pytest.fixture
def frames(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Return a list that records the sender, the receiver and the payload bytes of every data frame."""
    seen: list[tuple[int, int, int]] = []

    def record_frame(link: MemoryLink, header: bytes, payload: memoryview | None = None) -> None:
        if HEADER.unpack(header)[0] == FrameKind.DATA:
            seen.append((sum(link.ends) - link.peer, link.peer, 0 if payload is None else payload.nbytes))

    observe_methods(monkeypatch, MemoryLink, write=record_frame)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memory", "unix"])
@pytest.mark.parametrize("hosts", SPLITS, ids=str)
@pytest.mark.parametrize(("kind", "algorithm"), two_level.ALGORITHMS, ids=lambda value: value)
async def test_two_level_algorithm_is_used_and_computes_the_closed_form_results(
    kind: str, algorithm: str, hosts: tuple[int, ...], transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = []

    def choose(of_kind: str, *_: Any, **named: Any) -> str:
        choices.append((of_kind, named["hosts"]))
        return algorithm

    replace_parts(monkeypatch, choose_algorithm=choose)
    world_size = len(hosts)
    roots = range(world_size) if kind in ROOTED else (0,)
    case = {"kind": kind, "op": "PREMUL_SUM", "dtype": "float32", "world_size": world_size}
    cases = [{**case, "root": root, "count": count} for root in roots for count in ("0", "1", "p-1", "p+1", "1000")]
    cases += [{**case, "root": roots[-1], "count": "1000000"}]

    async def rank(pg: ProcessGroup) -> list[bytes]:
        set_hosts(pg, hosts)
        if kind == "barrier":
            await pg.barrier()
            return []
        return await check(pg, cases)

    first, *others = await run_ranks(world_size, rank, transport=transport)
    assert all(each == first for each in others), "ranks have results with different bits"
    assert set(choices) == {(kind, hosts)}


@pytest.mark.slow
@pytest.mark.parametrize("hosts", SPLITS, ids=str)
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "PREMUL_SUM"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
async def test_rounded_two_level_results_have_the_same_bits_on_all_ranks(
    dtype: str, op: str, hosts: tuple[int, ...]
) -> None:
    async def rank(pg: ProcessGroup) -> list[bytes]:
        set_hosts(pg, hosts)
        random = np.random.default_rng(pg.rank())
        chosen = ReduceOp.PREMUL_SUM(0.1 + pg.rank()) if op == "PREMUL_SUM" else getattr(ReduceOp, op)
        results = []
        for count in SIZES.values():
            values = random.standard_normal(count) + (1j * random.standard_normal(count) if dtype[0] == "c" else 0)
            # Offset each rank's array differently, so that the arrays have different alignments.
            tensor = np.empty(count + 8, dtype)[pg.rank() : count + pg.rank()]
            tensor[:] = values
            results.append((await pg.allreduce(tensor, chosen)).tobytes())
        return results

    first, *others = await run_ranks(len(hosts), rank)
    assert all(each == first for each in others)


@pytest.mark.parametrize("hosts", SPLITS, ids=str)
@pytest.mark.parametrize("algorithm", SIZES)
async def test_two_level_allreduce_sends_the_expected_bytes_between_hosts(
    algorithm: str, hosts: tuple[int, ...], frames: list[tuple[int, int, int]]
) -> None:
    """Expect 2n(h-1) bytes in total, or for "leaders", each leader's tensor once to each other leader."""
    count, number = SIZES[algorithm], len(set(hosts))

    async def rank(pg: ProcessGroup) -> set[str]:
        set_hosts(pg, hosts)
        result = await pg.allreduce(np.full(count, pg.rank(), np.float32))
        assert (result == sum(range(pg.size()))).all()
        return {plan.algorithm for plan in plans_of(pg)}

    assert await run_ranks(len(hosts), rank) == [{algorithm}] * len(hosts)
    crossing = [nbytes for source, target, nbytes in frames if hosts[source] != hosts[target]]
    assert sum(crossing) == count * 4 * (number - 1) * (number if algorithm == "leaders" else 2)
    if algorithm == "leaders":
        assert len(crossing) == number * (number - 1).bit_length()


@pytest.mark.parametrize("hosts", SPLITS, ids=str)
async def test_two_level_barrier_sends_the_expected_messages_between_hosts(
    hosts: tuple[int, ...], frames: list[tuple[int, int, int]]
) -> None:
    number = len(set(hosts))

    async def rank(pg: ProcessGroup) -> None:
        set_hosts(pg, hosts)
        await pg.barrier()

    await run_ranks(len(hosts), rank)
    crossing = [nbytes for source, target, nbytes in frames if hosts[source] != hosts[target]]
    assert crossing == [0] * (number * (number - 1).bit_length())


async def test_two_level_barrier_waits_for_the_last_rank_of_every_host() -> None:
    """Let one rank call only after all other ranks wait in the barrier."""
    hosts = (0, 1, 0, 1, 1)

    async def rank(pg: ProcessGroup, last: int) -> None:
        set_hosts(pg, hosts)
        if pg.rank() != last:
            work = pg.barrier()
            entered.append(pg.rank())
            if len(entered) == pg.size() - 1:
                all_waiting.set()
            await work
            assert arrived
            return
        await all_waiting.wait()
        # A frame takes one loop iteration, so afterwards all frames that do not depend on the last rank have arrived.
        for _ in range(100):
            await asyncio.sleep(0)
        arrived.append(True)
        await pg.barrier()

    for last in range(len(hosts)):
        entered: list[int] = []
        arrived: list[bool] = []
        all_waiting = asyncio.Event()
        await run_ranks(len(hosts), rank, last)
