"""Where the ranks of a group meet: from the arguments of `new_group` and the environment to a store."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any, NamedTuple, Protocol, runtime_checkable

from aiocoll.endpoints import parse_endpoint
from aiocoll.errors import RendezvousError
from aiocoll.numerals import parse_int
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.private_folder import private_folder
from aiocoll.store import FileStore, HashStore, Store, TCPStore

__all__ = ["Place", "Where", "find_where", "nowhere"]


class Where(NamedTuple):
    """Where this rank meets the others, and which one it is.

    Attributes:
        identity: the same for all groups of one job in this process.
        rank: None if the store assigns it.
        world_size: number of ranks; 0 for a newcomer to a group that grows, which is assigned both.
        store: the caller's own.
        scheme: how the store is reached otherwise, "tcp" or "file".
        host: the store's address, or path.
        port: the store's.
        hosted: whether the store is served by a process that is no rank.
        job: name of the job.
        key: the job key, where it comes along with the address.
    """

    identity: Any
    rank: int | None
    world_size: int
    store: Store | None = None
    scheme: str = ""
    host: str = ""
    port: int = 0
    hosted: bool = True
    job: str = ""
    key: bytes | None = None

    @property
    def hosts(self) -> bool:
        """Whether this rank serves the store."""
        return self.scheme == "tcp" and self.rank == 0 and not self.hosted

    @property
    def replaceable(self) -> bool:
        """Whether there may be another store at the same place when this one is gone; a meeting has one."""
        return not self.hosts and self.key is None

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


@runtime_checkable
class Place(Protocol):
    """What `init_method` may be besides a string."""

    def where(self) -> Where:
        """Return where the ranks meet."""


def find_where(
    init_method: str | Place | None,
    store: Store | None,
    rank: int | None,
    world_size: int | None,
    env: Mapping[str, str],
    job: str,
) -> Where:
    """Return where a rank meets the others.

    Args:
        init_method: of `new_group`.
        store: of `new_group`.
        rank: None: that in the environment, or the store assigns one.
        world_size: None: that in the environment.
        env: the environment.
        job: name of the job.

    Raises:
        ValueError, TypeError: an argument or a variable is missing or wrong; the message names it.
        RendezvousError: under torchrun, they have to be told a port.
    """
    if store is not None:
        return Where(("store", id(store)), *_numbers(rank, world_size, {}, "with store=", assigned=True), store)
    if isinstance(init_method, Place):
        return init_method.where()
    method = "env://" if init_method is None else init_method
    scheme, _, place = method.partition("://")
    if scheme == "env":
        if (rank, world_size) == (None, None) and _alone(env):
            return Where((method, "alone"), 0, 1, HashStore())
        hosted = env.get("AIOCOLL_STORE") == "launcher"
        numbers = _numbers(rank, world_size, env, "with init_method='env://'", assigned=hosted)
        host, port = _from_environment(env)
        return Where((method, host, port, job), *numbers, None, "tcp", host, port, hosted, job)
    numbers = _numbers(rank, world_size, {}, f"with init_method={method!r}", assigned=scheme == "file")
    if scheme == "tcp":
        host, port = parse_endpoint(place.partition("/")[0])
        return Where((method, job), *numbers, None, "tcp", host, port, False, job)
    if scheme == "file" and place.startswith("/"):
        return Where((method, job), *numbers, None, "file", place, job=job)
    raise ValueError(f"init_method={method!r} must be env://, tcp://host:port or file:///path")


def nowhere(rank: int | None, world_size: int | None, env: Mapping[str, str]) -> Where:
    """Return rank and world size of a dry run, which needs no store."""
    numbers = _numbers(rank, world_size, env, "with backend='fake'")
    return Where(None, *numbers)


def _alone(env: Mapping[str, str]) -> bool:
    """Whether a program that nothing has started as a rank is to be the only one."""
    asked = env.get("AIOCOLL_SINGLETON", "0")
    if asked not in ("0", "1"):
        raise ValueError(f"AIOCOLL_SINGLETON={asked!r}: must be 1, for a group of one rank, or 0")
    return asked == "1" and not any(name in env for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def _numbers(
    rank: int | None, world_size: int | None, env: Mapping[str, str], when: str, *, assigned: bool = False
) -> tuple[int | None, int]:
    """Return rank and world size; the rank may be missing if it can be `assigned`."""
    size_name, size = _number("world_size", world_size, env, when)
    if assigned and rank is None and "RANK" not in env:
        if size < 1:
            raise ValueError(f"{size_name}={size}: world_size must be positive")
        return None, size
    rank_name, number = _number("rank", rank, env, when)
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
        hint = (
            f", set {variable} in the environment, or start the ranks with `aiocoll run`; a program that nothing has "
            "started as a rank is a group of one with AIOCOLL_SINGLETON=1"
            if from_environment
            else ""
        )
        raise ValueError(f"{name} is missing: give {name}= {when}{hint}")
    try:
        return variable, parse_int(env[variable])
    except ValueError:
        raise ValueError(f"{variable}={env[variable]!r} in the environment must be a number") from None


def _from_environment(env: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of the store."""
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "AIOCOLL_PORT" not in env:
        # The port is that of torchrun's agent, which uses another protocol.
        if env.get("LOCAL_WORLD_SIZE") != env.get("WORLD_SIZE"):
            raise RendezvousError(
                "under torchrun on several hosts set AIOCOLL_PORT to a port that is free on the master"
            )
        run = f"{env.get('TORCHELASTIC_RUN_ID', '')}-{env.get('TORCHELASTIC_RESTART_COUNT', '0')}-{env['MASTER_PORT']}"
        # A short name, whatever the id is: the path of a socket has room for 107 bytes.
        return f"unix:{private_folder(env)}/aiocoll-{sha256(run.encode()).hexdigest()[:16]}", 0
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
            return env["MASTER_ADDR"], port
    raise ValueError(f"{variable}={env[variable]!r} in the environment must be a port number from 1 to 65535")
