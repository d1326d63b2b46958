"""A man in the middle between ranks and listeners, which forwards all bytes and records each client's first bytes.

The argument is JSON: a list of [local port, host, remote port]. For each line of input, the program reports the
recorded bytes of each connection in hex.
"""

from __future__ import annotations

import asyncio
import json
import sys

#: The number of recorded bytes per connection.
MOST = 2048


async def main(ways: list[tuple[int, str, int]]) -> None:
    recorded: list[bytearray] = []

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

    def forwarder(host: str, port: int) -> object:
        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            remote = await asyncio.open_connection(host, port)
            recorded.append(bytearray())
            await asyncio.gather(pump(reader, remote[1], recorded[-1]), pump(remote[0], writer, None))

        return forward

    for local_port, host, port in ways:
        await asyncio.start_server(forwarder(host, port), "", local_port)  # type: ignore[arg-type]
    print(json.dumps("ready"), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps([each.hex() for each in recorded]), flush=True)


if __name__ == "__main__":
    asyncio.run(main(json.loads(sys.argv[1])))
