"""A limit on the time to compare dict keys and set elements that have the same hash.

A dict compares a new key with every earlier key of the same hash. A malicious sender can make any number of keys with
the same hash. It can also make keys that Python compares slowly: comparing an int with a Decimal converts the int, in
quadratic time.
"""

from __future__ import annotations

import datetime as dt
import sys
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from aiocoll.codec.records import RefusedError

__all__ = ["check_keys"]

#: Types that need no check: few values have equal hashes, or Python randomizes the hash.
_UNIQUE = frozenset({str, bytes, bool, type(None)})
#: An int below this number is its own hash, except -1, which has the hash of -2.
_MODULUS = sys.hash_info.modulus
#: Maximum number of keys with the same hash, if their values are fast to compare (about 0.1 µs per value).
_MAX_SAME_HASH = 128
#: Relative cost of a slow comparison: a number of a `_SLOW` type with a number of another type, or of two `time`
#: values with time zones.
_SLOWER = 16
_SLOW = (Decimal, Fraction, np.generic)
#: Size in bytes from which a number is slow to convert: an int of about 1700 bits, a Decimal of about 360 digits.
#: Converting such a number to another type takes as long as `_SLOWER` comparisons.
_LARGE = 256


class _Profile(NamedTuple):
    """The estimated cost of comparing one key with another.

    Attributes:
        pattern: the type of the key and the types of its elements. Keys with equal patterns compare values of the same
            types.
        is_slow: whether the key has a value that is slow to compare with values of other types.
        is_mixed: whether the key is slow to compare even with a key of the same pattern.
        is_large: whether the key has a number that is slow to convert.
        depth: nesting depth of frozensets in the key.
        spread: the largest number of elements with the same hash in such a frozenset.
    """

    pattern: Any
    is_slow: bool = False
    is_mixed: bool = False
    is_large: bool = False
    depth: int = 0
    spread: int = 1


class _SameHash:
    """Keys that have the same hash.

    Args:
        first: the first key.
    """

    def __init__(self, first: Any) -> None:
        self._count = 1
        self._profile = _profile(first)

    def add(self, key: Any) -> None:
        """Add a key; raise an error if a dict would need too long to compare the keys with this hash.

        Raises:
            RefusedError: the comparisons would take too long.
        """
        mine, other = self._profile, _profile(key)
        self._profile = mine = _joined([mine, other], mine.pattern, is_mixed=mine.pattern != other.pattern)
        self._count += 1
        # Comparing two frozensets means comparing each element with all elements of the same hash in the other
        # frozenset.
        cost: int = mine.spread**mine.depth
        if mine.is_slow and mine.is_mixed:
            cost *= _MAX_SAME_HASH if mine.is_large else _SLOWER
        most = max(1, _MAX_SAME_HASH // cost)
        if self._count > most:
            why = "" if cost == 1 else " that are slow to compare"
            raise RefusedError(f"more than {most} keys with the same hash{why}; send a list of pairs instead")


def check_keys(keys: Iterable[Any], by_hash: dict[int, Any]) -> None:
    """Raise an error if comparing the keys that have the same hash would take too long.

    Args:
        keys: the keys of a dict, or the elements of a set.
        by_hash: the earlier keys, by hash: one key, or the `_SameHash` of several keys. This function adds `keys`.

    Raises:
        RefusedError: comparing the keys would take too long.
    """
    for key in keys:
        kind = type(key)
        if kind in _UNIQUE or (kind is int and -_MODULUS < key < _MODULUS):
            continue
        code = hash(key)
        if (earlier := by_hash.setdefault(code, key)) is key:
            continue
        if type(earlier) is not _SameHash:
            earlier = by_hash[code] = _SameHash(earlier)
        earlier.add(key)


def _profile(key: Any) -> _Profile:
    kind = type(key)
    if kind is tuple or kind is slice:
        parts = [_profile(each) for each in (key if kind is tuple else (key.start, key.stop, key.step))]
        return _joined(parts, (kind, *(part.pattern for part in parts)))
    if kind is frozenset:
        parts = [_profile(each) for each in key]
        patterns = frozenset(part.pattern for part in parts)
        joined = _joined(parts, (kind, patterns), is_mixed=len(patterns) > 1)
        largest = max(Counter(map(hash, key)).values(), default=1)
        return joined._replace(depth=joined.depth + 1, spread=max(joined.spread, largest))
    if kind is dt.datetime or kind is dt.time:
        return _Profile((kind, key.tzinfo is None), is_slow=key.tzinfo is not None, is_mixed=key.tzinfo is not None)
    numbers = (key.numerator, key.denominator) if kind is Fraction else (key,)
    is_large = any(type(each) in (int, Decimal) and each.__sizeof__() > _LARGE for each in numbers)
    return _Profile(kind, is_slow=issubclass(kind, _SLOW), is_large=is_large)


def _joined(parts: list[_Profile], pattern: Any, *, is_mixed: bool = False) -> _Profile:
    return _Profile(
        pattern,
        is_slow=any(part.is_slow for part in parts),
        is_mixed=is_mixed or any(part.is_mixed for part in parts),
        is_large=any(part.is_large for part in parts),
        depth=max((part.depth for part in parts), default=0),
        spread=max((part.spread for part in parts), default=1),
    )
