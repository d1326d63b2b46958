"""Reduction kernels of every op and dtype, compared with closed-form results."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from aiocoll.elements import kernels
from aiocoll.elements.dtypes import DType, array_dtype, by_name, from_float32, to_float32
from aiocoll.elements.ops import ReduceOp, kernel
from aiocoll.errors import BackendUnavailableError

from ..each import each

SIGNED = ["int8", "int16", "int32", "int64"]
UNSIGNED = ["uint8", "uint16", "uint32", "uint64"]
FLOATS = ["float32", "float64"]
HALF = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
COMPLEX = ["complex64", "complex128"]
# Element counts: none, one, odd, and more than one piece of a fold for most dtypes. A piece has 256 KiB, or 64 Ki
# elements of a narrow float.
COUNTS = [0, 1, 7, 70_001]
PAIRS = [
    (name, dtype)
    for name in ("SUM", "AVG", "PRODUCT", "MIN", "MAX")
    for dtype in (*SIGNED, *UNSIGNED, *FLOATS, *HALF, *COMPLEX)
    if not (name in ("MIN", "MAX") and dtype in COMPLEX)
]


def encode(dtype: DType, values: Sequence[object] | np.ndarray) -> np.ndarray:
    """Return `values` as the stored bits of `dtype`; each value must be exactly representable."""
    if dtype.kind != "half":
        return np.array(values, dtype=dtype.storage)
    out = np.empty(len(values), dtype.storage)
    from_float32(dtype)(np.array(values, dtype=np.float32), out)
    return out


def decode(dtype: DType, stored: np.ndarray) -> np.ndarray:
    if dtype.kind != "half":
        return stored
    out = np.empty(len(stored), np.float32)
    to_float32(dtype)(stored, out)
    return out


def inputs_of_ranks(dtype: DType, world_size: int, count: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Return the input of each rank r with elements r + 1 + (i % 2), and the pattern i % 2."""
    pattern = np.arange(count) % 2
    return [encode(dtype, pattern + rank + 1) for rank in range(world_size)], pattern


def closed_form(name: str, world_size: int, pattern: np.ndarray) -> np.ndarray:
    p = world_size
    zero, one = {
        "SUM": (p * (p + 1) // 2, p * (p + 3) // 2),
        "PREMUL_SUM": (p * (p + 1) // 2, p * (p + 3) // 2),
        "AVG": (p * (p + 1) // 2 // p, p * (p + 3) // 2 // p),
        "PRODUCT": (math.factorial(p), math.factorial(p + 1)),
        "MIN": (1, 2),
        "MAX": (p, p + 1),
    }[name]
    return np.where(pattern == 0, zero, one)


@each("count", COUNTS)
@each("world_size", [1, 2, 3])
@each(("name", "dtype_name"), PAIRS)
def test_fold_kernels_compute_the_closed_form_results(name: str, dtype_name: str, world_size: int, count: int) -> None:
    dtype = by_name(dtype_name)
    inputs, pattern = inputs_of_ranks(dtype, world_size, count)
    want = closed_form(name, world_size, pattern)
    if name == "AVG" and dtype.kind not in ("int", "uint"):
        want = pattern + (world_size + 1) / 2
    made = kernel(getattr(ReduceOp, name), dtype, world_size)
    for target in (-1, *range(world_size)):
        operands = [x.copy() for x in inputs]
        out = np.empty(count, dtype.storage) if target < 0 else operands[target]
        made.fold(operands, out)
        # The exact result is rounded once: float8_e5m2, with two mantissa bits, cannot represent 9.
        assert np.array_equal(out, encode(dtype, want))
        for rank, (operand, original) in enumerate(zip(operands, inputs, strict=True)):
            assert rank == target or np.array_equal(operand, original)


@each("count", COUNTS)
@each(("name", "dtype_name"), PAIRS)
def test_combine_kernels_write_their_result_to_a_new_array_or_to_either_operand(
    name: str, dtype_name: str, count: int
) -> None:
    dtype = by_name(dtype_name)
    (left, right), pattern = inputs_of_ranks(dtype, 2, count)
    want = closed_form("SUM" if name == "AVG" else name, 2, pattern)
    made = kernel(getattr(ReduceOp, name), dtype, 2)
    for target in range(3):
        a, b, out = left.copy(), right.copy(), np.empty(count, dtype.storage)
        out = (out, a, b)[target]
        made.combine(a, b, out)
        assert np.array_equal(decode(dtype, out), want)


@each(
    ("name", "ufunc"), [("SUM", np.add), ("PRODUCT", np.multiply), ("BXOR", np.bitwise_xor), ("BAND", np.bitwise_and)]
)
def test_combine_kernel_for_a_numpy_dtype_is_the_numpy_ufunc(name: str, ufunc: np.ufunc) -> None:
    assert kernel(getattr(ReduceOp, name), by_name("int32"), 2).combine is ufunc


@each("dtype_name", [*SIGNED, *UNSIGNED])
def test_bit_ops_compute_the_closed_form_results(dtype_name: str) -> None:
    dtype = by_name(dtype_name)
    inputs = [encode(dtype, [0b1100, 7, 0]), encode(dtype, [0b1010, 7, 1]), encode(dtype, [0b1001, 7, 2])]
    out = np.empty(3, dtype.storage)
    for name, want in {"BAND": [8, 7, 0], "BOR": [15, 7, 3], "BXOR": [15, 7, 3]}.items():
        kernel(getattr(ReduceOp, name), dtype, 3).fold(inputs, out)
        assert out.tolist() == want


@each(
    ("name", "want"),
    [
        ("SUM", [False, True, True, True]),
        ("MAX", [False, True, True, True]),
        ("BOR", [False, True, True, True]),
        ("PRODUCT", [False, False, False, True]),
        ("MIN", [False, False, False, True]),
        ("BAND", [False, False, False, True]),
        ("BXOR", [False, True, True, False]),
    ],
)
def test_reductions_of_bools_are_logical(name: str, want: list[bool]) -> None:
    out = np.empty(4, np.bool_)
    made = kernel(getattr(ReduceOp, name), by_name("bool"), 2)
    made.fold([np.array([False, False, True, True]), np.array([False, True, False, True])], out)
    assert out.tolist() == want


@each("dtype_name", [*SIGNED, *UNSIGNED])
def test_integer_reductions_wrap_around_without_a_warning(dtype_name: str) -> None:
    dtype = by_name(dtype_name)
    info = np.iinfo(dtype.storage)
    top, two = encode(dtype, [info.max]), encode(dtype, [2])
    out = np.empty(1, dtype.storage)
    kernel(ReduceOp.SUM, dtype, 2).combine(top, two, out)
    assert out[0] == info.min + 1
    kernel(ReduceOp.PRODUCT, dtype, 2).combine(top, two, out)
    assert int(out[0]) % (1 << dtype.itemsize * 8) == 2 * info.max % (1 << dtype.itemsize * 8)


@each("dtype_name", [*SIGNED, *UNSIGNED])
@each("world_size", [1, 2, 3, 7, 128, 255, 256, 300, 70_000])
def test_integer_average_truncates_toward_zero(dtype_name: str, world_size: int) -> None:
    dtype = by_name(dtype_name)
    info = np.iinfo(dtype.storage)
    sums = [info.min, info.min + 1, *range(max(-9, info.min), 10), info.max - 1, info.max]
    x = encode(dtype, sums)
    finalize = kernel(ReduceOp.AVG, dtype, world_size).finalize
    assert finalize is not None
    finalize(x)
    assert x.tolist() == [abs(s) // world_size * (1 if s >= 0 else -1) for s in sums]


@each("dtype_name", [*FLOATS, *COMPLEX, *HALF])
def test_float_average_is_divided_once_after_the_sum(dtype_name: str) -> None:
    dtype = by_name(dtype_name)
    x = encode(dtype, [3.0, -6.0, 0.75])
    finalize = kernel(ReduceOp.AVG, dtype, 3).finalize
    assert finalize is not None
    finalize(x)
    assert decode(dtype, x).tolist() == [1.0, -2.0, 0.25]


@each("world_size", [1, 2, 3, 7, 64, 1000])
@each("dtype_name", [*FLOATS, *COMPLEX])
def test_float_average_is_the_exactly_rounded_quotient(dtype_name: str, world_size: int) -> None:
    dtype = by_name(dtype_name)
    real = np.dtype(f"float{dtype.itemsize * 4}") if dtype.kind == "complex" else dtype.storage
    bits = np.random.default_rng(7).bytes(4096 * real.itemsize)
    sums = np.concatenate([np.frombuffer(bits, real), np.array([0, -0.0, np.inf, -np.inf, np.nan, 5e-324, 1], real)])
    sums = sums[: len(sums) // 2 * 2]
    with np.errstate(all="ignore"):
        want = sums / real.type(world_size)
        finalize = kernel(ReduceOp.AVG, dtype, world_size).finalize
        assert finalize is not None
        finalize(got := sums.copy().view(dtype.storage))
    number = ~np.isnan(want)
    assert np.isnan(got.view(real)[~number]).all()
    assert got.view(real)[number].tobytes() == want[number].tobytes()


@each("name", ["SUM", "PRODUCT", "MIN", "MAX", "PREMUL_SUM"])
def test_only_the_average_has_a_final_division(name: str) -> None:
    op = ReduceOp.PREMUL_SUM(2) if name == "PREMUL_SUM" else getattr(ReduceOp, name)
    made = kernel(op, by_name("float32"), 2)
    assert made.finalize is None
    assert (made.prescale is None) == (name != "PREMUL_SUM")


@each("count", COUNTS)
@each("dtype_name", [*FLOATS, *COMPLEX, *HALF])
def test_premul_sum_multiplies_before_the_sum(dtype_name: str, count: int) -> None:
    dtype = by_name(dtype_name)
    inputs, pattern = inputs_of_ranks(dtype, 2, count)
    for rank, factor in enumerate((0.5, np.float32(-2))):
        prescale = kernel(ReduceOp.PREMUL_SUM(factor), dtype, 2).prescale
        assert prescale is not None
        prescale(inputs[rank], inputs[rank])
    kernel(ReduceOp.PREMUL_SUM(1), dtype, 2).fold(inputs, inputs[0])
    assert np.array_equal(decode(dtype, inputs[0]), 0.5 * (pattern + 1) - 2 * (pattern + 2))


def test_premul_sum_accepts_a_complex_factor() -> None:
    prescale = kernel(ReduceOp.PREMUL_SUM(2j), by_name("complex64"), 2).prescale
    assert prescale is not None
    out = np.empty(2, np.complex64)
    prescale(np.array([1, 1j], np.complex64), out)
    assert out.tolist() == [2j, -2]


@each("name", ["MIN", "MAX"])
@each("dtype_name", [*FLOATS, *HALF])
def test_nan_propagates_through_min_and_max(name: str, dtype_name: str) -> None:
    dtype = by_name(dtype_name)
    numbers, nans = np.arange(33.0) / 2, np.full(33, np.nan)
    made = kernel(getattr(ReduceOp, name), dtype, 2)
    out = np.empty(33, dtype.storage)
    for a, b in ((numbers, nans), (nans, numbers), (-nans, numbers), (nans, nans)):
        made.combine(encode(dtype, a), encode(dtype, b), out)
        assert np.isnan(decode(dtype, out)).all()


@each("name", ["MIN", "MAX"])
@each("dtype_name", [*FLOATS, *HALF])
def test_comparison_of_signed_zeros_does_not_depend_on_the_position_in_the_array(name: str, dtype_name: str) -> None:
    """Check MIN and MAX of 0.0 and -0.0 at every position, since ranks may reduce an element at different positions."""
    dtype = by_name(dtype_name)
    made = kernel(getattr(ReduceOp, name), dtype, 2)
    seen = set()
    for count in range(1, 70):
        out = np.empty(count, dtype.storage)
        made.combine(encode(dtype, [0.0] * count), encode(dtype, [-0.0] * count), out)
        seen |= set(np.signbit(decode(dtype, out)).tolist())
    assert len(seen) == 1


@each(
    ("dtype_name", "big", "small", "want"),
    [
        # Adding the small value once is lost, because it is half a unit in the last place of the big value. Adding it
        # twice changes the sum.
        ("float16", 2048.0, 1.0, 2050.0),
        ("bfloat16", 256.0, 1.0, 258.0),
        ("float8_e4m3fn", 16.0, 1.0, 18.0),
        ("float8_e5m2", 8.0, 1.0, 10.0),
    ],
)
def test_float16_sum_is_rounded_once(dtype_name: str, big: float, small: float, want: float) -> None:
    dtype = by_name(dtype_name)
    made = kernel(ReduceOp.SUM, dtype, 3)
    inputs = [encode(dtype, [big]), encode(dtype, [small]), encode(dtype, [small])]
    out = np.empty(1, dtype.storage)
    made.fold(inputs, out)
    assert decode(dtype, out).tolist() == [want]
    made.combine(inputs[0], inputs[1], out)
    made.combine(out, inputs[2], out)
    assert decode(dtype, out).tolist() == [big]


def test_float16_average_does_not_overflow_before_the_division() -> None:
    dtype = by_name("float16")
    out = np.empty(20_000, np.float16)
    kernel(ReduceOp.AVG, dtype, 2).fold([np.full(20_000, 60000, np.float16)] * 2, out)
    assert (out == 60000).all()
    kernel(ReduceOp.SUM, dtype, 2).fold([np.full(20_000, 60000, np.float16)] * 2, out)
    assert np.isinf(out).all()


@each("dtype_name", ["float16", "bfloat16"])
def test_float16_sum_equals_the_float32_sum_in_rank_order(dtype_name: str) -> None:
    dtype = by_name(dtype_name)
    rng = np.random.default_rng(3)
    inputs = [encode(dtype, rng.standard_normal(70_001)) for _ in range(5)]
    total = decode(dtype, inputs[0])
    for x in inputs[1:]:
        total = total + decode(dtype, x)
    out = np.empty(70_001, dtype.storage)
    kernel(ReduceOp.SUM, dtype, 5).fold(inputs, out)
    assert np.array_equal(out, encode(dtype, total))


def subtract_from_twice(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    """Write 2a - b to `out`: a noncommutative op that fails if `out` is one of its inputs."""
    out[:] = a
    out += a
    out -= b


@pytest.mark.parametrize("dtype_name", ["int32", "float64", "complex64", "float16", "bfloat16"])
def test_custom_op_folds_in_rank_order_into_a_new_array_or_any_input(dtype_name: str) -> None:
    dtype = by_name(dtype_name)
    if dtype_name == "bfloat16":
        pytest.importorskip("ml_dtypes")
    made = kernel(ReduceOp.custom(subtract_from_twice, commutative=False), dtype, 4)
    for target in range(-1, 4):
        inputs = [encode(dtype, [5, 1]), encode(dtype, [3, 2]), encode(dtype, [1, 1]), encode(dtype, [4, 0])]
        out = np.empty(2, dtype.storage) if target < 0 else inputs[target]
        made.fold(inputs, out)
        assert decode(dtype, out).tolist() == [22, -2]
    for target in range(2):
        pair = [encode(dtype, [5, 1]), encode(dtype, [3, 2])]
        made.combine(*pair, pair[target])
        assert decode(dtype, pair[target]).tolist() == [7, 0]


@pytest.mark.parametrize("dtype_name", ["float32", "float16", "bool", "bfloat16", "float8_e5m2"])
def test_custom_op_receives_arrays_of_the_users_dtype(dtype_name: str) -> None:
    dtype = by_name(dtype_name)
    if dtype_name in ("bfloat16", "float8_e5m2"):
        pytest.importorskip("ml_dtypes")
    seen = set()

    def spy(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        seen.update({a.dtype, b.dtype, out.dtype})
        out[:] = b

    left, right, out = encode(dtype, [0, 0]), encode(dtype, [1, 1]), np.zeros(2, dtype.storage)
    kernel(ReduceOp.custom(spy), dtype, 2).combine(left, right, out)
    assert seen == {array_dtype(dtype)}
    assert np.array_equal(out, right)


def test_ufunc_can_be_a_custom_op() -> None:
    out = np.empty(1)
    kernel(ReduceOp.custom(np.hypot), by_name("float64"), 2).fold([np.array([3.0]), np.array([4.0])], out)
    assert out.tolist() == [5.0]


def test_custom_op_that_returns_its_result_is_refused() -> None:
    made = kernel(ReduceOp.custom(lambda a, b, out: a + b, name="plus"), by_name("float64"), 2)
    with pytest.raises(
        TypeError, match=r"op 'plus': f\(a, b, out\) must write its result to out and return None, not ndarray"
    ):
        made.combine(np.ones(1), np.ones(1), np.ones(1))


def test_custom_op_on_bfloat16_requires_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(dtype: DType) -> np.dtype:
        raise BackendUnavailableError(f"arrays of {dtype.name} need ml_dtypes: pip install ml_dtypes")

    monkeypatch.setattr(kernels, "array_dtype", refuse)
    with pytest.raises(TypeError, match=r"op 'f': a custom function on bfloat16 needs ml_dtypes: .*pip install"):
        kernel(ReduceOp.custom(subtract_from_twice, name="f"), by_name("bfloat16"), 2)


@each(("name", "dtype_name"), [pair for pair in PAIRS if pair[1] in (*FLOATS, *COMPLEX)])
def test_result_bits_of_portable_kernels_do_not_depend_on_the_position_in_the_array(name: str, dtype_name: str) -> None:
    dtype = by_name(dtype_name)
    made = kernel(getattr(ReduceOp, name), dtype, 3)
    if not made.portable:
        assert (name, dtype.kind) == ("PRODUCT", "complex")
        return
    rng = np.random.default_rng(5)
    inputs = [rng.standard_normal(200).astype(dtype.storage.char.lower()).view(dtype.storage)[:100] for _ in range(3)]
    whole = np.empty(100, dtype.storage)
    made.fold(inputs, whole)
    for start in range(0, 100, 9):
        part = np.empty(min(9, 100 - start), dtype.storage)
        made.fold([x[start : start + 9] for x in inputs], part)
        assert part.tobytes() == whole[start : start + 9].tobytes()
