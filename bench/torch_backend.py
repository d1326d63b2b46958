"""Backend "aio" of torch.distributed, compared with Gloo: ``python bench/torch_backend.py``, with torch installed.

Two ranks measure `dist.all_reduce` of several sizes, one of them next to a main thread busy in Python, and a step of
DDP with 34 MB of gradients. A round launches both backends once, and every other round begins with the other one. The
rounds run on quiet cores, then with a busy process per core. An iteration takes as long as its slowest rank. A table
has medians over the launches of the median iteration, and of the tenth percentile. A ratio is the median over the
rounds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from busy import busy
from launch import Launch, launch_until_quiet
from machine import machine
from markdown import micros, ranks_of, size_of, table
from torch.nn.parallel import DistributedDataParallel

from aiocoll.machine_load import LoadMeter, usable_cores

BACKENDS = ("aio", "gloo")
RANKS = 2
KIB, MIB = 1 << 10, 1 << 20
#: Number of iterations of `all_reduce`, by array size in bytes.
ITERATIONS = {8: 1000, 64 * KIB: 500, MIB: 200, 16 * MIB: 20, 256 * MIB: 5}
#: Bytes of the tensor that is reduced while the main thread is busy, and number of iterations.
OVERLAPPED, OVERLAPPED_ITERATIONS = 16 * MIB, 20
#: Layers, width and batch of the trained model: 33.6 MB of float32 gradients. DDP reduces buckets of 4 MiB.
LAYERS, WIDTH, BATCH, BUCKET_MIB = 8, 1024, 32, 4
STEPS = 10
#: Number of warm-up iterations before the measured ones.
WARM_UP = 3
#: Maximum number of repetitions of a launch while the load is high, and time limit of a launch in seconds.
REPEATS, LIMIT = 5, 300


#: Seconds of each iteration, by case.
Times = dict[str, list[float]]


# -- a rank


def rank(backend: str, folder: str, rank: int) -> None:
    """Measure all cases on one rank; rank 0 prints the seconds of each iteration as JSON."""
    if backend == "aio":
        import aiocoll.torch  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = {}
    for nbytes, iterations in ITERATIONS.items():
        tensor = torch.full((nbytes // 4,), rank + 1.0)
        dist.all_reduce(tensor)
        assert tensor.eq(sum(range(1, RANKS + 1))).all()
        tensor.zero_()
        found[f"all_reduce {size_of(nbytes)}"] = seconds(iterations, lambda tensor=tensor: dist.all_reduce(tensor))
    large = torch.zeros(OVERLAPPED // 4)
    found[f"all_reduce {size_of(OVERLAPPED)}, main thread busy in Python"] = seconds(
        OVERLAPPED_ITERATIONS, lambda: compute_during(dist.all_reduce(large, async_op=True))
    )
    found["step of DDP, 34 MB"] = seconds(STEPS, training_step(rank))
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def seconds(iterations: int, call: Callable[[], object]) -> list[float]:
    """Return for each iteration the seconds on the slowest rank."""
    taken = []
    for _ in range(WARM_UP + iterations):
        began = time.perf_counter()
        call()
        taken.append(time.perf_counter() - began)
    slowest = torch.tensor(taken[WARM_UP:], dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return list(slowest.tolist())


def compute_during(work: Any) -> None:
    """Keep the main thread busy in Python until the work has ended."""
    total = 0
    while not work.is_completed():
        for number in range(100):
            total += number * number
    work.wait()


def training_step(rank: int) -> Callable[[], None]:
    """Return a function that trains a DDP model for one step."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=BUCKET_MIB)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return step


# -- the launches


def launch(backend: str) -> Launch[Times]:
    """Start the ranks of one launch, and return what rank 0 has printed."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--rank", backend, folder]
        ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(RANKS)]
        try:
            outputs = [each.communicate(timeout=LIMIT)[0] for each in ranks]
        finally:
            for each in ranks:
                each.kill()
                each.wait()
    if any(each.returncode for each in ranks):
        raise RuntimeError(f"{backend}: ranks failed; exit codes {[each.returncode for each in ranks]}")
    return Launch(dict(json.loads(outputs[0])), None, time.monotonic() - start)


def rounds(number: int) -> Iterator[dict[str, Launch[Times]]]:
    """In each round, launch every backend once; yield the launches of the round by backend."""
    meter = LoadMeter()
    for turn in range(number):
        backends = BACKENDS[:: 1 if turn % 2 else -1]
        yield {backend: launch_until_quiet(partial(launch, backend), meter, REPEATS) for backend in backends}


def report(done: list[dict[str, Launch[Times]]]) -> str:
    """Return a table of the times in the finished rounds, and a line about launches under a high load."""
    rows = []
    for case in done[0]["aio"].timings:
        middles, tenths = (
            {each: [how(launches[each].timings[case]) for launches in done] for each in BACKENDS}
            for how in (median, lambda taken: quantiles(taken, n=10)[0])
        )
        ratios = [aio / gloo for aio, gloo in zip(middles["aio"], middles["gloo"], strict=True)]
        cells = [f"{micros(median(middles[each]))} ({micros(median(tenths[each]))})" for each in BACKENDS]
        rows.append([case, *cells, f"{median(ratios):.2f}", f"{min(ratios):.2f}–{max(ratios):.2f}"])
    loads = [each.load for launches in done for each in launches.values()]
    disturbed = sum(load is not None and load.is_high for load in loads)
    head = table(["what", "aio, µs", "gloo, µs", "aio ÷ gloo", "least–most"], rows)
    return f"{head}\n\n{disturbed} of {len(BACKENDS) * len(done)} launches under a high load."


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare backend aio of torch.distributed with Gloo.")
    parser.add_argument("--rounds", type=int, default=10, help="launches of each backend (default: 10)")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.rank[0], args.rank[1], int(args.rank[2]))
        return
    cores = len(usable_cores())
    print(f"# Backend aio next to Gloo, {ranks_of(RANKS)}\n", machine(), sep="\n")
    for name, count in (("Quiet", 0), (f"{cores} busy processes", cores)):
        with busy(count):
            print(f"\n## {name}\n\n{report(list(rounds(args.rounds)))}", flush=True)


if __name__ == "__main__":
    main()
