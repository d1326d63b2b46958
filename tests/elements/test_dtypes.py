"""Element dtypes: wire codes, NumPy equivalents, and conversions between narrow floats and float32."""

from __future__ import annotations

import builtins
import copy
import pickle

import numpy as np
import pytest

from aiocoll.elements import dtypes
from aiocoll.errors import BackendUnavailableError

from ..each import each

NATIVE = [
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
FLOAT8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
HALF = ["float16", "bfloat16", *FLOAT8]
ALL_BITS = np.arange(1 << 16, dtype=np.uint32) << 16


def extension_dtype(name: str) -> np.dtype:
    if name == "float16":
        return np.dtype(np.float16)
    return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))


def upcast(name: str, codes: np.ndarray) -> np.ndarray:
    dtype = dtypes.by_name(name)
    out = np.empty(len(codes), np.float32)
    dtypes.to_float32(dtype)(codes.view(dtype.storage), out)
    return out


def downcast(name: str, values: np.ndarray) -> np.ndarray:
    dtype = dtypes.by_name(name)
    out = np.empty(len(values), dtype.storage)
    with np.errstate(all="ignore"):
        dtypes.from_float32(dtype)(values, out)
    return out.view(f"uint{dtype.itemsize * 8}")


def test_wire_codes_of_dtypes_equal_the_documented_numbers() -> None:
    codes = {dtypes.by_code(code).name: code for code in range(1, 24)}
    assert codes == {
        "bool": 1,
        "int8": 2,
        "int16": 3,
        "int32": 4,
        "int64": 5,
        "uint8": 6,
        "uint16": 7,
        "uint32": 8,
        "uint64": 9,
        "float32": 10,
        "float64": 11,
        "complex64": 12,
        "complex128": 13,
        "float16": 14,
        "bfloat16": 15,
        "float8_e4m3fn": 16,
        "float8_e5m2": 17,
        "float8_e4m3fnuz": 18,
        "float8_e5m2fnuz": 19,
        "int4": 20,
        "uint4": 21,
        "int2": 22,
        "uint2": 23,
    }


@each("code", [0, 24, 255, -1])
def test_unknown_wire_code_of_a_dtype_is_refused(code: int) -> None:
    with pytest.raises(ValueError, match=f"dtype code {code} is unknown; codes go from 1 to 23"):
        dtypes.by_code(code)


@each("name", NATIVE)
def test_native_dtypes_map_to_numpy_dtypes_of_the_same_name(name: str) -> None:
    dtype = dtypes.from_numpy(np.dtype(name))
    assert dtype is dtypes.by_name(name)
    assert dtype.name == name
    assert dtype.storage == np.dtype(name) == dtypes.array_dtype(dtype)
    assert dtype.itemsize == np.dtype(name).itemsize


@each("name", HALF[1:])
def test_dtypes_of_ml_dtypes_are_stored_as_unsigned_integers(name: str) -> None:
    dtype = dtypes.from_numpy(extension_dtype(name))
    assert dtype is dtypes.by_name(name)
    assert dtype.kind == "half"
    assert dtype.storage == np.dtype(f"uint{dtype.itemsize * 8}")
    assert dtypes.array_dtype(dtype) == extension_dtype(name)


def test_numpy_longlong_maps_to_int64() -> None:
    assert dtypes.from_numpy(np.dtype(np.longlong)) is dtypes.by_name("int64")


def test_pickling_or_copying_a_dtype_returns_the_same_instance() -> None:
    dtype = dtypes.by_name("float32")
    assert pickle.loads(pickle.dumps(dtype)) is dtype
    assert copy.deepcopy(dtype) is dtype


def test_array_dtype_of_bfloat16_requires_ml_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(dtypes, "import_module", refuse)
    with pytest.raises(BackendUnavailableError, match="arrays of bfloat16 need ml_dtypes: pip install ml_dtypes"):
        dtypes.array_dtype(dtypes.by_name("bfloat16"))
    assert dtypes.array_dtype(dtypes.by_name("float16")) == np.float16


@pytest.mark.parametrize("name", HALF)
def test_conversions_of_narrow_floats_do_not_import_ml_dtypes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(module: str, *args: object, **kwargs: object) -> object:
        assert not module.startswith("ml_dtypes")
        return original(module, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    values = np.array([0.0, 0.5, -1.5, 12.0], np.float32)
    assert upcast(name, downcast(name, values)).tolist() == [0.0, 0.5, -1.5, 12.0]


@each(
    ("dtype", "message"),
    [
        (">f4", "'>f4' is float32 in foreign byte order; convert it first"),
        ("O", "dtype object contains Python objects"),
        (np.clongdouble, "is not supported; use one of bool, int8"),
    ],
)
def test_conversion_of_an_unsupported_numpy_dtype_is_refused(dtype: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        dtypes.from_numpy(np.dtype(dtype))


def test_unknown_dtype_name_is_refused() -> None:
    with pytest.raises(TypeError, match="dtype 'float8' is not supported; use one of bool, "):
        dtypes.by_name("float8")


@each("name", HALF)
def test_upcast_to_float32_is_exact_for_every_narrow_float(name: str) -> None:
    codes = np.arange(1 << 8 * dtypes.by_name(name).itemsize, dtype=f"u{dtypes.by_name(name).itemsize}")
    got, want = upcast(name, codes), codes.view(extension_dtype(name)).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    assert (np.signbit(got) == np.signbit(want))[~np.isnan(want)].all()


@each("name", HALF)
def test_downcast_inverts_the_upcast_of_every_narrow_float(name: str) -> None:
    codes = np.arange(1 << 8 * dtypes.by_name(name).itemsize, dtype=f"u{dtypes.by_name(name).itemsize}")
    values = upcast(name, codes)
    back, number = downcast(name, values), ~np.isnan(values)
    assert (back[number] == codes[number]).all()
    assert np.isnan(upcast(name, back[~number])).all()


def rounding_cases(name: str) -> dict[str, np.ndarray]:
    """Return groups of float32 values to round to dtype `name`: ties, values near ties, overflows, random values."""
    rng = np.random.default_rng(2)
    codes = np.arange(1 << 8 * dtypes.by_name(name).itemsize, dtype=f"u{dtypes.by_name(name).itemsize}")
    points = np.sort(np.unique(upcast(name, codes)[np.isfinite(upcast(name, codes))]))
    middles = (points[:-1].astype(np.float64) + points[1:]) / 2
    ties = middles.astype(np.float32)
    with np.errstate(over="ignore"):
        near = np.concatenate([np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))])
    largest = np.finfo(np.float32).max
    beyond = np.concatenate([s * np.minimum(points[-1] * np.linspace(0.9, 2.5, 20_001), largest) for s in (1, -1)])
    return {
        "upper halves": ALL_BITS.view(np.float32),
        "just above": (ALL_BITS | 1).view(np.float32),
        "just below": (ALL_BITS | 0xFFFF).view(np.float32),
        "ties": ties,
        "near ties": near,
        "overflow": beyond.astype(np.float32),
        "any bits": rng.integers(0, 1 << 32, 200_000, dtype=np.uint32).view(np.float32),
        "finite": (rng.standard_normal(200_000) * 10.0 ** rng.integers(-9, 4, 200_000)).astype(np.float32),
    }


@each("name", HALF)
def test_downcast_rounds_like_ml_dtypes(name: str) -> None:
    for case, values in rounding_cases(name).items():
        # Slices of different lengths are needed, because short float16 arrays take another code path.
        for part in (values, values[:100], values[-5000:]):
            with np.errstate(all="ignore"):
                want = part.astype(extension_dtype(name)).view(downcast(name, part[:1]).dtype)
            assert np.array_equal(downcast(name, part), want), case


def test_bfloat16_downcast_rounds_ties_to_even_and_keeps_nan() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F7FFFFF, 0x7F800001], np.uint32)
    assert [hex(code) for code in downcast("bfloat16", bits.view(np.float32))] == [
        "0x3f80",  # exactly half way, rounds down to even
        "0x3f82",  # exactly half way, rounds up to even
        "0x3f81",  # above half way, rounds up
        "0x7fc0",  # NaNs whose mantissa would carry over
        "0xffc0",
        "0x7f80",  # the largest float32 rounds to infinity
        "0x7fc0",  # a NaN whose upper half reads as infinity
    ]


@each(
    ("name", "codes"),
    [
        ("float8_e4m3fn", [0x7E, 0x7F, 0x7F, 0xFF, 0x80]),
        ("float8_e5m2", [0x5F, 0x7C, 0x7E, 0xFC, 0x80]),
        ("float8_e4m3fnuz", [0x80, 0x80, 0x80, 0x80, 0x00]),
        ("float8_e5m2fnuz", [0x63, 0x80, 0x80, 0x80, 0x00]),
    ],
)
def test_float8_downcast_of_too_large_values_gives_the_specified_codes(name: str, codes: list[int]) -> None:
    values = np.array([448.0, 1e6, np.nan, -np.inf, -0.0], np.float32)
    assert downcast(name, values).tolist() == codes


@each("name", HALF)
@each("count", [0, 1, 20_000])
def test_downcast_does_not_change_its_input_array(name: str, count: int) -> None:
    values = np.linspace(-3.0, 3.0, count, dtype=np.float32)
    kept = values.copy()
    downcast(name, values)
    assert np.array_equal(values, kept)
