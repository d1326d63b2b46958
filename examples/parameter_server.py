"""A parameter server and its workers: aiocoll run -n 4 examples/parameter_server.py

Rank 0 holds the weights of a classifier of handwritten digits, and applies every gradient when the gradient arrives.
The other ranks are workers, each with its own share of the images. A worker sends a gradient and receives the current
weights. Workers come and leave at any time, and no worker waits for another.
"""

import asyncio
from pathlib import Path

import numpy as np

import aiocoll

CLASSES = 10
BATCH = 64
RATE = 0.2
STEPS = 250  # steps of the first worker; the second makes twice as many, the third three times as many
PAUSE = 0.2  # seconds between the first steps of two workers
SERVER = 0
WEIGHTS = 1  # tag of the server's messages


async def main() -> None:
    async with aiocoll.new_group() as pg:
        if pg.size() < 2:
            raise SystemExit("no worker ranks; start at least 2 ranks: aiocoll run -n 4 examples/parameter_server.py")
        with np.load(Path(__file__).with_name("digits.npz")) as data:
            images, labels = data["images"] / 16, data["labels"]
        images = np.hstack([images, np.ones((len(images), 1))])  # the ones learn the frequency of each digit
        test = np.arange(len(images)) % 5 == 0
        if pg.rank() == SERVER:
            await serve(pg, images[test], labels[test])
        else:
            share = np.flatnonzero(~test)[pg.rank() - 1 :: pg.size() - 1]
            await work(pg, images[share], labels[share])


async def serve(pg: aiocoll.ProcessGroup, images: np.ndarray, labels: np.ndarray) -> None:
    """Answer each worker's gradient with the updated weights, until all workers have left."""
    weights = np.zeros((images.shape[1], CLASSES))
    gradients, left = 0, 0
    async for worker, message in pg.incoming():
        if isinstance(message, np.ndarray):
            gradients += 1
            weights -= RATE * message.reshape(weights.shape)
        else:
            loss, accuracy = score(weights, images, labels)
            print(f"worker {worker} {message} at gradient {gradients}: loss {loss:.3f}, accuracy {accuracy:.3f}")
            if message == "leaves":
                left += 1
                if left == pg.size() - 1:
                    return
                continue
        await pg.send(weights, worker, WEIGHTS)  # `weights` may change as soon as the send is done


async def work(pg: aiocoll.ProcessGroup, images: np.ndarray, labels: np.ndarray) -> None:
    """Send gradients of small batches to the server, each computed with the last received weights."""
    await asyncio.sleep(PAUSE * (pg.rank() - 1))
    random = np.random.default_rng(pg.rank())
    weights = np.empty((images.shape[1], CLASSES))
    steps = STEPS * pg.rank()
    await pg.send_object("joins", SERVER)
    await pg.recv(weights, SERVER, WEIGHTS)
    for _ in range(steps):
        batch = random.integers(len(images), size=BATCH)
        error = chances(weights, images[batch]) - np.eye(CLASSES)[labels[batch]]
        await pg.send(images[batch].T @ error / BATCH, SERVER)
        await pg.recv(weights, SERVER, WEIGHTS)
    await pg.send_object("leaves", SERVER)
    print(f"worker {pg.rank()}: {steps} gradients of {len(images)} images")


def chances(weights: np.ndarray, images: np.ndarray) -> np.ndarray:
    scores = images @ weights
    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
    return scores / scores.sum(axis=1, keepdims=True)


def score(weights: np.ndarray, images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    found = chances(weights, images)
    loss = -np.log(found[np.arange(len(labels)), labels]).mean()
    return float(loss), float((found.argmax(axis=1) == labels).mean())


if __name__ == "__main__":
    asyncio.run(main())
