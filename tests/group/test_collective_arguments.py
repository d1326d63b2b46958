"""Arguments of collectives: accepted shapes, dtypes and array types, and errors before a call starts."""

from __future__ import annotations

import array
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp

from ..ranks import LINKS, parametrize_transports

# -- parts of different lengths


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
@pytest.mark.parametrize("counts", [[3, 0, 5], [0, 0, 0], [0, 100_000, 1], [1, 2, 300_000]])
async def test_arrays_of_different_ranks_in_collectives_can_have_any_length(
    pg: ProcessGroup, counts: list[int]
) -> None:
    rank, world = pg.rank(), range(3)

    def part(source: int, block: int, count: int) -> Any:
        return np.full(count, 10 * source + block, "int32")

    outputs = [np.zeros(count, "int32") for count in counts]
    assert await pg.allgather(outputs, part(rank, 0, counts[rank])) is outputs
    for source, output in enumerate(outputs):
        np.testing.assert_array_equal(output, part(source, 0, counts[source]))

    for root in world:
        outputs = [np.zeros(count, "int32") for count in counts] if rank == root else []
        gathered = await pg.gather(outputs, part(rank, 1, counts[rank]), root)
        for source, output in enumerate(gathered or []):
            np.testing.assert_array_equal(output, part(source, 1, counts[source]))
        inputs = [part(root, block, counts[block]) for block in world] if rank == root else None
        output = await pg.scatter(np.zeros(counts[rank], "int32"), inputs, root)
        np.testing.assert_array_equal(output, part(root, rank, counts[rank]))

    output = np.zeros(counts[rank], "int32")
    await pg.reduce_scatter(output, [part(rank, block, counts[block]) for block in world])
    np.testing.assert_array_equal(output, np.full(counts[rank], 30 + 3 * rank))

    lengths = [[counts[(source + target) % 3] for target in world] for source in world]
    outputs = [np.zeros(lengths[source][rank], "int32") for source in world]
    await pg.alltoall(outputs, [part(rank, target, lengths[rank][target]) for target in world])
    for source, output in enumerate(outputs):
        np.testing.assert_array_equal(output, part(source, rank, lengths[source][rank]))

    into = np.zeros((sum(lengths[source][rank] for source in world), 2), "int32")
    out_of = np.concatenate([np.full((lengths[rank][target], 2), target, "int32") for target in world])
    await pg.alltoall_base(into, out_of, [lengths[source][rank] for source in world], lengths[rank])
    assert (into == rank).all()


@pytest.mark.ranks(2)
async def test_collectives_allocate_outputs_if_none_are_passed(pg: ProcessGroup) -> None:
    tensor = np.full((2, 3), pg.rank(), "float32")
    for gathered in (await pg.allgather(None, tensor), await pg.gather(None, tensor, 1)):
        for source, each in enumerate(gathered or []):
            assert each.shape == (2, 3)
            assert each.dtype == np.float32
            assert (each == source).all()


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
@pytest.mark.parametrize("count", [1, 1000, 300_000])
async def test_single_tensor_collectives_read_or_write_one_tensor_for_all_ranks(pg: ProcessGroup, count: int) -> None:
    size, rank = pg.size(), pg.rank()
    output = np.zeros((size, count))
    output[rank] = rank
    # In place: the input is this rank's block of the output.
    assert await pg.allgather_into_tensor(output, output[rank]) is output
    assert all((output[source] == source).all() for source in range(size))
    part = np.zeros(count)
    await pg.reduce_scatter_tensor(part, output)
    assert (part == size * rank).all()
    # In place: the output is this rank's block of the input.
    await pg.reduce_scatter_tensor(output[rank], output, ReduceOp.MAX)
    assert (output[rank] == rank).all()
    exchanged = np.zeros((size, count))
    await pg.alltoall_base(exchanged, np.full((size, count), float(rank)))
    assert all((exchanged[source] == source).all() for source in range(size))


# -- kinds of memory


@pytest.mark.ranks(2)
async def test_strided_tensors_are_staged_in_collectives(pg: ProcessGroup) -> None:
    size, rank = pg.size(), pg.rank()
    whole = np.zeros((4, 6))
    columns = whole[:, ::2]
    columns[...] = rank + 1
    assert await pg.allreduce(columns) is columns
    assert (whole[:, ::2] == 3).all()
    assert (whole[:, 1::2] == 0).all()
    await pg.broadcast(whole.T, 1)
    outputs = [np.zeros((2, 8))[:, ::2] for _ in range(size)]
    result = await pg.allgather(outputs, np.full((4, 4), float(rank))[::2])
    assert all(given is got for given, got in zip(outputs, result, strict=True))
    assert [each.mean() for each in outputs] == [0, 1]
    gathered = np.zeros((3, size)).T
    await pg.allgather_into_tensor(gathered, np.full(3, rank + 5.0))
    assert gathered.tolist() == [[5, 5, 5], [6, 6, 6]]
    target = np.zeros(6)[::3]
    await pg.reduce_scatter_tensor(target, np.arange(8.0)[::2])
    assert target.tolist() == [[0, 4], [8, 12]][rank]
    exchanged = np.zeros((2, size)).T
    await pg.alltoall_base(exchanged, np.full((2, size), rank + 1.0).T)
    assert exchanged.tolist() == [[1, 1], [2, 2]]


@pytest.mark.ranks(2)
async def test_objects_with_the_buffer_protocol_are_accepted(pg: ProcessGroup) -> None:
    raw = bytearray([pg.rank() + 1] * 5)
    assert await pg.allreduce(raw) is raw
    assert raw == bytes([3] * 5)
    numbers = array.array("d", [pg.rank(), 1])
    assert await pg.allreduce(numbers) is numbers
    assert list(numbers) == [1, 2]
    view = memoryview(raw)[1:3]
    await pg.broadcast(view, 0)
    assert (await pg.allgather(None, b"\1\2"))[1].tolist() == [1, 2]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
async def test_narrow_floats_are_summed(pg: ProcessGroup, name: str) -> None:
    tensor = np.full((3, 5), 1.5 + pg.rank(), getattr(ml_dtypes, name))
    assert await pg.allreduce(tensor) is tensor
    assert (tensor.astype("float32") == 4).all()


@pytest.mark.ranks(5)
async def test_sum_of_many_small_narrow_floats_is_rounded_once(pg: ProcessGroup) -> None:
    """Check that 256 + 1 + 1 + 1 + 1 is 260: bfloat16 lacks 257, so rounding after each addition would give 256."""
    tensor = np.full(10, 256 if pg.rank() == 0 else 1, ml_dtypes.bfloat16)
    await pg.allreduce(tensor)
    assert (tensor.astype("float32") == 260).all()


@pytest.mark.ranks(2)
async def test_torch_tensors_are_used_without_a_copy(pg: ProcessGroup) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.ones(4, 3).to(dtype)
        before = tensor.data_ptr()
        assert await pg.allreduce(tensor) is tensor
        assert tensor.data_ptr() == before
        assert torch.equal(tensor, torch.full((4, 3), 1 if dtype is torch.bool else 2).to(dtype))
    strided = torch.zeros(4, 4)[:, ::2]
    strided += pg.rank()
    await pg.allreduce(strided)
    assert (strided == 1).all()


# -- numbers


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("values", "op", "expected"),
    [
        ((1.5, 2.0), ReduceOp.SUM, 3.5),
        ((3, 4), ReduceOp.PRODUCT, 12),
        ((-7, 0), ReduceOp.AVG, -3),
        ((True, False), ReduceOp.SUM, True),
        ((True, False), ReduceOp.PRODUCT, False),
        ((1 + 2j, 3j), ReduceOp.SUM, 1 + 5j),
        ((np.float32(1), np.float32(2)), ReduceOp.MAX, np.float32(2)),
        ((np.uint8(200), np.uint8(100)), ReduceOp.SUM, np.uint8(44)),
    ],
)
async def test_collectives_accept_and_return_python_numbers(
    pg: ProcessGroup, values: tuple[Any, Any], op: ReduceOp, expected: Any
) -> None:
    result = await pg.allreduce(values[pg.rank()], op)
    assert result == expected
    assert type(result) is type(expected)
    for root in range(2):
        reduced = await pg.reduce(values[pg.rank()], root, op)
        assert reduced == (expected if pg.rank() == root else values[pg.rank()])
        assert await pg.broadcast(values[pg.rank()], root) == values[root]
    if op.name != "AVG":
        assert await pg.scan(values[pg.rank()], op) == (expected if pg.rank() else values[0])


# -- refusals


def ones(count: int = 4) -> Any:
    return np.ones(count)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda pg: pg.allreduce("abc"), TypeError, "tensor must be .*, not str"),
        (lambda pg: pg.allreduce([1, 2]), TypeError, "tensor must be .*, not list"),
        (lambda pg: pg.allreduce(np.array(["a"])), TypeError, "op SUM is not defined on <U1, whose arrays can be sent"),
        (lambda pg: pg.allreduce(2**63), OverflowError, "does not fit in int64"),
        (lambda pg: pg.allreduce(b"read-only"), ValueError, "tensor is read-only"),
        (lambda pg: pg.allreduce(ones(), "SUM"), TypeError, "op must be a ReduceOp, such as ReduceOp.SUM, not str"),
        (lambda pg: pg.allreduce(ones(), None), TypeError, "op must be a ReduceOp, such as ReduceOp.SUM, not NoneType"),
        (lambda pg: pg.scan(ones(), "SUM"), TypeError, "op must be a ReduceOp, such as ReduceOp.SUM, not str"),
        (lambda pg: pg.allreduce(ones(), ReduceOp.BAND), TypeError, "op BAND is not defined on float64"),
        (lambda pg: pg.allreduce(ones(), timeout=-1), ValueError, "timeout=-1: must be >= 0 seconds"),
        (lambda pg: pg.allreduce(ones(), timeout="1"), TypeError, "timeout must be seconds"),
        (lambda pg: pg.allreduce(ones(), key=7), TypeError, "key must be a str or None, not int"),
        (lambda pg: pg.scan(ones(), ReduceOp.AVG), ValueError, "op=ReduceOp.AVG is not defined for scan"),
        (lambda pg: pg.exscan(ones(), ReduceOp.AVG), ValueError, "op=ReduceOp.AVG is not defined for exscan"),
        (lambda pg: pg.reduce(ones(), 2), ValueError, "root=2 is not a rank of group 'world:0': ranks are 0 to 1"),
        (lambda pg: pg.reduce(ones(), -1), ValueError, "root=-1 is not a rank"),
        (lambda pg: pg.broadcast(ones(), None), TypeError, r"root must be a rank \(int\), not NoneType"),
        (lambda pg: pg.broadcast(ones(), False), TypeError, r"root must be a rank \(int\), not bool"),
        (
            lambda pg: pg.allgather([ones()], ones()),
            ValueError,
            "outputs needs exactly one array per rank: 2, not 1",
        ),
        (lambda pg: pg.allgather([ones(3), ones()], ones()), ValueError, r"outputs\[0\] has 3 elements, tensor has 4"),
        (lambda pg: pg.allgather([ones(), ones().astype(int)], ones()), TypeError, r"outputs\[1\] has dtype int64"),
        (
            lambda pg: pg.allgather(iter([]), ones()),
            ValueError,
            "outputs needs exactly one array per rank.*list_iterator",
        ),
        (lambda pg: pg.allgather_into_tensor(ones(7), ones()), ValueError, "output has 7 elements, expected 8"),
        (lambda pg: pg.allgather_into_tensor(8, ones()), TypeError, "output must be .*, not int"),
        (
            lambda pg: pg.gather([ones()], ones(), 1),
            ValueError,
            r"outputs must be None or \[\] on rank 0: only the root",
        ),
        (
            lambda pg: pg.gather([ones()], ones(), 0),
            ValueError,
            "outputs needs exactly one array per rank: 2, not 1",
        ),
        (lambda pg: pg.scatter(ones(), None, 0), ValueError, "inputs needs exactly one array per rank: 2, not None"),
        (lambda pg: pg.scatter(ones(), [ones()] * 2, 1), ValueError, r"inputs must be None or \[\] on rank 0"),
        (lambda pg: pg.scatter(ones(3), [ones()] * 2, 0), ValueError, r"inputs\[0\] has 4 elements, output has 3"),
        (lambda pg: pg.reduce_scatter(ones(), None), ValueError, "inputs needs exactly one array per rank"),
        (lambda pg: pg.reduce_scatter(ones(3), [ones()] * 2), ValueError, r"inputs\[0\] has 4 elements, output has 3"),
        (lambda pg: pg.reduce_scatter_tensor(ones(), ones(9)), ValueError, "input has 9 elements, expected 8"),
        (
            lambda pg: pg.alltoall([ones()] * 2, None),
            ValueError,
            "inputs needs exactly one array per rank: 2, not None",
        ),
        (lambda pg: pg.alltoall([ones()], [ones()] * 2), ValueError, "outputs needs exactly one array per rank"),
        (
            lambda pg: pg.alltoall(None, [ones()] * 2),
            ValueError,
            "outputs needs exactly one array per rank: 2, not None",
        ),
        (
            lambda pg: pg.alltoall_base(ones(), ones().astype(int)),
            TypeError,
            "output has dtype float64, input has int64",
        ),
        (lambda pg: pg.alltoall_base(ones(5), ones()), ValueError, "output has 5 rows, not a multiple of 2 ranks"),
        (
            lambda pg: pg.alltoall_base(ones(), ones(), [1, 2]),
            ValueError,
            r"output_split_sizes=\[1, 2\] must be 2 non-neg",
        ),
        (lambda pg: pg.alltoall_base(ones(), ones(), None, [5, -1]), ValueError, r"input_split_sizes=\[5, -1\]"),
        (lambda pg: pg.alltoall_base(ones(), ones(), None, 4), TypeError, "input_split_sizes"),
    ],
)
async def test_call_with_wrong_arguments_takes_no_sequence_number(
    pg: ProcessGroup, call: Any, error: type[Exception], message: str
) -> None:
    if pg.rank() == 0:
        with pytest.raises(error, match=message):
            call(pg)
        assert pg.pending() == []
    work = pg.allreduce(np.ones(3))
    assert work.seq == 1
    assert (await work == 2).all()


@pytest.mark.ranks(2)
async def test_arguments_with_overlapping_memory_are_refused(pg: ProcessGroup) -> None:
    shared = np.zeros(8)
    with pytest.raises(ValueError, match=r"tensor shares memory with the output of rank [01]"):
        pg.allgather_into_tensor(shared, shared[4:] if pg.rank() == 0 else shared[:4])
    with pytest.raises(ValueError, match="output shares memory with input"):
        pg.alltoall_base(shared, shared)
    await pg.barrier()


# -- repeated calls with equal kind, dtype and shape, which find a cached plan


@pytest.mark.ranks(3)
@parametrize_transports(*LINKS)
async def test_second_call_with_the_same_shape_returns_a_separate_result(pg: ProcessGroup) -> None:
    rank, world = pg.rank(), pg.size()
    total = sum(range(1, world + 1))
    base = np.arange(24.0)
    layouts = {
        "plain": base[:6].reshape(2, 3),
        "with gaps": base.reshape(4, 6)[::2, ::2],
        "transposed": base[6:12].reshape(3, 2).T,
        "unaligned": np.zeros(49, np.uint8)[1:].view(np.float64).reshape(2, 3),
        "of a subclass": np.ma.array(base[:6].reshape(2, 3)).view(np.ndarray),
    }
    for _ in range(2):
        for name, tensor in layouts.items():
            assert tensor.shape == (2, 3), name
            tensor[...] = rank + 1
            assert await pg.allreduce(tensor) is tensor
            assert (tensor == total).all(), name
    for _ in range(2):
        last = ReduceOp.custom(lambda a, b, out: np.copyto(out, b), commutative=False, name="last")
        for op, expected in ((ReduceOp.SUM, total), (ReduceOp.MIN, 1), (last, world)):
            tensor = np.full((2, 3), rank + 1.0)
            assert await pg.allreduce(tensor, op) is tensor
            assert (tensor == expected).all()
        for dtype in ("float64", "int64", "longlong", "float32", np.dtype("f8", metadata={"unit": "m"})):
            for shape in ((), (1,), (1, 1)):
                number = np.full(shape, rank + 1, dtype)
                assert await pg.allreduce(number) is number
                assert number.shape == shape
                assert (number == total).all()
        for root in range(world):
            tensor = np.full(6, rank + 1.0)
            assert (await pg.reduce(tensor, root) == (total if rank == root else rank + 1)).all()
            assert (await pg.broadcast(tensor, root) == total).all()


@pytest.mark.ranks(2)
async def test_arguments_of_a_second_call_with_the_same_shape_are_checked(pg: ProcessGroup) -> None:
    tensor = np.ones(4)
    for _ in range(2):
        await pg.allreduce(tensor)
        await pg.broadcast(tensor, 1)
    frozen = np.ones(4)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="tensor is read-only"):
        pg.allreduce(frozen)
    with pytest.raises(TypeError, match=r"tensor is a masked array; pass tensor.filled\(...\)"):
        pg.allreduce(np.ma.array(tensor))
    with pytest.raises(TypeError, match="root must be a rank"):
        pg.broadcast(tensor, True)
    with pytest.raises(TypeError, match="root must be a rank"):
        pg.broadcast(tensor, 1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="op must be a ReduceOp"):
        pg.allreduce(tensor, "SUM")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="timeout"):
        pg.allreduce(tensor, timeout=-1)
    with pytest.raises(TypeError, match="key must be a str or None"):
        pg.allreduce(tensor, key=1)  # type: ignore[arg-type]
    # The refused calls have not taken a sequence number.
    assert pg.allreduce(tensor).seq == 5
    await pg.drain()
