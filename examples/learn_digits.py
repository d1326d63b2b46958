"""Ranks that learn, lose one of them and continue: aiocoll run -n 2 --max-restarts 1 examples/learn_digits.py

The ranks train a classifier of handwritten digits, each on its share of the images. Half-way through the training, the
last rank kills its own process. The other ranks report the number of the lost rank. The launcher starts a replacement
process, which receives the weights. At the end of the training all ranks have the same weights, to the last bit. The
program then measures three sizes of `allreduce`, and prints them with the load of the machine.

The images of the digits are from the UCI Machine Learning Repository's "Optical Recognition of Handwritten Digits" (E.
Alpaydin and C. Kaynak, 1998, CC BY 4.0).
"""

import hashlib
import os
import signal
import time
from datetime import datetime
from pathlib import Path

import numpy as np
import uvloop

import aiocoll
from aiocoll.machine_load import LoadMeter, usable_cores

CLASSES = 10
STEPS = 300
KILL_AT = 150  # the step before which the last rank kills itself
RATE = 0.5
SIZES = {8: 10_000, 64 << 10: 3_000, 16 << 20: 100}  # bytes: calls


async def main() -> None:
    state = {"step": 0, "weights": np.zeros((65, CLASSES))}
    images, labels = load_digits()
    test = np.arange(len(images)) % 5 == 0
    async for pg in aiocoll.elastic(state=state):
        report(pg, f"{pg.size()} ranks learn from {(~test).sum()} images; next step: {state['step']}")
        try:
            await train(pg, images[~test], labels[~test], state)
            await check_weights(pg, state["weights"])
        except aiocoll.PeerLostError as error:  # the loop continues with the next group
            report(pg, str(error))
            continue
        right = (np.argmax(images[test] @ state["weights"], axis=1) == labels[test]).mean()
        report(pg, f"all ranks have the same weights; accuracy on {test.sum()} other images: {right:.3f}")
        await measure(pg)


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the images, of shape (1797, 65) with a last column of ones, and their labels."""
    with np.load(Path(__file__).with_name("digits.npz")) as data:
        images, labels = data["images"] / 16, data["labels"]
    return np.hstack([images, np.ones((len(images), 1))]), labels


async def train(pg: aiocoll.ProcessGroup, images: np.ndarray, labels: np.ndarray, state: dict) -> None:
    """Do the remaining gradient descent steps of multinomial logistic regression."""
    mine = slice(pg.rank(), None, pg.size())
    expected = np.eye(CLASSES)[labels[mine]]
    while state["step"] < STEPS:
        if state["step"] == KILL_AT and pg.rank() == pg.size() - 1 > 0 and os.environ["AIOCOLL_RESTART_COUNT"] == "0":
            log(f"rank {pg.rank()} runs kill -9 on its own process")
            os.kill(os.getpid(), signal.SIGKILL)
        scores = np.exp(images[mine] @ state["weights"])
        gradient = images[mine].T @ (scores / scores.sum(axis=1, keepdims=True) - expected)
        state["weights"] -= RATE / len(images) * await pg.allreduce(gradient)
        state["step"] += 1


async def check_weights(pg: aiocoll.ProcessGroup, weights: np.ndarray) -> None:
    digests = await pg.allgather_object(hashlib.sha256(weights.tobytes()).hexdigest())
    assert len(set(digests)) == 1, f"the ranks have different weights: {digests}"


async def measure(pg: aiocoll.ProcessGroup) -> None:
    report(pg, f"allreduce of {pg.size()} ranks on {len(usable_cores())} cores:")
    meter = LoadMeter(pid=os.getppid())  # the ranks are children of the launcher
    for nbytes, calls in SIZES.items():
        x = np.zeros(nbytes // 8)
        times = np.empty(calls)
        await pg.allreduce(x)
        for i in range(calls):
            start = time.perf_counter()
            await pg.allreduce(x)
            times[i] = 1e6 * (time.perf_counter() - start)
        median, fastest = np.median(times), np.quantile(times, 0.1)
        report(pg, f"{nbytes:>10,} B   median {median:>8,.1f} µs   fastest tenth {fastest:>8,.1f} µs")
    load = meter.lap()
    report(pg, f"load: {load}{'; do not trust the times' if load.is_high else ''}")


def report(pg: aiocoll.ProcessGroup, text: str) -> None:
    if pg.rank() == 0:
        log(text)


def log(text: str) -> None:
    print(f"{datetime.now():%M:%S.%f}"[:-3], text, flush=True)  # minutes, seconds and milliseconds


if __name__ == "__main__":
    uvloop.run(main())
