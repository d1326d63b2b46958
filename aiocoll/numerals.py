"""Conversion of numbers from arguments, environment variables and command-line options.

Use the result of `to_int` and `to_float`, not the argument. A NumPy integer wraps around, a 0-d array is not hashable,
and neither can be sent as data.

For text, Python's ``int`` and ``float`` accept too much: ``int("1_0")`` is 10, and blanks and digits of other scripts
are accepted, too. A variable set by mistake would be read as another number.
"""

from __future__ import annotations

import math
import operator
import re
from numbers import Real
from typing import Any

__all__ = ["parse_float", "parse_int", "to_float", "to_int"]

#: An integer of up to 18 digits fits into 64 bits. Ranks, ports and descriptors need fewer digits.
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_DECIMAL = re.compile(r"-?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?|-?inf|nan")


def parse_int(text: str) -> int:
    """Parse an integer of ASCII digits with an optional minus sign.

    Raises:
        ValueError: the text has another form. The message names no variable.
    """
    if _INTEGER.fullmatch(text) is None:
        raise ValueError(f"{text!r} must be a whole number")
    return int(text)


def parse_float(text: str) -> float:
    """Parse a number such as ``12``, ``1.5``, ``1e-3`` or ``inf``.

    Raises:
        ValueError: the text has another form. The message names no variable.
    """
    if _DECIMAL.fullmatch(text) is None:
        raise ValueError(f"{text!r} must be a number")
    return float(text)


def to_int(value: Any, name: str, what: str = "an int") -> int:
    """Convert an argument to an int; accept ints, NumPy integers, and other objects with ``__index__``.

    Raises:
        TypeError: the argument is not an integer, or is a bool. The message states that `name` must be `what`.
    """
    if not isinstance(value, bool):
        try:
            return int(operator.index(value))
        except TypeError:
            pass
    raise TypeError(f"{name} must be {what}, not {type(value).__name__}")


def to_float(value: Any, name: str, what: str = "a number") -> float:
    """Convert an argument to a float; accept real Python or NumPy numbers, and arrays without dimensions.

    Raises:
        TypeError: the argument is not a real number, or is a bool. The message states that `name` must be `what`.
    """
    number: Any = value.item() if getattr(value, "shape", None) == () else value
    is_real = isinstance(number, Real) and not isinstance(number, bool)
    if not is_real:
        raise TypeError(f"{name} must be {what}, not {type(value).__name__}")
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf
