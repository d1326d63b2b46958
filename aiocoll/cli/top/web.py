"""Web page of `aiocoll top` on the loopback interface, which updates its tables once a second.

Each request needs the token of the printed address. The page has it in its query; update requests have it in a header,
which no other page can make a browser send. Requests must name this server as their host, against DNS rebinding. The
content policy lets the page load nothing else.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from importlib.resources import files
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

__all__ = ["Page", "serve"]

HOST: Final = "127.0.0.1"
#: Maximum bytes of a request head. Browsers send a few hundred.
LONGEST: Final = 8192
#: Seconds to receive a request and to send the answer.
MAX_WAIT: Final = 5.0
#: Maximum number of connections. A browser opens at most six.
MOST: Final = 32
#: Seconds for which the answer to an update request is reused for further requests.
FRESH: Final = 0.9

_HEADERS: Final = (
    ("Cache-Control", "no-store"),
    ("Connection", "close"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
    ("Referrer-Policy", "no-referrer"),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
)
_POLICY: Final = (
    "default-src 'none'; script-src 'nonce-{0}'; style-src 'nonce-{0}'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)


class _RequestError(Exception):
    """Raised for an invalid HTTP request, with the HTTP status of the response."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class Page:
    """The HTTP server of the `aiocoll top` web page.

    Args:
        title: title of the job.
        news: returns the state of the job as plain data; called in a thread, one call at a time, per request.

    Attributes:
        token: the token that requests need.
        port: the port on which it listens; 0 before `listen`.
    """

    def __init__(self, title: str, news: Callable[[], dict[str, Any]]) -> None:
        self._title = title
        self._ask = news
        self.token = secrets.token_urlsafe(24)
        self.port = 0
        self._page = files("aiocoll.cli.top").joinpath("page.html").read_text(encoding="utf-8")
        self._lock = asyncio.Lock()
        self._news, self._made = b"", float("-inf")
        self._connections = 0

    async def listen(self) -> asyncio.Server:
        """Listen on a free port of the loopback interface."""
        server = await asyncio.start_server(self._connected, HOST, 0, limit=LONGEST)
        self.port = server.sockets[0].getsockname()[1]
        return server

    @property
    def address(self) -> str:
        """Return the address to open in a browser, with the token."""
        return f"http://{HOST}:{self.port}/?token={self.token}"

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        try:
            async with asyncio.timeout(MAX_WAIT):
                if self._connections <= MOST:
                    writer.write(await self._answer(reader))
                    await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            writer.transport.abort()
        finally:
            self._connections -= 1
            with suppress(OSError):
                writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> bytes:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            return _response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, b"the request is too long\n")
        try:
            path, query, headers = _parse(head)
            if headers.get("host") != f"{HOST}:{self.port}":
                raise _RequestError(
                    HTTPStatus.FORBIDDEN, f"wrong Host header: open the page as http://{HOST}:{self.port}"
                )
            if path == "/":
                self._check(query.get("token", [""])[0])
                return self._show()
            if path == "/news":
                self._check(headers.get("authorization", "").removeprefix("Bearer "))
                return _response(HTTPStatus.OK, await self._newest(), "application/json")
            raise _RequestError(HTTPStatus.NOT_FOUND, "there is no page at this path")
        except _RequestError as refused:
            return _response(refused.status, f"{refused}\n".encode())

    def _check(self, token: str) -> None:
        if not hmac.compare_digest(token.encode(errors="replace"), self.token.encode()):
            raise _RequestError(
                HTTPStatus.FORBIDDEN, "the token is wrong: open the whole address that aiocoll top has printed"
            )

    def _show(self) -> bytes:
        nonce = secrets.token_urlsafe(16)
        page = self._page.replace("NONCE", nonce).replace('"TITLE"', _quoted(self._title))
        policy = ("Content-Security-Policy", _POLICY.format(nonce))
        return _response(HTTPStatus.OK, page.encode(), "text/html; charset=utf-8", policy)

    async def _newest(self) -> bytes:
        async with self._lock:
            if time.monotonic() - self._made >= FRESH:
                self._news = json.dumps(await asyncio.to_thread(self._ask)).encode()
                self._made = time.monotonic()
            return self._news


def serve(title: str, news: Callable[[], dict[str, Any]], show_address: Callable[[str], object]) -> None:
    """Serve the `aiocoll top` web page until Ctrl-C; call `show_address` with the address of the page."""

    async def run() -> None:
        page = Page(title, news)
        server = await page.listen()
        show_address(page.address)
        async with server:
            await server.serve_forever()

    asyncio.run(run())


def _parse(head: bytes) -> tuple[str, dict[str, list[str]], dict[str, str]]:
    """Parse the head of a request; return its path, query and headers, with header names in lower case."""
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise _RequestError(HTTPStatus.BAD_REQUEST, "the request is not HTTP/1.x")
    if words[0] != "GET":
        raise _RequestError(HTTPStatus.METHOD_NOT_ALLOWED, "only GET is supported")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or name.strip() != name or name.lower() in headers:
            raise _RequestError(HTTPStatus.BAD_REQUEST, "a request header is malformed, or occurs twice")
        headers[name.lower()] = value.strip()
    try:
        url = urlsplit(words[1])
        return url.path, parse_qs(url.query), headers
    except ValueError:
        raise _RequestError(HTTPStatus.BAD_REQUEST, "the URL of the request is malformed") from None


def _response(
    status: HTTPStatus, body: bytes, kind: str = "text/plain; charset=utf-8", *more: tuple[str, str]
) -> bytes:
    headers = (("Content-Type", kind), ("Content-Length", str(len(body))), *_HEADERS, *more)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    return f"HTTP/1.1 {status.value} {status.phrase}\r\n{lines}\r\n".encode() + body


def _quoted(text: str) -> str:
    """Return a text as a JavaScript string literal that cannot end the script element around it."""
    return json.dumps(text).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
