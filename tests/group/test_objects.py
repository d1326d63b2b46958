"""Collectives on Python objects: every root, keys, errors and the size limit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, ProcessGroup, SerializationError

from ..internals import Limits
from ..ranks import TRANSPORTS, parametrize_transports, run_ranks


def sized_object(rank: int, other: int = 0) -> dict[str, Any]:
    """Return an object whose size grows with the rank, so that some need one frame and others a grant."""
    return {"rank": rank, "other": other, "nested": [(rank, {1, 2}), None], "bytes": b"x" * 150_000 * rank}


@pytest.mark.ranks(1, 2, 5)
@parametrize_transports(*TRANSPORTS)
async def test_object_collectives_work_for_every_root(pg: ProcessGroup) -> None:
    rank, world = pg.rank(), range(pg.size())
    for root in world:
        assert await pg.broadcast_object(sized_object(rank), root) == sized_object(root)
        gathered = await pg.gather_object(sized_object(rank), root)
        assert gathered == ([sized_object(each) for each in world] if rank == root else None)
        objs = [sized_object(rank, each) for each in world] if rank == root else None
        assert await pg.scatter_object(objs, root) == sized_object(root, rank)
    assert await pg.allgather_object(sized_object(rank)) == [sized_object(each) for each in world]
    exchanged = await pg.alltoall_object([sized_object(rank, each) for each in world])
    assert exchanged == [sized_object(each, rank) for each in world]


@pytest.mark.ranks(3)
async def test_arrays_can_be_sent_inside_objects(pg: ProcessGroup) -> None:
    matrix = np.arange(6, dtype="float32").reshape(2, 3) * pg.rank()
    for source, got in enumerate(await pg.allgather_object({"matrix": matrix})):
        np.testing.assert_array_equal(got["matrix"], np.arange(6).reshape(2, 3) * source)
        assert got["matrix"].dtype == np.float32


@pytest.mark.ranks(2)
async def test_keyed_objects_match_in_any_order(pg: ProcessGroup) -> None:
    keys = ["a", "b", "c", "a"]
    works = {}
    for key in keys if pg.rank() else [*keys[1:3], "a", "a"]:
        work = pg.allgather_object((key, pg.rank()), key=key)
        works[key, work.seq] = work
    for (key, _), work in works.items():
        assert await work == [(key, 0), (key, 1)]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda pg: pg.broadcast_object(1, 2), ValueError, "root=2 is not a rank"),
        (lambda pg: pg.gather_object(1, "0"), TypeError, "root must be a rank"),
        (lambda pg: pg.scatter_object([1], 0), ValueError, "objs needs exactly one object per rank: 2, not 1"),
        (lambda pg: pg.scatter_object(None, 0), ValueError, "objs needs exactly one object per rank: 2, not None"),
        (lambda pg: pg.alltoall_object([1, 2, 3]), ValueError, "objs needs exactly one object per rank: 2, not 3"),
        (lambda pg: pg.allgather_object({"a": [object()]}), SerializationError, r"cannot send obj\['a'\]\[0\]: object"),
        (lambda pg: pg.allgather_object(1, timeout="soon"), TypeError, "timeout must be seconds"),
        (lambda pg: pg.allgather_object(1, key=5), TypeError, "key must be a str or None, not int"),
    ],
)
async def test_call_with_wrong_arguments_takes_no_sequence_number(
    pg: ProcessGroup, call: Any, error: type[Exception], message: str
) -> None:
    if pg.rank() == 0:
        with pytest.raises(error, match=message):
            call(pg)
    work = pg.allgather_object(pg.rank())
    assert work.seq == 1
    assert await work == [0, 1]


@pytest.mark.ranks(2)
async def test_error_for_different_roots_names_both_roots(pg: ProcessGroup) -> None:
    with pytest.raises(CollectiveMismatchError, match=r"GATHER_OBJECT.*root=0.*GATHER_OBJECT.*root=1"):
        await pg.gather_object(1, pg.rank())


async def test_object_above_the_size_limit_is_refused(limits: Limits) -> None:
    limits(max_object_bytes=1000)

    async def rank(pg: ProcessGroup) -> None:
        if pg.rank() == 0:
            await pg.broadcast_object(b"x" * 500_000)
        else:
            with pytest.raises(SerializationError, match=r"rank 0 sent an object of 5000.. bytes; the limit is 1000"):
                await pg.broadcast_object()
        assert await pg.allgather_object(pg.rank()) == [0, 1]

    await run_ranks(2, rank)
