"""What tests on a device may run with. It imports nothing, as `run.py` has to say what is missing."""

#: Devices that are played, and what arrays on real ones are of; see `on_device/worlds.py`.
PLAYED, REAL = ("fake", "played"), ("cupy", "torch")
#: The variable that says by which adapter devices are called, and what it may be; not set: by none, or the default.
ADAPTER = "GPU_ADAPTER"
ADAPTERS = ("cupy", "ctypes")
