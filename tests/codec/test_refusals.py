"""Errors of the codec: unsupported values are named with their path, and invalid bytes are refused."""

from __future__ import annotations

import collections
import datetime as dt
import os
import random
import subprocess
import sys
import zoneinfo
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import ml_dtypes
import msgpack
import numpy as np
import pytest

from aiocoll.codec import dumps, loads
from aiocoll.errors import SerializationError

from ..each import each
from .classes import Colour, Local, Point


def same_hash(count: int, first: int = 7) -> list[int]:
    """Return `count` unequal integers with equal hashes."""
    return [first + n * sys.hash_info.modulus for n in range(count)]


REFUSED: list[tuple[Any, str, str]] = [
    ({"layers": [1, 2, 3, {"bias": Local()}]}, r"obj\['layers'\]\[3\]\['bias'\]: ", r"Local is not supported"),
    ((1, [Local()]), r"obj\[1\]\[0\]: ", "set allow_pickle=True on every rank"),
    ({(1, Local()): 1}, r"obj\.keys\(\)\[<tuple>\]\[1\]: ", "Local is not supported"),
    ({1: {frozenset({Local()})}}, r"obj\[1\]{...}{...}: ", "Local is not supported"),
    ([*range(40_000), Local()], r"obj\[40000\]: ", "Local"),
    ([2**64, Local()], r"obj\[1\]: ", "Local"),
    (collections.Counter(a=1), "obj: ", "collections.Counter is a subclass of dict and would arrive as one"),
    ([type("Mine", (collections.OrderedDict,), {})()], r"obj\[0\]: ", "Mine is a subclass of OrderedDict"),
    ([Colour.RED], r"obj\[0\]: ", "Colour is a subclass of int"),
    ([type("Name", (str,), {})("x")], r"obj\[0\]: ", "Name is a subclass of str"),
    (Point(1, 2), "obj: ", r"Point is a named tuple and would arrive as a tuple: send tuple\(x\)"),
    (np.array([1, None]), "obj: ", "ndarray has unsupported dtype object"),
    (np.zeros(2, [("a", "i4")]), "obj: ", r"dtype \[\('a', '<i4'\)\]: use one"),
    (np.zeros(1, [("a", "i4")])[0], "obj: ", "numpy.void has unsupported dtype"),
    (np.zeros(2, "V8"), "obj: ", "ndarray of dtype |V8"),
    (np.ma.array([1]), "obj: ", "is a subclass of ndarray"),
    (memoryview(b"x"), "obj: ", "memoryview is not supported"),
    (msgpack.ExtType(2, b""), "obj: ", "ExtType is a named tuple"),
    (msgpack.Timestamp(1), "obj: ", "Timestamp is not supported"),
    ([dumps], r"obj\[0\]: ", "function is not supported"),
    ([int], r"obj\[0\]: ", "type is not supported"),
    (..., "obj: ", "ellipsis is not supported"),
    ([range(1 << 8192)], r"obj\[0\]: ", "a range or Fraction has an integer of over 8192 bits"),
    ([Fraction(1, 1 << 8192)], r"obj\[0\]: ", "an integer of over 8192 bits"),
    (
        [{(n,): 0 for n in same_hash(129)}],
        r"obj\[0\]: ",
        "more than 128 keys with the same hash; send a list of pairs",
    ),
    ([set(same_hash(129, 1 << 100))], r"obj\[0\]: ", "more than 128 keys with the same hash"),
    (dt.datetime(2024, 1, 1, tzinfo=type("Zone", (dt.tzinfo,), {})()), "obj: ", "Zone is not supported"),
]


@each(("obj", "path", "reason"), REFUSED)
def test_error_names_an_unsupported_value_with_its_path(obj: Any, path: str, reason: str) -> None:
    with pytest.raises(SerializationError, match=rf"^cannot send {path}.*{reason}"):
        dumps(obj)


def test_encoding_a_zoneinfo_without_a_key_is_refused() -> None:
    path = next(p for p in map("{}/Europe/Paris".format, zoneinfo.TZPATH) if os.path.exists(p))
    with open(path, "rb") as file:
        zone = zoneinfo.ZoneInfo.from_file(file)
    with pytest.raises(SerializationError, match="a ZoneInfo without a key"):
        dumps([zone])


SAMPLE = {
    "a": [1, 2.5, None, "text", b"bytes", (1, {2, frozenset({3})})],
    (4, 5): np.arange(6, dtype="<i2").reshape(2, 3),
    "s": [np.float32(1), np.str_("x"), ml_dtypes.bfloat16(1), np.array(["ab"]), np.datetime64(1, "s")],
    "t": [dt.datetime(2024, 1, 1, 1, 2, 3, tzinfo=zoneinfo.ZoneInfo("Asia/Tokyo")), dt.timedelta(1), dt.date(1, 2, 3)],
    "n": [2**100, 1j, Decimal("1.5"), Fraction(1, 3), range(3), slice(1), UUID(int=1), bytearray(b"x")],
}


@pytest.mark.slow
def test_data_with_a_changed_byte_is_decoded_or_raises_a_serialization_error() -> None:
    data = dumps(SAMPLE)
    refused = 0
    for position in range(len(data)):
        for value in range(256):
            changed = data[:position] + bytes((value,)) + data[position + 1 :]
            try:
                loads(changed)
            except SerializationError:
                refused += 1
    assert refused > 100 * len(data)


def test_truncated_or_extended_data_of_an_object_is_refused() -> None:
    data = dumps(SAMPLE)
    for length in range(len(data)):
        with pytest.raises(SerializationError):
            loads(data[:length])
    with pytest.raises(SerializationError, match=f"{len(data) + 1} bytes are not a valid object"):
        loads(data + b"\xc0")


def test_decoding_random_bytes_returns_a_value_or_raises_a_serialization_error() -> None:
    rng = random.Random(5)
    for _ in range(5000):
        try:
            loads(b"\x94\xc7\x00" + bytes((rng.randrange(70),)) + rng.randbytes(rng.randrange(40)))
        except SerializationError as error:
            assert str(error)  # noqa: PT017 - most of the bytes are refused, some may be valid


def tag(code: int) -> msgpack.ExtType:
    return msgpack.ExtType(code, b"")


#: The encoded fields of an integer of 8193 bits, one bit above the limit.
BIG = [tag(7), (1 << 8192).to_bytes(1025, "big")]


def tagged(code: int, *fields: Any) -> bytes:
    return bytes(msgpack.packb([tag(code), *fields]))


HOSTILE: list[tuple[bytes, str]] = [
    (b"", "0 bytes are not a valid object"),
    (b"\xc1", "not a valid object"),
    (b"\xdd\xff\xff\xff\xff", "not a valid object"),
    (b"\xdc\x80\x01" * 5_000_000, "not a valid object"),
    (b"\x91" * 5_000_000, "not a valid object"),
    (b"\xdf\xff\xff\xff\xff", "not a valid object"),
    (b"\xc6\xff\xff\xff\xff", "not a valid object"),
    (b"\x81\x90\x01", "unhashable"),
    (msgpack.packb(msgpack.ExtType(99, b"")), "unknown type 99"),
    (msgpack.packb(msgpack.ExtType(2, b"x")), "type 2 with 1 bytes"),
    (msgpack.packb(msgpack.ExtType(2, b"")), "a type tag is not the first item of a list"),
    (msgpack.packb([1, msgpack.ExtType(2, b"")]), "a type tag is not the first item of a list"),
    (tagged(2, msgpack.ExtType(2, b"")), "a type tag is not the first item of a list"),
    (tagged(66, "ab", [1]), "an item that is not a piece"),
    (tagged(73, {1: 2}), "an item that is not a piece"),
    (tagged(63, 1, 2), "found a piece of a long container outside of one"),
    (msgpack.packb([tag(2), [tag(63), 1]]), "found a piece of a long container outside of one"),
    (msgpack.packb([tag(73), [tag(63), 1]]), "a piece of a dict is not a dict"),
    (msgpack.packb([tag(73), [tag(63), {}, {}]]), "a piece of a dict is not a dict"),
    (msgpack.packb([tag(67), [tag(63), [1]]]), "unhashable"),
    (msgpack.packb([tag(2), tag(3), 1]), "a type tag is not the first item of a list"),
    (msgpack.packb([tag(67), *([tag(63), *range(256)], [tag(63), *range(257)])]), "257 elements of a set in one"),
    (tagged(3, *range(257)), "257 elements of a set in one piece"),
    (msgpack.packb(dict.fromkeys(range(257))), "not a valid object"),
    (tagged(12, 0, BIG, 1), "over 8192 bits"),
    (tagged(16, 1, BIG), "over 8192 bits"),
    (tagged(5, "<f8", [BIG, 0], b""), "not the shape"),
    (tagged(3, [1]), "unhashable"),
    (tagged(5, "<f8", [2]), "extension type 5 has the wrong fields"),
    (tagged(5, "<f8", [2], b"short"), r"shape \[2\] and dtype float64 does not have 5 bytes"),
    (tagged(5, "<f8", [-1, -1], b"12345678"), "not the shape"),
    (tagged(5, "<f8", [2**63, 0], b""), "not the shape"),
    (tagged(5, "<f8", [1] * 65, b"12345678"), "not the shape"),
    (tagged(5, "<f8", [True], b"12345678"), "not the shape"),
    (tagged(5, "|O", [1], b"12345678"), "'|O' is not a supported dtype"),
    (tagged(5, "O", [1], b"12345678"), "'O' is not a supported dtype"),
    (tagged(5, "<i4,<i4", [1], b"12345678"), "not a supported dtype"),
    (tagged(5, "<M8", [1], b"12345678"), "not a supported dtype"),
    (tagged(5, "<f77", [1], b"12345678"), "not a valid object"),
    (tagged(5, "<M8[parsec]", [1], b"12345678"), "not a valid object"),
    (tagged(5, "ml_dtypes.float8_nonsense", [1], b"1"), "not a valid object"),
    (tagged(5, "ml_dtypes.__loader__", [1], b"1"), "not a supported dtype"),
    (tagged(6, "<U99999999999", b""), "not a valid object"),
    (tagged(11, 10**12), "wrong fields"),
    (tagged(12, 1, 2, 0), "not a valid object"),
    (tagged(14, b"short"), "not a valid object"),
    (tagged(15, "1e99999999999999999999"), "not a valid object"),
    (tagged(16, 1, 0), "not a valid object"),
    (tagged(20, 0, 0, 0), "not a valid object"),
    (tagged(21, 1, 2, 3, 4, "zone", 0), "not a valid object"),
    (tagged(24, "../../etc/passwd"), "not a valid object"),
    (tagged(24, "America"), "not a valid object"),
    (tagged(24, "Mars/Base"), "No time zone found with key Mars/Base"),
]


@each(("data", "message"), HOSTILE)
def test_maliciously_built_bytes_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(SerializationError, match=message):
        loads(data, max_bytes=1 << 26)


def test_decoding_an_object_that_is_not_a_buffer_raises_a_type_error() -> None:
    with pytest.raises(TypeError, match="memoryview: a bytes-like object is required, not 'str'"):
        loads("text")  # type: ignore[arg-type]


def test_error_for_a_missing_extension_dtype_names_the_package() -> None:
    data = dumps(np.array([1], dtype=ml_dtypes.bfloat16))
    code = (
        "import sys; sys.modules['ml_dtypes'] = None\n"
        "from aiocoll.codec import loads\nfrom aiocoll.errors import SerializationError\n"
        f"try: loads({data!r})\nexcept SerializationError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "received an array of ml_dtypes.bfloat16; to receive it, pip install 'aiocoll[dtypes]'\n"
