"""Wrong arguments from Python code, which the accelerator refuses in order not to access wrong memory."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from aiocoll.native import core
from aiocoll.native.layout import LANE_WORDS, LINE, SLOTS, SMALL_SLOTS

pytestmark = pytest.mark.skipif(core is None, reason="needs the accelerator in C")

SMALL, MIDDLE = 4096, 65536


def aligned_memory(nbytes: int) -> memoryview:
    """Return memory of `nbytes` bytes that starts at the beginning of a cache line."""
    whole = np.zeros(nbytes + LINE, np.uint8)
    start = -whole.ctypes.data % LINE
    return memoryview(whole)[start : start + nbytes]


LINES = -(-LANE_WORDS * 8 // LINE) * LINE
BYTES = LINES + SLOTS * LINE
LAYOUT = (LINES, BYTES, SMALL, BYTES + SMALL_SLOTS * SMALL, MIDDLE, 0)
NBYTES = BYTES + SMALL_SLOTS * SMALL + (SLOTS - SMALL_SLOTS) * MIDDLE


def make_common_lane(layout: tuple[int, ...] = LAYOUT, nbytes: int = NBYTES, **others: Any) -> Any:
    assert core is not None
    posted = others.get("posted", array("Q", bytes(8 * SLOTS)))
    readers = others.get("readers", [()] * SLOTS)
    return core.CommonLane(aligned_memory(nbytes), layout, posted, bytearray(SLOTS), readers, lambda *_: True)


def test_accelerator_accepts_a_lane_that_fits_its_memory() -> None:
    make_common_lane().close()


@pytest.mark.parametrize(
    "layout",
    [
        (*LAYOUT[:1], -LINE, *LAYOUT[2:]),
        (-LINE, *LAYOUT[1:]),
        (LINES + 8, *LAYOUT[1:]),
        (NBYTES - LINE, *LAYOUT[1:]),
        (*LAYOUT[:2], SMALL + 2**40, *LAYOUT[3:]),
        (*LAYOUT[:2], -1, *LAYOUT[3:]),
        (*LAYOUT[:3], NBYTES, *LAYOUT[4:]),
        (*LAYOUT[:3], 2**62, 2**62, 0),
        (*LAYOUT[:4], MIDDLE + 1, 0),
    ],
)
def test_accelerator_refuses_a_layout_that_is_longer_than_its_memory(layout: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        make_common_lane(layout)


def test_accelerator_refuses_a_lane_with_too_short_arrays() -> None:
    with pytest.raises(ValueError, match="one number"):
        make_common_lane(posted=array("Q", bytes(8)))
    with pytest.raises(ValueError, match="one list"):
        make_common_lane(readers=[()])


def test_accelerator_object_refuses_a_second_initialization() -> None:
    lane = make_common_lane()
    with pytest.raises(TypeError, match="already initialized"):
        lane.__init__(
            aligned_memory(NBYTES), LAYOUT, array("Q", bytes(8 * SLOTS)), bytearray(SLOTS), [()] * SLOTS, None
        )


def make_steps(size: int = 2, buffers: int = 2, dtype: str = "f8", **parts: Any) -> Any:
    """Return the schedule steps of an allreduce of two elements; `parts` replaces some fields."""
    assert core is not None
    given = {
        "copies": (),
        "first": ((0, 16, (1,), 0, 0, SMALL_SLOTS),),
        "takes": ((1, 16, 2, 0, 0, SMALL_SLOTS),),
        "fold": 0,
        "own": ((0, 0),),
        "moves": (),
        "last": (),
        "private": False,
    } | parts
    fold, storage = (lambda *_: None), np.dtype(dtype)
    return core.Steps(
        None, "allreduce", "ALLREDUCE", None, 1, storage, buffers, size, tuple(given.values()), np.add, fold
    )


def test_accelerator_accepts_consistent_schedule_steps() -> None:
    make_steps()
    make_steps(dtype=">f8")


@pytest.mark.parametrize(
    "parts",
    [
        {"size": 1},
        {"buffers": 0},
        {"buffers": -1},
        {"dtype": "V0"},
        {"fold": 2},
        {"fold": -2},
        {"copies": ((0, 2),)},
        {"copies": ((-1, 0),)},
        {"first": ((0, -16, (1,), 0, 0, SMALL_SLOTS),)},
        {"first": ((0, 16, (1,), 0, 0, 0),)},
        {"first": ((0, 16, (1,), 0, SLOTS, 1),)},
        {"first": ((0, 16, (1,), 0, 1, SMALL_SLOTS),)},
        {"first": ((0, 16, (1,), 0, SMALL_SLOTS, 5),)},
        {"first": ((0, 16, (), 0, 0, SMALL_SLOTS),)},
        {"first": ((0, 16, (0, 1), 0, 0, SMALL_SLOTS),)},
        {"first": ((0, 16, (2**32 + 1,), 0, 0, SMALL_SLOTS),)},
        {"first": ((7, 16, (1,), 0, 0, SMALL_SLOTS),)},
        {"takes": ((1, -16, 2, 0, 0, SMALL_SLOTS),)},
        {"takes": ((-1, 16, 2, 0, 0, SMALL_SLOTS),)},
        {"takes": ((1, 16, 2, 0, 0, 2**32 - 1),)},
        {"takes": ((1, 16, 2, 0, 0, SMALL_SLOTS), (0, 8, 1, 0, 0, SMALL_SLOTS))},
        {"takes": ((1, 12, 2, 0, 0, SMALL_SLOTS),)},
        {"takes": (), "own": ()},
        {"own": ((2, 0),)},
        {"own": ((0, 9),)},
        {"moves": ((1, 0),)},
        {"moves": ((0, 9),)},
    ],
)
def test_accelerator_refuses_inconsistent_schedule_steps(parts: dict[str, Any]) -> None:
    with pytest.raises(
        ValueError, match=r"does not exist|out of range|inconsistent|not a rank|have a reader|is invalid"
    ):
        make_steps(**parts)


def make_relay(**parts: Any) -> Any:
    """Return the relay steps of a reduction from one rank to its peer; `parts` replaces some fields."""
    assert core is not None
    size = parts.pop("size", 2)
    given = {"chunk": 4, "behind": 1, "puts": (), "takes": ((0, 0, 9),), "sources": ((0, 0, 9),), "copy": ()} | parts
    numbers: Any = (None, "reduce", "REDUCE", None, 1, np.dtype("f8"), 2, size)
    return core.Steps(*numbers, tuple(given.values()), np.add, lambda *_: None)


def test_accelerator_accepts_a_consistent_relay() -> None:
    make_relay()
    make_relay(copy=((0, 0, 5), (1, 4, 9)))
    make_relay(puts=((0, 0, 4), (0, 4, 9)), takes=((0, 4, 9), (0, 0, 4)), sources=((0, 4, 9),))
    make_relay(behind=0, puts=((0, 0, 9),), sources=())


@pytest.mark.parametrize(
    "parts",
    [
        {"size": 1},
        {"chunk": 0},
        {"chunk": -1},
        {"behind": -1},
        {"behind": 2},
        {"behind": 0, "puts": ((0, 0, 4),)},
        {"takes": ((2, 0, 9),)},
        {"takes": ((-1, 0, 9),)},
        {"takes": ((0, -1, 8),)},
        {"takes": ((0, 9, 0),)},
        {"takes": ((0, 0, 2**62),), "sources": ((0, 0, 2**62),)},
        {"sources": ((0, 0, 8),)},
        {"sources": ((0, 0, 9), (0, 0, 9))},
        {"puts": ((0, 0, 9), (0, 0, 9))},
        {"puts": ((0, 0, 4), (0, 4, 8)), "takes": ((0, 0, 9), (0, 0, 9))},
        {"copy": ((0, 0, 5),)},
        {"copy": ((0, 0, 5), (1, 0, 6))},
    ],
)
def test_accelerator_refuses_an_inconsistent_relay(parts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"does not exist|out of range|inconsistent"):
        make_relay(**parts)
