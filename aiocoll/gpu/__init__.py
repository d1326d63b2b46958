"""Collectives on CUDA arrays: by NCCL, or staged through the host. Nothing of it is loaded before such an array comes.

api          what is needed of CUDA and of NCCL, as two protocols of plain integers
cupy_api     both of them by CuPy: the only module that imports it
driver       some calls of CUDA without CuPy
provider     which of them there are: those by CuPy, or what a test provides
device       a device as a loop uses it: calls are made in the loop, done on the device, and told to the loop
launcher     the one thread of a device that starts work there
waiter       the thread that waits for what is on one stream
events       events of one device, used again and again
staging      page-locked memory of the host, used again and again
"""
