"""A web service on several ranks that count together: aiocoll run -n 2 examples/service.py

Each rank serves HTTP on a port of its own. POST /count/3 adds one to bucket 3, at whichever rank it comes. Beside the
requests one allreduce follows the other and adds up what came since the last one, so GET /stats tells the counts of
all ranks, on any of them.

A request whose client goes away is cancelled while it waits for a collective; that ends the waiting, never the
collective. A rank that dies takes along only what came in its last round: the others answer all the time, count on
without it, and take in a process that is started in its place with --join and --port. The launcher would end the
others, so to see that, start every rank by itself, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set. Rank 0
holds the store then, where newcomers come in: it is the one that cannot be replaced.
"""

import argparse
import asyncio
import contextlib
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
        self.ranks = pg.size()
        self.total = np.zeros(BUCKETS, np.int64)
        self.fresh = np.zeros(BUCKETS, np.int64)
        self.telling = np.zeros(BUCKETS, np.int64)  # in the round that is under way
        self.rounds = 0
        self.gone = 0  # clients that did not wait for their answer
        self.stopping = False
        self.growing: asyncio.Task[aiocoll.ProcessGroup | None] | None = None

    async def agree(self) -> None:
        """Take over what the best informed rank knows: some may have missed the last round, a newcomer all of them."""
        *total, rounds = await self.pg.allreduce(np.append(self.total, self.rounds), aiocoll.ReduceOp.MAX)
        if rounds == self.rounds:  # the round that failed here has failed everywhere
            self.fresh += self.telling
        self.telling = np.zeros(BUCKETS, np.int64)
        self.total, self.rounds = np.array(total), rounds

    async def add_up(self) -> bool:
        """Count a round; return whether one of the ranks wants to stop."""
        self.telling, self.fresh = self.fresh, np.zeros(BUCKETS, np.int64)
        grown = self.growing is not None and self.growing.done() and self.growing.result() is not None
        # A key, since `grow` makes calls of its own meanwhile, and not at the same moment on all ranks.
        self.round = self.pg.allreduce(np.append(self.telling, [self.stopping, grown]), key="round")
        *counts, stopping, grown = await self.round
        self.total += counts
        self.rounds += 1
        self.telling = np.zeros(BUCKETS, np.int64)
        if grown == self.pg.size():
            await self.change_to(await self.growing)
            self.growing = None
            await self.agree()
        return stopping > 0

    async def run(self) -> None:
        whole, done = True, False
        while not done:
            try:
                if not whole:
                    await self.recover()
                    whole = True
                done = await self.add_up()
            except aiocoll.GroupError as error:
                print(f"goes on without the lost: {error}", flush=True)
                whole = False
            if self.pg.rank() == 0:  # the others wait for it in the allreduce
                await asyncio.sleep(PACE)

    async def recover(self) -> None:
        """Go on with the ranks that live; those that replace the others may come later."""
        await self.stop_growing()
        await self.change_to(await self.pg.shrink())
        await self.agree()
        if self.pg.size() < self.ranks:
            self.growing = asyncio.create_task(self.grow())

    async def grow(self) -> aiocoll.ProcessGroup | None:
        try:
            return await self.pg.grow(self.ranks - self.pg.size(), timeout=float("inf"))
        except (aiocoll.StoreError, aiocoll.RendezvousError) as error:
            print(f"nobody can come in: {error}", flush=True)
            return None

    async def change_to(self, pg: aiocoll.ProcessGroup) -> None:
        old, self.pg = self.pg, pg
        await old.shutdown()

    async def stop_growing(self) -> None:
        if self.growing is not None:
            self.growing.cancel()
            await asyncio.wait([self.growing])
            self.growing = None

    async def count(self, request: web.Request) -> web.Response:
        bucket = int(request.match_info["bucket"])
        if bucket >= BUCKETS:
            raise web.HTTPNotFound(text=f"there are buckets 0 to {BUCKETS - 1}")
        self.fresh[bucket] += 1
        return web.Response(status=204)

    async def stats(self, request: web.Request) -> web.Response:
        try:
            with contextlib.suppress(aiocoll.GroupError):  # then the answer is what was known before
                await self.round
        except asyncio.CancelledError:  # of this await, not of the collective
            self.gone += 1
            raise
        told = {"ranks": self.pg.size(), "rounds": int(self.rounds), "total": self.total.tolist(), "gone": self.gone}
        return web.json_response(told)


async def main() -> None:
    parser = argparse.ArgumentParser(description="a web service on several ranks that count together")
    parser.add_argument("--port", type=int, help=f"of this rank; by default {PORT} + rank, 0 is any")
    parser.add_argument("--join", action="store_true", help="take the place of a rank that died")
    arguments = parser.parse_args()
    counter = Counter(await aiocoll.new_group(join=arguments.join))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, setattr, counter, "stopping", True)
    app = web.Application()
    app.add_routes([web.post(r"/count/{bucket:\d+}", counter.count), web.get("/stats", counter.stats)])
    runner = web.AppRunner(app, handler_cancellation=True)
    port = PORT + counter.pg.rank() if arguments.port is None else arguments.port
    try:
        await counter.agree()
        await counter.add_up()  # so that there is a round to wait for before the first request comes
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", port).start()
        host, port = runner.addresses[0]
        print(f"rank {counter.pg.rank()} of {counter.pg.size()} serves http://{host}:{port}", flush=True)
        await counter.run()
        print(f"{counter.total.sum()} counted in {counter.rounds} rounds")
    finally:
        await runner.cleanup()
        await counter.stop_growing()
        await counter.pg.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
