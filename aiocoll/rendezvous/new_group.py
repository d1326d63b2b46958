"""`new_group`: creation of the group of all ranks, which meet by an init method or a store."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Generator
from datetime import timedelta
from functools import partial
from typing import Any

from aiocoll.backends import Backend, BackendConfig, factory_of, refuse_device, sole_backend
from aiocoll.engine.group_spec import GroupSpec
from aiocoll.errors import GroupError, RendezvousError
from aiocoll.group.dispatch.devices import devices
from aiocoll.group.process_group import ProcessGroup
from aiocoll.group.reconfigurer import ADOPTED
from aiocoll.launcher import is_newcomer
from aiocoll.meeting.claim import RanksHaveMetError, RankTakenError, assign
from aiocoll.meeting.growth import Assignment, await_assignment
from aiocoll.meeting.store_handle import StoreHandle
from aiocoll.options import GroupOptions, job_key, seconds
from aiocoll.rendezvous.job import Job, shared
from aiocoll.rendezvous.parameters import DEFAULT, InitMethod, find_dry_run, find_parameters
from aiocoll.runtime import Runtime, refuse_trio, running_loop
from aiocoll.store import Store
from aiocoll.store.commands import count_bytes
from aiocoll.store.deadline import DeadlineStore

__all__ = ["new_group"]

#: Job keys by job name, for later groups: reading a key from the environment removes it there.
_keys: dict[str, bytes] = {}


class new_group:
    """Make a group of all ranks. Await it, or use it in ``async with``, which closes the group.

    Args:
        backend: None or "aio" for the library's own backend, a registered name, or pairs such as "cpu:aio,cuda:nccl";
            see `aiocoll.backends`.
        init_method: ``env://``, ``tcp://host:port``, ``file:///path``, ``redis://host:port/db`` (see
            `aiocoll.RedisStore`), or a ticket of an `aiocoll.Meeting`. The default is ``env://``, or the ticket of
            `Ticket.as_default`. Not together with `store`.
        store: a store that all ranks share.
        rank: this rank; with ``env://`` the default is ``RANK`` or the variable of a known launcher. None assigns a
            free rank, if no rank hosts the store: with `store`, ``file://``, ``redis://`` and
            ``AIOCOLL_STORE=launcher``. Then no process may choose its rank, and each call becomes another rank.
        world_size: number of ranks; with ``env://`` the default is ``WORLD_SIZE`` or the variable of that launcher.
        timeout: seconds within which the ranks must meet, and the default timeout of operations.
        device: a device that the backend serves and this process has, such as "cpu" or "cuda:0", or None.
        name: name of the group, the same on all ranks; by default numbered in the order of the calls.
        join: False meets the other ranks. True makes this process a rank of an existing group whose ranks call
            `ProcessGroup.grow`; the group assigns the rank. With ``env://``, ``AIOCOLL_JOIN=1`` has the same effect:
            the launcher sets it for the process that replaces a lost rank. None joins if the ranks have met on this
            store, and meets them otherwise; the store or the group assigns the rank. Each job then needs a new store.
            A file is not removed at the end of the job.
        options: see `GroupOptions`.

    Returns:
        An object to await or to enter with ``async with``; it yields the `ProcessGroup`.

    Raises:
        ValueError, TypeError: an argument or a variable is missing or invalid.
        RendezvousError: the ranks did not meet; the message names the missing ranks.
        AuthenticationError: another process does not belong to this job, or a rank on another host needs a job key.

    Cost: for the first group of a job, a few round trips to the store and one connection per rank. Other ranks connect
        when they first exchange data. Later groups of the same ranks share connections.
    """

    def __init__(
        self,
        backend: str | None = None,
        *,
        init_method: str | InitMethod | None = None,
        store: Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        timeout: float | timedelta = 300.0,
        device: str | None = None,
        name: str | None = None,
        join: bool | None = False,
        options: GroupOptions | None = None,
    ) -> None:
        refuse_trio()
        if init_method is not None and store is not None:
            raise ValueError("init_method and store exclude each other: give one of them")
        self._devices = BackendConfig(backend).get_device_backend_map()
        self._backend = sole_backend(self._devices)
        is_unspecified = init_method is None and store is None and rank is None and world_size is None and not join
        if is_unspecified and self._backend != Backend.FAKE:
            init_method = DEFAULT.get()
        for argument, given, kind in (
            ("init_method", init_method, str if not isinstance(init_method, InitMethod) else InitMethod),
            ("store", store, Store),
            ("name", name, str),
            ("options", options, GroupOptions),
            ("device", device, str),
        ):
            if given is not None and not isinstance(given, kind):
                raise TypeError(f"{argument} must be a {kind.__name__} or None, not {type(given).__name__}")
        if name is not None:
            count_bytes("name", name)
        if device is not None:
            refuse_device(device, self._devices)
            if self._backend == Backend.AIO:
                _refuse_absent(device)
        self._device = device
        self._name = name
        self._timeout = seconds(timeout, "timeout")
        self._options = GroupOptions.resolve(options, os.environ)
        job_id = self._options.job_id or ""
        if isinstance(init_method, InitMethod):
            if (rank, world_size) != (None, None) or join is not False:
                raise ValueError("leave out rank, world_size and join: the ticket given as init_method determines them")
            self._parameters = init_method.where()
            if not self._parameters.world_size and (name is not None or self._backend != Backend.AIO):
                raise ValueError(
                    "leave out name and backend: init_method is a ticket of a newcomer, and the group assigns them"
                )
        elif join or self._joins_by_environment(init_method, store):
            if (rank, world_size, name) != (None, None, None) or self._backend != Backend.AIO:
                why = "join=True" if join else "AIOCOLL_JOIN=1 in the environment"
                raise ValueError(f"{why}: leave out rank, world_size, name and backend, which the group assigns")
            self._parameters = find_parameters(init_method, store, 0, 1, os.environ, job_id)._replace(
                world_size=0, hosted=True
            )
        elif self._backend == Backend.FAKE:
            self._parameters = find_dry_run(rank, world_size, os.environ)
        else:
            self._parameters = find_parameters(init_method, store, rank, world_size, os.environ, job_id)
        self._finds_out = join is None and bool(self._parameters.world_size)
        if self._finds_out and self._parameters.rank is not None:
            raise ValueError(
                "join=None: leave out rank (RANK), and use a store that no rank hosts; the store or the group assigns "
                "the rank"
            )
        if self._parameters.rank is None and self._backend != Backend.AIO:
            raise ValueError(f"rank is missing: give rank=, since backend={backend!r} does not assign ranks")
        self._pg: Any = None

    @property
    def timeout(self) -> float:
        """Seconds within which the ranks must meet."""
        return self._timeout

    @property
    def newcomer(self) -> bool:
        """Return whether this process joins an existing group. With `join=None`, this is known only after the call."""
        return not self._parameters.world_size

    def __await__(self) -> Generator[Any, None, ProcessGroup]:
        return self._make().__await__()

    async def __aenter__(self) -> ProcessGroup:
        self._pg = await self._make()
        group: ProcessGroup = self._pg
        return group

    async def __aexit__(self, *exc: Any) -> None:
        await self._pg.__aexit__(*exc)

    def _joins_by_environment(self, init_method: str | None, store: Store | None) -> bool:
        of_environment = store is None and init_method in (None, "env://")
        return of_environment and self._backend != Backend.FAKE and is_newcomer(os.environ)

    async def _make(self) -> ProcessGroup:
        options, loop = self._options, running_loop()
        left: Callable[[], float] = partial(_time_left, Runtime.of(loop).time, Runtime.of(loop).time() + self._timeout)
        if self._parameters.ask is not None:
            self._parameters = await self._parameters.resolve(self._key(), options, self._timeout)
        where = self._parameters
        if (factory := factory_of(self._backend)) is not None:
            return await self._make_by(factory, options)
        if not where.world_size:
            return await self._join_group(options, left)
        if self._backend == Backend.FAKE:
            return self._make_fake(options)
        if where.rank is None:
            return await self._assign(options, left)
        identity = (id(loop), where.identity, where.rank)
        job = shared.get(identity)
        if job is None:
            job = shared[identity] = self._make_job(identity, self._open_store_handle(options), where.rank)
        elif job.world_size != where.world_size:
            raise ValueError(
                f"world_size={where.world_size}, but other groups of this job have {job.world_size} ranks; pass the "
                "same world_size, or use another store"
            )
        return await job.group(GroupSpec(self._name, self._timeout, options, self._devices), left(), self._timeout)

    async def _assign(self, options: GroupOptions, left: Callable[[], float]) -> ProcessGroup:
        store_handle = self._open_store_handle(options)
        store_handle.once = self._finds_out
        store_handle.hold()
        try:
            size = self._parameters.world_size
            first = await assign(DeadlineStore(store_handle.store, left()), size)
            for rank in (*range(first, size), *range(first)):
                job = self._make_job((id(store_handle), rank), store_handle, rank)
                try:
                    return await job.group(
                        GroupSpec(self._name, self._timeout, options, self._devices), left(), self._timeout
                    )
                except RankTakenError as error:  # try the next rank: this process may replace an ended one
                    reason: RendezvousError = error
                except RanksHaveMetError as error:
                    reason = error
                    break
            if not self._finds_out:
                raise reason
            self._parameters = self._parameters._replace(rank=0, world_size=0, hosted=True)
            try:
                return await self._join_group(options, left)
            except RendezvousError as error:
                raise RendezvousError(
                    f"{reason}, so this process waited as a newcomer: {error}; a new job needs a new store"
                ) from None
        finally:
            await store_handle.drop()

    async def _join_group(self, options: GroupOptions, left: Callable[[], float]) -> ProcessGroup:
        store_handle, timeout = self._open_store_handle(options), self._timeout
        store_handle.hold()
        try:
            assignment = await await_assignment(store_handle.store, timeout)
            identity = (id(store_handle), assignment.prefix, assignment.rank)
            key = self._key()
            job = Job(identity, store_handle, assignment, options, key, timeout)
            group = await job.group(GroupSpec(assignment.name, timeout, options, self._devices), left(), timeout)
            try:
                await group.broadcast_object(None, 0, key=ADOPTED, timeout=left())
            except BaseException as error:
                await group.shutdown()
                if isinstance(error, GroupError):
                    raise RendezvousError(
                        f"the group that assigned this process a rank failed to grow: {error}"
                    ) from error
                raise
            return group
        finally:
            await store_handle.drop()

    def _open_store_handle(self, options: GroupOptions) -> StoreHandle:
        where, key = self._parameters, self._key()
        # Open the store without a world size: it must not end with the first ranks, because newcomers may need it.
        to_open = where._replace(world_size=0) if self._finds_out else where
        return StoreHandle(
            where.store, lambda: to_open.open(self._timeout, key, options), where.replaceable, where.holder
        )

    def _make_job(self, identity: tuple[Any, ...], store_handle: StoreHandle, rank: int) -> Job:
        assignment = Assignment("", rank, self._parameters.world_size, self._name or "")
        return Job(identity, store_handle, assignment, self._options, self._key(), self._timeout)

    def _key(self) -> bytes | None:
        where = self._parameters
        return _key(self._options, where.job) if where.key is None else where.key

    async def _make_by(self, factory: Callable[..., Any], options: GroupOptions) -> ProcessGroup:
        where = self._parameters
        store = where.store if where.store is not None else where.open(self._timeout, self._key(), options)
        made = factory(store, where.rank, where.world_size, self._timeout, self._device, options=options)
        group: ProcessGroup = await made if inspect.isawaitable(made) else made
        return group

    def _make_fake(self, options: GroupOptions) -> ProcessGroup:
        from aiocoll.rendezvous.dry_run import World  # imported late: few programs do dry runs

        rank, size = self._parameters.rank, self._parameters.world_size
        assert rank is not None
        return World(rank, size, options).group(GroupSpec(self._name, self._timeout, options, self._devices))


def _refuse_absent(device: str) -> None:
    """Raise `ValueError` if a backend serves devices of this kind, but this process does not have `device`."""
    kind, _, index = device.partition(":")
    if kind != "cpu" and kind in devices:
        backend = devices.get(kind)
        if int(index or 0) >= (count := backend.count()):
            raise ValueError(f"device={device!r} not found: this process may use {count} {backend.label} devices")


def _time_left(time: Callable[[], float], end: float) -> float:
    """Return the seconds until `end`, at least 0."""
    return max(0.0, end - time())


def _key(options: GroupOptions, job: str) -> bytes | None:
    found = job_key(os.environ, options.job_key)
    if options.job_key is not None:
        return found
    if found is not None:
        _keys[job] = found
    return _keys.get(job)
