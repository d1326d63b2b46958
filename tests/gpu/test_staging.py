"""Page-locked memory is taken once and used again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from aiocoll.gpu import staging
from aiocoll.gpu.api import DeviceError
from aiocoll.gpu.staging import SMALLEST, Staging
from aiocoll.testing.fake_cuda import FakeCuda


@pytest.fixture
def cuda() -> Iterator[FakeCuda]:
    with FakeCuda() as made:
        yield made


@pytest.mark.parametrize(
    ("nbytes", "size"),
    [(0, SMALLEST), (1, SMALLEST), (SMALLEST, SMALLEST), (SMALLEST + 1, 2 * SMALLEST), (100_000, 131_072)],
)
def test_blocks_are_powers_of_two(cuda: FakeCuda, nbytes: int, size: int) -> None:
    pool = Staging(cuda)
    block = pool.take(nbytes)
    assert block.nbytes == size == cuda.live()["pinned"]
    assert block.dtype.name == "uint8"


def test_what_comes_back_is_used_again_the_last_first(cuda: FakeCuda) -> None:
    pool = Staging(cuda)
    first, second, larger = pool.take(10), pool.take(10), pool.take(10_000)
    for block in (first, second, larger):
        pool.give(block)
    assert pool.kept == first.nbytes + second.nbytes + larger.nbytes
    assert pool.take(100) is second
    assert pool.take(4096) is first
    assert pool.take(16_000) is larger
    assert pool.kept == 0
    assert cuda.calls["pinned"] == 3


def test_no_more_is_kept_than_may_be(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "KEPT", 3 * SMALLEST)
    pool = Staging(cuda)
    blocks = [pool.take(1) for _ in range(5)]
    while blocks:
        pool.give(blocks.pop())
    assert pool.kept == cuda.live()["pinned"] == 3 * SMALLEST
    pool.clear()
    assert pool.kept == cuda.live()["pinned"] == 0


def test_what_cuda_refuses_is_told(cuda: FakeCuda) -> None:
    pool = Staging(cuda)
    cuda.fail_next("pinned", "out of memory")
    with pytest.raises(DeviceError, match="out of memory"):
        pool.take(1)
    pool.give(pool.take(1))
    assert pool.kept == SMALLEST
