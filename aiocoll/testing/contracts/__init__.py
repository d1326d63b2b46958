"""The contracts of stores, transports and devices, as tests for other distributions; see `docs/plugins.md`.

A test module defines a subclass of a contract, named ``Test...``, with the fixtures that the contract's docstring
names. The tests need pytest and pytest-asyncio, with ``asyncio_mode = "auto"``.
"""

from aiocoll.testing.contracts.devices import DeviceContract, ToDevice, ToHost
from aiocoll.testing.contracts.links import LinkContract, Linked, MakeLinks, Recorder, TransportContract, frame
from aiocoll.testing.contracts.stores import CloseStore, OpenStore, StoreContract

__all__ = [
    "CloseStore",
    "DeviceContract",
    "LinkContract",
    "Linked",
    "MakeLinks",
    "OpenStore",
    "Recorder",
    "StoreContract",
    "ToDevice",
    "ToHost",
    "TransportContract",
    "frame",
]
