"""Ranks that learn together: aiocoll run -n 4 examples/allreduce.py

Each rank holds its share of scikit-learn's handwritten digits. What the ranks know in common, mean and variance,
gradients, the number of right answers, comes out of `allreduce`. A table of how long it takes ends the program.
"""

import asyncio
import hashlib
import statistics
import time

import numpy as np
from sklearn.datasets import load_digits

import aiocoll

CLASSES = 10
STEPS = 300
RATE = 0.5
SIZES = [8 << shift for shift in range(0, 22, 3)]  # 8 B to 16 MiB


async def main() -> None:
    async with aiocoll.new_group() as pg:
        await learn(pg)
        await measure(pg)


async def learn(pg: aiocoll.ProcessGroup) -> None:
    images, labels = load_digits(return_X_y=True)
    images, labels = images[pg.rank() :: pg.size()], labels[pg.rank() :: pg.size()]

    total = await pg.allreduce(len(images))
    mean = await pg.allreduce(images.sum(axis=0)) / total
    variance = await pg.allreduce(((images - mean) ** 2).sum(axis=0)) / total
    images = (images - mean) / np.sqrt(variance + 1)  # + 1: some pixels are never inked

    test = np.arange(len(images)) % 5 == 0
    weights = await train(pg, images[~test], labels[~test])
    right = int((np.argmax(images[test] @ weights, axis=1) == labels[test]).sum())
    right, tests = await pg.allreduce(np.array([right, test.sum()]))

    digest = hashlib.sha256(weights.tobytes()).hexdigest()[:8]
    assert set(await pg.allgather_object(digest)) == {digest}, "the ranks have learnt different weights"
    share = f"rank {pg.rank()} of {pg.size()}: {len(images)} of {total} images"
    print(f"{share}; weights {digest}; accuracy {right / tests:.4f}")


async def train(pg: aiocoll.ProcessGroup, images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Multinomial logistic regression by gradient descent; the same weights on every rank, to the bit."""
    total = await pg.allreduce(len(images))
    wanted = np.eye(CLASSES)[labels]
    weights = np.zeros((images.shape[1], CLASSES))
    for _ in range(STEPS):
        scores = np.exp(images @ weights)
        gradient = images.T @ (scores / scores.sum(axis=1, keepdims=True) - wanted)
        weights -= RATE / total * await pg.allreduce(gradient)
    return weights


async def measure(pg: aiocoll.ProcessGroup) -> None:
    if pg.rank() == 0:
        print(f"\nallreduce of float64 on {pg.size()} ranks, median of the slowest rank\n")
        print(f"{'bytes':>10} {'µs':>10} {'algbw GB/s':>12} {'busbw GB/s':>12}")
    for nbytes in SIZES:
        x = np.ones(nbytes // 8)
        times = np.zeros(max(5, min(200, (64 << 20) // nbytes)))
        await pg.allreduce(x)
        for i in range(len(times)):
            x.fill(1)
            start = time.perf_counter()
            await pg.allreduce(x)
            times[i] = time.perf_counter() - start
        assert (x == pg.size()).all()
        await pg.allreduce(times, aiocoll.ReduceOp.MAX)
        if pg.rank() == 0:
            seconds = statistics.median(times)
            algbw = nbytes / seconds / 1e9
            busbw = algbw * 2 * (pg.size() - 1) / pg.size()
            print(f"{nbytes:>10} {seconds * 1e6:>10.1f} {algbw:>12.3f} {busbw:>12.3f}")


if __name__ == "__main__":
    asyncio.run(main())
