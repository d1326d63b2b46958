"""Adapters of array libraries, imported with the first array of their library; `aiocoll.shipped` registers them.

cuda_array     flat views of CUDA memory, and code that the adapters of CUDA arrays share
cupy_arrays    CuPy arrays
torch_tensors  torch tensors, on the CPU and on CUDA devices
torch_sparse   sparse torch tensors
torch_objects  torch tensors inside sent objects
interfaces     objects of any library with ``__cuda_array_interface__``, or with DLPack on a device
"""
