"""Stepwise decoding of objects, and limits on dict and set keys with equal hashes."""

from __future__ import annotations

import random
import sys
from fractions import Fraction
from typing import Any

import pytest

from aiocoll.codec import dumps, loads, reading
from aiocoll.errors import SerializationError

from ..each import each
from .test_refusals import SAMPLE, same_hash
from .test_roundtrip import VALUES, random_object, same

STEP = 1024


def steps_of(data: bytes | memoryview, **options: Any) -> tuple[int, Any]:
    """Decode `data` in steps; return the number of steps and the decoded object."""
    steps, count = reading(data, **options), 1
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return count, end.value
        count += 1


@each("value", VALUES)
def test_stepwise_decoding_returns_every_kind_of_value_unchanged(value: Any) -> None:
    obj = [value, b"x" * STEP, value, [[value] * 200]]
    data = dumps(obj)
    count, found = steps_of(data)
    assert count == -(-len(data) // STEP)
    assert same(found, obj)


@each("seed", range(50))
def test_stepwise_decoding_returns_nested_objects_unchanged(seed: int) -> None:
    rng = random.Random(seed)
    obj = [random_object(rng, 5) for _ in range(10)]
    data = dumps(obj)
    assert same(steps_of(memoryview(bytearray(data)))[1], obj)


@each("length", [256, 257, 513, 2049])
@each("key", [int, str, lambda n: (n, str(n)), lambda n: 2**70 + n])
def test_stepwise_decoding_returns_long_containers_unchanged(length: int, key: Any) -> None:
    keys = [key(n) for n in range(length)]
    for obj in (dict(zip(keys, range(length), strict=True)), set(keys), frozenset(keys), tuple(keys), keys):
        data = dumps([obj])
        for found in (loads(data), steps_of(data)[1]):
            assert same(found, [obj])
    nested = {k: {k: [k]} for k in keys[:2049]}
    assert same(steps_of(dumps(nested))[1], nested)
    assert list(steps_of(dumps(nested))[1]) == keys[:2049]


def test_short_object_is_decoded_in_one_step() -> None:
    assert steps_of(dumps(b"x" * (STEP - 3))) == (1, b"x" * (STEP - 3))
    assert steps_of(dumps(b"x" * (STEP - 2))) == (2, b"x" * (STEP - 2))


def test_stepwise_decoding_refuses_truncated_or_extended_bytes() -> None:
    data = dumps([b"x" * STEP, SAMPLE])
    for length in range(STEP, len(data)):
        with pytest.raises(SerializationError, match=f"{length} bytes are not a valid object"):
            steps_of(data[:length])
    for more in (b"\xc0", bytes(STEP), bytes(3 * STEP)):
        with pytest.raises(SerializationError, match=f"{len(data) + len(more)} bytes are not a valid object"):
            steps_of(data + more)
    with pytest.raises(SerializationError, match=f"has {len(data)} bytes, but max_bytes is 100"):
        steps_of(data, max_bytes=100)


def test_data_with_a_changed_byte_has_the_same_outcome_in_stepwise_and_direct_decoding() -> None:
    data = dumps([b"x" * STEP, SAMPLE])
    rng = random.Random(3)
    for position in range(STEP, len(data)):
        changed = bytearray(data)
        changed[position] = rng.randrange(256)
        assert outcome(lambda: loads(changed)) == outcome(lambda: steps_of(changed)[1])  # noqa: B023


def outcome(read: Any) -> str:
    try:
        return repr(read())
    except SerializationError:
        return "refused"


def test_stepwise_decoding_of_pickles_requires_permission_on_both_sides() -> None:
    obj = [b"x" * STEP, Ellipsis]
    data = dumps(obj, allow_pickle=True)
    assert steps_of(data, allow_pickle=True)[1] == obj
    with pytest.raises(SerializationError, match="allow_pickle=True on every rank"):
        steps_of(data)


KEYS = {
    "ints": lambda count: same_hash(count, 2**70),
    "tuples": lambda count: [(n,) for n in same_hash(count)],
    "tuples of plain values": lambda count: [tuple(-1 - (n >> bit & 1) for bit in range(8)) for n in range(count)],
    "frozensets": lambda count: [frozenset({n}) for n in same_hash(count)],
    "fractions": lambda count: [Fraction(n) for n in same_hash(count)],
}


@each("kind", KEYS)
def test_number_of_dict_keys_with_equal_hashes_is_limited(kind: str) -> None:
    """Check keys of every type, since a dict compares each key with all earlier keys of equal hash."""
    few, many = KEYS[kind](128), KEYS[kind](129)
    assert len(set(map(hash, many))) == 1
    for make in (dict.fromkeys, set, frozenset):
        for others in (0, 5000):
            rest = [str(n) for n in range(others)]
            data = dumps(make([*few[:64], *rest, *few[64:]]))
            assert loads(data) == steps_of(data)[1] == make([*few, *rest])
            with pytest.raises(SerializationError, match="more than 128 keys with the same hash"):
                dumps(make([*many[:64], *rest, *many[64:]]))


@pytest.mark.parametrize("make", [dict.fromkeys, set, frozenset])
@pytest.mark.parametrize("others", [0, 5000])
def test_decoder_refuses_data_of_a_sender_that_ignores_the_key_limit(
    make: Any, others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KEYS["ints"](129)
    with monkeypatch.context() as uncounted:
        uncounted.setattr("aiocoll.codec.encode.check_keys", lambda keys, hashes: None)
        data = dumps([make([*keys[:64], *map(str, range(others)), *keys[64:]])])
    for read in (loads, steps_of):
        with pytest.raises(SerializationError, match="more than 128 keys with the same hash"):
            read(data)


def test_repeated_list_items_do_not_count_toward_the_key_limit() -> None:
    obj = [(1, 2)] * 5000 + [Fraction(1, 3)] * 500
    assert loads(dumps(obj)) == obj


def test_plain_dict_keys_rarely_have_equal_hashes() -> None:
    """Check that at most 35 plain int and float keys can share a hash, so that the codec need not count them."""
    floats = [2.0**n for n in range(-1074, 1024)]
    ints = [n * sys.hash_info.modulus for n in range(-4, 9)]
    assert max(map([hash(key) for key in {*floats, *ints}].count, map(hash, floats))) <= 35
    assert loads(dumps(dict.fromkeys(floats + ints))) == dict.fromkeys(floats + ints)
