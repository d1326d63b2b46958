"""Speed of reducing arrays in aiocoll, compared with NumPy's plain additions: ``python bench/kernels.py``.

The plain way is a chain of ``np.add``: NumPy's own on float16, that of ml_dtypes on bfloat16 and float8. It rounds
after each addition, where aiocoll rounds once. Both are timed in turn. The best of many rounds counts, so that other
work on the machine has little effect.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence

import numpy as np

from aiocoll.elements.dtypes import array_dtype, by_name
from aiocoll.elements.ops import ReduceOp, kernel

KIB = 1024
DTYPES = ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "int32"]
SIZES = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, 1024 * KIB]


def seconds(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Return the minimum seconds of each function, measured in turn."""
    repeats = []
    for call in calls:
        call()
        start = time.perf_counter()
        call()
        repeats.append(max(1, int(5e-4 / (time.perf_counter() - start))))
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for place, (call, repeat) in enumerate(zip(calls, repeats, strict=True)):
            start = time.perf_counter()
            for _ in range(repeat):
                call()
            best[place] = min(best[place], (time.perf_counter() - start) / repeat)
    return best


def plain(inputs: Sequence[np.ndarray], out: np.ndarray) -> None:
    np.add(inputs[0], inputs[1], out=out)
    for x in inputs[2:]:
        np.add(out, x, out=out)


def row(name: str, op: str, inputs: int, nbytes: int, rounds: int) -> str:
    """Return the table row of one case, with nanoseconds per element of the result."""
    dtype = by_name(name)
    shown, count = array_dtype(dtype), nbytes // dtype.itemsize
    rng = np.random.default_rng(1)
    data = [(8 * rng.standard_normal(count)).astype(np.float32).astype(shown) for _ in range(inputs)]
    stored, out = [x.view(dtype.storage) for x in data], np.empty(count, dtype.storage)
    plain_out = np.empty(count, shown)
    made = kernel(getattr(ReduceOp, op), dtype, inputs)
    calls = [lambda: made.fold(stored, out), lambda: plain(data, plain_out)]
    own, other = (1e9 * t / count for t in seconds(calls, rounds))
    return f"| {name} | {op} | {inputs} | {nbytes // KIB} | {own:.2f} | {other:.2f} | {other / own:.1f} |"


def small(name: str, op: str, inputs: int, count: int, rounds: int) -> str:
    """Return the table row that compares reducing few elements with one bare addition, in nanoseconds."""
    dtype = by_name(name)
    data, out = [np.ones(count, dtype.storage) for _ in range(inputs)], np.empty(count, dtype.storage)
    made = kernel(getattr(ReduceOp, op), dtype, inputs)
    calls = [lambda: made.fold(data, out), lambda: np.add(data[0], data[1], out=out)]
    own, bare = (1e9 * t for t in seconds(calls, rounds))
    return f"| {name} | {op} | {inputs} | {count} | {own:.0f} | {bare:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", nargs="+", default=DTYPES, help="element types")
    parser.add_argument("--inputs", nargs="+", type=int, default=[2, 4, 8], help="number of arrays to add up")
    parser.add_argument("--rounds", type=int, default=100, help="timings of each case; the best counts")
    args = parser.parse_args()
    print(f"NumPy {np.__version__}, Python {platform.python_version()}, {platform.machine()}\n")
    print("| dtype | op | inputs | KiB | ns/element | plain np.add | times faster |\n|---|---|--:|--:|--:|--:|--:|")
    for name in args.dtypes:
        for nbytes in SIZES:
            for inputs in args.inputs:
                print(row(name, "SUM", inputs, nbytes, args.rounds), flush=True)
        print(row(name, "AVG", 2, SIZES[-1], args.rounds), flush=True)
    print("\n| dtype | op | inputs | elements | ns | one np.add |\n|---|---|--:|--:|--:|--:|")
    for name in ("float32", "float64", "int32", "float16", "bfloat16"):
        for op, inputs in (("SUM", 2), ("AVG", 2), ("SUM", 3)):
            if name in ("float32", "float64", "int32") or op == "SUM":
                print(small(name, op, inputs, 4, args.rounds), flush=True)


if __name__ == "__main__":
    main()
