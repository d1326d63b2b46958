"""`new_group`: from an init method to a store, a rank and a world size, and from there to a group."""

from __future__ import annotations

import inspect
import operator
import os
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from datetime import timedelta
from hashlib import sha256
from typing import Any, NamedTuple

from aiocoll.backends import Backend, BackendConfig, factory_of, refuse_device, sole_backend
from aiocoll.endpoints import parse_endpoint
from aiocoll.errors import GroupError, RendezvousError
from aiocoll.group.dispatch.origin import GroupSpec
from aiocoll.group.process_group import ProcessGroup
from aiocoll.group.reconfigurer import ADOPTED
from aiocoll.meeting.growth import await_assignment
from aiocoll.meeting.store_handle import StoreHandle
from aiocoll.numerals import parse_int
from aiocoll.options import GroupOptions, job_key, seconds
from aiocoll.rendezvous.job import Job, shared
from aiocoll.rendezvous.private_folder import private_folder
from aiocoll.runtime import running_loop
from aiocoll.store import FileStore, Store, TCPStore

__all__ = ["new_group"]

#: Keys found in the environment, by job: they are removed there when found, and later groups need them too.
_keys: dict[str, bytes] = {}


class new_group:
    """Make a group of all ranks. Await it, or use it in ``async with``, which closes the group.

    Args:
        backend: None or "aio" for the library's own, a registered name, or pairs such as "cpu:aio,cuda:nccl"; see
            `aiocoll.backends`.
        init_method: ``env://`` (the default), ``tcp://host:port`` or ``file:///path``; not together with `store`.
        store: a store that all ranks share.
        rank: this rank; from ``RANK`` with ``env://``.
        world_size: number of ranks; from ``WORLD_SIZE`` with ``env://``.
        timeout: seconds the ranks have to meet, and that an operation may take by default.
        device: a kind of device that the backend serves, or None.
        name: name of the group, the same on all ranks; by default numbered in the order of the calls.
        join: become a rank of an existing group whose ranks call `ProcessGroup.grow`; the group assigns the rank.
        options: see `GroupOptions`.

    Returns:
        What is awaited or entered, and gives the `ProcessGroup`.

    Raises:
        ValueError, TypeError: an argument or a variable is missing or wrong.
        RendezvousError: the ranks did not meet; the message names the missing ranks.
        AuthenticationError: another process is not of this job, or a rank on another host needs a job key.

    Cost: for the first group of a job a few round trips to the store and one connection per rank; two ranks connect
        when they first need it. Later groups of the same ranks share connections.
    """

    def __init__(
        self,
        backend: str | None = None,
        *,
        init_method: str | None = None,
        store: Store | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        timeout: float | timedelta = 300.0,
        device: str | None = None,
        name: str | None = None,
        join: bool = False,
        options: GroupOptions | None = None,
    ) -> None:
        if init_method is not None and store is not None:
            raise ValueError("init_method and store exclude each other: give one of them")
        self._devices = BackendConfig(backend).get_device_backend_map()
        self._backend = sole_backend(self._devices)
        for argument, given, kind in (
            ("init_method", init_method, str),
            ("store", store, Store),
            ("name", name, str),
            ("options", options, GroupOptions),
            ("device", device, str),
        ):
            if given is not None and not isinstance(given, kind):
                raise TypeError(f"{argument} must be a {kind.__name__} or None, not {type(given).__name__}")
        if device is not None:
            refuse_device(device, self._devices)
        self._device = device
        self._name = name
        self._timeout = seconds(timeout, "timeout")
        self._options = GroupOptions.resolve(options, os.environ)
        self._join = join
        job_id = self._options.job_id or ""
        if join:
            if (rank, world_size, name) != (None, None, None) or self._backend != Backend.AIO:
                raise ValueError("join=True: leave out rank, world_size, name and backend, which the group assigns")
            self._where = _where(init_method, store, 0, 1, os.environ, job_id)._replace(world_size=0, hosted=True)
        elif self._backend == Backend.FAKE:
            self._where = _nowhere(rank, world_size, os.environ)
        else:
            self._where = _where(init_method, store, rank, world_size, os.environ, job_id)
        self._pg: Any = None

    def __await__(self) -> Generator[Any, None, ProcessGroup]:
        return self._make().__await__()

    async def __aenter__(self) -> ProcessGroup:
        self._pg = await self._make()
        group: ProcessGroup = self._pg
        return group

    async def __aexit__(self, *exc: Any) -> None:
        await self._pg.__aexit__(*exc)

    async def _make(self) -> ProcessGroup:
        where, options, loop = self._where, self._options, running_loop()
        if (factory := factory_of(self._backend)) is not None:
            return await self._make_by(factory, options)
        if self._join:
            return await self._join_group(options)
        if self._backend == Backend.FAKE:
            return self._make_fake(options)
        identity = (id(loop), where.identity, where.rank)
        job = shared.get(identity)
        if job is None:
            job = shared[identity] = self._job(identity, options)
        elif job.world_size != where.world_size:
            raise ValueError(f"world_size={where.world_size}, but the groups of this job have {job.world_size} ranks")
        return await job.group(GroupSpec(self._name, self._timeout, options, self._devices))

    async def _join_group(self, options: GroupOptions) -> ProcessGroup:
        store_handle, timeout = self._open_store_handle(options), self._timeout
        store_handle.hold()
        try:
            assignment = await await_assignment(store_handle.store, timeout)
            identity = (id(store_handle), assignment.prefix, assignment.rank)
            key = _key(options, self._where.job)
            job = Job(
                identity, store_handle, assignment.prefix, assignment.rank, assignment.world_size, options, key, timeout
            )
            group = await job.group(GroupSpec(assignment.name, timeout, options))
            try:
                await group.broadcast_object(None, 0, key=ADOPTED)
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
        where, key = self._where, _key(options, self._where.job)
        return StoreHandle(where.store, lambda: where.open(self._timeout, key, options), where.hosts)

    def _job(self, identity: tuple[Any, ...], options: GroupOptions) -> Job:
        where = self._where
        key = _key(options, where.job)
        store_handle = self._open_store_handle(options)
        return Job(identity, store_handle, None, where.rank, where.world_size, options, key, self._timeout)

    async def _make_by(self, factory: Callable[..., Any], options: GroupOptions) -> ProcessGroup:
        where = self._where
        store = where.store if where.store is not None else where.open(self._timeout, _key(options, where.job), options)
        made = factory(store, where.rank, where.world_size, self._timeout, self._device, options=options)
        group: ProcessGroup = await made if inspect.isawaitable(made) else made
        return group

    def _make_fake(self, options: GroupOptions) -> ProcessGroup:
        from aiocoll.rendezvous.dry_run import World  # few programs have one

        spec = GroupSpec(self._name, self._timeout, options, self._devices)
        return World(self._where.rank, self._where.world_size, options).group(spec)


def _key(options: GroupOptions, job: str) -> bytes | None:
    found = job_key(os.environ, options.job_key)
    if options.job_key is not None:
        return found
    if found is not None:
        _keys[job] = found
    return _keys.get(job)


class _Where(NamedTuple):
    """Where this rank meets the others, and its rank and world size (0 for a newcomer, which is assigned them)."""

    identity: Any
    rank: int
    world_size: int
    store: Store | None
    scheme: str
    host: str
    port: int
    hosted: bool
    job: str

    @property
    def hosts(self) -> bool:
        """Whether this rank serves the store."""
        return self.scheme == "tcp" and self.rank == 0 and not self.hosted

    def open(self, timeout: float, key: bytes | None, options: GroupOptions) -> Store:
        """Open the store of the init method."""
        if self.scheme == "file":
            return FileStore(self.host, self.world_size or None)
        return TCPStore(
            self.host,
            self.port,
            self.world_size or None,
            self.hosts,
            timeout,
            wait_for_workers=False,
            key=key,
            job=self.job,
            bind=options.bind,
            encryption=options.encryption,
            tls_ca=options.tls_ca,
            tls_certificate=options.tls_certificate,
            tls_key=options.tls_key,
        )


def _where(
    init_method: str | None,
    store: Store | None,
    rank: int | None,
    world_size: int | None,
    env: Mapping[str, str],
    job: str,
) -> _Where:
    if store is not None:
        numbers = _numbers(rank, world_size, {}, "with store=")
        return _Where(("store", id(store)), *numbers, store, "store", "", 0, True, "")
    method = "env://" if init_method is None else init_method
    scheme, _, place = method.partition("://")
    if scheme == "env":
        numbers = _numbers(rank, world_size, env, "with init_method='env://'")
        host, port, hosted = _from_environment(env)
        return _Where((method, host, port, job), *numbers, None, "tcp", host, port, hosted, job)
    numbers = _numbers(rank, world_size, {}, f"with init_method={method!r}")
    if scheme == "tcp":
        host, port = parse_endpoint(place.partition("/")[0])
        return _Where((method, job), *numbers, None, "tcp", host, port, False, job)
    if scheme == "file" and place.startswith("/"):
        return _Where((method, job), *numbers, None, "file", place, 0, False, job)
    raise ValueError(f"init_method={method!r} must be env://, tcp://host:port or file:///path")


def _nowhere(rank: int | None, world_size: int | None, env: Mapping[str, str]) -> _Where:
    """Return rank and world size of a dry run, which needs no store."""
    numbers = _numbers(rank, world_size, env, "with backend='fake'")
    return _Where(None, *numbers, None, "", "", 0, True, "")


def _numbers(rank: int | None, world_size: int | None, env: Mapping[str, str], when: str) -> tuple[int, int]:
    (rank_name, number), (size_name, size) = (
        _number(name, value, env, when) for name, value in (("rank", rank), ("world_size", world_size))
    )
    if size < 1 or not 0 <= number < size:
        raise ValueError(
            f"{rank_name}={number}, {size_name}={size}: world_size must be positive and rank 0 to world_size - 1"
        )
    return number, size


def _number(name: str, value: int | None, env: Mapping[str, str], when: str) -> tuple[str, int]:
    """Return an argument, or else its variable, and its name for error messages."""
    variable = name.upper()
    if value is not None:
        if isinstance(value, bool) or not hasattr(value, "__index__"):
            raise TypeError(f"{name} must be an int, not {type(value).__name__}")
        return name, operator.index(value)
    if variable not in env:
        from_environment = env or when.endswith("'env://'")
        hint = f", set {variable} in the environment, or start the ranks with `aiocoll run`" if from_environment else ""
        raise ValueError(f"{name} is missing: give {name}= {when}{hint}")
    try:
        return variable, parse_int(env[variable])
    except ValueError:
        raise ValueError(f"{variable}={env[variable]!r} in the environment must be a number") from None


def _from_environment(env: Mapping[str, str]) -> tuple[str, int, bool]:
    """Return host and port of the store, and whether a launcher hosts it."""
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "AIOCOLL_PORT" not in env:
        # The port is that of torchrun's agent, which uses another protocol.
        if env.get("LOCAL_WORLD_SIZE") != env.get("WORLD_SIZE"):
            raise RendezvousError(
                "under torchrun on several hosts set AIOCOLL_PORT to a port that is free on the master"
            )
        run = f"{env.get('TORCHELASTIC_RUN_ID', '')}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}-{env['MASTER_PORT']}"
        # A short name, whatever the id is: the path of a socket has room for 107 bytes.
        return f"unix:{private_folder(env)}/aiocoll-{sha256(run.encode()).hexdigest()[:16]}", 0, False
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if name not in env]
    if missing:
        raise ValueError(
            f"{' and '.join(missing)} missing in the environment: start the ranks with `aiocoll run`, set them, "
            "or give init_method= or store="
        )
    if not env["MASTER_ADDR"]:
        raise ValueError("MASTER_ADDR='' in the environment must be the host name or address of rank 0")
    variable = "AIOCOLL_PORT" if "AIOCOLL_PORT" in env else "MASTER_PORT"
    with suppress(ValueError):
        if 0 < (port := parse_int(env[variable])) <= 65535:
            return env["MASTER_ADDR"], port, env.get("AIOCOLL_STORE") == "launcher"
    raise ValueError(f"{variable}={env[variable]!r} in the environment must be a port number from 1 to 65535")
