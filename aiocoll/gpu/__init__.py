"""CUDA devices and NCCL, for collectives on CUDA arrays. Loaded by the first call on such an array.

backend       the backend of CUDA devices, by which the core uses this package
calls         how a group carries out its calls
streams       CUDA streams of any library, as addresses
api           the CUDA and NCCL functions that are used, and kernels, as protocols of plain integers
cupy_api      CUDA and NCCL by CuPy: the only module that imports CuPy
driver        some CUDA calls without CuPy
ctypes_cuda   all CUDA calls without CuPy, by the driver
ctypes_nccl   NCCL without CuPy, by the library that comes with torch
provider      selection of CUDA and NCCL: CuPy, the libraries, or fakes of a test
device        a device for event loops: it runs their calls, and notifies them of the ends
launch_order  the order of the NCCL calls of several groups on a device
launcher      the launcher thread of a device
waiter        the completion thread of one stream
events        a pool of events of one device
end_word      a word of host memory in which a device reports the end of a call
staging       a pool of page-locked host memory
bounce        copies between a device and ordinary memory
turns         one communicator creation at a time per device
"""
