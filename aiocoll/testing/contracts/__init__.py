"""The contracts of stores and transports: tests that other distributions run on their plugins; see `docs/plugins.md`.

A test module defines a subclass of a contract, named ``Test...``, with the fixtures that the contract's docstring
names. The tests need pytest and pytest-asyncio, with ``asyncio_mode = "auto"``.
"""

from aiocoll.testing.contracts.links import LinkContract, Linked, MakeLinks, Recorder, TransportContract, frame
from aiocoll.testing.contracts.stores import CloseStore, OpenStore, StoreContract

__all__ = [
    "CloseStore",
    "LinkContract",
    "Linked",
    "MakeLinks",
    "OpenStore",
    "Recorder",
    "StoreContract",
    "TransportContract",
    "frame",
]
