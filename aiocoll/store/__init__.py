"""Stores: small shared dictionaries through which ranks meet."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiocoll.store.base import Store
from aiocoll.store.file import FileStore
from aiocoll.store.hash import HashStore
from aiocoll.store.key_value import KeyValueStore
from aiocoll.store.prefix import PrefixStore
from aiocoll.store.server import StoreServer
from aiocoll.store.tcp import TCPStore

if TYPE_CHECKING:
    from aiocoll.redis.store import RedisStore

__all__ = ["FileStore", "HashStore", "KeyValueStore", "PrefixStore", "RedisStore", "Store", "StoreServer", "TCPStore"]


def __getattr__(name: str) -> Any:
    """Import `RedisStore` on its first use."""
    if name == "RedisStore":
        found = globals()[name] = import_module("aiocoll.redis.store").RedisStore
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
