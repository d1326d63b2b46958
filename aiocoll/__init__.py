"""Collectives you can await: asyncio-native collective communication.

The layers, lowest first; a module imports only from layers below its own, or from its own folder:

    0  errors log runtime unseen threads loading elements/ codec/
    1  work handshake options process backends dump/
    2  transport/ store/
    3  algorithms/
    4  engine/
    5  tuning meeting/ group/
    6  rendezvous/
    7  distributed/
    8  testing/ cli/
"""

from aiocoll import errors
from aiocoll.backends import Backend, BackendConfig, register_backend
from aiocoll.elements.ops import ReduceOp
from aiocoll.errors import *  # noqa: F403 - errors.__all__ is the list of them
from aiocoll.group.point_to_point import Recv, Send
from aiocoll.group.process_group import ProcessGroup, current_process_group, process_group
from aiocoll.options import GroupOptions
from aiocoll.rendezvous.new_group import new_group
from aiocoll.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from aiocoll.work import Work

__version__ = "0.1.0"

__all__ = [
    "Backend",
    "BackendConfig",
    "FileStore",
    "GroupOptions",
    "HashStore",
    "PrefixStore",
    "ProcessGroup",
    "Recv",
    "ReduceOp",
    "Send",
    "Store",
    "TCPStore",
    "Work",
    "current_process_group",
    "new_group",
    "process_group",
    "register_backend",
]
__all__ += errors.__all__
