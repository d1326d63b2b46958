"""Reductions of 16-bit floats, compared with float32 arithmetic for every bit pattern and memory alignment."""

from __future__ import annotations

import ctypes
import platform
import struct
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest

from aiocoll.elements import half_precision as halves
from aiocoll.elements.dtypes import DType, by_name
from aiocoll.elements.half_precision import half_fold
from aiocoll.elements.ops import ReduceOp, kernel

from ..each import each

BOTH = ["float16", "bfloat16"]
CODES = np.arange(1 << 16, dtype=np.uint16)
INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}
# Float16 edge cases: zeros, the smallest subnormals, numbers around 1, and the largest numbers.
FLOAT16 = [0.0, -0.0, 2**-24, -3 * 2**-24, 1023 * 2**-24, -(2**-14), 0.1, 1.0, -1.5, 1000.0, 65504.0, -65504.0]
SPECIAL = [np.inf, -np.inf, np.nan]
OPERANDS = {
    "float16": [*FLOAT16, *SPECIAL],
    "bfloat16": [*FLOAT16, *SPECIAL, 2**-133, -(2**-126), 2**-120, 3.38953139e38, -3.38953139e38],
}
CASES = [(name, operand) for name, operands in OPERANDS.items() for operand in operands]


def expand(name: str, codes: np.ndarray) -> np.ndarray:
    """Return the float32 values of float16 or bfloat16 bit patterns."""
    if name == "float16":
        return codes.view(np.float16).astype(np.float32)
    return (codes.astype(np.uint32) << 16).view(np.float32)


def round_to(name: str, values: np.ndarray) -> np.ndarray:
    """Return float32 values rounded to 16-bit patterns, by an algorithm independent of the library."""
    with np.errstate(all="ignore"):
        if name == "float16":
            return values.astype(np.float16).view(np.uint16)
        number = np.where(np.isfinite(values), values, 0).astype(np.float64)
        unit = np.ldexp(1.0, np.maximum(np.frexp(number)[1], -125) - 8)
        exact = np.where(np.isfinite(values), np.rint(number / unit) * unit, values)
        signed = np.copysign(exact, values).astype(np.float32)
    return (signed.view(np.uint32) >> 16).astype(np.uint16)


def as_stored(name: str, codes: np.ndarray) -> np.ndarray:
    return codes.view(np.float16) if name == "float16" else codes


def check_codes(name: str, got: np.ndarray, want: np.ndarray) -> None:
    """Check that 16-bit patterns equal the rounded float32 values; all NaNs count as equal."""
    codes, nan = got.view(np.uint16), np.isnan(want)
    assert np.isnan(expand(name, codes[nan])).all()
    assert np.array_equal(codes[~nan], round_to(name, want)[~nan])


def finite_codes(name: str) -> np.ndarray:
    return CODES[(CODES & INFINITY[name]) != INFINITY[name]]


def add(*terms: np.ndarray) -> np.ndarray:
    total = terms[0]
    with np.errstate(all="ignore"):
        for term in terms[1:]:
            total = total + term
    return total


@each("codes", ["all", "finite"])
@each(("name", "operand"), CASES)
def test_float16_sum_is_correct_for_every_bit_pattern(name: str, operand: float, codes: str) -> None:
    dtype = by_name(name)
    left = CODES if codes == "all" else finite_codes(name)
    right = np.full(len(left), round_to(name, np.array([operand], np.float32))[0], np.uint16)
    a, b, out = as_stored(name, left), as_stored(name, right), np.empty(len(left), dtype.storage)
    want = add(expand(name, left), expand(name, right))
    made = kernel(ReduceOp.SUM, dtype, 2)
    for first, second in ((a, b), (b, a)):
        made.combine(first, second, out)
        check_codes(name, out, want)
    made.fold([a, b, b], out)
    check_codes(name, out, add(want, expand(name, right)))
    for offset in range(17):  # short arrays use other code paths
        some = slice(offset, None, 17)
        few = out[some].copy()
        made.combine(a[some].copy(), b[some].copy(), few)
        check_codes(name, few, want[some])
        made.fold([a[some].copy(), b[some].copy(), b[some].copy()], few)
        check_codes(name, few, add(want, expand(name, right))[some])


@each(("name", "operand"), CASES)
def test_float16_product_is_correct_for_every_bit_pattern(name: str, operand: float) -> None:
    dtype = by_name(name)
    right = np.full(len(CODES), round_to(name, np.array([operand], np.float32))[0], np.uint16)
    a, b, out = as_stored(name, CODES), as_stored(name, right), np.empty(len(CODES), dtype.storage)
    made = kernel(ReduceOp.PRODUCT, dtype, 3)
    with np.errstate(all="ignore"):
        want = expand(name, CODES) * expand(name, right)
        made.combine(a, b, out)
        check_codes(name, out, want)
        made.combine(a[:500], b[:500], out[:500])
        check_codes(name, out, want)
        made.fold([a, b, b], out)
        check_codes(name, out, want * expand(name, right))


@each("operation", ["MIN", "MAX"])
@each(("name", "operand"), CASES)
def test_float16_minimum_and_maximum_are_correct_for_every_bit_pattern(
    name: str, operand: float, operation: str
) -> None:
    dtype = by_name(name)
    select = np.minimum if operation == "MIN" else np.maximum
    for left in (CODES, finite_codes(name)):
        right = np.full(len(left), round_to(name, np.array([operand], np.float32))[0], np.uint16)
        out = np.empty(len(left), dtype.storage)
        kernel(getattr(ReduceOp, operation), dtype, 2).combine(as_stored(name, left), as_stored(name, right), out)
        check_codes(name, out, select(expand(name, left), expand(name, right)))


@each("name", BOTH)
def test_float16_fold_of_one_input_keeps_every_bit_pattern(name: str) -> None:
    out = np.empty(len(CODES), by_name(name).storage)
    kernel(ReduceOp.SUM, by_name(name), 1).fold([as_stored(name, CODES)], out)
    check_codes(name, out, expand(name, CODES))


@each("world_size", [2, 3, 4, 5, 7, 8])
@each("name", BOTH)
def test_float16_sums_are_computed_in_rank_order(name: str, world_size: int) -> None:
    rng = np.random.default_rng(world_size)
    codes = rng.choice(finite_codes(name), (world_size, 200_001))
    # Clear exponent bits in the first half of the elements, whose sums then do not overflow. In the second half, they
    # do.
    codes[:, :100_000] &= 0xC7FF
    out = np.empty(codes.shape[1], by_name(name).storage)
    kernel(ReduceOp.SUM, by_name(name), world_size).fold([as_stored(name, row) for row in codes], out)
    check_codes(name, out, add(*(expand(name, row) for row in codes)))


@each("divisor", [1, 2, 3, 5, 7, 8, 1000, 4095, 4096, 4097])
@each("name", BOTH)
def test_float16_average_is_correct_for_every_bit_pattern(name: str, divisor: int) -> None:
    """Check that the float32 quotient is rounded once to 16 bits, even if it is subnormal."""
    left, right = finite_codes(name), finite_codes(name)[::-1].copy() & 0x83FF
    out = np.empty(len(left), by_name(name).storage)
    made = kernel(ReduceOp.AVG, by_name(name), divisor)
    made.fold([as_stored(name, left), as_stored(name, right)], out)
    check_codes(name, out, add(expand(name, left), expand(name, right)) / np.float32(divisor))
    made.fold([as_stored(name, left)], out)
    check_codes(name, out, expand(name, left) / np.float32(divisor))


@each("factor", [0.5, -3.0, 0.1, 2.0**-20, 1e30, 1e300, -np.inf, np.nan, "NaN with all bits"])
@each("name", BOTH)
def test_float16_premul_sum_is_correct_for_every_bit_pattern(name: str, factor: float | str) -> None:
    value = struct.unpack("<d", b"\xff" * 7 + b"\x7f")[0] if isinstance(factor, str) else factor
    prescale = kernel(ReduceOp.PREMUL_SUM(value), by_name(name), 2).prescale
    assert prescale is not None
    with np.errstate(all="ignore"):
        for codes in (CODES, finite_codes(name)):
            prescale(as_stored(name, codes), out := np.empty(len(codes), by_name(name).storage))
            check_codes(name, out, expand(name, codes) * np.float32(value))


def no_conversions(_: DType) -> None:
    """Return None as the conversion function, so that any conversion raises an error."""


@pytest.mark.parametrize("name", BOTH)
def test_finite_float16_values_are_reduced_without_conversion_to_float32(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(halves, "to_float32", no_conversions)
    fold = half_fold(np.add, by_name(name), "sum")
    left = finite_codes(name)
    right = left ^ 0x8000
    out = np.empty(len(left), by_name(name).storage)
    fold([as_stored(name, left), as_stored(name, right)], out)
    assert not out.view(np.uint16).any()  # x - x, which is +0


@each("value", SPECIAL)
@each("place", [0, 1, 70_000, 99_999])
@each("name", BOTH)
def test_float16_infinities_and_nans_among_numbers_are_kept(name: str, place: int, value: float) -> None:
    """Check special values that packed arithmetic could lose: infinities could cancel, NaNs could become numbers."""
    codes = np.full((3, 100_001), round_to(name, np.array([1.0], np.float32))[0], np.uint16)
    for row, special in ((1, value), (2, -value)):
        codes[row, place] = round_to(name, np.array([special], np.float32))[0]
    out = np.empty(codes.shape[1], by_name(name).storage)
    kernel(ReduceOp.SUM, by_name(name), 3).fold([as_stored(name, row) for row in codes[:2]], out)
    check_codes(name, out, add(expand(name, codes[0]), expand(name, codes[1])))
    kernel(ReduceOp.SUM, by_name(name), 3).fold([as_stored(name, row) for row in codes], out)
    assert np.isnan(expand(name, out.view(np.uint16)[place : place + 1])).all()
    assert (np.delete(expand(name, out.view(np.uint16)), place) == 3).all()


def test_float16_sums_of_at_least_65520_round_to_infinity() -> None:
    def sums(*terms: float) -> set[float]:
        out = np.empty(5000, np.float16)
        kernel(ReduceOp.SUM, by_name("float16"), 2).fold([np.full(5000, term, np.float16) for term in terms], out)
        return set(out.tolist())

    assert sums(65504, 15.9921875) == {65504.0}
    assert sums(65504, 16) == {np.inf}
    assert sums(-65504, -16) == {-np.inf}
    assert sums(65504, 65504, -65504) == {65504.0}  # float32 holds the intermediate sum
    assert sums(*[65504] * 9) == {np.inf}
    assert sums(40000, 40000) == {np.inf}  # each term is far below the limit
    assert sums(*[8192] * 8) == {np.inf}
    assert sums(*[8188] * 8) == {65504.0}


@each("count", [1, 5000, 70_001])
@each("name", BOTH)
def test_float16_folds_emit_no_overflow_warning(name: str, count: int) -> None:
    largest = np.full(count, INFINITY[name] - 1, np.uint16)
    out = np.empty(count, np.uint16)
    made = kernel(ReduceOp.SUM, by_name(name), 2)
    with np.errstate(all="raise"):
        made.fold([as_stored(name, largest)] * 2, as_stored(name, out))
        assert (out == INFINITY[name]).all()
        made.fold([as_stored(name, out), as_stored(name, out ^ 0x8000)], as_stored(name, out))
        assert set(np.geterr().values()) == {"raise"}
    assert np.isnan(expand(name, out)).all()


@each("count", [1, 2, 3, 4095, 4096, 4097, 65_535, 65_536, 65_537, 131_073])
@each("name", BOTH)
def test_float16_kernels_work_at_any_memory_alignment(name: str, count: int) -> None:
    """Check inputs and outputs whose address is aligned to 4 bytes, to 2 bytes, or not at all."""
    dtype = by_name(name)
    memory = np.zeros((4, 2 * count + 8), np.uint8)
    ones, twos = (round_to(name, np.array([value], np.float32))[0] for value in (1.0, 2.0))
    three = round_to(name, np.array([3.0], np.float32))[0]
    for starts in ((0, 0, 0), (2, 0, 0), (0, 2, 0), (0, 0, 2), (2, 2, 2), (1, 0, 2), (0, 3, 1)):
        memory[:] = 0xEE
        a, b, out = (
            row[start : start + 2 * count].view(np.uint16) for row, start in zip(memory[:3], starts, strict=True)
        )
        a[:], b[:] = ones, twos
        kernel(ReduceOp.SUM, dtype, 2).combine(as_stored(name, a), as_stored(name, b), as_stored(name, out))
        assert (out == three).all()
        assert (a == ones).all()
        assert (b == twos).all()
        assert (memory[2, : starts[2]] == 0xEE).all()
        assert (memory[2, starts[2] + 2 * count :] == 0xEE).all()


@each("name", BOTH)
def test_float16_kernels_share_no_scratch_memory_between_threads(name: str) -> None:
    dtype = by_name(name)
    made = kernel(ReduceOp.SUM, dtype, 2)

    def work(value: int) -> bool:
        codes = np.full(30_001, round_to(name, np.array([value], np.float32))[0], np.uint16)
        want = round_to(name, np.array([2 * value], np.float32))[0]
        out = np.empty(30_001, np.uint16)
        results = []
        for _ in range(30):
            made.fold([as_stored(name, codes)] * 2, as_stored(name, out))
            results.append((out == want).all())
        return all(results)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, [1, 2, 3, 4, 5, 6, 7, 8]))


@contextmanager
def subnormals_off() -> Iterator[None]:
    """Enable the processor's flush-to-zero modes in this thread, as some fast libraries do."""
    if platform.machine() != "x86_64" or not sys.platform.startswith("linux"):
        pytest.skip("sets x86's control register through glibc's fenv_t")
    libm = ctypes.CDLL(None)
    if not hasattr(libm, "fesetenv"):
        libm = ctypes.CDLL("libm.so.6")
    saved, changed = ctypes.create_string_buffer(32), ctypes.create_string_buffer(32)
    libm.fegetenv(saved)
    libm.fegetenv(changed)
    control = int.from_bytes(changed.raw[28:], "little") | 0x8040
    ctypes.memmove(ctypes.addressof(changed) + 28, control.to_bytes(4, "little"), 4)
    libm.fesetenv(changed)
    try:
        yield
    finally:
        libm.fesetenv(saved)


def test_float16_subnormals_survive_flush_to_zero() -> None:
    codes = np.arange(1, 0x401, dtype=np.uint16).repeat(8)
    out = np.empty(len(codes), np.float16)
    made = kernel(ReduceOp.SUM, by_name("float16"), 2)
    with subnormals_off():
        made.fold([codes.view(np.float16)] * 2, out)
    assert np.array_equal(out.view(np.uint16), round_to("float16", 2 * expand("float16", codes)))
