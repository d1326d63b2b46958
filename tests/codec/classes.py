"""Classes of users whose objects the codec does not keep."""

from __future__ import annotations

import enum
from typing import NamedTuple


class Point(NamedTuple):
    x: int
    y: int


class Colour(enum.IntEnum):
    RED = 1


class Local:
    """An object that the codec does not support."""
