"""Adapters of array libraries, each imported with the first array of its library; `aiocoll.shipped` lists them.

cuda_array     memory of a CUDA device as a flat view, and the parts that its adapters share
cupy_arrays    CuPy
torch_tensors  torch, on the CPU and on CUDA devices; `torch_sparse` and `torch_objects` are for its sparse tensors, and
               for tensors in sent objects
interfaces     objects of any library with ``__cuda_array_interface__``, or DLPack on a device
"""
