"""The registry of stores: how `new_group` opens the store of a URL."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from aiocoll.registry import Registry
from aiocoll.security.tls import TlsOptions
from aiocoll.store.base import Store

__all__ = ["STORE_VERSION", "StoreOpener", "StoreOptions", "StoreRequest", "stores"]

#: Of the interface `StoreOpener`.
STORE_VERSION: Final = 1


class StoreOptions(TlsOptions, Protocol):
    """The options of a group that concern its store; see `aiocoll.GroupOptions`."""

    @property
    def bind(self) -> str | None:
        """The address on which this rank listens."""


class StoreRequest(NamedTuple):
    """The store that `new_group` asks for.

    Attributes:
        url: the init method, such as "redis://host:6379/0".
        job: name of the job, "" without one; jobs on one server must not see each other's keys.
        world_size: number of ranks; None for a newcomer to a group that grows.
        serves: whether this rank serves the store; only if the opener has `served_by_rank_0`.
        timeout: seconds that each call waits by default.
        key: the job key, or None.
        options: of the group.
    """

    url: str
    job: str
    world_size: int | None
    serves: bool
    timeout: float
    key: bytes | None
    options: StoreOptions


class StoreOpener(Protocol):
    """How the stores of one URL scheme are opened.

    Attributes:
        served_by_rank_0: rank 0 serves the store, so every rank must be given its number. Otherwise the store exists
            without the ranks, and assigns a free number to a rank that is given none.
        has_secrets: the URL may contain secrets. Error messages then show neither its user and password nor its query,
            and ``?rank=0&world_size=2`` is not read from it.
    """

    @property
    def served_by_rank_0(self) -> bool:
        """Whether rank 0 serves the store."""

    @property
    def has_secrets(self) -> bool:
        """Whether the URL may contain secrets."""

    def check(self, url: str, world_size: int) -> None:
        """Check a URL when `new_group` is called, before anything is opened.

        Raises:
            ValueError: the URL has another form; the message does not repeat it.
        """

    def open(self, request: StoreRequest) -> Store:
        """Return the store, which may connect at its first call. The group closes it."""


#: The stores by URL scheme.
stores: Final = Registry[StoreOpener]("store", STORE_VERSION)
