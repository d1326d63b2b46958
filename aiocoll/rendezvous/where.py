"""The meeting place of a group: from the arguments of `new_group` and the environment to a store."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, runtime_checkable

from aiocoll.errors import AuthenticationError
from aiocoll.numerals import parse_int, to_int
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.launchers import COMMANDS, EXPLICIT, Ask, recognise
from aiocoll.store import HashStore, Store
from aiocoll.store.registry import StoreOpener, StoreRequest, stores
from aiocoll.store.tcp import tcp_url

__all__ = ["DEFAULT", "Place", "Where", "find_where", "nowhere"]

_PASSWORD = re.compile("//.*@")
_QUERY = re.compile(r"\?.*")


class Where(NamedTuple):
    """Where this rank meets the others, and which one it is.

    Attributes:
        identity: the same for all groups of one job in this process.
        rank: None if the store assigns it.
        world_size: number of ranks; 0 for a newcomer to a group that grows, which is assigned both.
        store: the caller's own.
        url: of the store otherwise; its scheme names the opener in `aiocoll.store.registry.stores`.
        hosted: whether the store is served by a process that is no rank.
        job: name of the job.
        key: the job key, where it comes along with the address.
        several_hosts: the launcher that has started ranks on several hosts, which need a job key; "" for others.
        ask: asks the launcher for the address.
        holder: how the process that gave this one its ticket calls it.
    """

    identity: Any
    rank: int | None
    world_size: int
    store: Store | None = None
    url: str = ""
    hosted: bool = True
    job: str = ""
    key: bytes | None = None
    several_hosts: str = ""
    ask: Ask | None = None
    holder: str = ""

    def __repr__(self) -> str:
        return f"Where(rank={self.rank}, world_size={self.world_size}, scheme={self.scheme!r})"  # the rest has secrets

    @property
    def scheme(self) -> str:
        """The scheme of the store's URL, "" without one."""
        return self.url.partition("://")[0]

    @property
    def hosts(self) -> bool:
        """Whether this rank serves the store."""
        return self.rank == 0 and not self.hosted

    @property
    def replaceable(self) -> bool:
        """Whether there may be another store at the same place when this one is gone; a meeting has one."""
        return not self.hosts and self.key is None

    async def found(self, key: bytes | None, options: GroupOptions, timeout: float) -> Where:
        """Return where the store is, asking the launcher if only that knows.

        Raises:
            RendezvousError: it does not tell, or not all ranks have asked in `timeout` seconds.
        """
        if self.ask is None:
            return self
        store = await self.ask(key, options, self.job, timeout)
        return self._replace(url=tcp_url(store.host, store.port), key=store.key, ask=None)

    def open(self, timeout: float, key: bytes | None, options: GroupOptions) -> Store:
        """Open the store of the init method.

        Raises:
            AuthenticationError: ranks on several hosts need a job key.
        """
        if self.several_hosts and key is None:
            raise AuthenticationError(
                f"{self.several_hosts} has started ranks on several hosts, and there is no job key: put one into a "
                "file that is on every host, and that only you can read, and name that by AIOCOLL_JOB_KEY_FILE; make "
                'one with `python -c "import secrets; print(secrets.token_hex(32))"`. MPICH\'s mpiexec and '
                "`srun --mpi=pmi2` hand one over by themselves"
            )
        request = StoreRequest(self.url, self.job, self.world_size or None, self.hosts, timeout, key, options)
        return stores.get(self.scheme).open(request)


@runtime_checkable
class Place(Protocol):
    """What `init_method` may be besides a string."""

    def where(self) -> Where:
        """Return where the ranks meet."""


#: Where the ranks of this context meet if nothing is said.
DEFAULT: ContextVar[Place | None] = ContextVar("aiocoll_place", default=None)


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
    opener = None if method.partition("://")[0] == "env" else _opener(method)
    if opener is None or not opener.has_secrets:
        method, rank, world_size = _without_query(method, rank, world_size)
    if opener is None:
        return _from_environment(method, rank, world_size, env, job)
    shown = _shown(method, has_secrets=opener.has_secrets)
    served = opener.served_by_rank_0
    numbers = _numbers(rank, world_size, {}, f"with init_method={shown!r}", assigned=not served)
    try:
        opener.check(method, numbers[1])
    except ValueError as error:
        raise ValueError(f"init_method={shown!r}: {error}") from None
    return Where((method, job), *numbers, None, method, not served, job)


def _opener(url: str) -> StoreOpener:
    """Return what opens the store of a URL.

    Raises:
        ValueError: no store has this scheme.
    """
    scheme, separator, _ = url.partition("://")
    shown = _shown(url, has_secrets=True)
    if not separator:
        known = ", ".join(f"{name}://" for name in stores.names())
        raise ValueError(f"init_method={shown!r} must be a URL that begins with one of env://, {known}")
    try:
        return stores.get(scheme)
    except ValueError as error:
        raise ValueError(f"init_method={shown!r}: {error}") from None


def _shown(url: str, *, has_secrets: bool) -> str:
    """Return a URL as error messages show it."""
    return _QUERY.sub("?...", _PASSWORD.sub("//...@", url)) if has_secrets else url


def _without_query(method: str, rank: int | None, world_size: int | None) -> tuple[str, int | None, int | None]:
    """Return a URL without ``?rank=0&world_size=2``, and the numbers that are given there or as arguments."""
    url, _, query = method.partition("?")
    texts = dict(pair.split("=", 1) for pair in query.split("&") if "=" in pair)
    numbers = {"rank": rank, "world_size": world_size}
    if not texts or not texts.keys() <= numbers.keys():
        return method, rank, world_size  # a file may be called that
    for name, text in texts.items():
        if numbers[name] is not None:
            raise ValueError(f"init_method={method!r} has {name}, and {name}= is given, too: give one of them")
        try:
            numbers[name] = parse_int(text)
        except ValueError:
            raise ValueError(f"init_method={method!r}: {name} must be a number, not {text!r}") from None
    return url, numbers["rank"], numbers["world_size"]


def nowhere(rank: int | None, world_size: int | None, env: Mapping[str, str]) -> Where:
    """Return rank and world size of a dry run, which needs no store."""
    numbers = _numbers(rank, world_size, env, "with backend='fake'")
    return Where(None, *numbers)


def _from_environment(method: str, rank: int | None, world_size: int | None, env: Mapping[str, str], job: str) -> Where:
    """Return where a rank meets the others by what has started it; arguments count as if they were variables."""
    launcher, given = recognise(env), (rank, world_size) != (None, None)
    if launcher is None and not given and _alone(env):
        return Where((method, "alone"), 0, 1, HashStore())
    if launcher is None or launcher.is_standard or given:
        hosted = env.get("AIOCOLL_STORE") == "launcher"
        try:
            numbers = _numbers(rank, world_size, env, "with init_method='env://'", assigned=hosted)
            standard = launcher if launcher is not None and launcher.is_standard else EXPLICIT
            address = standard.address(env)
        except ValueError as error:
            raise ValueError(f"{error}{_another(env)}") from None
        # A program that sets another MASTER_PORT than its launcher chooses a place of its own.
        hosted = hosted and env.get("AIOCOLL_STORE_PORT", str(address.port)) == str(address.port)
        return Where((method, *address[:2], job), *numbers, None, tcp_url(*address[:2]), hosted, job)
    numbers, address = launcher.numbers(env), launcher.address(env)
    return Where(
        (method, launcher.name, *address[:2], job),
        *numbers,
        None,
        tcp_url(*address[:2]),
        address.ask is not None,
        job,
        several_hosts=launcher.name if address.several_hosts else "",
        ask=address.ask,
    )


def _another(env: Mapping[str, str]) -> str:
    """Say which launcher would be asked if nothing were given."""
    others = {name: text for name, text in env.items() if name not in EXPLICIT.marks}
    launcher = recognise(others)
    if launcher is None or launcher.is_standard:
        return ""
    there = [name for name in EXPLICIT.marks if name in env]
    return (
        f"; {launcher.name} has started this process ({launcher.mark(env)}), and is asked if you give neither rank= "
        f"nor world_size={' and unset ' if there else ''}{', '.join(there)}"
    )


def _alone(env: Mapping[str, str]) -> bool:
    """Whether a program that nothing has started as a rank is to be the only one."""
    asked = env.get("AIOCOLL_SINGLETON", "0")
    if asked not in ("0", "1"):
        raise ValueError(f"AIOCOLL_SINGLETON={asked!r}: must be 1, for a group of one rank, or 0")
    return asked == "1"


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
        return name, to_int(value, name)
    if variable not in env:
        from_environment = env or when.endswith("'env://'")
        hint = (
            f", or set {variable} in the environment; start the ranks with {COMMANDS}, or set AIOCOLL_SINGLETON=1 to "
            "run the program alone, as a group of one rank"
            if from_environment
            else ""
        )
        raise ValueError(f"{name} is missing: give {name}= {when}{hint}")
    try:
        return variable, parse_int(env[variable])
    except ValueError:
        raise ValueError(f"{variable}={env[variable]!r} in the environment must be a number") from None
