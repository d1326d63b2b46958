"""Keys of dicts and elements of sets: a limit on how long it takes to compare those with one hash.

A dict compares a new key with every earlier key that has its hash. A sender can make any number of keys with one hash,
and keys that Python compares slowly: an int is converted to compare it with a Decimal, in quadratic time.
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

#: Plain values of which few have one hash, or whose hashes a sender cannot predict.
_UNIQUE = frozenset({str, bytes, bool, type(None)})
#: An int of fewer digits is its own hash, but for -1, whose hash is that of -2.
_MODULUS = sys.hash_info.modulus
#: Keys with one hash that are compared at about 0.1 µs for each value in them.
_MAX_ALIKE = 128
#: How much longer it takes to compare numbers of different types, one of them of `_SLOW`, or times with a time zone.
_SLOWER = 16
_SLOW = (Decimal, Fraction, np.generic)
#: Bytes in memory of a number of some 1700 bits, or 360 digits: to convert it takes as long as to compare `_SLOWER`.
_LARGE = 256


class _Profile(NamedTuple):
    """Cost of comparing a key.

    Attributes:
        pattern: its type, with those of its elements: keys with one pattern are compared type by type.
        is_slow: whether it has a value that is slow to compare with other types.
        is_mixed: whether it is slow to compare with a key of the same pattern.
        is_large: whether it has a number that is slow to convert.
        depth: of frozensets in it.
        spread: the largest number of elements with one hash in such a frozenset.
    """

    pattern: Any
    is_slow: bool = False
    is_mixed: bool = False
    is_large: bool = False
    depth: int = 0
    spread: int = 1


class _Alike:
    """Keys with one hash.

    Args:
        first: the first of them.
    """

    def __init__(self, first: Any) -> None:
        self._count = 1
        self._profile = _profile(first)

    def add(self, key: Any) -> None:
        """Add a key, which is compared with those before it.

        Raises:
            RefusedError: that takes too long.
        """
        mine, other = self._profile, _profile(key)
        self._profile = mine = _joined([mine, other], mine.pattern, is_mixed=mine.pattern != other.pattern)
        self._count += 1
        # To compare two frozensets, each element of one is compared with those of the other that have its hash.
        cost: int = mine.spread**mine.depth
        if mine.is_slow and mine.is_mixed:
            cost *= _MAX_ALIKE if mine.is_large else _SLOWER
        most = max(1, _MAX_ALIKE // cost)
        if self._count > most:
            why = "" if cost == 1 else " that are slow to compare"
            raise RefusedError(f"more than {most} keys with one hash{why}: send a list of pairs instead")


def check_keys(keys: Iterable[Any], alike: dict[int, Any]) -> None:
    """Refuse keys that would take too long to compare: too many with the same hash.

    Args:
        keys: of a dict, or the elements of a set.
        alike: by hash, the one key so far, or the `_Alike` of several; these are added.

    Raises:
        RefusedError: so it is.
    """
    for key in keys:
        kind = type(key)
        if kind in _UNIQUE or (kind is int and -_MODULUS < key < _MODULUS):
            continue
        code = hash(key)
        if (earlier := alike.setdefault(code, key)) is key:
            continue
        if type(earlier) is not _Alike:
            earlier = alike[code] = _Alike(earlier)
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
        alike = max(Counter(map(hash, key)).values(), default=1)
        return joined._replace(depth=joined.depth + 1, spread=max(joined.spread, alike))
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
