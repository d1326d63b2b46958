"""Collectives on CUDA arrays: by NCCL, or staged through the host. Nothing of it is loaded before such an array comes.

api          what is needed of CUDA and of NCCL, as two protocols of plain integers
cupy_api     both of them by CuPy: the only module that imports it
provider     which of them there are: those by CuPy, or what a test provides
"""
