"""Names of the kinds of devices and of the adapters on which the GPU tests run.

This module imports nothing, because `run.py` must work without any package.
"""

#: Kinds of simulated devices, and array libraries for tests on real devices; see `on_device/worlds.py`.
SIMULATED, REAL = ("fake", "simulated"), ("cupy", "torch")
#: An environment variable that selects an adapter, and its values. If unset, tests use the default adapter or fakes.
ADAPTER = "GPU_ADAPTER"
ADAPTERS = ("cupy", "ctypes")
