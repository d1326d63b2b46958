"""Registration of the backend "aiocoll" with `ray.util.collective`."""

from __future__ import annotations

import contextlib

__all__ = ["register"]


def register() -> None:
    """Register the backend "aiocoll" with `ray.util.collective`, in this process.

    Call it in the driver and in each actor, before `create_collective_group` or `init_collective_group` with
    ``backend="aiocoll"``. Its groups accept NumPy arrays and torch CPU tensors, and write to them in place. A failed
    call raises the same error as a `BlockingGroup`. The group is not repaired.
    """
    from ray.util.collective import register_collective_backend

    from aiocoll.integrations.ray.backend import Group

    with contextlib.suppress(ValueError):  # it is already registered
        register_collective_backend("AIOCOLL", Group)
