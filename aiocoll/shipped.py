"""Registration, by name, of the implementations that this package contains, without importing them."""

from __future__ import annotations

from aiocoll import registry
from aiocoll.backends import serve_device
from aiocoll.elements.adapters import ADAPTER_VERSION, adapters
from aiocoll.group.dispatch.devices import DEVICE_VERSION, devices
from aiocoll.store.registry import STORE_VERSION, stores
from aiocoll.transport.registry import TRANSPORT_VERSION, transports

__all__ = ["COMMANDS"]

stores.register_all(
    {
        "tcp": "aiocoll.store.tcp:TCP_OPENER",
        "file": "aiocoll.store.file:FILE_OPENER",
        "redis": "aiocoll.redis.store:REDIS_OPENER",
        "rediss": "aiocoll.redis.store:REDIS_OPENER",
    },
    version=STORE_VERSION,
)
transports.register_all(
    {
        "tcp": "aiocoll.transport.registry:TCP",
        "unix": "aiocoll.transport.registry:UNIX",
        "shm": "aiocoll.transport.registry:SHM",
    },
    version=TRANSPORT_VERSION,
)
#: Maps a command name to a help line and the function that adds arguments. `aiocoll.plugins` registers the commands.
COMMANDS = {
    "run": ("start the ranks of a program", "aiocoll.cli.run:configure"),
    "bench": ("measure the collectives on this machine", "aiocoll.cli.bench:configure"),
    "doctor": (
        "check this host, and the connections to other hosts, for problems and causes of slowness",
        "aiocoll.cli.doctor:configure",
    ),
    "top": ("watch the ranks of a running job", "aiocoll.cli.top.command:configure"),
    "trace": (
        "find in the dumps of ranks which collective diverged first and which ranks are missing",
        "aiocoll.cli.trace:configure",
    ),
}

# Error messages name the adapters in this order.
adapters.register_all(
    {
        "torch": "aiocoll.arrays.torch_tensors:TORCH",
        "cupy": "aiocoll.arrays.cupy_arrays:CUPY",
        "__cuda_array_interface__": "aiocoll.arrays.interfaces:INTERFACE",
        "dlpack:2": "aiocoll.arrays.interfaces:DLPACK",
        "dlpack:10": "aiocoll.arrays.interfaces:ROCM",
    },
    version=ADAPTER_VERSION,
)
devices.register_all({"cuda": "aiocoll.gpu.backend:CUDA"}, version=DEVICE_VERSION)
serve_device("cuda", "nccl")
registry.shipped = None  # not earlier: another thread that uses a registry waits for this import
