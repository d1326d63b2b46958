"""How long an awaited allreduce takes, beside Gloo: `make bench`, or python bench/allreduce.py [--quick] [-n 2 4].

What is compared: `await pg.allreduce(x)` over TCP on loopback and over unix sockets, on uvloop, against torch's
`dist.all_reduce(x)` over Gloo called as it is fastest, blocking (awaiting it through a future costs more). All of them
reduce the same float32 NumPy arrays in place.

How: a launch starts real processes, one per rank, and measures every size; launches of the peers alternate, so that
whatever else the machine does hits all alike. No barrier between iterations. The time of an iteration is that of its
slowest rank; the median of a launch is compared with the median of the Gloo launch beside it, and the median of those
ratios is reported. Every result is checked.

`--loop-lag` measures instead how long one callback holds the event loop while 256 MiB are reduced.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import secrets
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from report import Launch, heading, lag_table, machine, table

HERE = Path(__file__).parent
KIB, MIB = 1 << 10, 1 << 20
PEERS = ("gloo", "tcp", "unix")
#: Bytes, and iterations of one launch: enough for a p99 where they are cheap; about half a second of Gloo where not.
FULL = {
    4: 1000,
    64: 1000,
    KIB: 1000,
    4 * KIB: 1000,
    16 * KIB: 1000,
    64 * KIB: 500,
    256 * KIB: 200,
    MIB: 200,
    4 * MIB: 50,
    16 * MIB: 25,
    64 * MIB: 10,
    256 * MIB: 5,
}
QUICK = {4: 200, 64 * KIB: 200, MIB: 50, 16 * MIB: 10}
#: Launches of each peer; the contract's numbers are medians over at least 5.
LAUNCHES, QUICK_LAUNCHES = 5, 2
#: Bytes and iterations of `--loop-lag`.
LAG, LAG_ITERATIONS, QUICK_LAG_ITERATIONS = 256 * MIB, 10, 3
#: Seconds after which a launch has hung; the longest takes a tenth of it.
HUNG = 300


def main() -> None:
    parser = argparse.ArgumentParser(description="Time allreduce against Gloo.")
    parser.add_argument("-n", type=int, nargs="+", default=[2, 4], metavar="RANKS", help="world sizes (default: 2 4)")
    parser.add_argument("--quick", action="store_true", help="a few sizes and launches, under a minute")
    parser.add_argument("--loop-lag", action="store_true", help="how long callbacks hold the loop, without Gloo")
    args = parser.parse_args()
    if min(args.n) < 2:
        parser.error("-n: at least 2 ranks")
    if not args.loop_lag and importlib.util.find_spec("torch") is None:
        parser.error("torch is not installed, and Gloo comes with it: use `make bench`")
    print(heading(args.loop_lag), machine(), "", sep="\n", flush=True)
    for world_size in args.n:
        measure = loop_lag if args.loop_lag else against_gloo
        print(measure(world_size, args.quick), "", sep="\n", flush=True)
    print(f"Load at the end: {' '.join(Path('/proc/loadavg').read_text().split()[:3])}")


def against_gloo(world_size: int, quick: bool) -> str:
    """Return a table of all peers at all sizes."""
    sizes = QUICK if quick else FULL
    launches: dict[str, list[Launch]] = {peer: [] for peer in PEERS}
    for number in range(QUICK_LAUNCHES if quick else LAUNCHES):
        for peer in PEERS:
            start = time.perf_counter()
            ranks = launch("peers.py", world_size, {"peer": peer, "sizes": list(sizes.items())})
            launches[peer].append(Launch.of(ranks))
            took = time.perf_counter() - start
            print(f"{world_size} ranks, launch {number + 1}, {peer}: {took:.1f} s", file=sys.stderr, flush=True)
    return table(world_size, list(sizes), launches)


def loop_lag(world_size: int, quick: bool) -> str:
    """Return a table of callbacks, for both loops over both transports."""
    iterations = QUICK_LAG_ITERATIONS if quick else LAG_ITERATIONS
    found = {}
    for loop in ("asyncio", "uvloop"):
        for transport in ("tcp", "unix"):
            config = {"loop": loop, "transport": transport, "nbytes": LAG, "iterations": iterations}
            found[loop, transport] = launch("loop_lag.py", world_size, config)
    return lag_table(world_size, LAG, found)


def launch(script: str, world_size: int, config: dict[str, Any]) -> list[dict[str, Any]]:
    """Run `script` once per rank, at the same time; return what each prints, as JSON."""
    config = config | {"world_size": world_size, "job_key": secrets.token_hex(16)}
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            subprocess.Popen(
                [sys.executable, str(HERE / script), json.dumps(config | {"rank": rank})],
                stdout=subprocess.PIPE,
                cwd=folder,  # where the ranks meet
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            outputs = [process.communicate(timeout=HUNG)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode]
    if failed:
        sys.exit(f"{script}: rank(s) {failed} failed; their messages are above")
    return [json.loads(output) for output in outputs]


if __name__ == "__main__":
    main()
