"""Somebody between ranks and listeners: passes on what both ends say, and notes what who dials has said.

The argument is JSON: a list of [port here, host, port there]. It goes on until it is given a line, and then tells what
was said first on each connection, in hex.
"""

from __future__ import annotations

import asyncio
import json
import sys

#: Bytes noted of what one end says.
MOST = 2048


async def main(ways: list[tuple[int, str, int]]) -> None:
    said: list[bytearray] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: bytearray | None) -> None:
        try:
            while data := await reader.read(1 << 16):
                if note is not None and len(note) < MOST:
                    note += data[: MOST - len(note)]
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def passing_on(host: str, port: int) -> object:
        async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there = await asyncio.open_connection(host, port)
            said.append(bytearray())
            await asyncio.gather(pump(reader, there[1], said[-1]), pump(there[0], writer, None))

        return pass_on

    for here, host, port in ways:
        await asyncio.start_server(passing_on(host, port), "", here)  # type: ignore[arg-type]
    print(json.dumps("ready"), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps([each.hex() for each in said]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
