"""Wording of errors: a public exception class, the name of the called method, and a remedy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from aiocoll import GroupOptions, ProcessGroup, ReduceOp, SerializationError, errors, new_group, testing
from aiocoll.elements.buffers import view

scipy_sparse = pytest.importorskip("scipy.sparse")


class Frame:
    """A stand-in for a Series or DataFrame of pandas or polars, which has `to_numpy`."""

    def to_numpy(self) -> np.ndarray:
        return np.ones(2)


WRONG: dict[str, Callable[[ProcessGroup], Any]] = {
    "no array": lambda pg: pg.allreduce("text"),
    "sparse where dense": lambda pg: pg.scan(scipy_sparse.eye(3).tocoo()),
    "sparse with an op": lambda pg: pg.allreduce(scipy_sparse.eye(3).tocsr(), ReduceOp.MAX),
    "too few outputs": lambda pg: pg.allgather([np.ones(2)] * (pg.size() + 1), np.ones(2)),
    "too few inputs": lambda pg: pg.reduce_scatter(np.ones(2), []),
    "too few objects": lambda pg: pg.scatter_object([], pg.rank()),
    "read-only": lambda pg: pg.allreduce(np.broadcast_to(1.0, 3)),
    "no rank": lambda pg: pg.broadcast(np.ones(2), 99),
    "an object": lambda pg: pg.allgather_object(object()),
    "a missing argument": lambda pg: pg.broadcast(np.ones(2)),  # type: ignore[call-arg]
}


@pytest.mark.parametrize("debug", ["off", "detail"])
@pytest.mark.parametrize("what", WRONG)
async def test_errors_raised_by_calls_have_public_exception_classes(what: str, debug: Any) -> None:
    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(Exception) as raised:  # noqa: PT011 - the class is checked below
            await WRONG[what](pg)
        seen: BaseException | None = raised.value
        while seen is not None:
            assert type(seen).__module__ in ("builtins", errors.__name__)
            seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)

    await testing.run_ranks(2, rank, options=GroupOptions(debug=debug))


def test_qualified_names_of_process_group_methods_are_their_public_names() -> None:
    public = {name for name in dir(ProcessGroup) if not name.startswith("_")}
    functions = {name: call for name in public if inspect.isfunction(call := getattr(ProcessGroup, name))}
    assert {"allreduce", "send", "empty", "shrink", "coalescing", "split_group"} <= functions.keys()
    assert {call.__qualname__ for call in functions.values()} == {f"ProcessGroup.{n}" for n in functions} - {
        "ProcessGroup.aclose"  # `aclose` is an alias of `shutdown`
    }


@pytest.mark.ranks(1)
async def test_missing_argument_error_names_the_called_method(pg: ProcessGroup) -> None:
    with pytest.raises(TypeError, match=r"^ProcessGroup\.empty\(\) missing 1 required positional argument: 'dtype'"):
        await pg.empty(3)  # type: ignore[call-arg]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.PRODUCT, ReduceOp.LAND], ids=["MIN", "PRODUCT", "LAND"])
async def test_error_for_an_unsupported_op_on_sparse_arrays_names_the_supported_ops(
    pg: ProcessGroup, op: ReduceOp
) -> None:
    refused = r"is not defined on sparse arrays, since .*: use SUM or AVG, or make the arrays dense$"
    with pytest.raises(ValueError, match=refused):
        pg.allreduce(scipy_sparse.eye(3).tocoo(), op)


@pytest.mark.ranks(2)
async def test_error_for_an_object_above_the_size_limit_names_the_limit(pg: ProcessGroup) -> None:
    with pytest.raises(
        SerializationError, match="max_bytes is 16777216; send large arrays by the collectives on arrays"
    ):
        pg.broadcast_object({"weights": np.zeros(1 << 22)}, pg.rank())


@pytest.mark.parametrize("variable", ["RANK", "WORLD_SIZE"])
async def test_error_for_a_missing_rank_or_world_size_names_argument_and_variable(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "localhost"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(variable)
    missing = rf"{variable.lower()} is missing: give {variable.lower()}= with init_method='env://', or set {variable}"
    with pytest.raises(ValueError, match=rf"{missing} in the environment; start the ranks with `aiocoll run`"):
        await new_group()


def test_error_for_a_data_frame_names_its_conversion_to_an_array() -> None:
    with pytest.raises(TypeError, match=r"not Frame; pass x\.to_numpy\(\)$"):
        view(Frame(), name="x")


@pytest.mark.parametrize("library", ["pandas", "polars"])
@pytest.mark.parametrize("kind", ["Series", "DataFrame"])
def test_data_frames_of_pandas_and_polars_are_refused_with_a_conversion_hint(library: str, kind: str) -> None:
    frame = getattr(pytest.importorskip(library), kind)({"a": [1.0, 2.0]} if kind == "DataFrame" else [1.0, 2.0])
    with pytest.raises(TypeError, match=re.escape(f"not {kind}; pass x.to_numpy()") + "$"):
        view(frame, name="x")
