"""`Job`: one rank in one job. The first group makes its store and endpoint, and all groups share them."""

from __future__ import annotations

import asyncio
import functools
import os
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from aiocoll.algorithms.machine import Tuning
from aiocoll.engine.communicator import Communicator
from aiocoll.engine.endpoint import Endpoint
from aiocoll.engine.group_spec import GroupSpec
from aiocoll.errors import AiocollError, AuthenticationError, RendezvousError, StoreUnavailableError
from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.log import logger
from aiocoll.meeting.cards import CALLED_OFF, CardCache, MeetingMovedError, call_off, cores, ranks_on_host
from aiocoll.meeting.claim import Claims, call_off_all
from aiocoll.meeting.growth import Assignment, Invitation, await_newcomer, invite
from aiocoll.meeting.holders import arrival, watch_deaths
from aiocoll.meeting.store_handle import StoreHandle
from aiocoll.native import describe_implementation
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.exchange import Exchange, await_end, run_until_notice
from aiocoll.rendezvous.listening import listen_between_hosts
from aiocoll.rendezvous.measured_links import MeasuredLinks, agree_on_links
from aiocoll.rendezvous.same_host import encryption_at, single_copy, split_hosts
from aiocoll.rendezvous.transport_choice import TransportChoice
from aiocoll.rendezvous.unmet import describe_missing_links, describe_missing_ranks, describe_silent_store
from aiocoll.runtime import Runtime
from aiocoll.security.tls import agreed
from aiocoll.store import PrefixStore, Store
from aiocoll.store.deadline import last_request
from aiocoll.transport.base import Card, Link, Transport
from aiocoll.transport.memory import Hub, MemoryTransport
from aiocoll.transport.registry import CarrierRequest
from aiocoll.transport.stream.stream_options import StreamOptions
from aiocoll.transport.stream.tls_stream import OpenEncrypted
from aiocoll.transport.stream.transport import StreamTransport
from aiocoll.tuning import from_wire, load, to_wire

__all__ = ["Job", "shared"]


#: Seconds before reconnecting to a lost store: long enough not to load the host, short compared to any timeout.
PAUSE = 0.05

#: Jobs by (loop, rendezvous, rank), and hubs and card caches by (loop, kind, job). Later groups on the same loop share
#: these objects of the first group.
shared: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()


class Job:
    """The state of one rank in one job, on one event loop: its store, endpoint and groups.

    Args:
        identity: its key in `shared`, removed with its last group.
        store_handle: the store in which the ranks meet.
        assignment: this rank, the world size and the part of the store in which the ranks meet.
        options: resolved options of the first group.
        key: the job key, or None.
        timeout: seconds the ranks have to meet.
    """

    #: Whether this is a dry run, in which the other ranks do not exist.
    dry = False

    def __init__(
        self,
        identity: tuple[Any, ...],
        store_handle: StoreHandle,
        assignment: Assignment,
        options: GroupOptions,
        key: bytes | None,
        timeout: float,
    ) -> None:
        self.rank = assignment.rank
        self.world_size = assignment.world_size
        self.endpoint: Endpoint | None = None
        self._identity = identity
        self._store_handle = store_handle
        self._prefix = assignment.prefix
        self._options = options
        self._key = key
        self._timeout = timeout
        self._loop = asyncio.get_running_loop()
        self._runtime = Runtime.of(self._loop)
        self._hub: Hub | None = None
        self._tuning = Tuning()
        self._links = MeasuredLinks({})
        self._open_stream = OpenEncrypted(options, self.rank)
        self._transport = TransportChoice(options.transport)
        self._opening = asyncio.Lock()
        self._cards: CardCache | None = None
        # Objects of the rendezvous in progress, for error texts: the store exchange, the transport and the endpoint.
        self._exchange: Exchange | None = None
        self._stream: StreamTransport | None = None
        self._joining: Endpoint | None = None
        self._members = 0
        self._death_watcher: asyncio.Task[None] | None = None
        store_handle.hold()
        #: The number of groups made with each name; None counts the groups without a name.
        self._names: Counter[str | None] = Counter()
        self._claims = self._make_claims()

    async def group(self, spec: GroupSpec, left: float, timeout: float) -> ProcessGroup:
        """Make a group of all ranks. The first group also carries out the rendezvous.

        Args:
            spec: name and options of the group.
            left: seconds in which the ranks must meet.
            timeout: the timeout in seconds shown in errors, of which `left` remain.
        """
        self._members += 1
        try:
            await self._open(left, timeout)
            assert self.endpoint is not None
            return self._make_world_group(self.endpoint, spec)
        except BaseException:
            await self.release()
            raise

    def _make_world_group(self, endpoint: Endpoint, spec: GroupSpec) -> ProcessGroup:
        name = f"world:{self._names.total()}" if spec.name is None else spec.name
        if any(group.name == name for group in endpoint.groups.values()):
            raise ValueError(f"name={name!r} is the name of an open group; give every group its own")
        # An earlier, closed group may have the same name. The count makes the ids differ, so no old frame is accepted.
        self._names[spec.name] += 1
        identity = endpoint.group_id(f"{name}\0{spec.name}\0{self._names[spec.name]}")
        return self._make_group(endpoint, identity, range(self.world_size), spec._replace(name=name))

    def _make_group(self, endpoint: Endpoint, identity: int, ranks: Sequence[int], spec: GroupSpec) -> ProcessGroup:
        cards = [endpoint.cards[rank] for rank in ranks]
        hosts = {card["host"] for card in cards}
        together = self._hub is None and len(hosts) == 1
        chunk_nbytes = min(card["piece"] for card in cards) if together else 0
        tuning = self._tuning if self._hub is not None or together else self._links.tune(self._tuning, hosts)
        comm = Communicator(endpoint, identity, ranks, spec, chunk_nbytes, tuning)
        endpoint.add(comm)
        return ProcessGroup(comm, spec, self)

    def store(self, identity: int) -> Store:
        """Return a store view for the keys of one group. Later jobs on the same store server do not see these keys."""
        return PrefixStore(f"group/{identity:x}", self._claims.store)

    def derive(self, identity: int, ranks: Sequence[int], spec: GroupSpec) -> ProcessGroup:
        """Make a group of `ranks`, after all these ranks have agreed to make it."""
        assert self.endpoint is not None
        group = self._make_group(self.endpoint, identity, ranks, spec)
        self._members += 1
        return group

    async def release(self) -> None:
        """Release a closed group; the last group closes the endpoint and the store."""
        self._members -= 1
        if self._members:
            return
        if shared.get(self._identity) is self:
            del shared[self._identity]
        endpoint, self.endpoint = self.endpoint, None
        try:
            if endpoint is not None:
                await endpoint.aclose()
            if self._death_watcher is not None:
                self._death_watcher.cancel()
                await asyncio.wait([self._death_watcher])
        finally:
            await self._store_handle.drop()
            if endpoint is not None:
                endpoint.loop_end.forget()

    def drop(self, group: ProcessGroup) -> None:
        """Release an open group whose event loop no longer runs; finalizers then close the store."""
        self._members -= 1
        endpoint = self.endpoint
        if endpoint is None:
            return
        if self._members and not self._loop.is_closed():
            endpoint.leave(parts_of(group).comm)
        elif not self._members:
            endpoint.drop()

    # -- growing

    async def invite(self, invitation: Invitation, timeout: float) -> Assignment:
        """Assign ranks to newcomers, and return the assignment of this rank."""
        return await invite(self._store_handle.store, invitation, timeout)

    async def await_newcomer(self) -> None:
        """Wait until a newcomer requests to join."""
        await await_newcomer(self._store_handle.store)

    async def rendezvous_again(
        self, assignment: Assignment, limit: float, spec: GroupSpec, store: Store | None = None
    ) -> ProcessGroup:
        """Meet the newcomers in a new `Job`, which receives no messages of older jobs."""
        handle = self._store_handle if store is None else StoreHandle(store, lambda: store, replaceable=False)
        job = Job((*self._identity, assignment.prefix), handle, assignment, self._options, self._key, limit)
        return await job.group(spec, limit, limit)

    async def call_off(self, assignment: Assignment, reason: str, store: Store | None = None) -> None:
        """Publish for the newcomers why the ranks cannot meet, if the store still answers."""
        place = PrefixStore(assignment.prefix, self._store_handle.store if store is None else store)
        await last_request(call_off(place, assignment.world_size, reason))

    # -- rendezvous

    @property
    def _store(self) -> Store:
        store = self._store_handle.store
        return PrefixStore(self._prefix, store) if self._prefix else store

    def _make_claims(self) -> Claims:
        return Claims(self._store, self.rank, self.world_size, self._runtime, self._store_handle.once)

    async def _open(self, left: float, timeout: float) -> None:
        """Meet the other ranks, unless an earlier group has done so. On failure, the caller releases the job."""
        try:
            async with asyncio.timeout(None if left == float("inf") else left), self._opening:
                await (self._meet() if self.endpoint is None else self._open_stream.renew())
        except TimeoutError:
            raise RendezvousError(await self._describe_absence(timeout)) from None
        except OSError as error:
            if isinstance(error, AiocollError):
                raise
            raise RendezvousError(f"rank {self.rank} could not meet the others: {error.strerror or error}") from error

    async def _warn_when_late(self) -> None:
        """After the warning time, log once which ranks are missing in the rendezvous."""
        after = self._options.warn_after
        if after != float("inf"):
            await self._runtime.sleep(after)
            logger.warning("%s; still waiting", await self._describe_absence(after), extra={"rank": self.rank})

    async def _describe_absence(self, seconds: float) -> str:
        """Return an error text that explains why the ranks have not met within `seconds`."""
        store, time = self._store, f"{round(seconds, 2) or seconds:g} s"
        missing = None if self._exchange is None else await self._exchange.list_missing_ranks()
        if missing:
            absent = describe_missing_ranks(missing, self.world_size, store.trouble, self._claims.met)
            return f"rank {self.rank} waited {time} for {absent}"
        is_silent = missing is None and (self._joining is None or self.endpoint is not None)
        why = store.trouble or (
            describe_silent_store(store) if is_silent else describe_missing_links(self._joining, self._stream)
        )
        return f"rank {self.rank} of {self.world_size} did not meet the others within {time}: {why}"

    async def _meet(self) -> None:
        warning = self._runtime.create_task(self._warn_when_late(), f"aiocoll meeting {self.rank}")
        try:
            await self._meet_until_done()
        finally:
            warning.cancel()
            await asyncio.wait([warning])

    async def _meet_until_done(self) -> None:
        while True:
            try:
                await self._meet_once()
                return
            except MeetingMovedError as error:
                logger.debug("rank %d: %s", self.rank, error, extra={"rank": self.rank})
            except StoreUnavailableError as error:
                # The store may belong to an earlier job that is ending. Retry: the new job's store will listen soon.
                if (
                    self._prefix
                    or self.endpoint is not None
                    or not self._store_handle.replaceable
                    or isinstance(error, AuthenticationError)
                ):
                    raise
                logger.debug("rank %d lost the store and reconnects: %s", self.rank, error, extra={"rank": self.rank})
                await self._store_handle.store.aclose()
                await self._runtime.sleep(PAUSE)
                self._store_handle.reopen()
                self._claims = self._make_claims()

    async def _meet_once(self) -> None:
        """Claim the rank and meet the others; raise if a rank publishes that the rendezvous failed or starts again."""
        with self._claims.active():
            await self._claims.claim()
            store = self._claims.store
            name = f"aiocoll meeting {self.rank}"
            await run_until_notice(self._runtime, self._meet_in(store), await_end(store), name)

    async def _meet_in(self, store: Store) -> None:
        tuning = await self._load_tuning() if self.rank == 0 else None
        exchange = self._exchange = Exchange(store, self.rank, self.world_size, self._timeout)
        job = await exchange.exchange_job_name(self._runtime.random_bytes)
        self._cards = shared.setdefault((id(self._loop), "cards", job), CardCache())
        stream, card = await self._listen(job)
        self._stream = stream
        if self.rank == 0:
            # Publish the medium that most links use if all ranks are on one host. Links over other media are slower.
            medium = self._transport.provider.medium
            card |= {"medium": medium, "tuning": None if tuning is None else to_wire(tuning, cores())}
        transport: Transport = stream
        # A peer may connect before this rank has an endpoint to accept its link.
        early: list[Link] = []
        transport.accepted = early.append
        try:
            card |= await self._split_hosts(store, stream)
            await self._claims.restart_after_ended_rank()
            cards = await exchange.exchange_cards("card", card, self._cards)
            holders = {card.get("holder", ""): rank for rank, card in cards.items()}
            self._tuning = from_wire(cards[0].get("tuning"), cards[0].get("medium"), ranks_on_host(0, cards))
            transport, cards = await self._choose_transport(exchange, stream, job, cards)
            if transport is stream:
                self._links = await agree_on_links(exchange, stream, cards, self._options.connections)
            crowded = ranks_on_host(self.rank, cards) > cores()
            spin = self._spin_seconds(cards)
            endpoint = Endpoint(self._runtime, transport, self.rank, self.world_size, spin, crowded)
            self._joining = endpoint
            for link in early:
                endpoint.accept(link)
            joining = self._join_ranks(endpoint, cards)
            await run_until_notice(self._runtime, joining, self._claims.await_loss(), f"aiocoll joining {self.rank}")
            stream.set_all_met()
        except BaseException:
            if self.endpoint is None:
                for link in early:
                    link.close()
                await transport.aclose()
            raise
        if holder := self._store_handle.holder:
            await self._store_handle.store.set(arrival(holder), b"")
            watching = watch_deaths(self._store_handle.store, holders, endpoint.roster.report)
            self._death_watcher = self._runtime.create_task(watching, f"aiocoll deaths {self.rank}")
        await self._claims.confirm()

    async def _join_ranks(self, endpoint: Endpoint, cards: Mapping[int, Card]) -> None:
        await endpoint.join(cards)
        self.endpoint = endpoint
        _log_implementation()

    async def _load_tuning(self) -> Tuning | None:
        """Read the tuning file, if any. On a virtual clock, read it only if the options name it.

        A run on a virtual clock must not depend on the machine.
        """
        if self._options.tuning is None and not self._runtime.may_listen:
            return None
        try:
            return load(self._options.tuning, os.environ)
        except ValueError as error:
            await call_off_all(self._store, self.world_size, f"rank 0 could not join: {error}")
            raise

    async def _listen(self, job: str) -> tuple[StreamTransport, Card]:
        options, holder, choice = self._options, self._store_handle.holder, self._transport
        transport = StreamTransport(
            self._runtime,
            self.rank,
            self.world_size,
            job,
            self._key,
            StreamOptions(
                transport=choice.provider.sockets,
                single_copy=single_copy(options, os.environ),
                host_id=options.host_id,
                connect_timeout=self._timeout,
                open_stream=self._open_stream,
                carrier=choice.make_carrier(CarrierRequest(self._runtime, self.rank, self.world_size)),
                carries_all=choice.carries_all,
            ),
        )
        place = {"loop": f"{os.getpid()}/{id(self._loop)}", "store": self._store.reached, "holder": holder}
        place["encryption"] = encryption_at(self.rank, place["store"], options)
        card = await transport.listen() if self._runtime.may_listen else transport.card
        return transport, card | place | choice.card

    async def _split_hosts(self, store: Store, stream: StreamTransport) -> Card:
        try:
            return await split_hosts(store, stream, trusted=self._key is not None)
        except AuthenticationError as error:
            await call_off_all(self._store, self.world_size, str(error))
            raise

    async def _choose_transport(
        self, exchange: Exchange, stream: StreamTransport, job: str, cards: Mapping[int, Card]
    ) -> tuple[Transport, Mapping[int, Card]]:
        """Choose the transport from the cards of all ranks, so that every rank makes the same choice."""
        choice = self._transport
        stream.agree_on_carrier(choice.agree(cards))
        if choice.is_auto and len({card.get("loop") for card in cards.values()}) == 1:
            await stream.aclose()
            hub: Hub = shared.setdefault((id(self._loop), "hub", job), Hub(self._runtime, self._runtime.latency))
            self._hub = hub
            memory = MemoryTransport(hub, self.rank)
            memory.accepted = stream.accepted
            await memory.listen()
            return memory, cards
        hosts = len({card["host"] for card in cards.values()})
        if not choice.provider.crosses_hosts and hosts > 1:
            raise RendezvousError(
                f"transport={self._options.transport!r}, but the ranks are on {hosts} hosts; use 'auto' or 'tcp'"
                + "".join(f" (rank {rank}: {card['apart']})" for rank, card in cards.items() if card.get("apart"))
            )
        if choice.provider.always_tcp or hosts > 1:
            encrypted = agreed({rank: card["encryption"] for rank, card in cards.items()}, hosts)
            stores = {rank: card["store"] for rank, card in cards.items()}
            card = await self._listen_tcp(exchange.store, stream, stores, hosts == 1, encrypted)
            assert self._cards is not None
            cards = await exchange.exchange_cards("tcp", card, self._cards)
        return stream, cards

    async def _listen_tcp(
        self, store: Store, stream: StreamTransport, stores: Mapping[int, str], alone: bool, encrypted: bool
    ) -> Card:
        options = self._options
        try:
            await self._open_stream.encrypt(encrypted)
            return await listen_between_hosts(stream, options, stores, together=alone)
        except (AiocollError, ValueError) as error:
            await store.set(f"tcp/{self.rank}", CALLED_OFF + f"rank {self.rank} could not join: {error}".encode())
            raise

    def _spin_seconds(self, cards: Mapping[int, Card]) -> float:
        """Return the polling time in seconds; 0 if a peer runs in this process, because polling blocks the peer."""
        alone = all(rank == self.rank or card["process"] != cards[self.rank]["process"] for rank, card in cards.items())
        return self._options.spin_us / 1e6 if alone else 0.0


@functools.cache
def _log_implementation() -> None:
    """Log once per process whether the accelerator or pure Python runs."""
    logger.info("aiocoll runs %s", describe_implementation())
