"""`aiocoll doctor` on several hosts: each host listens, dials all others as a rank would, and gets all results.

The hosts exchange results in rounds through the store: which hosts have come, their addresses, which host reaches
which. Host 0 ends each round, so that all hosts have the same results. A host that has stopped delays the others until
the time limit of the round, not longer.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

import msgpack

import aiocoll
from aiocoll.cli.hosts import Hosts, reach_store, serve
from aiocoll.cli.reach import Attempt, HostFacts, HostsMet
from aiocoll.cli.terminal import Progress
from aiocoll.errors import AiocollError, RendezvousError, StoreError, StoreTimeoutError
from aiocoll.meeting.cards import cores
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.listening import listen_between_hosts
from aiocoll.runtime import Runtime, running_loop
from aiocoll.security.loop_timeout import loop_timeout
from aiocoll.sockets import is_ready
from aiocoll.store import PrefixStore, Store
from aiocoll.store.listening import local_address
from aiocoll.transport.base import Card
from aiocoll.transport.byte_stream import ByteStream, receive_message, send_message
from aiocoll.transport.registry import TCP, find_transport
from aiocoll.transport.stream.addresses import is_wildcard
from aiocoll.transport.stream.stream_options import StreamOptions
from aiocoll.transport.stream.tls_stream import OpenEncrypted
from aiocoll.transport.stream.transport import StreamTransport

__all__ = ["meet_hosts"]

#: Timeout in seconds of a connection attempt. The kernel sends three SYN packets in this time.
_DIAL = 5.0
#: Number of timed round trips on a connection, and their time limit in seconds. The fastest round trip counts.
_PINGS, _PING_FOR = 20, 1.0
#: Extra seconds per exchange round, for short work on a busy host, such as making a certificate.
_SLACK = 10.0


async def meet_hosts(hosts: Hosts, options: GroupOptions, timeout: float, notify: Callable[[str], None]) -> HostsMet:
    """Meet the other hosts through the store of host 0, and dial each of them.

    Args:
        hosts: the hosts of the job.
        options: the resolved options.
        timeout: time limit in seconds, first to reach the store, then for the other hosts to come.
        notify: called with a text about each wait.

    Raises:
        AiocollError: the store cannot be served or reached, or host 0 has ended. Or this host came too late, or its
            arguments differ from those of host 0.
    """
    options = replace(options, job_id=hosts.name)  # as the launcher sets it for ranks
    async with AsyncExitStack() as stack:
        (host, port), listens = hosts.master, ""
        if hosts.node_rank == 0:
            server = await serve(hosts, hosts.nnodes, options, timeout, notify)
            stack.push_async_callback(server.aclose)
            host, port = local_address(server.host), server.port
            listens = f"{'all addresses' if is_wildcard(server.host) else server.host} port {port}"
            notify(f"host 0 listens on {listens} for the others, and waits for them for {timeout:g} s")
        else:
            notify(f"looking for host 0 at {host} port {port} for {timeout:g} s")
        store = reach_store(hosts, options, (host, port), timeout)
        rounds = _Rounds(PrefixStore("doctor", store), hosts)
        await stack.enter_async_context(stack.enter_context(Progress()).watching(rounds.stage))
        await stack.enter_async_context(store)
        report = {"nnodes": hosts.nnodes, "store": store.reached, "listens": listens, "facts": _facts(options)}
        came = await rounds.claim_number(report, timeout)
        visitor = await stack.enter_async_context(_Visitor(hosts, options, [*came]))
        met = await _dial_hosts(rounds, visitor, came, timeout)
        await rounds.leave()
        return met


async def _dial_hosts(rounds: _Rounds, visitor: _Visitor, came: Mapping[int, Any], timeout: float) -> HostsMet:
    """Listen, dial the other hosts, and exchange the results with them."""
    facts = {host: HostFacts(*report["facts"]) for host, report in came.items()}
    met = HostsMet(came[0]["nnodes"], came[0]["listens"], timeout, facts, {})
    if met.differ():
        return met
    listening = await rounds.exchange("listening", await visitor.listen(came), _SLACK)
    facts |= {
        host: facts[host]._replace(where=_card_address(card), trouble=why) for host, (card, why) in listening.items()
    }
    cards = {host: card for host, (card, _) in listening.items() if card is not None}
    rows = await rounds.exchange("row", await visitor.dial(cards), _DIAL + len(cards) * _PING_FOR + _SLACK)
    return met._replace(rows={host: {peer: Attempt(*each) for peer, each in row.items()} for host, row in rows.items()})


def _facts(options: GroupOptions) -> HostFacts:
    system = (
        f"{cores()} cores, aiocoll {aiocoll.__version__}, Python {platform.python_version()}, "
        f"{platform.system()} {platform.release()}"
    )
    ports = "ports {} to {}".format(*options.port_range) if options.port_range else ""
    return HostFacts(socket.gethostname(), system, options.encryption, ports)


def _card_address(card: Card | None) -> str:
    return "" if card is None else "{} port {}".format(*card["tcp"])


class _Rounds:
    """The rounds in which all hosts exchange their results through the store."""

    def __init__(self, store: Store, hosts: Hosts) -> None:
        self._store = store
        self._host = hosts.node_rank
        self._nnodes = hosts.nnodes
        self._there: Collection[int] = range(hosts.nnodes)
        self._round = ""

    async def stage(self, seconds: int) -> str:
        """Return the text of the progress line: the current step of this host, and the `seconds` that have passed."""
        doing = "dialling the others"
        if not self._round:
            doing = "looking for host 0"
        elif self._round == "came":
            doing = "waiting for the others"
            if self._host == 0:
                came = [await self._store.check([f"came/{host}"]) for host in range(self._nnodes)]
                doing = f"{sum(came)} of {self._nnodes} hosts have come"
        return f"{doing}, {seconds} s"

    async def claim_number(self, mine: Mapping[str, Any], timeout: float) -> dict[int, Any]:
        """Claim the number of this host, and run the first round; return the reports of hosts that came in time.

        Raises:
            RendezvousError: the number is taken, host 0 expects another number of hosts, or this host came too late.
        """
        own = msgpack.packb([socket.gethostname(), os.getpid(), os.urandom(8)])
        name, pid, _ = msgpack.unpackb(first := await self._store.compare_set(f"claim/{self._host}", b"", own))
        if first != own:
            raise RendezvousError(
                f"host number {self._host} is taken by {name} (process {pid}): give each host its own --node-rank, or "
                "wait until the previous command has ended"
            )
        came = await self.exchange("came", mine, timeout)
        if came[0]["nnodes"] != self._nnodes:
            raise RendezvousError(
                f"--nnodes {self._nnodes}: host 0 was given --nnodes {came[0]['nnodes']}; use the same on all hosts"
            )
        if self._host not in came:
            raise RendezvousError(
                f"host {self._host} came too late: the other hosts have started without it; "
                "run the command again on all hosts"
            )
        return came

    async def exchange(self, what: str, mine: Any, limit: float) -> dict[int, Any]:
        """Run a round: publish `mine`, and return the reports that hosts have published within `limit` seconds.

        Raises:
            RendezvousError: host 0 has not ended the round in time.
        """
        self._round = what
        await self._store.set(f"{what}/{self._host}", msgpack.packb(mine))
        if self._host == 0:
            keys = {host: f"{what}/{host}" for host in self._there}
            with suppress(StoreTimeoutError):
                await self._store.wait(keys.values(), limit)
            report = {host: await self._store.get(key) for host, key in keys.items() if await self._store.check([key])}
            await self._store.set(what, msgpack.packb(report))
        try:
            found = msgpack.unpackb(await self._store.get(what, limit + _SLACK), strict_map_key=False)
        except StoreTimeoutError:
            raise RendezvousError(
                f"host 0 serves a store, but has not completed this step of the check within {limit + _SLACK:g} s: "
                "check that `aiocoll doctor` runs there, and not another job"
            ) from None
        self._there = found.keys()
        return {host: msgpack.unpackb(data, strict_map_key=False) for host, data in found.items()}

    async def leave(self) -> None:
        """Publish that this host leaves the check. Host 0 waits for all others, because its end closes the store."""
        with suppress(StoreError):
            if self._host:
                await self._store.set(f"left/{self._host}", b"")
            else:
                await self._store.wait([f"left/{host}" for host in self._there if host], _SLACK)


class _Visitor:
    """A context manager that listens and dials as a rank does; its rank number is the number of this host."""

    def __init__(self, hosts: Hosts, options: GroupOptions, came: Collection[int]) -> None:
        self._options = options
        self._came = came
        self._runtime = Runtime.of(running_loop())
        self._open_stream = OpenEncrypted(options, hosts.node_rank)
        transport = find_transport(options.transport)
        self._transport = StreamTransport(
            self._runtime,
            hosts.node_rank,
            hosts.nnodes,
            hosts.name,
            hosts.key,
            StreamOptions(
                # Do not use unix sockets, even if two of the hosts are the same machine: a job needs TCP between hosts.
                transport=TCP.sockets if transport.crosses_hosts else transport.sockets,
                host_id=options.host_id,
                connect_timeout=_DIAL,
                open_stream=self._open_stream,
            ),
        )
        self._transport.heartbeat_accepted = self._on_connection
        self._answering: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> _Visitor:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._transport.aclose()
        for task in self._answering:
            task.cancel()
        await asyncio.gather(*self._answering, return_exceptions=True)

    async def listen(self, came: Mapping[int, Any]) -> tuple[Card | None, str]:
        """Start to listen; return the address card for the other hosts and "", or None and the reason of a failure."""
        try:
            await self._open_stream.encrypt(self._options.encryption != "none")
            stores = {host: report["store"] for host, report in came.items()}
            return await listen_between_hosts(self._transport, self._options, stores, together=False), ""
        except (AiocollError, ValueError) as error:
            return None, str(error)

    async def dial(self, cards: Mapping[int, Card]) -> dict[int, Attempt]:
        """Dial all other hosts at the same time; then measure the round-trip time to each, one after another."""
        peers = [host for host in cards if host != self._transport.rank]
        reached = await asyncio.gather(*(self._reach(host, cards[host]) for host in peers))
        return {
            host: await _ping(found) if not isinstance(found, str) else Attempt(0.0, found)
            for host, found in zip(peers, reached, strict=True)
        }

    async def _reach(self, host: int, card: Card) -> ByteStream | str:
        """Open a heartbeat connection to a host (either end may dial such a one); return it, or the error as text."""
        try:
            stream = await self._transport.connect_heartbeat(host, card)
        except AiocollError as error:
            text, usual = str(error), f"rank {host} cannot be reached"
            return text.removeprefix(usual) if text.startswith(usual) else f": {text}"
        assert stream is not None
        return stream

    def _on_connection(self, host: int, stream: ByteStream) -> None:
        task = self._runtime.create_task(_echo_bytes(stream), f"aiocoll answering host {host}")
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)


async def _echo_bytes(stream: ByteStream) -> None:
    """Send back each byte that arrives, until the connection ends."""
    try:
        with suppress(OSError):
            while True:
                send_message(stream, await receive_message(stream, 1))
    finally:
        stream.close()


async def _ping(stream: ByteStream) -> Attempt:
    fastest, trouble = inf, ": the connection was made, and then no byte came back"
    try:
        with suppress(OSError):
            runtime, arrived = Runtime.of(running_loop()), partial(is_ready, stream.sock.fileno())
            async with loop_timeout(runtime, _PING_FOR, arrived):
                for _ in range(_PINGS):
                    began = perf_counter()
                    send_message(stream, b"?")
                    await receive_message(stream, 1)
                    fastest = min(fastest, perf_counter() - began)
    finally:
        stream.close()
    return Attempt(fastest) if fastest < inf else Attempt(0.0, trouble)
