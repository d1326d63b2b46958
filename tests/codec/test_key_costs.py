"""Decoding time of dict and set keys with equal hashes: limited per byte, for every key type."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import sys
import time
import zoneinfo
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from functools import cache
from itertools import combinations, takewhile
from typing import Any
from uuid import UUID

import ml_dtypes
import numpy as np
import pytest

from aiocoll.codec import dumps, loads
from aiocoll.errors import SerializationError

P = sys.hash_info.modulus
#: The hash value that the keys of these tests share. Powers of two whose exponents differ by 61 have equal hashes.
CODE = 2
#: Time zones whose clocks go back at the same instant. Times in the repeated hour are unequal but have equal hashes.
ZONES = ("Berlin", "Paris", "Rome", "Madrid", "Vienna", "Brussels", "Oslo", "Prague", "Warsaw", "Zurich", "Amsterdam")
#: The maximum decoding time per byte of keys, relative to the time per byte of small tuples in a list. Measured times
#: are half of this limit. Quadratic algorithms take hundreds of times as long.
RATIO = 60.0
#: The number of keys of one type, the number of keys of another type, and bytes per key.
MIXES = [(1, 1, 300_000), (1, 127, 1000), (64, 64, 200), (7, 16, 1000), (4, 4, 20_000)]

#: Key factories by type: (index, size) gives a key of about `size` bytes, or None if this type has no more keys.
KINDS: dict[str, Callable[[int, int], Hashable | None]] = {
    "int": lambda n, size: CODE + (P << 8 * size) + n * P,
    "small int": lambda n, size: CODE + n * P if n < 4 else None,
    "float": lambda n, size: math.ldexp(CODE, 61 * (n - 16)) if n < 32 else None,
    "complex": lambda n, size: complex(math.ldexp(-1000001, 61 * (n - 16)), 1) if n < 32 else None,
    "Decimal": lambda n, size: Decimal(CODE + n * P),
    "long Decimal": lambda n, size: long_decimal(n, size),
    "Decimal with exponent": lambda n, size: Decimal(f"{CODE * pow(10, n - 10**15, P) % P}E+{10**15 - n}"),
    "Fraction": lambda n, size: Fraction(CODE * 3 + (3 * n + 1) * P, 3),
    "long Fraction": lambda n, size: Fraction(CODE * 3 + ((3 * n + 1) << 8 * min(size // 2, 990)) * P, 3),
    "UUID": lambda n, size: UUID(int=CODE + n * P),
    "np.int64": lambda n, size: np.int64(CODE + n * P) if n < 4 else None,
    "np.float64": lambda n, size: np.float64(math.ldexp(CODE, 61 * (n - 16))) if n < 32 else None,
    "np.longdouble": lambda n, size: np.longdouble(CODE) * (1 + n * np.finfo(np.longdouble).eps),
    "np.complex128": lambda n, size: np.complex128(complex(math.ldexp(-1000001, 61 * (n - 16)), 1)) if n < 32 else None,
    "bfloat16": lambda n, size: ml_dtypes.bfloat16(math.ldexp(CODE, 61 * (n - 1))) if n < 3 else None,
}


def long_decimal(n: int, size: int) -> Decimal:
    """Return a Decimal of about `size` digits whose last digits give it the hash `CODE`."""
    digits = "1" * size
    rest = (CODE - hash(Decimal(digits + "0" * 45))) % P
    return Decimal(f"{digits}{rest + n * P:045d}")


@cache
def keys(kind: str, count: int, size: int) -> list[Any]:
    return list(takewhile(lambda key: key is not None, (KINDS[kind](n, size) for n in range(count))))


def packed(keys: Sequence[Any]) -> bytes:
    """Return an encoded dict with the given keys, even if `dumps` would refuse them."""
    with pytest.MonkeyPatch.context() as uncounted:
        uncounted.setattr("aiocoll.codec.encode.check_keys", lambda keys, hashes: None)
        pairs = b"".join(dumps({key: 0})[1:] for key in keys)
    return b"\xde" + len(keys).to_bytes(2, "big") + pairs


def seconds_per_byte(data: bytes) -> float:
    """Return the CPU seconds per byte that `loads` takes to decode or refuse `data`."""
    start = time.thread_time()
    with suppress(SerializationError):
        loads(data)
    return (time.thread_time() - start) / len(data)


@cache
def unit_seconds() -> float:
    data = dumps([(number, number) for number in range(2000)])
    return min(seconds_per_byte(data) for _ in range(5))


def check_time(keys: Sequence[Any]) -> None:
    data = packed(keys)
    assert any(seconds_per_byte(data) < RATIO * unit_seconds() for _ in range(3)), (
        f"{len(keys)} keys in {len(data)} bytes"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_time_of_dict_keys_with_equal_hashes_and_two_types_is_limited(kind: str) -> None:
    """Check both orders of the two key types."""
    for other in KINDS:
        for some, others, size in MIXES:
            mixed = [*keys(kind, some, size), *keys(other, others, size)][:255]
            assert set(map(hash, mixed)) == {CODE}
            check_time(mixed)


@pytest.mark.parametrize("wrapped", [lambda key: (0, key), lambda key: ((key,), key), lambda key: frozenset({key})])
def test_decoding_time_of_dict_keys_that_contain_numbers_with_equal_hashes_is_limited(
    wrapped: Callable[[Any], Hashable],
) -> None:
    for one, other in combinations(KINDS, 2):
        check_time([wrapped(key) for key in (*keys(one, 1, 100_000), *keys(other, 1, 100_000))])


def test_frozenset_keys_whose_elements_have_equal_hashes_but_different_types_are_refused() -> None:
    """Use two frozensets of an int and a Decimal, where each int has the hash of the other set's Decimal."""
    large, other = CODE + (P << 1_600_000), CODE + 2 + (P << 1_600_000)
    pair = [frozenset({Decimal(CODE), other}), frozenset({large, Decimal(CODE + 2)})]
    assert hash(pair[0]) == hash(pair[1])
    check_time(pair)
    with pytest.raises(SerializationError, match="more than 1 keys with the same hash that are slow to compare"):
        loads(packed(pair))


@pytest.mark.parametrize(("depth", "count"), [(1, 100), (2, 4)])
def test_decoding_time_of_frozenset_keys_with_equal_hashes_is_limited(depth: int, count: int) -> None:
    """Check frozensets whose comparison takes 128 comparisons per element and nesting level."""

    def frozensets(depth: int, count: int) -> list[Any]:
        if depth == 0:
            return keys("int", count, 10)
        elements = frozensets(depth - 1, 127 + count)
        return [frozenset({*elements[:127], each}) for each in elements[127:]]

    made = frozensets(depth, count)
    assert (len(set(map(hash, made))), len(made), len(made[0])) == (1, count, 128)
    check_time(made)
    with pytest.raises(SerializationError, match="more than 1 keys with the same hash that are slow to compare"):
        loads(packed(made[:2]))


@pytest.mark.parametrize(("equal_hashes", "most"), [(1, 128), (2, 64), (3, 42), (64, 2), (65, 1)])
def test_limit_of_frozenset_keys_depends_on_the_number_of_elements_with_equal_hashes(
    equal_hashes: int, most: int
) -> None:
    common, last = keys("int", 64, 10), keys("int", 64 + 200, 10)[64:]
    made = [frozenset({*common[: equal_hashes - 1], number}) for number in last]
    assert loads(dumps(set(made[:most]))) == set(made[:most])
    with pytest.raises(SerializationError, match=f"more than {most} keys with the same hash"):
        dumps(set(made[: most + 1]))


def test_number_of_datetime_keys_with_equal_hashes_is_limited() -> None:
    when = dt.datetime(2020, 10, 25, 2, 30)
    times = [when.replace(tzinfo=zoneinfo.ZoneInfo(f"Europe/{zone}")) for zone in ZONES]
    assert (len(set(times)), len(set(map(hash, times)))) == (len(ZONES), 1)
    check_time(times)
    with pytest.raises(SerializationError, match="more than 8 keys with the same hash that are slow to compare"):
        loads(packed(times))
    assert loads(packed(times[:8])) == dict.fromkeys(times[:8], 0)


ORDINARY: dict[str, list[Any]] = {
    "bit masks": [1 << bit for bit in range(7000)],
    "moduli": [(1 << 8192) - number for number in range(200)],
    "long numbers": [10**300_000 + number for number in range(3)],
    "fractions": [Fraction(1, 1 << bit) for bit in range(500)],
    "grid": list(itertools.product((-1, -2), repeat=7)),
    "grid of prices": [(Decimal("1.5"), "EUR", *place) for place in itertools.product((-1, -2, 0), repeat=6)],
    "edges": [frozenset({(a, 0), (b, 1)}) for a in (-1, -2, 3) for b in (-1, -2, 3)],
    "pairs of neighbours": [frozenset({(-1, a), (-2, a)}) for a in (-1, -2)],
    "numbers of all kinds": [
        key for n in (-2, -1, 3) for key in (n, Decimal(n) / 7, Fraction(n, 7), n / 7, complex(n, 1), np.float32(n / 7))
    ],
    "prices": [Decimal(cents) / 100 for cents in range(-300, 300)],
    "long decimals": [Decimal(10) ** 2000 + number for number in range(100)],
    "powers": [np.float64(2.0) ** power for power in range(-1000, 1000)],
    "times": [dt.datetime(2020, 10, 25, hour, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")) for hour in range(24)],
    "ids": [number * 0x9E3779B97F4A7C15 % (1 << 64) for number in range(2000)],
}


@pytest.mark.parametrize("name", ORDINARY)
def test_typical_dict_and_set_keys_are_accepted(name: str) -> None:
    keys = ORDINARY[name]
    assert loads(dumps(dict.fromkeys(keys, 0))) == dict.fromkeys(keys, 0)
    assert loads(dumps(set(keys))) == set(keys)
    assert loads(dumps(frozenset(keys))) == frozenset(keys)


def test_keys_of_a_large_int_and_a_decimal_with_equal_hashes_are_refused_by_sender_and_receiver() -> None:
    pair = [*keys("Decimal", 1, 0), *keys("int", 1, 1000)]
    reason = "more than 1 keys with the same hash that are slow to compare; send a list of pairs instead"
    for order in (pair, pair[::-1]):
        with pytest.raises(SerializationError, match=reason):
            dumps(set(order))
        with pytest.raises(SerializationError, match=reason):
            loads(packed(order))
        assert loads(dumps([(key, 0) for key in order])) == [(key, 0) for key in order]


def test_float_keys_count_toward_the_limit_of_slow_keys_with_equal_hashes() -> None:
    """Check that floats and Decimals with equal hashes count together toward the limit of 8 slow keys."""
    mixed = [*keys("float", 7, 0), *keys("Decimal", 2, 0)]
    assert dumps(set(mixed[:8]))
    with pytest.raises(SerializationError, match="more than 8 keys with the same hash"):
        dumps(set(mixed))
