"""Clients without the job key: run one behaviour of `tests.rendezvous.test_stranger_conduct` on another host.

Arguments: the conduct, and in JSON the hosts and ports to visit. At the end, a line has the number of visits to each.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from contextlib import suppress

from tests.rendezvous.test_stranger_conduct import Conduct, flood, half_open, hold, repeat

CONDUCTS: dict[str, Conduct] = {"hold": hold, "repeat": repeat, "flood": flood, "half open": half_open}


async def main(conduct: Conduct, places: list[tuple[str, int]]) -> None:
    """Connect to all listeners until a line of input arrives; raise an error if a client ends earlier."""
    visits = [0] * len(places)

    async def visit_repeatedly(number: int) -> None:
        while True:
            with suppress(ConnectionRefusedError, ConnectionResetError, BrokenPipeError):
                await conduct(socket.AF_INET, tuple(places[number]))
            visits[number] += 1
            await asyncio.sleep(0.01)

    tasks = [asyncio.create_task(visit_repeatedly(number)) for number in range(len(places))]
    print(json.dumps("ready"), flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if not isinstance(result, asyncio.CancelledError):
            raise RuntimeError("a stranger ended before the line of input") from result
    print(json.dumps(visits), flush=True)


if __name__ == "__main__":
    asyncio.run(main(CONDUCTS[sys.argv[1]], json.loads(sys.argv[2])))
