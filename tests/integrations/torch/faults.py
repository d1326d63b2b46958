"""A rank of a torch program with a fault: `python -m tests.integrations.torch.faults CASE RANK FOLDER`.

Prints a line of JSON: the class of the error, its text, its cause, and the seconds from the fault to the error.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import aiocoll.torch

SIZE = 2
CASES: dict[str, Callable[[int, Path], float | None]] = {}


def case(function: Callable[[int, Path], float | None]) -> Callable[[int, Path], float | None]:
    """Register a case under the name of its function."""
    CASES[function.__name__] = function
    return function


@case
def killed(rank: int, folder: Path) -> float | None:
    """Kill rank 1 while both ranks train."""
    model = DistributedDataParallel(torch.nn.Linear(16, 16))
    for step in range(1_000_000):
        if step == 3 and rank == 1:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        model(torch.ones(4, 16)).sum().backward()
    return None


@case
def other_shapes(rank: int, folder: Path) -> None:
    (folder / "killed").write_text(str(time.time()))
    dist.all_reduce(torch.ones(3 + rank))


@case
def timeout_of_a_call(rank: int, folder: Path) -> None:
    group = dist.new_group(timeout=timedelta(seconds=0.3))
    (folder / "killed").write_text(str(time.time()))
    if rank == 0:
        dist.all_reduce(torch.ones(3), group=group)
    else:
        time.sleep(3)


@case
def timeout_that_is_set(rank: int, folder: Path) -> None:
    dist.group.WORLD.set_timeout(timedelta(seconds=0.3))
    (folder / "killed").write_text(str(time.time()))
    if rank == 0:
        dist.recv(torch.ones(3), 1)
    else:
        time.sleep(3)


@case
def timeout_of_a_wait(rank: int, folder: Path) -> None:
    (folder / "killed").write_text(str(time.time()))
    if rank == 1:
        dist.barrier()
        dist.send(torch.ones(3), 0)
        return
    work = dist.irecv(torch.ones(3), 1)
    try:
        work.wait(timedelta(seconds=0.1))
    finally:
        dist.barrier()  # rank 1 sends only after this barrier
        work.wait()


@case
def other_device(rank: int, folder: Path) -> None:
    (folder / "killed").write_text(str(time.time()))
    dist.group.WORLD.allreduce([torch.ones(3, device="meta")])


@case
def own_thread(rank: int, folder: Path) -> None:
    (folder / "killed").write_text(str(time.time()))
    thread = aiocoll.torch.loop_thread()
    thread.start(lambda: dist.all_reduce(torch.ones(3))).result()


@case
def interrupted(rank: int, folder: Path) -> float | None:
    """Return the shortest of three times from SIGINT to `KeyboardInterrupt`."""
    if rank == 1:
        dist.barrier()
        return None
    times = []
    for _ in range(3):
        sent: list[float] = []

        def interrupt(sent: list[float] = sent) -> None:
            time.sleep(0.2)
            sent.append(time.time())
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=interrupt).start()
        try:
            dist.recv(torch.ones(3), 1)
        except KeyboardInterrupt:
            times.append(time.time() - sent[0])
    dist.barrier()
    return min(times)


def main(name: str, rank: int, folder: Path) -> None:
    """Run one fault case, and print its error as a line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "aio", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE, timeout=timedelta(seconds=60)
    )
    found: dict[str, object] = {}
    try:
        found["seconds"] = CASES[name](rank, folder)
    except Exception as error:
        took = time.time() - float((folder / "killed").read_text())
        found = {"error": type(error).__name__, "text": str(error), "seconds": took,
                 "cause": type(error.__cause__).__name__}  # fmt: skip
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
