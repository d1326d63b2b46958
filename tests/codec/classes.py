"""User-defined classes whose type the codec cannot preserve."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.IntEnum):
    RED = 1


class Local:
    """A class that the codec does not support."""
