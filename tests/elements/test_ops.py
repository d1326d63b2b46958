"""Reduction ops (`ReduceOp`): constants, custom ops, and the dtypes that each op accepts."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from aiocoll.elements.dtypes import by_name
from aiocoll.elements.ops import Kernel, ReduceOp, kernel

from ..each import each

BUILTIN = ["SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR"]
INTEGERS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
INTEGERS += ["int4", "uint4", "int2", "uint2"]
FLOATS = [
    "float32",
    "float64",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
]
COMPLEX = ["complex64", "complex128"]

ALLOWED = {
    "SUM": ["bool", *INTEGERS, *FLOATS, *COMPLEX],
    "PRODUCT": ["bool", *INTEGERS, *FLOATS, *COMPLEX],
    "AVG": [*INTEGERS, *FLOATS, *COMPLEX],
    "MIN": ["bool", *INTEGERS, *FLOATS],
    "MAX": ["bool", *INTEGERS, *FLOATS],
    "BAND": ["bool", *INTEGERS],
    "BOR": ["bool", *INTEGERS],
    "BXOR": ["bool", *INTEGERS],
    "LAND": ["bool", *INTEGERS, *FLOATS],
    "LOR": ["bool", *INTEGERS, *FLOATS],
    "LXOR": ["bool", *INTEGERS, *FLOATS],
    "PREMUL_SUM": [*FLOATS, *COMPLEX],
}


def op_named(name: str) -> ReduceOp:
    return ReduceOp.PREMUL_SUM(2) if name == "PREMUL_SUM" else getattr(ReduceOp, name)


def take_left(a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
    out[:] = a


@each("name", BUILTIN)
def test_reduce_op_constants_are_distinct_and_picklable(name: str) -> None:
    op = getattr(ReduceOp, name)
    assert op.name == op.wire_name == name
    assert repr(op) == f"ReduceOp.{name}"
    assert pickle.loads(pickle.dumps(op)) == op
    assert {op: 1}[getattr(ReduceOp, name)] == 1
    assert [other for other in BUILTIN if getattr(ReduceOp, other) == op] == [name]


@each(
    ("factor", "kept"),
    [
        (2, 2.0),
        (0.5, 0.5),
        (1 + 2j, 1 + 2j),
        (np.float32(0.25), 0.25),
        (np.array(3), 3.0),
        (np.array([[1.5]]), 1.5),
    ],
)
def test_premul_sum_stores_its_factor(factor: object, kept: complex) -> None:
    op = ReduceOp.PREMUL_SUM(factor)
    assert op.factor == kept
    assert op.wire_name == "PREMUL_SUM"
    assert repr(op) == f"ReduceOp.PREMUL_SUM({kept})"


@each("factor", ["2", None, [2.0], True, np.array("x"), np.True_])
def test_premul_sum_refuses_a_factor_that_is_not_a_number(factor: object) -> None:
    with pytest.raises(TypeError, match="factor must be a real or complex number, not"):
        ReduceOp.PREMUL_SUM(factor)


def test_premul_sum_refuses_an_array_of_factors() -> None:
    with pytest.raises(ValueError, match="factor must be a number or an array of one element"):
        ReduceOp.PREMUL_SUM(np.ones(2))


def test_custom_op_is_named_after_its_function() -> None:
    op = ReduceOp.custom(take_left, commutative=False)
    assert (op.name, op.wire_name, op.commutative) == ("take_left", "custom:take_left in rank order", False)
    assert repr(op) == "ReduceOp.custom(take_left)"
    assert ReduceOp.custom(take_left, name="left").wire_name == "custom:left"
    assert op == ReduceOp.custom(take_left, commutative=False)
    assert op != ReduceOp.custom(take_left)


def test_custom_op_with_the_name_sum_differs_from_reduce_op_sum() -> None:
    op = ReduceOp.custom(take_left, name="SUM")
    assert op != ReduceOp.SUM
    assert op.wire_name != ReduceOp.SUM.wire_name
    assert kernel(op, by_name("float32"), 2).combine is not np.add


def test_custom_op_that_is_not_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match=r"f must be a function f\(a, b, out\), not int"):
        ReduceOp.custom(3)


@each("name", list(ALLOWED))
@each("dtype", ["bool", *INTEGERS, *FLOATS, *COMPLEX])
def test_each_reduce_op_accepts_exactly_the_documented_dtypes(name: str, dtype: str) -> None:
    if dtype in ALLOWED[name]:
        assert isinstance(kernel(op_named(name), by_name(dtype), 3), Kernel)
    else:
        with pytest.raises(TypeError, match=f"op {name} is not defined on {dtype}; it accepts "):
            kernel(op_named(name), by_name(dtype), 3)


def test_error_for_an_unsupported_dtype_lists_the_accepted_dtypes_of_the_op() -> None:
    with pytest.raises(
        TypeError, match="op BAND is not defined on float16; it accepts bool, signed integers, unsigned"
    ):
        kernel(ReduceOp.BAND, by_name("float16"), 2)


@each("dtype", ["float64", "bfloat16"])
def test_premul_sum_with_a_complex_factor_on_a_real_array_is_refused(dtype: str) -> None:
    with pytest.raises(TypeError, match=rf"op PREMUL_SUM: the factor 2j is complex, but the array is {dtype}"):
        kernel(ReduceOp.PREMUL_SUM(2j), by_name(dtype), 2)
    assert kernel(ReduceOp.PREMUL_SUM(2 + 0j), by_name(dtype), 2).prescale is not None


def test_op_that_is_not_a_reduce_op_is_refused() -> None:
    with pytest.raises(TypeError, match=r"op must be a ReduceOp, such as ReduceOp.SUM, not str"):
        kernel("SUM", by_name("float32"), 2)


def test_kernels_of_builtin_ops_are_cached() -> None:
    dtype = by_name("int32")
    assert kernel(ReduceOp.AVG, dtype, 4) is kernel(ReduceOp.AVG, dtype, 4)
    assert kernel(ReduceOp.AVG, dtype, 4) is not kernel(ReduceOp.AVG, dtype, 5)
    op = ReduceOp.custom(take_left)
    assert kernel(op, dtype, 4) is not kernel(op, dtype, 4)


@each(
    ("name", "dtype", "ordered", "portable"),
    [
        ("SUM", "float32", False, True),
        ("MAX", "float64", False, True),
        ("SUM", "complex64", False, True),
        ("PRODUCT", "complex128", False, False),
        ("SUM", "float16", True, True),
        ("AVG", "bfloat16", True, True),
        ("PRODUCT", "float8_e5m2", True, True),
        ("PREMUL_SUM", "float16", True, True),
        ("MIN", "bfloat16", False, True),
        ("LXOR", "float16", False, True),
    ],
)
def test_kernel_properties_ordered_and_portable_match_the_documentation(
    name: str, dtype: str, ordered: bool, portable: bool
) -> None:
    made = kernel(op_named(name), by_name(dtype), 2)
    assert (made.ordered, made.portable) == (ordered, portable)


@each("commutative", [True, False])
def test_custom_op_is_ordered_unless_commutative(commutative: bool) -> None:
    made = kernel(ReduceOp.custom(take_left, commutative=commutative), by_name("float32"), 2)
    assert (made.ordered, made.portable) == (not commutative, False)
