"""Benchmark workloads: the arrays of a collective, and their expected contents after the call.

Sizes are defined as in nccl-tests: bytes of the array of a rank (allreduce, broadcast, reduce, scan), or of all blocks
together (allgather, reduce_scatter, alltoall, gather, scatter). Elements are small whole numbers that repeat with a
prime period. So every sum is exact, and a block at the wrong place is detected.

This module needs only NumPy, because the benchmarks of other libraries use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from aiocoll.algorithms.spec import Part, spec_of

__all__ = ["DTYPES", "KINDS", "OPS", "Array", "Case", "Workload", "bus_factor"]

Array = npt.NDArray[Any]

KINDS = (
    "allreduce",
    "broadcast",
    "reduce",
    "allgather",
    "reduce_scatter",
    "alltoall",
    "gather",
    "scatter",
    "scan",
    "barrier",
)
OPS = ("sum", "avg", "min", "max", "product")
DTYPES = ("float32", "float64", "float16", "int8", "uint8", "int16", "int32", "int64")

#: Period of the array patterns: a prime, so that blocks do not begin at the same element, and small enough for int8.
PERIOD = 113
#: Shift between the patterns of two blocks, in elements.
SHIFT = 7
#: Number of elements to compare at once, so that they stay in cache and the result takes little memory.
CHUNK = PERIOD * 4096
#: The root of collectives that have one.
ROOT = 0
#: Maximum number of calls between two checks of the arrays, so that errors are found soon.
ROUNDS = 48


def bus_factor(kind: str, world_size: int) -> float:
    """Return the ratio of bus bandwidth to algorithm bandwidth of a collective, as nccl-tests defines it."""
    if kind == "allreduce":
        return 2 * (world_size - 1) / world_size
    return (world_size - 1) / world_size if spec_of(kind).in_blocks else 1.0


class Case(NamedTuple):
    """A benchmark case: a collective, its size in bytes, element type and reduction."""

    kind: str
    nbytes: int
    dtype: str = "float32"
    op: str = "sum"

    def count(self, world_size: int) -> int:
        """Return the number of elements of the array, or of all blocks together; at least 1 per array or block."""
        spec = spec_of(self.kind)
        if spec.input is None:
            return 0
        count = self.nbytes // np.dtype(self.dtype).itemsize
        return max(1, count // world_size) * world_size if spec.in_blocks else max(1, count)

    def size(self, world_size: int) -> int:
        """Return the number of bytes of the array, or of all blocks together."""
        return self.count(world_size) * np.dtype(self.dtype).itemsize


@dataclass(slots=True)
class _Block:
    """A block of an array, with its patterns before and after a call. None means that the content does not matter."""

    array: Array
    before: Array | None
    after: Array | None


class Workload:
    """The arrays of one rank for the calls of one benchmark case.

    Args:
        case: the collective, its size, element type and reduction.
        rank: this rank.
        world_size: number of ranks.

    Attributes:
        inplace: the array of a call that works in place, else None.
        inputs: the blocks that a rank contributes, one after another in one array; None if it contributes none.
        outputs: the blocks that a rank receives, one after another in one array; None if it receives none.
    """

    def __init__(self, case: Case, rank: int, world_size: int) -> None:
        self.case = case
        self.rank = rank
        self.world_size = world_size
        self.inplace: Array | None = None
        self.inputs: Array | None = None
        self.outputs: Array | None = None
        self._blocks: list[_Block] = []
        self._dtype = np.dtype(case.dtype)
        self._spec = spec_of(case.kind)
        count = case.count(world_size)
        if self._spec.in_blocks:
            self._make_block_arrays(count // world_size)
        elif self._spec.input is not None:
            self._make_array_in_place(count)

    @property
    def rounds(self) -> int:
        """Return the number of consecutive calls, at least 2, after which the arrays must be filled again."""
        return min(ROUNDS, self._max_exact_calls) if self._sums_ones_in_place else ROUNDS

    @property
    def _max_exact_calls(self) -> int:
        """Return how often arrays of ones can be summed in place before the sums are no longer exact."""
        info = np.finfo(self._dtype)
        # A sum that is a power of two is exact up to the largest exponent, other sums as long as they fit the mantissa.
        bits = info.maxexp - 1 if self.world_size & (self.world_size - 1) == 0 else info.nmant + 1
        return int(bits / np.log2(self.world_size))

    @property
    def _sums_ones_in_place(self) -> bool:
        """Return whether repeated calls sum arrays of ones in place. Other cases use zeros, or separate outputs."""
        case = self.case
        summed = case.kind == "allreduce" and case.op == "sum" and self._dtype.kind == "f"
        return summed and self.world_size > 1 and self._max_exact_calls > 1

    def fill_patterns(self) -> None:
        """Fill the arrays with the patterns for a call whose result is checked."""
        for block in self._blocks:
            _fill(block.array, block.before)

    def count_wrong(self) -> int:
        """Count the elements that differ from the expected result of one call after `fill_patterns`."""
        return sum(_wrong(block.array, block.after) for block in self._blocks if block.after is not None)

    def fill_repeatable(self) -> None:
        """Fill the arrays with values whose results stay exact when the call is repeated in place."""
        self.fill_patterns()
        if self.inplace is not None and self._spec.reduces:
            self.inplace.fill(1 if self._sums_ones_in_place else 0)

    def count_wrong_after(self, rounds: int) -> int:
        """Count the elements that differ from the expected result of `rounds` calls after `fill_repeatable`."""
        if self.inplace is None or not self._spec.reduces:
            return self.count_wrong()
        expected = float(self.world_size) ** rounds if self._sums_ones_in_place else 0
        return _wrong(self.inplace, np.full(1, expected, self._dtype))

    def _make_array_in_place(self, count: int) -> None:
        rank, p = self.rank, self.world_size
        self.inplace = np.empty(count, self._dtype)
        before, after = None, None if self._spec.reduces else self._row(ROOT)
        if self._spec.inputs(rank, p, ROOT):
            before = self._row(rank)
        if self._spec.reduces and self._spec.outputs(rank, p, ROOT):
            after = self._reduced_pattern(range(rank + 1 if self.case.kind == "scan" else p))
        self._blocks.append(_Block(self.inplace, before, after))

    def _make_block_arrays(self, count: int) -> None:
        r, p, spec = self.rank, self.world_size, self._spec
        # The blocks of rank r have the patterns r*p to r*p + p-1. If rank r has a single block, its pattern is r.
        inputs = [r if spec.input is Part.BLOCK else r * p + j for j in range(len(spec.inputs(r, p, ROOT)))]
        if inputs:
            self.inputs = np.empty(count * len(inputs), self._dtype)
            rows = [self._row(number) for number in inputs]
            self._blocks += [_Block(*each) for each in zip(_split_array(self.inputs, count), rows, rows, strict=True)]
        outputs = [j if spec.input is Part.BLOCK else j * p + r for j in range(len(spec.outputs(r, p, ROOT)))]
        if outputs:
            self.outputs = np.empty(count * len(outputs), self._dtype)
            rows = [
                self._reduced_pattern(range(r, p * p, p)) if spec.reduces else self._row(number) for number in outputs
            ]
            self._blocks += [
                _Block(each, None, row) for each, row in zip(_split_array(self.outputs, count), rows, strict=True)
            ]

    def _row(self, number: int) -> Array:
        return self._numbers(number).astype(self._dtype)

    def _numbers(self, number: int) -> npt.NDArray[np.int64]:
        """Return one period of a pattern. For products it has only 1 and 2, so products of many ranks stay exact."""
        row = (np.arange(PERIOD) + SHIFT * number) % PERIOD
        return 1 + row % 2 if self.case.op == "product" and self._spec.reduces else row

    def _reduced_pattern(self, numbers: range) -> Array:
        """Return one period of the expected reduction of patterns; integers overflow as they do on the ranks."""
        rows = np.array([self._numbers(number) for number in numbers])
        is_float = self._dtype.kind == "f"
        if self.case.op == "avg":
            total = rows.sum(0).astype(np.float64 if is_float else self._dtype)
            mean: npt.NDArray[np.float64] = total / len(numbers)
            return mean.astype(self._dtype)  # truncate integers, as the ranks do
        ufuncs: dict[str, np.ufunc] = {"sum": np.add, "min": np.minimum, "max": np.maximum, "product": np.multiply}
        reduced: npt.NDArray[np.int64] = ufuncs[self.case.op].reduce(rows)
        return reduced.astype(self._dtype)


def _split_array(array: Array, count: int) -> list[Array]:
    return [array[start : start + count] for start in range(0, array.size, count)]


def _fill(array: Array, row: Array | None) -> None:
    """Repeat `row` in `array`. Without a row, fill it with zeros, so that no old data passes for a result."""
    if row is None:
        array.fill(0)
        return
    periods = array.size // row.size
    array[: periods * row.size].reshape(periods, row.size)[:] = row
    array[periods * row.size :] = row[: array.size - periods * row.size]


def _wrong(array: Array, row: Array) -> int:
    """Count the elements of `array` that differ from the repeated `row`."""
    wrong = 0
    for start in range(0, array.size, CHUNK):
        part = array[start : start + CHUNK]
        periods = part.size // row.size
        wrong += int(np.count_nonzero(part[: periods * row.size].reshape(periods, row.size) != row))
        wrong += int(np.count_nonzero(part[periods * row.size :] != row[: part.size - periods * row.size]))
    return wrong
