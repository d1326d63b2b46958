"""Every collective algorithm in the engine: results, equal rounding on all ranks, NaNs and operand order."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiocoll import ProcessGroup, ReduceOp
from aiocoll.algorithms.select import ALGORITHMS

from ..internals import replace_parts
from ..ranks import run_ranks
from .test_collectives import ROOTED, Call, check

#: Algorithms that fold all inputs in rank order, and so support noncommutative ops.
ORDERED = ("oneround", "bruck", "pairwise", "linear", "fold")


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["memory", "unix"])
@pytest.mark.parametrize(("kind", "algorithm"), ALGORITHMS, ids=lambda value: value)
async def test_forced_algorithm_is_used_and_computes_the_closed_form_results(
    kind: str, algorithm: str, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world_size = 2 if algorithm == "exchange" else 5
    requested_kinds = []

    def choose(of_kind: str, *_: Any, **__: Any) -> str:
        requested_kinds.append(of_kind)
        return algorithm

    replace_parts(monkeypatch, choose_algorithm=choose)
    if kind in ("barrier", "monitored_barrier"):
        await run_ranks(world_size, lambda pg: getattr(pg, kind)(), transport=transport)
    else:
        # PREMUL_SUM always uses links, unlike SUM, and it adds SCALE actions to the schedule.
        op, dtype = ("affine", "int64") if algorithm in ORDERED else ("PREMUL_SUM", "float32")
        roots = range(world_size) if kind in ROOTED else (0, 0)
        case = {"kind": kind, "op": op, "dtype": dtype, "world_size": world_size}
        cases = [{**case, "root": root, "count": count} for root in roots for count in ("1", "p+1", "1000")]
        cases += [{**case, "root": roots[-1], "count": "1000000"}]
        await run_ranks(world_size, check, cases, transport=transport)
    assert set(requested_kinds) == {kind}


@pytest.mark.parametrize("transport", ["memory", "unix"])
@pytest.mark.parametrize("op", ["SUM", "AVG", "PRODUCT", "MIN", "PREMUL_SUM"])
@pytest.mark.parametrize("dtype", ["float32", "complex64", "float16"])
async def test_rounded_results_of_flat_algorithms_have_the_same_bits_on_all_ranks(
    dtype: str, op: str, transport: str
) -> None:
    """Reduce random values, whose rounding would differ if ranks reduced them in different orders."""
    if dtype == "complex64" and op == "MIN":
        pytest.skip("MIN is not defined on complex numbers")

    async def rank(pg: ProcessGroup) -> list[bytes]:
        random = np.random.default_rng(pg.rank())
        chosen = ReduceOp.PREMUL_SUM(0.1 + pg.rank()) if op == "PREMUL_SUM" else getattr(ReduceOp, op)
        results = []
        for count in (1, 7, 100, 5_000, 300_000):
            tensor = random.standard_normal(count) + (1j * random.standard_normal(count) if dtype[0] == "c" else 0)
            tensor = tensor.astype(dtype)
            # Offset each rank's array differently, so that the arrays have different alignments.
            moved = np.empty(count + 8, dtype)[pg.rank() : count + pg.rank()]
            moved[:] = tensor
            results.append((await pg.allreduce(moved, chosen)).tobytes())
        return results

    first, *others = await run_ranks(5, rank, transport=transport)
    assert all(each == first for each in others)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX], ids=repr)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
async def test_nan_of_any_rank_appears_in_the_result(pg: ProcessGroup, dtype: str, op: ReduceOp) -> None:
    tensor = np.zeros(pg.size() + 1, dtype)
    tensor[pg.rank()] = np.nan
    await pg.allreduce(tensor, op)
    assert np.isnan(tensor[:-1]).all()
    assert tensor[-1] == 0


@pytest.mark.ranks(3)
@pytest.mark.parametrize("values", [[7, -7, 8, -8, 1, -1, 0]], ids=["mixed"])
async def test_integer_averages_truncate_toward_zero(pg: ProcessGroup, values: list[int]) -> None:
    tensor = np.array(values) if pg.rank() == 0 else np.zeros(len(values), int)
    await pg.allreduce(tensor, ReduceOp.AVG)
    assert tensor.tolist() == [2, -2, 2, -2, 0, 0, 0]


@pytest.mark.parametrize("transport", ["memory", "unix"])
@pytest.mark.parametrize("kind", ["allreduce", "reduce", "reduce_scatter", "scan", "exscan"])
async def test_noncommutative_op_receives_operands_in_rank_order(kind: str, transport: str) -> None:
    """Reduce bit sets of ranks with an op that checks that its left operand has only lower ranks."""
    wrong: list[tuple[Any, Any]] = []

    def join(a: Any, b: Any, out: Any) -> None:
        for left, right in zip(a.tolist(), b.tolist(), strict=True):
            if left.bit_length() > (right & -right).bit_length() - 1:
                wrong.append((left, right))
        np.bitwise_or(a, b, out)

    op = ReduceOp.custom(join, commutative=False)

    async def rank(pg: ProcessGroup) -> None:
        rank, size = pg.rank(), pg.size()
        for count in (1, size + 1, 3000):
            tensor = np.full(count, 1 << rank)
            expected = {"scan": (2 << rank) - 1, "exscan": (1 << rank) - 1 or 1}.get(kind, (1 << size) - 1)
            if kind == "reduce":
                await pg.reduce(tensor, 1, op)
                expected = expected if rank == 1 else 1 << rank
            elif kind == "reduce_scatter":
                inputs = [tensor.copy() for _ in range(size)]
                await pg.reduce_scatter(tensor, inputs, op)
            else:
                await getattr(pg, kind)(tensor, op)
            assert np.all(tensor == expected)

    await run_ranks(4, rank, transport=transport)
    assert not wrong


async def test_custom_op_receives_arrays_of_the_tensors_dtype() -> None:
    seen = set()

    def add(a: Any, b: Any, out: Any) -> None:
        seen.update(each.dtype.name for each in (a, b, out))
        np.add(a, b, out)

    async def rank(pg: ProcessGroup) -> None:
        dtype = pytest.importorskip("ml_dtypes").bfloat16
        tensor = np.ones(10, dtype)
        assert (await pg.allreduce(tensor, ReduceOp.custom(add)) == 2).all()

    await run_ranks(2, rank)
    assert seen == {"bfloat16"}


def test_result_check_of_the_tests_finds_a_wrong_element() -> None:
    """Check the comparison function `equal`, on which all tests of results rely."""
    call = Call({"kind": "allreduce", "dtype": "float16", "op": "SUM", "root": 0, "world_size": 3, "count": "1000"}, 0)
    from ..reductions import equal

    right = call.expected()[0]
    wrong = right.copy()
    wrong[999] += 1
    assert equal(right, right.copy())
    assert not equal(right, wrong)
    assert not equal(right, right.astype("float32"))
