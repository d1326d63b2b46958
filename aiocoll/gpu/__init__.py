"""CUDA devices and NCCL for collectives on CUDA arrays. Loaded by the first call on such an array.

backend       the backend of CUDA devices, by which the core uses this package
calls         how a group carries out its calls
streams       CUDA streams of any library, as addresses
api           the functions of CUDA and NCCL that are used, and kernels, as protocols of plain integers
cupy_api      both of them by CuPy: the only module that imports it
driver        some calls of CUDA without CuPy
ctypes_cuda   all calls of CUDA without CuPy, over the driver
ctypes_nccl   NCCL without CuPy, over the library that torch brings
provider      where CUDA and NCCL come from: CuPy, or a test
device        a device as a loop uses it: calls from the loop run on the device, and the loop is told when they end
launch_order  the order in which groups put calls of NCCL on a device
launcher      the one thread of a device that starts work there
waiter        the thread that waits for the calls on one stream
events        a pool of events of one device
staging       a pool of page-locked host memory
bounce        copies between a device and ordinary memory, where no page-locked memory can be had
turns         calls on a device that several ranks take part in, one at a time
"""
