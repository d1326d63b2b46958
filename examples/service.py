"""A web service on several ranks that count together: aiocoll run -n 2 examples/service.py

Each rank serves HTTP on a port of its own. POST /count/3 adds one to bucket 3, at whichever rank it comes. Beside the
requests one allreduce follows the other and adds up what came since the last one, so GET /stats tells the counts of
all ranks, on any of them. A request whose client goes away is cancelled while it waits for a collective; that ends the
waiting, never the collective.
"""

import argparse
import asyncio
import signal

import numpy as np
from aiohttp import web

import aiocoll

PORT = 8400  # of rank 0; the others follow
BUCKETS = 8
PACE = 0.05  # seconds between two rounds: how old an answer may be


class Counter:
    """Counts that all ranks know, plus what came here since the last round."""

    def __init__(self, pg: aiocoll.ProcessGroup) -> None:
        self.pg = pg
        self.total = np.zeros(BUCKETS, np.int64)
        self.fresh = np.zeros(BUCKETS, np.int64)
        self.rounds = 0
        self.gone = 0  # clients that did not wait for their answer
        self.stopping = False

    async def add_up(self) -> bool:
        """Count a round; return whether one of the ranks wants to stop."""
        fresh, self.fresh = self.fresh, np.zeros(BUCKETS, np.int64)
        self.round = self.pg.allreduce(np.append(fresh, self.stopping))
        *counts, stopping = await self.round
        self.total += counts
        self.rounds += 1
        return stopping > 0

    async def run(self) -> None:
        while not await self.add_up():
            if self.pg.rank() == 0:  # the others wait for it in the allreduce
                await asyncio.sleep(PACE)

    async def count(self, request: web.Request) -> web.Response:
        bucket = int(request.match_info["bucket"])
        if bucket >= BUCKETS:
            raise web.HTTPNotFound(text=f"there are buckets 0 to {BUCKETS - 1}")
        self.fresh[bucket] += 1
        return web.Response(status=204)

    async def stats(self, request: web.Request) -> web.Response:
        try:
            await self.round
        except asyncio.CancelledError:  # of this await, not of the collective
            self.gone += 1
            raise
        return web.json_response({"rounds": self.rounds, "total": self.total.tolist(), "gone": self.gone})


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=PORT, help="of rank 0")
    arguments = parser.parse_args()
    async with aiocoll.new_group() as pg:
        counter = Counter(pg)
        await counter.add_up()  # there is something to wait for before the first request comes
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, setattr, counter, "stopping", True)
        app = web.Application()
        app.add_routes([web.post(r"/count/{bucket:\d+}", counter.count), web.get("/stats", counter.stats)])
        runner = web.AppRunner(app, handler_cancellation=True)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", arguments.port + pg.rank()).start()
            print(f"rank {pg.rank()} of {pg.size()} serves http://127.0.0.1:{arguments.port + pg.rank()}", flush=True)
            await counter.run()
        finally:
            await runner.cleanup()
        print(f"rank {pg.rank()}: {counter.total.sum()} counted in {counter.rounds} rounds")


if __name__ == "__main__":
    asyncio.run(main())
