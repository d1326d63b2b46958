"""Running ranks in tests: as tasks, as processes, on a virtual clock. The pytest plugin is `aiocoll.testing.plugin`."""

from aiocoll.testing.cases import InProcessTestCase, MultiProcessTestCase
from aiocoll.testing.processes import run_processes
from aiocoll.testing.ranks import run_ranks
from aiocoll.testing.skips import requires_gpu, requires_module, skip_if_world_is_odd, skip_if_world_smaller_than
from aiocoll.testing.spawn import spawn_ranks
from aiocoll.testing.virtual import VirtualLoop, run_virtual

__all__ = [
    "InProcessTestCase",
    "MultiProcessTestCase",
    "VirtualLoop",
    "requires_gpu",
    "requires_module",
    "run_processes",
    "run_ranks",
    "run_virtual",
    "skip_if_world_is_odd",
    "skip_if_world_smaller_than",
    "spawn_ranks",
]
