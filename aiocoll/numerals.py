"""Parsing of numbers that a user writes in the environment or on a command line.

Python's ``int`` and ``float`` accept more: ``int("1_0")`` is 10, and blanks and the digits of other scripts are
accepted too. A variable that was set by mistake would be read as another number.
"""

from __future__ import annotations

import re

__all__ = ["parse_float", "parse_int"]

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
