"""Run ranks in tests: as tasks, as processes, on a virtual clock. The pytest plugin is `aiocoll.testing.plugin`."""

from aiocoll.testing.processes import run_processes
from aiocoll.testing.ranks import run_ranks
from aiocoll.testing.virtual import VirtualLoop, run_virtual

__all__ = ["VirtualLoop", "run_processes", "run_ranks", "run_virtual"]
