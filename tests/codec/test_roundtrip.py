"""Encoding and decoding of objects: decoded objects have the original values and types."""

from __future__ import annotations

import datetime as dt
import math
import random
import struct
import sys
import zoneinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import ml_dtypes
import numpy as np
import pytest

from aiocoll.codec import MAX_BYTES, MAX_DEPTH, dumps, loads
from aiocoll.errors import SerializationError

from ..each import each
from .classes import Colour, Point


class Picklable:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Picklable) and other.value == self.value

    __hash__ = None  # type: ignore[assignment]


def same(a: Any, b: Any) -> bool:
    """Return whether two objects have equal values and types at all nesting levels; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.str_ | np.bytes_):
        return len(a) == len(b) and bool(a == b)
    if isinstance(a, np.ndarray | np.generic):
        padded = a.dtype.char in "gG"  # long doubles have padding bytes
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and (bool(np.all(a == b)) if padded else a.tobytes() == b.tobytes())
        )
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            same(k, m) and same(v, w) for (k, v), (m, w) in zip(a.items(), b.items(), strict=True)
        )
    if isinstance(a, set | frozenset):
        return a == b and sorted(map(repr, a)) == sorted(map(repr, b))
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, dt.datetime | dt.time):
        return a == b and same(a.tzinfo, b.tzinfo) and a.fold == b.fold
    if isinstance(a, dt.timezone):
        return repr(a) == repr(b)
    if isinstance(a, zoneinfo.ZoneInfo):
        return a.key == b.key
    if isinstance(a, Decimal):
        return str(a) == str(b)
    return bool(a == b)


VALUES = [
    None, True, False, 0, -1, 127, 128, 2**63 - 1, -(2**63), 2**64 - 1, 2**64, -(2**63) - 1, 10**100, -(10**100),
    2**4096,     0.0, -0.0, 1.5, math.inf, math.nan, 1e-310, 1 + 2j, complex(-0.0, math.nan),
    "", "text", "né\u2028\U0001f600", "\ud800 alone", "nul\0", b"", b"\x00\xff", bytearray(b"abc"), bytearray(),
    [], [1, [2, [3]]], (), (1,), (1, (2, [3, (4,)])), {}, {"a": 1}, {1: "a", "1": "b", 2.5: None, None: True},
    {(1, "x"): {(2, 3): [(4, {5: (6,)})]}}, {b"k": 2**70, 2**70: b"v"},
    {frozenset({1}): frozenset(), UUID(int=7): UUID(int=8)},
    set(), {1, "a", (2, 3)}, frozenset({frozenset({1}), ()}), [2**64, "plain but for one"],
    range(0), range(5, -7, -3), range(2**70), slice(None), slice(1, 10, 2), slice("a", (1,), None),
    dt.date(1, 1, 1), dt.time(23, 59, 59, 999999), dt.time(1, 2, tzinfo=dt.UTC, fold=1),
    dt.datetime(9999, 12, 31, 23, 59, 59, 999999), dt.datetime(2024, 2, 29, tzinfo=dt.UTC),
    dt.datetime(2024, 10, 27, 2, 30, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin"), fold=1),
    dt.datetime(2024, 1, 1, tzinfo=dt.timezone(dt.timedelta(hours=-3, minutes=-30), "NST")),
    dt.timezone(dt.timedelta(hours=2)), dt.UTC, zoneinfo.ZoneInfo("UTC"),
    dt.timedelta(0), dt.timedelta(days=-3, microseconds=1), dt.timedelta.max, dt.timedelta.min,
    UUID("12345678-1234-5678-1234-567812345678"), Decimal("1.10"), Decimal("-0"), Decimal("sNaN123"), Decimal("1E+999"),
    Fraction(1, 3), Fraction(-(10**30), 7),
    np.str_("text\0"), np.bytes_(b"ab\0"), np.str_(""), np.bool_(True), np.datetime64("2024-01-01T00", "h"),
    np.datetime64("NaT", "s"), np.timedelta64(5, "ms"), np.float64(-0.0), np.longdouble(1) / 3, np.clongdouble(1j),
]  # fmt: skip

NATIVE = [
    *("?", "b", "h", "i", "l", "B", "H", "I", "L", "e", "f", "d", "g", "F", "D", "G", "S", "U", "S5", "U3"),
    *("M8[ns]", "M8[25s]", "m8[us]", ">f4", ">i8", ">U2", ">M8[D]"),
]
EXTENSION = [
    name
    for name, kind in vars(ml_dtypes).items()
    if isinstance(kind, type) and issubclass(kind, np.generic) and name != "generic"
]
SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (5,), (3, 0, 2), (2, 3, 4), (1,) * 20]


def filled(dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    if dtype.kind in "SU":
        return np.array([str(i) for i in range(math.prod(shape))], dtype=dtype).reshape(shape)
    return np.arange(math.prod(shape)).reshape(shape).astype(dtype)


@each("value", VALUES)
def test_value_survives_encoding_and_decoding_unchanged(value: Any) -> None:
    for obj in (value, [value], {"k": (value, [value])}):
        assert same(loads(dumps(obj)), obj)


@each("shape", SHAPES)
@each("dtype", [*NATIVE, *EXTENSION])
def test_encoded_arrays_and_scalars_keep_type_shape_and_bits(dtype: str, shape: tuple[int, ...]) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype) if dtype in EXTENSION else dtype)
    array = filled(kind, shape)
    back = loads(dumps({"a": [array]}))["a"][0]
    assert same(back, array)
    assert back.flags.writeable
    assert back.flags.c_contiguous
    assert back.flags.aligned
    if array.size:
        scalar = array.reshape(-1)[-1]
        assert same(loads(dumps(scalar)), scalar)


def test_noncontiguous_arrays_are_decoded_in_c_order() -> None:
    base = np.arange(24.0).reshape(4, 6)
    for array in (base.T, base[::2, ::-1], np.asfortranarray(base), np.broadcast_to(base[0], (3, 6))):
        back = loads(dumps(array))
        assert back.flags.c_contiguous
        assert np.array_equal(back, array)


def test_decoded_array_is_a_copy_of_the_received_bytes() -> None:
    array = np.zeros(3)
    data = bytearray(dumps(array))
    back = loads(data)
    back[:] = 1
    assert np.array_equal(loads(data), array)


@pytest.mark.slow
@each("length", [15, 16, 32767, 32768, 32769, 65537])
def test_long_container_survives_encoding_and_decoding_unchanged(length: int) -> None:
    numbers = list(range(length))
    pairs = [(n,) for n in numbers]
    for obj in (numbers, tuple(numbers), set(numbers), frozenset(numbers), pairs, dict.fromkeys(pairs, 1)):
        assert same(loads(dumps(obj)), obj)


def random_object(rng: random.Random, depth: int) -> Any:
    leaves = [v for v in VALUES if not isinstance(v, list | tuple | dict | set | frozenset)]
    if depth == 0 or rng.random() < 0.3:
        return rng.choice([*leaves, filled(np.dtype(rng.choice(NATIVE)), rng.choice(SHAPES))])
    items = [random_object(rng, depth - 1) for _ in range(rng.randrange(5))]
    kind = rng.choice([list, tuple, dict, set, frozenset])
    if kind in (list, tuple):
        return kind(items)
    keys = [
        rng.choice([n, str(n), (n, str(n)), Fraction(n, 7), frozenset({n}), np.int16(n)]) for n in range(len(items))
    ]
    return dict(zip(keys, items, strict=True)) if kind is dict else kind(keys)


@each("seed", range(200))
def test_nested_object_survives_encoding_and_decoding_unchanged(seed: int) -> None:
    obj = random_object(random.Random(seed), 5)
    data = dumps(obj)
    assert same(loads(data), obj)
    assert same(loads(memoryview(bytearray(data))), obj)


def nested(depth: int, wrap: Any) -> Any:
    obj: Any = 1
    for _ in range(depth):
        obj = wrap(obj)
    return obj


@each("wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}, lambda x: frozenset({x})])
def test_nesting_depth_of_encoded_containers_is_limited(wrap: Any) -> None:
    deepest = nested(MAX_DEPTH, wrap)
    assert same(loads(dumps([[deepest]][0][0])), deepest)
    with pytest.raises(SerializationError, match="containers are nested deeper than 256"):
        dumps(wrap(deepest))


def test_error_for_an_object_that_contains_itself_has_a_shortened_path() -> None:
    obj: dict[str, Any] = {}
    obj["self"] = [obj]
    with pytest.raises(SerializationError, match="check for one that contains itself") as caught:
        dumps(obj)
    assert "['self'][0]['self']" in str(caught.value)
    assert len(str(caught.value)) < 300


def test_stack_overflow_during_encoding_raises_a_serialization_error() -> None:
    def deeper(n: int) -> bytes:
        return deeper(n - 1) if n else dumps(nested(MAX_DEPTH, lambda x: [x]))

    with pytest.raises(SerializationError, match="nested too deeply"):
        deeper(sys.getrecursionlimit() - 300)


def test_object_size_is_limited_by_sender_and_receiver() -> None:
    data = dumps("x" * 100)
    assert len(data) == 102
    assert dumps("x" * 100, max_bytes=102) == data
    with pytest.raises(SerializationError, match="has at least 102 bytes, but max_bytes is 101"):
        dumps("x" * 100, max_bytes=101)
    assert loads(data, max_bytes=102) == "x" * 100
    with pytest.raises(SerializationError, match="has 102 bytes, but max_bytes is 101"):
        loads(data, max_bytes=101)


def test_object_size_limit_is_checked_before_large_copies() -> None:
    huge = np.broadcast_to(np.zeros(1), (1 << 40,))
    with pytest.raises(SerializationError, match=f"max_bytes is {MAX_BYTES}"):
        dumps({"w": huge})
    doubled: list[Any] = []
    for _ in range(64):
        doubled = [doubled, doubled]
    with pytest.raises(SerializationError, match="max_bytes is 10000"):
        dumps(doubled, max_bytes=10_000)


def test_pickle_requires_permission_of_sender_and_receiver() -> None:
    obj = {"a": [Picklable(7), Colour.RED, Point(1, 2), (1, 2)]}
    data = dumps(obj, allow_pickle=True)
    assert same(loads(data, allow_pickle=True), obj)
    with pytest.raises(SerializationError, match="allow_pickle=True on every rank"):
        loads(data)
    with pytest.raises(SerializationError, match=r"obj\[0\]: pickle cannot encode .*Local"):
        dumps([type("Local", (), {"__reduce__": lambda self: 1 / 0})()], allow_pickle=True)
    assert dumps([1, (2,)], allow_pickle=True) == dumps([1, (2,)])
