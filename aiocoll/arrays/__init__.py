"""Adapters for array libraries; each is imported with the first array of its library.

`aiocoll.shipped` registers the adapters.

cuda_array     flat views of CUDA memory, and code that the adapters of CUDA arrays share
cupy_arrays    CuPy arrays
torch_tensors  torch tensors, on the CPU and on CUDA devices
torch_sparse   sparse torch tensors
torch_objects  torch tensors inside sent objects
interfaces     objects of any library with ``__cuda_array_interface__``, or with DLPack on a device
"""
