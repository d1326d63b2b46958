"""A recorder of the arrays that calls examine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiocoll.elements.buffers import view


@contextmanager
def recorded_views() -> Iterator[list[Any]]:
    """Yield a list that records each array that a call examines; calls with a cached plan examine none."""
    viewed: list[Any] = []

    def record(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is view.__code__:
            viewed.append(frame.f_locals["obj"])

    before = sys.getprofile()
    sys.setprofile(record)
    try:
        yield viewed
    finally:
        sys.setprofile(before)
