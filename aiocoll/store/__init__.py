"""Stores: small shared dictionaries through which ranks meet."""

from aiocoll.store.base import Store
from aiocoll.store.file import FileStore
from aiocoll.store.hash import HashStore
from aiocoll.store.key_value import KeyValueStore
from aiocoll.store.prefix import PrefixStore
from aiocoll.store.redis import RedisStore
from aiocoll.store.server import StoreServer
from aiocoll.store.tcp import TCPStore

__all__ = ["FileStore", "HashStore", "KeyValueStore", "PrefixStore", "RedisStore", "Store", "StoreServer", "TCPStore"]
