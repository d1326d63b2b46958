"""A minimal web server worker with the subset of ASGI and HTTP that docs/web-service.md needs. Argument: module:app."""

from __future__ import annotations

import asyncio
import importlib
import signal
import sys
from functools import partial
from typing import Any


async def serve_request(app: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    method, path, _ = (await reader.readline()).decode().split()
    while (await reader.readline()).strip():
        pass
    requests: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    requests.put_nowait({"type": "http.request"})
    responses: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    scope = {"type": "http", "method": method, "path": path, "query_string": b"", "headers": []}
    await app(scope, requests.get, responses.put)
    status, body = responses.get_nowait()["status"], responses.get_nowait()["body"]
    writer.write(b"HTTP/1.1 %d .\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body))
    await writer.drain()
    writer.close()


async def main() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    module, name = sys.argv[1].split(":")
    app = getattr(importlib.import_module(module), name)
    events: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    responses: asyncio.Queue[dict[str, str]] = asyncio.Queue()
    events.put_nowait({"type": "lifespan.startup"})
    lifespan = asyncio.create_task(app({"type": "lifespan"}, events.get, responses.put))
    started = asyncio.create_task(responses.get())
    await asyncio.wait([lifespan, started], return_when=asyncio.FIRST_COMPLETED)
    if lifespan.done():
        started.cancel()
        return lifespan.result()
    server = await asyncio.start_server(partial(serve_request, app), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await stop.wait()
    server.close()
    events.put_nowait({"type": "lifespan.shutdown"})
    return await lifespan


if __name__ == "__main__":
    asyncio.run(main())
