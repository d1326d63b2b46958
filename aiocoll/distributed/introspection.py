"""Queries about backends, debug levels and the dtypes of reductions."""

from __future__ import annotations

import os
from enum import IntEnum
from typing import Any, NewType

from aiocoll.backends import Backend, BackendConfig
from aiocoll.distributed.world import Group, find_default_group, require_member
from aiocoll.elements.ops import ReduceOp
from aiocoll.errors import BackendUnavailableError
from aiocoll.group.parts import parts_of
from aiocoll.options import GroupOptions

__all__ = [
    "DebugLevel",
    "GroupName",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_pg_count",
    "is_backend_available",
    "is_gloo_available",
    "is_mpi_available",
    "is_nccl_available",
    "is_ucc_available",
    "is_xccl_available",
    "supports_complex",
]

GroupName = NewType("GroupName", str)


class DebugLevel(IntEnum):
    """The debug levels of torch.distributed; at `DETAIL`, ranks compare their calls before data moves.

    No group has the level INFO, which exists so that programs can compare levels.
    """

    OFF = 0
    INFO = 1
    DETAIL = 2


def get_debug_level() -> DebugLevel:
    """Return the debug level of the default group; without one, the level that new groups will have."""
    pg = find_default_group()
    options = GroupOptions.resolve(None, os.environ) if pg is None else parts_of(pg).dispatcher.options
    return DebugLevel[options.debug.upper()]


def get_backend(group: Group = None) -> Backend:
    """Return the backend of a group for host arrays; for CUDA arrays if the group accepts only these.

    Args:
        group: a group; None means the default group.
    """
    devices = parts_of(require_member(group)).devices
    return Backend(devices.get("cpu") or next(iter(devices.values())))


def get_backend_config(group: Group = None) -> str:
    """Return the backend of a group for each kind of device, such as ``"cpu:aio,cuda:nccl"``.

    Args:
        group: a group; None means the default group.
    """
    return ",".join(f"{device}:{backend}" for device, backend in parts_of(require_member(group)).devices.items())


def get_default_backend_for_device(device: Any) -> str:
    """Return the default backend of a device.

    Args:
        device: "cpu", "cuda:0", or an object whose `str` is such a name.
    """
    kind = str(device).partition(":")[0]
    if kind not in Backend.default_device_backend_map:
        known = ", ".join(Backend.default_device_backend_map)
        raise ValueError(f"device={device!r} has no backend; backends exist for {known}")
    return Backend.default_device_backend_map[kind]


def is_backend_available(backend: str) -> bool:
    """Return whether this process can use the given backend or backends; "nccl" imports CuPy.

    Args:
        backend: a name, or pairs of device and name such as ``"cpu:aio"``.
    """
    try:
        names = set(BackendConfig(backend).get_device_backend_map().values())
    except ValueError:
        return False
    return Backend.NCCL not in names or _has_nccl()


def is_nccl_available() -> bool:
    """Return whether this process can use NCCL for CUDA arrays; imports CuPy if installed."""
    return is_backend_available(Backend.NCCL)


def is_gloo_available() -> bool:
    """Return whether the program has registered a backend named "gloo"; aiocoll itself has none."""
    return is_backend_available("gloo")


def is_mpi_available() -> bool:
    """Return whether the program has registered a backend named "mpi"."""
    return is_backend_available("mpi")


def is_ucc_available() -> bool:
    """Return whether the program has registered a backend named "ucc"."""
    return is_backend_available("ucc")


def is_xccl_available() -> bool:
    """Return whether the program has registered a backend named "xccl"."""
    return is_backend_available("xccl")


def supports_complex(reduceOp: ReduceOp) -> bool:
    """Return whether a reduction op can reduce complex numbers; MIN, MAX, bitwise and logical ops cannot.

    Args:
        reduceOp: an operation.
    """
    return reduceOp.name not in ("MIN", "MAX", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR", "MINLOC", "MAXLOC")


def get_pg_count() -> int:
    """Return the number of open groups: the default group, and all groups that were split off from it."""
    pg = find_default_group()
    return 0 if pg is None else len(parts_of(pg).reconfigurer.open_groups())


def _has_nccl() -> bool:
    from aiocoll.gpu.provider import runtime  # not at the top: only users of NCCL need it

    try:
        return runtime()[1] is not None
    except BackendUnavailableError:
        return False
