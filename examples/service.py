"""A web service on several ranks that count together: aiocoll run -n 2 examples/service.py

Each rank serves HTTP on a port of its own. POST /count/3 adds one to bucket 3, on any rank. Meanwhile, the ranks add up
the new counts in one allreduce after another, so GET /stats on any rank returns the counts of all ranks.

If an HTTP client disconnects, its request stops waiting for the collective, and the collective continues. If a rank
dies, only its counts since the last allreduce are lost. The other ranks continue to serve requests, and admit a
replacement. `aiocoll run -n 2 --max-restarts 9 examples/service.py` starts the replacement. Your own supervisor passes
--join and --port to the replacement.
"""

import argparse
import asyncio
import contextlib
import os
import signal

import numpy as np
from aiohttp import web

import aiocoll

PORT = 8400  # of the first rank; the others follow
BUCKETS = 8
PACE = 0.05  # seconds between two rounds: how old an answer may be


class Counter:
    """The total counts, which all ranks know, and this rank's new counts."""

    def __init__(self) -> None:
        self.total = np.zeros(BUCKETS, np.int64)
        self.fresh = np.zeros(BUCKETS, np.int64)
        self.sent = np.zeros(BUCKETS, np.int64)  # in the current round
        self.rounds = 0
        self.gone = 0  # clients that disconnected before the answer
        self.stopping = False
        self.counted = asyncio.Event()  # set after the first round

    async def run(self, join: bool) -> None:
        # With wait=0, the remaining ranks continue at once. A process that replaces a lost one may join later.
        async for self.pg in aiocoll.elastic(wait=0, join=join):
            try:
                await self.agree()
                while not await self.add_up():
                    if self.pg.rank() == 0:  # the other ranks wait for rank 0 in the allreduce
                        await asyncio.sleep(PACE)
            except aiocoll.GroupError as error:
                print(f"continues with another group: {error}", flush=True)

    async def agree(self) -> None:
        """Adopt the latest total counts of any rank, because some ranks may have missed rounds."""
        *total, rounds = await self.pg.allreduce(np.append(self.total, self.rounds), aiocoll.ReduceOp.MAX)
        if rounds == self.rounds:  # the last round has failed on all ranks
            self.fresh += self.sent
        self.sent = np.zeros(BUCKETS, np.int64)
        self.total, self.rounds = np.array(total), rounds

    async def add_up(self) -> bool:
        """Add up the new counts of all ranks in a round; return whether one of the ranks wants to stop."""
        self.sent, self.fresh = self.fresh, np.zeros(BUCKETS, np.int64)
        self.round = self.pg.allreduce(np.append(self.sent, self.stopping))
        *counts, stopping = await self.round
        self.total += counts
        self.rounds += 1
        self.sent = np.zeros(BUCKETS, np.int64)
        self.counted.set()
        return stopping > 0

    async def count(self, request: web.Request) -> web.Response:
        bucket = int(request.match_info["bucket"])
        if bucket >= BUCKETS:
            raise web.HTTPNotFound(text=f"no such bucket; use 0 to {BUCKETS - 1}")
        self.fresh[bucket] += 1
        return web.Response(status=204)

    async def stats(self, request: web.Request) -> web.Response:
        try:
            with contextlib.suppress(aiocoll.GroupError):  # if the round fails, answer with the last known counts
                await self.round
        except asyncio.CancelledError:  # of this wait; the collective continues
            self.gone += 1
            raise
        answer = {"ranks": self.pg.size(), "rounds": int(self.rounds), "total": self.total.tolist(), "gone": self.gone}
        return web.json_response(answer)


async def main() -> None:
    parser = argparse.ArgumentParser(description="a web service on several ranks that count together")
    parser.add_argument("--port", type=int, help=f"port of this rank; {PORT} plus the rank by default, 0 for any port")
    parser.add_argument("--join", action="store_true", help="join the running ranks in place of a dead one")
    arguments = parser.parse_args()
    counter = Counter()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, setattr, counter, "stopping", True)
    app = web.Application()
    app.add_routes([web.post(r"/count/{bucket:\d+}", counter.count), web.get("/stats", counter.stats)])
    runner = web.AppRunner(app, handler_cancellation=True)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(counter.run(arguments.join))
            await counter.counted.wait()
            await runner.setup()
            # A replacement has the LOCAL_RANK of the lost process, and thus its port, but another rank in the group.
            number = int(os.environ.get("LOCAL_RANK", counter.pg.rank()))
            port = PORT + number if arguments.port is None else arguments.port
            await web.TCPSite(runner, "127.0.0.1", port).start()
            host, port = runner.addresses[0]
            print(f"rank {counter.pg.rank()} of {counter.pg.size()} serves http://{host}:{port}", flush=True)
        print(f"{counter.total.sum()} counted in {counter.rounds} rounds")
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
