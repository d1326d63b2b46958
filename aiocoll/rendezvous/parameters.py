"""Rendezvous parameters: store, rank and world size from the arguments of `new_group` and the environment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple, Protocol, runtime_checkable

from aiocoll.errors import AuthenticationError
from aiocoll.numerals import parse_int, to_int
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.launchers import COMMANDS, EXPLICIT, RequestAddress, recognise
from aiocoll.store import HashStore, Store
from aiocoll.store.registry import StoreOpener, StoreRequest, stores
from aiocoll.store.tcp import tcp_url

__all__ = ["DEFAULT", "InitMethod", "RendezvousParameters", "find_dry_run", "find_parameters"]

_PASSWORD = re.compile("//.*@")
_QUERY = re.compile(r"\?.*")


class RendezvousParameters(NamedTuple):
    """The rendezvous parameters of one rank: store, rank and world size.

    Attributes:
        identity: a key that all groups of one job in this process share.
        rank: this rank; None if the store assigns it.
        world_size: number of ranks; 0 for a newcomer, to which the growing group assigns rank and world size.
        store: the store passed by the caller, or None.
        url: the URL of the store otherwise; its scheme names the opener in `aiocoll.store.registry.stores`.
        hosted: whether a process that is not a rank serves the store.
        job: name of the job.
        key: the job key, if it came with the address.
        several_hosts: the name of a launcher that has started ranks on several hosts, which need a job key; else "".
        ask: requests the address from the launcher, if only the launcher has it.
        holder: the meeting's name for this process, from its ticket.
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
    ask: RequestAddress | None = None
    holder: str = ""

    def __repr__(self) -> str:
        # Omit the key, the URL and other fields that may contain secrets.
        return f"RendezvousParameters(rank={self.rank}, world_size={self.world_size}, scheme={self.scheme!r})"

    @property
    def scheme(self) -> str:
        """Scheme of the store's URL; "" without a URL."""
        return self.url.partition("://")[0]

    @property
    def hosts(self) -> bool:
        """Return whether this rank serves the store itself."""
        return self.rank == 0 and not self.hosted

    @property
    def replaceable(self) -> bool:
        """Return whether a new store may start at the address of a store that has ended; False for a `Meeting`."""
        return not self.hosts and self.key is None

    async def resolve(self, key: bytes | None, options: GroupOptions, timeout: float) -> RendezvousParameters:
        """Return these parameters with the store's address, which is requested from the launcher if necessary.

        Raises:
            RendezvousError: the launcher has no address, or not all ranks sent their request within `timeout` seconds.
        """
        if self.ask is None:
            return self
        store = await self.ask(key, options, self.job, timeout)
        return self._replace(url=tcp_url(store.host, store.port), key=store.key, ask=None)

    def open(self, timeout: float, key: bytes | None, options: GroupOptions) -> Store:
        """Open the store that the parameters describe.

        Raises:
            AuthenticationError: ranks on several hosts need a job key.
        """
        if self.several_hosts and key is None:
            raise AuthenticationError(
                f"{self.several_hosts} started ranks on several hosts, but there is no job key: make one with "
                '`python -c "import secrets; print(secrets.token_hex(32))"`, put it into a file on every host that '
                "only you can read, and set AIOCOLL_JOB_KEY_FILE to its path. MPICH's mpiexec and `srun --mpi=pmi2` "
                "pass a key by themselves"
            )
        request = StoreRequest(self.url, self.job, self.world_size or None, self.hosts, timeout, key, options)
        return stores.get(self.scheme).open(request)


@runtime_checkable
class InitMethod(Protocol):
    """An object, such as a ticket, that may be passed as `init_method` in place of a URL."""

    def where(self) -> RendezvousParameters:
        """Return the rendezvous parameters of the process that uses this object."""


#: The default init method of `new_group` in the current context; set by `Ticket.as_default`.
DEFAULT: ContextVar[InitMethod | None] = ContextVar("aiocoll_init_method", default=None)


def find_parameters(
    init_method: str | InitMethod | None,
    store: Store | None,
    rank: int | None,
    world_size: int | None,
    env: Mapping[str, str],
    job: str,
) -> RendezvousParameters:
    """Return the rendezvous parameters of a rank.

    Args:
        init_method: argument of `new_group`.
        store: argument of `new_group`.
        rank: this rank; None reads the environment or lets the store assign one.
        world_size: number of ranks; None reads the environment.
        env: the environment.
        job: name of the job.

    Raises:
        ValueError, TypeError: an argument or a variable is missing or invalid; the message names it.
        RendezvousError: torchrun started ranks on several hosts, and AIOCOLL_PORT is not set.
    """
    if store is not None:
        return RendezvousParameters(
            ("store", id(store)), *_read_numbers(rank, world_size, {}, "with store=", assigned=True), store
        )
    if isinstance(init_method, InitMethod):
        return init_method.where()
    method = "env://" if init_method is None else init_method
    opener = None if method.partition("://")[0] == "env" else _find_opener(method)
    if opener is None or not opener.has_secrets:
        method, rank, world_size = _without_query(method, rank, world_size)
    if opener is None:
        return _from_environment(method, rank, world_size, env, job)
    shown = _redact(method, has_secrets=opener.has_secrets)
    served = opener.served_by_rank_0
    numbers = _read_numbers(rank, world_size, {}, f"with init_method={shown!r}", assigned=not served)
    try:
        opener.check(method, numbers[1])
    except ValueError as error:
        raise ValueError(f"init_method={shown!r}: {error}") from None
    return RendezvousParameters((method, job), *numbers, None, method, not served, job)


def _find_opener(url: str) -> StoreOpener:
    """Return the store opener for the scheme of a URL.

    Raises:
        ValueError: no opener has this scheme.
    """
    scheme, separator, _ = url.partition("://")
    shown = _redact(url, has_secrets=True)
    if not separator:
        known = ", ".join(f"{name}://" for name in stores.names())
        raise ValueError(f"init_method={shown!r} must be a URL that begins with one of env://, {known}")
    try:
        return stores.get(scheme)
    except ValueError as error:
        raise ValueError(f"init_method={shown!r}: {error}") from None


def _redact(url: str, *, has_secrets: bool) -> str:
    """Return a URL for error messages. If it may contain secrets, replace its password and query."""
    return _QUERY.sub("?...", _PASSWORD.sub("//...@", url)) if has_secrets else url


def _without_query(method: str, rank: int | None, world_size: int | None) -> tuple[str, int | None, int | None]:
    """Split a query such as ``?rank=0&world_size=2`` off a URL; return the URL, the rank and the world size."""
    url, _, query = method.partition("?")
    texts = dict(pair.split("=", 1) for pair in query.split("&") if "=" in pair)
    numbers = {"rank": rank, "world_size": world_size}
    if not texts or not texts.keys() <= numbers.keys():
        return method, rank, world_size  # the name of a file may contain a question mark
    for name, text in texts.items():
        if numbers[name] is not None:
            raise ValueError(f"init_method={method!r} contains {name}, and {name}= is given: pass only one of them")
        try:
            numbers[name] = parse_int(text)
        except ValueError:
            raise ValueError(f"init_method={method!r}: {name} must be a number, not {text!r}") from None
    return url, numbers["rank"], numbers["world_size"]


def find_dry_run(rank: int | None, world_size: int | None, env: Mapping[str, str]) -> RendezvousParameters:
    """Return the rendezvous parameters of a dry run, which needs no store."""
    numbers = _read_numbers(rank, world_size, env, "with backend='fake'")
    return RendezvousParameters(None, *numbers)


def _from_environment(
    method: str, rank: int | None, world_size: int | None, env: Mapping[str, str], job: str
) -> RendezvousParameters:
    """Return the rendezvous parameters from the launcher's environment variables. Arguments take precedence."""
    launcher, given = recognise(env), (rank, world_size) != (None, None)
    if launcher is None and not given and _is_singleton(env):
        return RendezvousParameters((method, "alone"), 0, 1, HashStore())
    if launcher is None or launcher.is_standard or given:
        hosted = env.get("AIOCOLL_STORE") == "launcher"
        try:
            numbers = _read_numbers(rank, world_size, env, "with init_method='env://'", assigned=hosted)
            standard = launcher if launcher is not None and launcher.is_standard else EXPLICIT
            address = standard.address(env)
        except ValueError as error:
            raise ValueError(f"{error}{_launcher_hint(env)}") from None
        # If the program has changed the launcher's MASTER_PORT, it does not use the launcher's store.
        hosted = hosted and env.get("AIOCOLL_STORE_PORT", str(address.port)) == str(address.port)
        return RendezvousParameters((method, *address[:2], job), *numbers, None, tcp_url(*address[:2]), hosted, job)
    numbers, address = launcher.numbers(env), launcher.address(env)
    return RendezvousParameters(
        (method, launcher.name, *address[:2], job),
        *numbers,
        None,
        tcp_url(*address[:2]),
        address.ask is not None,
        job,
        several_hosts=launcher.name if address.several_hosts else "",
        ask=address.ask,
    )


def _launcher_hint(env: Mapping[str, str]) -> str:
    """Return a hint for errors that arguments override the launcher's variables; "" if there is no launcher."""
    others = {name: text for name, text in env.items() if name not in EXPLICIT.marks}
    launcher = recognise(others)
    if launcher is None or launcher.is_standard:
        return ""
    present = [name for name in EXPLICIT.marks if name in env]
    return (
        f"; {launcher.name} started this process ({launcher.mark(env)}): to use its variables, omit rank= and "
        f"world_size={' and unset ' if present else ''}{', '.join(present)}"
    )


def _is_singleton(env: Mapping[str, str]) -> bool:
    """Return whether ``AIOCOLL_SINGLETON`` lets a program without a launcher make a group of one rank."""
    value = env.get("AIOCOLL_SINGLETON", "0")
    if value not in ("0", "1"):
        raise ValueError(f"AIOCOLL_SINGLETON={value!r}: must be 1, for a group of one rank, or 0")
    return value == "1"


def _read_numbers(
    rank: int | None, world_size: int | None, env: Mapping[str, str], when: str, *, assigned: bool = False
) -> tuple[int | None, int]:
    """Return the rank and the world size. The rank may be None if `assigned` is True: the store then assigns it."""
    size_name, size = _read_number("world_size", world_size, env, when)
    if assigned and rank is None and "RANK" not in env:
        if size < 1:
            raise ValueError(f"{size_name}={size}: world_size must be positive")
        return None, size
    rank_name, number = _read_number("rank", rank, env, when)
    if size < 1 or not 0 <= number < size:
        raise ValueError(
            f"{rank_name}={number}, {size_name}={size}: world_size must be positive and rank 0 to world_size - 1"
        )
    return number, size


def _read_number(name: str, value: int | None, env: Mapping[str, str], when: str) -> tuple[str, int]:
    """Return the name and value of an argument; if it is None, of the environment variable that replaces it."""
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
