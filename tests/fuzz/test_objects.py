"""Fuzz tests of the object codec: it decodes nearly valid bytes, or raises `SerializationError`."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any
from uuid import UUID

import msgpack
import numpy as np
from hypothesis import strategies as st

from aiocoll.codec import dumps, loads
from aiocoll.errors import SerializationError

from .budget import fuzz
from .mutation import paths

numbers = st.one_of(st.integers(), st.sampled_from([1 << 63, -(1 << 100), 10**500]))
leaves = st.one_of(
    st.none(),
    st.booleans(),
    numbers,
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from([Decimal("1.5"), Fraction(1, 3), UUID(int=7), dt.date(2020, 1, 2), dt.timedelta(days=3)]),
    st.sampled_from([dt.datetime(2020, 1, 2, tzinfo=dt.UTC), dt.datetime(2020, 1, 2), dt.time(3, 4)]),
    st.sampled_from([range(3), slice(1, 2)]),
    st.sampled_from(["float32", "int64", "bool", "complex64", "M8[s]", "U3", "S2"]).map(lambda t: np.zeros((2, 3), t)),
    st.sampled_from([np.float32(1.5), np.int8(3), np.empty((0, 4)), np.zeros(3, "i4,f8")]),
)
objects = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), numbers), inner, max_size=4),
        st.sets(numbers, max_size=4),
        st.frozensets(st.text(max_size=2), max_size=3),
    ),
    max_leaves=8,
)


def encoded(obj: Any) -> bytes:
    """Encode an object, or encode None if the codec refuses the object."""
    try:
        return dumps(obj)
    except SerializationError:
        return dumps(None)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Draw an encoded object in which some bytes are changed, missing, repeated or inserted."""
    data = bytearray(encoded(draw(objects)))
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, max(0, len(data) - 1)))
        stop = draw(st.integers(start, min(len(data), start + 12)))
        how = draw(st.sampled_from(["set", "drop", "repeat", "nest", "other"]))
        if how == "set" and data:
            data[start] = draw(st.integers(0, 255))
        elif how == "drop":
            del data[start:stop]
        elif how == "repeat":
            data[start:start] = data[start:stop] * draw(st.sampled_from([1, 2, 100]))
        elif how == "nest":
            data[start:start] = draw(st.sampled_from([b"\x91", b"\x92\xd4\x01\x00", b"\x81\x01"])) * draw(
                st.sampled_from([1, 2000])
            )
        else:
            data[start:stop] = encoded(draw(leaves))
    return bytes(data)


@st.composite
def structures(draw: st.DrawFn) -> bytes:
    """Draw an encoded object with elements and type tags added to, or removed from, its msgpack lists."""
    value = msgpack.unpackb(
        encoded(draw(objects)),
        strict_map_key=False,
        unicode_errors="surrogatepass",
        timestamp=0,
        object_pairs_hook=lambda pairs: [list(pair) for pair in pairs],  # lists, because a key may be unhashable here
    )
    chance = random.Random(draw(st.integers(0, 1 << 30)))
    for _ in range(draw(st.integers(1, 3))):
        lists = [part for part in (_at(value, path) for path in paths(value)) if isinstance(part, list)]
        if not lists:
            break
        part = chance.choice(lists)
        tag = msgpack.ExtType(draw(st.integers(0, 127)), draw(st.sampled_from([b"", b"", b"x"])))
        other = draw(st.one_of(st.just(tag), st.integers(-5, 1 << 63), st.binary(max_size=4), st.text(max_size=4)))
        part.insert(chance.randint(0, len(part)), other)
        if chance.random() < 0.5:
            part.pop(chance.randrange(len(part)))
    body: bytes = msgpack.packb(value, unicode_errors="surrogatepass")
    return body


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def check_decoding(data: bytes) -> None:
    try:
        found = loads(data)
    except SerializationError:
        return
    # To encode a decoded object must succeed or raise `SerializationError`.
    encoded(found)


@fuzz(messages(), examples=400)
def test_mutated_bytes_of_an_object_are_decoded_or_refused(data: bytes) -> None:
    check_decoding(data)


@fuzz(structures(), examples=300)
def test_mutated_object_structure_is_decoded_or_refused(data: bytes) -> None:
    check_decoding(data)


@fuzz(st.binary(max_size=100), examples=200)
def test_random_bytes_are_decoded_as_an_object_or_refused(data: bytes) -> None:
    check_decoding(data)
