"""The pool of page-locked host memory for staging: reuse, size limit and release."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.staging import SMALLEST, Staging

from ..fakes.cuda import FakeCuda
from ..internals import Limits


def call_now(call: Callable[[], None]) -> None:
    call()


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as made:
        yield made


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 4097, 40_000, 65_537, 100_000, 131_072, 1_000_001])
def test_page_locked_block_is_slightly_larger_than_requested(cuda: FakeCuda, nbytes: int) -> None:
    block = Staging(cuda, call_now).take(nbytes)
    assert nbytes <= block.nbytes <= max(nbytes * 1.25, nbytes + SMALLEST)
    assert block.nbytes % SMALLEST == 0
    assert block.nbytes == cuda.live()["pinned"]
    assert block.dtype.name == "uint8"


def test_returned_page_locked_blocks_are_reused_in_last_in_first_out_order(cuda: FakeCuda) -> None:
    pool = Staging(cuda, call_now)
    first, second, larger = pool.take(10), pool.take(10), pool.take(10_000)
    for block in (first, second, larger):
        pool.give(block)
    assert pool.kept == first.nbytes + second.nbytes + larger.nbytes
    assert pool.take(100) is second
    assert pool.take(4096) is first
    assert pool.take(9_000) is larger
    assert pool.kept == 0
    assert cuda.calls["pinned"] == 3


def test_oldest_page_locked_blocks_are_freed_beyond_the_limit(cuda: FakeCuda, limits: Limits) -> None:
    limits(max_free_staging_bytes=3 * SMALLEST)
    pool = Staging(cuda, call_now)
    small, large = [pool.take(1) for _ in range(3)], pool.take(2 * SMALLEST)
    while small:
        pool.give(small.pop())
    assert pool.kept == cuda.live()["pinned"] - 2 * SMALLEST == 3 * SMALLEST
    pool.give(large)
    assert pool.kept == cuda.live()["pinned"] == 3 * SMALLEST
    assert pool.take(2 * SMALLEST) is large
    assert pool.kept == SMALLEST
    pool.give(pool.take(4 * SMALLEST))
    assert pool.kept == 0, "a block larger than the limit was kept"
    pool.give(large)
    pool.clear()
    assert pool.kept == 0
    del large
    assert cuda.live()["pinned"] == 0


def test_refused_page_locked_allocation_raises_an_error(cuda: FakeCuda) -> None:
    pool = Staging(cuda, call_now)
    cuda.fail_next("pinned", "out of memory")
    with pytest.raises(DeviceError, match="out of memory"):
        pool.take(1)
    pool.give(pool.take(1))
    assert pool.kept == SMALLEST


def test_page_locked_memory_is_freed_by_the_given_function(cuda: FakeCuda, limits: Limits) -> None:
    """Check that another thread can free memory: freeing waits for the device and would block the event loop."""
    limits(max_free_staging_bytes=SMALLEST)
    calls: list[Callable[[], None]] = []
    pool = Staging(cuda, calls.append)
    blocks = [pool.take(1), pool.take(1)]
    while blocks:
        pool.give(blocks.pop())
    pool.clear()
    assert cuda.live()["pinned"] == 2 * SMALLEST
    for left in (SMALLEST, 0):
        calls.pop(0)()
        assert cuda.live()["pinned"] == left
