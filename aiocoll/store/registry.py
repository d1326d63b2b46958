"""Registry of store openers, by which `new_group` opens the store of a URL."""

from __future__ import annotations

from typing import Final, NamedTuple, Protocol

from aiocoll.registry import Registry
from aiocoll.security.tls import TlsOptions
from aiocoll.store.base import Store

__all__ = ["STORE_VERSION", "StoreOpener", "StoreOptions", "StoreRequest", "stores"]

#: The version of the interface `StoreOpener`.
STORE_VERSION: Final = 1


class StoreOptions(TlsOptions, Protocol):
    """The options of a group that its store uses; see `aiocoll.GroupOptions`."""

    @property
    def bind(self) -> str | None:
        """Address on which this rank listens."""


class StoreRequest(NamedTuple):
    """The arguments with which `new_group` requests a store from an opener.

    Attributes:
        url: the init method, such as "redis://host:6379/0".
        job: name of the job, "" without one. Jobs on one server must not see each other's keys.
        world_size: number of ranks; None for a newcomer to a group that grows.
        serves: whether this rank serves the store; False unless the opener has `served_by_rank_0`.
        timeout: default timeout of calls in seconds.
        key: the job key, or None.
        options: options of the group.
    """

    url: str
    job: str
    world_size: int | None
    serves: bool
    timeout: float
    key: bytes | None
    options: StoreOptions


class StoreOpener(Protocol):
    """The interface of an opener, which makes the stores for one URL scheme.

    Attributes:
        served_by_rank_0: whether rank 0 serves the store. Then every process must pass its rank. Otherwise the store
            exists without the ranks, and assigns free ranks to processes without one.
        has_secrets: whether the URL may contain secrets. Then error messages omit user, password and query, and the
            query is not searched for numbers such as ``?rank=0&world_size=2``.
    """

    @property
    def served_by_rank_0(self) -> bool:
        """Return whether rank 0 serves the store, as for TCP, instead of a separate server or a file."""

    @property
    def has_secrets(self) -> bool:
        """Return whether URLs of this scheme may contain secrets, which errors must not show."""

    def check(self, url: str, world_size: int) -> None:
        """Check a URL when `new_group` is called, before any store is opened.

        Raises:
            ValueError: the URL has an invalid form. The message does not repeat the URL.
        """

    def open(self, request: StoreRequest) -> Store:
        """Return the store that the request describes. It may connect at its first call; the group closes it."""


#: The store openers by URL scheme.
stores: Final = Registry[StoreOpener]("store", STORE_VERSION)
