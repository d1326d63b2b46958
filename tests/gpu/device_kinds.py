"""Names of devices and adapters in tests.

This module imports nothing, because `run.py` must work without any package.
"""

#: Simulated devices, and the array libraries for real devices; see `on_device/worlds.py`.
SIMULATED, REAL = ("fake", "simulated"), ("cupy", "torch")
#: The environment variable that selects an adapter, and its values. Without it, tests use the default, or the fakes.
ADAPTER = "GPU_ADAPTER"
ADAPTERS = ("cupy", "ctypes")
