"""Arrays of dtypes that can be sent but not reduced: structured dtypes, dates, strings and raw bytes."""

from __future__ import annotations

import pickle
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aiocoll import CollectiveMismatchError, ProcessGroup, Recv, ReduceOp, Send
from aiocoll.elements.dtypes import by_code, by_name, from_numpy
from aiocoll.elements.records import LONGEST_NAME

from ..ranks import LINKS, parametrize_transports

PARTICLE = np.dtype([("id", "i4"), ("mass", "f8")])
DTYPES = (
    PARTICLE,
    np.dtype([("id", "i1"), ("mass", "f8")], align=True),
    np.dtype([("at", [("x", "f4", (2, 3)), ("name", "S5")]), ("when", "M8[s]")]),
    np.dtype([("big", ">i4"), ("half", ml_dtypes.bfloat16), ("long", "g")]),
    np.dtype({"names": ["b", "a"], "formats": ["i2", "u1"], "offsets": [4, 0], "itemsize": 11}),
    np.dtype("M8[ns]"),
    np.dtype("m8[D]"),
    np.dtype("S7"),
    np.dtype("U3"),
    np.dtype(">U2"),
    np.dtype("V13"),
    np.dtype("V300001"),
)


def random_elements(dtype: np.dtype[Any], count: int, seed: int) -> Any:
    """Return valid elements of `dtype` with random bytes, also in the padding."""
    data = np.random.default_rng(seed).integers(1, 100, count * dtype.itemsize, dtype=np.uint8)
    if dtype.kind == "U":
        return np.array([str(seed + each)[:2] for each in range(count)], dtype)
    return data.view(dtype)


def is_equal(a: Any, b: Any) -> bool:
    return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())


def joined(dtype: np.dtype[Any], parts: list[Any]) -> Any:
    """Concatenate arrays including their padding, which `np.concatenate` does not copy."""
    return np.frombuffer(b"".join(part.tobytes() for part in parts), dtype)


@parametrize_transports(*LINKS)
@pytest.mark.ranks(1, 2, 3, 4, 7)
async def test_structured_arrays_work_in_all_calls_that_move_data(pg: ProcessGroup) -> None:
    rank, size = pg.rank(), pg.size()
    world = range(size)
    dtypes = DTYPES[:-1] if size < 4 else DTYPES[size - 2 : size]
    cases = [(dtype, count) for dtype in dtypes for count in (0, 1, size + 1)]
    for dtype, count in [*cases, (DTYPES[1], 20_001 // size), *([(DTYPES[-1], 1)] if size < 4 else [])]:

        def data(seed: int) -> Any:
            return random_elements(dtype, count, seed)  # noqa: B023

        def blank(*shape: int) -> Any:
            return np.zeros((*shape, count), dtype)  # noqa: B023

        for root in world if count == 1 else [size - 1]:
            x = data(rank)
            assert await pg.broadcast(x, root) is x
            assert is_equal(x, data(root))
            gathered = await pg.gather(None, data(rank), root)
            assert rank != root or all(map(is_equal, gathered, map(data, world)))
            outputs = [blank() for _ in world] if rank == root else None
            await pg.gather(outputs, data(rank), root)
            assert rank != root or all(map(is_equal, outputs, map(data, world)))
            out = await pg.scatter(blank(), [data(each) for each in world] if rank == root else None, root)
            assert is_equal(out, data(rank))
        assert all(map(is_equal, await pg.allgather(None, data(rank)), map(data, world)))
        assert all(map(is_equal, await pg.allgather([blank() for _ in world], data(rank)), map(data, world)))
        assert is_equal(
            await pg.allgather_into_tensor(blank(size), data(rank)),
            joined(dtype, list(map(data, world))).reshape(size, -1),
        )
        came = await pg.alltoall([blank() for _ in world], [data(10 * rank + each) for each in world])
        assert all(map(is_equal, came, (data(10 * each + rank) for each in world)))
        sent = joined(dtype, [data(10 * rank + each) for each in world])
        came = await pg.alltoall_base(np.zeros(size * count, dtype), sent)
        assert is_equal(came, joined(dtype, [data(10 * each + rank) for each in world]))
        if size > 1:
            after, before = (rank + 1) % size, (rank - 1) % size
            _, out = await pg.batch([Send(data(rank), after), Recv(blank(), before)])
            assert is_equal(out, data(before))


@parametrize_transports(*LINKS)
@pytest.mark.ranks(1, 2, 3, 4)
async def test_structured_arrays_work_in_blocks_and_lists(pg: ProcessGroup) -> None:
    rank, size = pg.rank(), pg.size()
    world = range(size)
    for dtype, count in product(DTYPES[:-1], (0, 1, 5)):
        each = [np.zeros((size, count), dtype) for _ in range(3)]
        outputs = [[np.zeros(count + at, dtype) for _ in world] for at in range(3)]
        tensors = [random_elements(dtype, count, rank + at) for at in range(3)]
        out = [np.zeros(count, dtype) for _ in range(3)]
        async with pg.coalescing():
            for at in range(3):
                pg.broadcast(tensors[at], size - 1)
                pg.allgather_into_tensor(each[at], random_elements(dtype, count, rank + at))
                pg.alltoall(outputs[at], [random_elements(dtype, count + at, 10 * rank + peer) for peer in world])
                pg.scatter(
                    out[at], [random_elements(dtype, count, peer + at) for peer in world] if rank == 0 else None, 0
                )
        for at in range(3):
            assert is_equal(tensors[at], random_elements(dtype, count, size - 1 + at))
            assert is_equal(out[at], random_elements(dtype, count, rank + at))
            assert all(is_equal(each[at][peer], random_elements(dtype, count, peer + at)) for peer in world)
            assert all(
                is_equal(outputs[at][peer], random_elements(dtype, count + at, 10 * peer + rank)) for peer in world
            )
        again = await pg.allgather_into_tensor_coalesced(
            [np.zeros((size, count), dtype) for _ in range(2)],
            [random_elements(dtype, count, rank + at) for at in range(2)],
        )
        assert all(
            is_equal(again[at][peer], random_elements(dtype, count, peer + at)) for at in range(2) for peer in world
        )


@pytest.mark.ranks(3)
async def test_structured_arrays_work_with_different_lengths_strides_shapes_and_dtypes(pg: ProcessGroup) -> None:
    rank = pg.rank()
    gathered = await pg.allgather(None, random_elements(PARTICLE, rank, rank))
    assert all(is_equal(part, random_elements(PARTICLE, each, each)) for each, part in enumerate(gathered))
    gathered = await pg.gather(None, random_elements(PARTICLE, 2 * rank, rank).reshape(rank, 2), 1)
    assert rank != 1 or all(
        is_equal(part, random_elements(PARTICLE, 2 * each, each).reshape(each, 2)) for each, part in enumerate(gathered)
    )
    records = random_elements(PARTICLE, 4, rank).view(np.recarray)
    assert await pg.broadcast(records, 1) is records
    assert records.tobytes() == random_elements(PARTICLE, 4, 1).tobytes()
    # A strided array is sent as a copy of its fields, without the memory between elements.
    plane = np.zeros((4, 2), PARTICLE)
    plane[:, 0]["id"] = rank + 1
    await pg.broadcast(plane[:, 0], 2)
    assert plane["id"].tolist() == [[3, 0]] * 4
    # Broadcast an array without dimensions, and a scalar.
    one = np.array((rank, 0.5), PARTICLE)
    await pg.broadcast(one, 2)
    assert one.tolist() == (2, 0.5)
    scalar = await pg.broadcast(np.datetime64("2020-01-01") + np.timedelta64(rank, "D"), 1)
    assert scalar == np.datetime64("2020-01-02")
    x = await pg.empty((2, 2), PARTICLE)
    x[...] = (rank, 1.5)
    assert (await pg.broadcast(x, 1))["id"].tolist() == [[1, 1], [1, 1]]
    if rank == 0:
        await pg.send(random_elements(PARTICLE, 3, 5), 1, tag=4)
    elif rank == 1:
        async for source, message in pg.incoming(tag=4):
            assert (source, message.dtype) == (0, np.uint8)
            assert is_equal(message.view(PARTICLE), random_elements(PARTICLE, 3, 5))
            break


OTHERS = (
    ([("ID", "i4"), ("mass", "f8")], "{ID: <i4, mass: <f8}"),
    ([("id", "u4"), ("mass", "f8")], "{id: <u4, mass: <f8}"),
    ([("id", "i4"), ("mass", ">f8")], "{id: <i4, mass: >f8}"),
    ([("mass", "f8"), ("id", "i4")], "{mass: <f8, id: <i4}"),
    ({"names": ["id", "mass"], "formats": ["i4", "f8"], "offsets": [8, 0]}, "{id: <i4 at 8, mass: <f8 at 0; 12 bytes}"),
    ("V12", "V12"),
    ("uint8", "uint8"),
)


@pytest.mark.parametrize(("other", "name"), OTHERS)
@pytest.mark.parametrize("call", ["broadcast", "allgather", "gather", "send", "block"])
@pytest.mark.ranks(2)
async def test_different_layouts_of_structured_dtypes_are_reported_as_a_mismatch(
    pg: ProcessGroup, call: str, other: Any, name: str
) -> None:
    dtype = np.dtype(other) if pg.rank() else PARTICLE
    x = np.ones(12 // dtype.itemsize, dtype)

    async def run() -> None:
        if call == "broadcast":
            await pg.broadcast(x, 0)
        elif call == "allgather":
            await pg.allgather([x.copy(), x.copy()], x)
        elif call == "gather":
            await pg.gather([x.copy(), x.copy()] if pg.rank() == 0 else None, x, 0)
        elif call == "send":
            await (pg.send(x, 1) if pg.rank() == 0 else pg.recv(x, 0))
        else:
            async with pg.coalescing():
                pg.broadcast(x, 0)
        await pg.barrier()  # the barrier fails if the call had completed before the mismatch

    with pytest.raises(CollectiveMismatchError, match=r"differ in the following: (dtype|members)") as caught:
        await run()
    assert x.tobytes() == np.ones(len(x), dtype).tobytes()
    text = str(caught.value)
    assert "dtype={id: <i4, mass: <f8}" in text
    assert f"dtype={name}" in text


@pytest.mark.ranks(2)
async def test_unsupported_structured_dtypes_are_refused(pg: ProcessGroup) -> None:
    x = np.zeros(4, PARTICLE)
    for op in (ReduceOp.SUM, ReduceOp.BAND, ReduceOp.custom(np.add)):
        for call in (
            lambda op: pg.allreduce(x, op),
            lambda op: pg.reduce(x, 0, op),
            lambda op: pg.scan(x, op),
            lambda op: pg.exscan(x, op),
            lambda op: pg.reduce_scatter_tensor(x[:2], x, op),
            lambda op: pg.reduce_scatter(x[:2].copy(), [x[:2], x[2:]], op),
        ):
            with pytest.raises(
                TypeError, match=r"op .* is not defined on \{id: <i4, mass: <f8\}, whose arrays can be sent but not"
            ):
                call(op)
    for dtype in (np.dtype("O"), np.dtype([("a", [("b", "O", 2)])]), np.dtypes.StringDType()):
        with pytest.raises(TypeError, match=r"tensor: dtype .* contains Python objects, .* use a dtype without"):
            pg.broadcast(np.zeros(2, dtype), 0)
    with pytest.raises(TypeError, match=r"tensor: dtype .* has elements of 0 bytes"):
        pg.broadcast(np.zeros(2, np.dtype([])), 0)
    with pytest.raises(TypeError, match=r"output has dtype \{id: <i4, mass: <f8\}, expected V12"):
        pg.allgather_into_tensor(np.zeros(4, PARTICLE), np.zeros(2, "V12"))
    with pytest.raises(ValueError, match="output has 3 elements, expected 4"):
        pg.allgather_into_tensor(np.zeros(3, PARTICLE), np.zeros(2, PARTICLE))
    assert await pg.allreduce(1) == 2


def test_layout_name_describes_the_structured_dtype() -> None:
    assert from_numpy(PARTICLE) is from_numpy(np.dtype((np.record, [("id", "i4"), ("mass", "f8")])))
    assert pickle.loads(pickle.dumps(from_numpy(PARTICLE))) is from_numpy(PARTICLE)
    assert from_numpy(DTYPES[2]).name == "{at: {x: <f4[2, 3], name: S5}, when: <M8[s]}"
    assert from_numpy(DTYPES[1]).name == "{id: i1 at 0, mass: <f8 at 8; 16 bytes}"
    assert from_numpy(np.dtype([("a b", "i1"), ("\ud800", "i1")])).name == r"{'a b': i1, '\ud800': i1}"
    # Dtypes with equal fields and offsets have the same layout, whether or not they have the align flag.
    packed = np.dtype({"names": ["id", "mass"], "formats": ["i1", "f8"], "offsets": [0, 8]})
    assert from_numpy(packed) is from_numpy(DTYPES[1])
    long = [from_numpy(np.dtype([(f"field{at}", "i4") for at in range(200)] + [(last, "i1")])) for last in "ab"]
    assert [len(each.name) for each in long] == [LONGEST_NAME] * 2
    assert long[0].name != long[1].name
    for dtype in (from_numpy(PARTICLE), *long):
        assert by_name(dtype.name) is by_code(dtype.code) is dtype


def test_unused_structured_dtype_is_dropped_from_the_dtype_table_after_256_newer_ones() -> None:
    code = from_numpy(np.dtype([("used once", "i4")])).code
    assert by_code(code).itemsize == 4, "the layout was forgotten, although a message may still carry its code"
    for number in range(256):
        from_numpy(np.dtype([(f"used once, too {number}", "i4")]))
    with pytest.raises(ValueError, match="is unknown"):
        by_code(code)


@pytest.mark.ranks(2)
async def test_estimates_and_hooks_report_the_bytes_of_structured_arrays(pg: ProcessGroup) -> None:
    x = np.zeros(1000, PARTICLE)
    with pg.time_estimator() as estimate:
        pg.broadcast(x, 0)
    assert estimate.calls[0].nbytes == 12_000
    infos = []

    class Hook:
        def on_end(self, info: Any) -> None:
            infos.append((info.op, info.nbytes))

    with_hook = pg.add_hook(Hook())
    await pg.broadcast(x, 0)
    await pg.barrier()
    with_hook.remove()
    assert infos[0] == ("BROADCAST", 12_000)
