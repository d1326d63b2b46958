"""Registries to which other distributions add implementations; see `docs/plugins.md`.

    registry       name                     implementation         entry points           version
    stores         scheme of the URL        `StoreOpener`          aiocoll.stores         `STORE_VERSION`
    transports     option `transport`       `TransportProvider`    aiocoll.transports     `TRANSPORT_VERSION`
    adapters       package of the arrays    `ArrayAdapter`         aiocoll.adapters       `ADAPTER_VERSION`
    devices        kind of device           `DeviceBackend`        aiocoll.devices        `DEVICE_VERSION`
    commands       ``aiocoll NAME``         `Command`              aiocoll.commands       `COMMAND_VERSION`

A distribution has an entry point with the name of the implementation. It refers to a function that takes the registry
and calls `register`. aiocoll calls the function when the name is first used. A program may also call `register` itself.

`aiocoll.testing.contracts` has the tests that every store, transport and device must pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from aiocoll.backends import serve_device
from aiocoll.elements.adapters import ADAPTER_VERSION, ArrayAdapter, adapters
from aiocoll.elements.buffers import Buffer, share
from aiocoll.elements.device import DeviceArray
from aiocoll.group.dispatch.devices import (
    DEVICE_VERSION,
    DeviceBackend,
    DeviceCalls,
    devices,
    receive_in_memory,
    send_from_memory,
)
from aiocoll.group.prepared_call import PlannedCall, PreparedCall
from aiocoll.loading import loading
from aiocoll.registry import Registry
from aiocoll.security.handshake import ConnKind
from aiocoll.shipped import COMMANDS
from aiocoll.store.registry import STORE_VERSION, StoreOpener, StoreOptions, StoreRequest, stores
from aiocoll.transport.base import Link, Sink
from aiocoll.transport.byte_stream import ByteStream, receive_message, send_message
from aiocoll.transport.frame import HEADER, Header
from aiocoll.transport.registry import (
    TRANSPORT_VERSION,
    CarrierRequest,
    DataCarrier,
    DataLink,
    TransportProvider,
    transports,
)

if TYPE_CHECKING:
    import argparse

__all__ = [
    "ADAPTER_VERSION",
    "COMMAND_VERSION",
    "DEVICE_VERSION",
    "HEADER",
    "STORE_VERSION",
    "TRANSPORT_VERSION",
    "ArrayAdapter",
    "Buffer",
    "ByteStream",
    "CarrierRequest",
    "Command",
    "ConnKind",
    "DataCarrier",
    "DataLink",
    "DeviceArray",
    "DeviceBackend",
    "DeviceCalls",
    "Header",
    "Link",
    "PlannedCall",
    "PreparedCall",
    "Registry",
    "Sink",
    "StoreOpener",
    "StoreOptions",
    "StoreRequest",
    "TransportProvider",
    "adapters",
    "commands",
    "devices",
    "receive_in_memory",
    "receive_message",
    "send_from_memory",
    "send_message",
    "serve_device",
    "share",
    "stores",
    "transports",
]

#: Version of the interface `Command`.
COMMAND_VERSION: Final = 1


@dataclass(frozen=True)
class Command:
    """A subcommand of `aiocoll`.

    Attributes:
        help: one line for `aiocoll --help`.
        configure: a function, or "module:function", which is imported when the command is used. The function takes the
            `argparse.ArgumentParser` of the command, adds arguments, and sets the default `command`: a function that
            takes the parsed arguments and returns the exit code.
    """

    help: str
    configure: Callable[[argparse.ArgumentParser], None] | str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to a parser, by a call of `configure`.

        Args:
            parser: the argument parser of the command.

        Raises:
            BackendUnavailableError: `configure` cannot be imported.
        """
        configure: Any = self.configure
        if isinstance(configure, str):
            module, _, attribute = configure.partition(":")
            with loading(f"`{parser.prog}`"):
                configure = getattr(import_module(module), attribute)
        configure(parser)


#: The commands by name.
commands: Final = Registry[Command]("command", COMMAND_VERSION)
commands.register_all({name: Command(*about) for name, about in COMMANDS.items()}, version=COMMAND_VERSION)
