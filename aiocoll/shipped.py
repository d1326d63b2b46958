"""Registration of the implementations that ship with the package; none of them is imported here."""

from __future__ import annotations

from aiocoll.backends import serve_device
from aiocoll.elements.adapters import ADAPTER_VERSION, adapters
from aiocoll.group.dispatch.devices import DEVICE_VERSION, devices

__all__: list[str] = []

# In the order in which error messages name them.
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
