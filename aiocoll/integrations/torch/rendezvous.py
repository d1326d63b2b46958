"""torch's rendezvous ``env://`` under `aiocoll run`, whose own store listens on ``MASTER_PORT``."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch.distributed as dist

from aiocoll.group.process_group import ProcessGroup
from aiocoll.integrations.torch.process import process
from aiocoll.integrations.torch.store import is_loopback
from aiocoll.rendezvous.new_group import new_group

__all__ = ["meet_under_launcher"]

_Handler = Callable[..., Iterator[tuple[dist.Store, int, int]]]


def meet_under_launcher() -> None:
    """Make torch's ``env://`` rendezvous work under `aiocoll run`: rank 0 serves a torch store on a free port."""
    # Import the module by name, because the attribute `torch.distributed.rendezvous` is a function that hides it.
    handlers = import_module("torch.distributed.rendezvous")._rendezvous_handlers
    if not getattr(handlers["env"], "of_aiocoll", False):
        handlers["env"] = _wrapped(handlers["env"])


def _wrapped(theirs: _Handler) -> _Handler:
    def meet(url: str, **arguments: Any) -> Iterator[tuple[dist.Store, int, int]]:
        port = os.environ.get("MASTER_PORT")
        if os.environ.get("AIOCOLL_STORE") != "launcher" or os.environ.get("AIOCOLL_STORE_PORT", port) != port:
            return theirs(url, **arguments)
        return _meet(arguments.get("timeout") or timedelta(minutes=30))

    meet.of_aiocoll = True  # type: ignore[attr-defined]
    return meet


def _meet(timeout: timedelta) -> Iterator[tuple[dist.Store, int, int]]:
    thread = process.thread()
    if process.world is None:
        process.world = thread.run(_open_world(timeout.total_seconds()))
    pg = process.world
    store = _make_server(pg, timeout) if pg.rank() == 0 else None
    place = None if store is None else (_own_host(), store.port)
    host, port = thread.start(lambda: pg.broadcast_object(place)).result()
    if store is None:
        store = dist.TCPStore(host, port, pg.size(), False, timeout)
    yield store, pg.rank(), pg.size()
    raise RuntimeError("the ranks of a torch world cannot meet again; use aiocoll.elastic to continue after a loss")


async def _open_world(timeout: float) -> ProcessGroup:
    return await new_group(timeout=timeout)


def _make_server(pg: ProcessGroup, timeout: timedelta) -> dist.TCPStore:
    return dist.TCPStore(_own_host(), 0, pg.size(), True, timeout, wait_for_workers=False)


def _own_host() -> str:
    """Return this host's address on the route to ``MASTER_ADDR``; other ranks can connect to this address."""
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    if is_loopback(master):
        return "127.0.0.1"
    family, kind, _, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        found: str = probe.getsockname()[0]
    return found
