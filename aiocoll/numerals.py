"""Numbers that a user gives: as arguments, which may be NumPy scalars, in the environment or on a command line.

Use what `to_int` and `to_float` return, not the argument: a NumPy integer wraps, a 0-d array is no key of a dict, and
neither can be sent as data.

Of text, Python's ``int`` and ``float`` accept more: ``int("1_0")`` is 10, and blanks and the digits of other scripts
are accepted too. A variable that was set by mistake would be read as another number.
"""

from __future__ import annotations

import math
import operator
import re
from numbers import Real
from typing import Any

__all__ = ["parse_float", "parse_int", "to_float", "to_int"]

#: 18 digits fit into 64 bits; no rank, port or descriptor number needs as many.
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|-?inf|nan")


def parse_int(text: str) -> int:
    """Return the integer that `text` is: ASCII digits, with a minus before them if it is negative.

    Raises:
        ValueError: it is anything else; the message names no variable.
    """
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"{text!r} must be a whole number")
    return int(text)


def parse_float(text: str) -> float:
    """Return the number that `text` is: as in ``12``, ``1.5``, ``1e-3`` or ``inf``.

    Raises:
        ValueError: it is anything else; the message names no variable.
    """
    if _DECIMAL.fullmatch(text) is None:
        raise ValueError(f"{text!r} must be a number")
    return float(text)


def to_int(value: Any, name: str, what: str = "an int") -> int:
    """Return the integer that an argument is: an int, a NumPy integer, or another object with ``__index__``.

    Raises:
        TypeError: it is none, or a bool; the message says that `name` must be `what`.
    """
    if not isinstance(value, bool):
        try:
            return int(operator.index(value))
        except TypeError:
            pass
    raise TypeError(f"{name} must be {what}, not {type(value).__name__}")


def to_float(value: Any, name: str, what: str = "a number") -> float:
    """Return the real number that an argument is: a Python or NumPy number, or an array of no dimensions.

    Raises:
        TypeError: it is none, or a bool; the message says that `name` must be `what`.
    """
    number: Any = value.item() if getattr(value, "shape", None) == () else value
    is_real = isinstance(number, Real) and not isinstance(number, bool)
    if not is_real:
        raise TypeError(f"{name} must be {what}, not {type(value).__name__}")
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
