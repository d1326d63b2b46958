"""`Carriers`: selects the backend for each call of a torch group, by the device of the tensors."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from aiocoll.integrations.torch.arguments import to_timedelta

__all__ = ["BACKEND", "Carriers", "alias", "routed"]

C = TypeVar("C", bound=Callable[..., Any])

#: Name of aiocoll's backend in a torch backend configuration such as "cpu:aio,cuda:nccl".
BACKEND = "aio"


class Carriers:
    """The backends of one torch group by device type: aiocoll for the CPU, torch's backends for the rest.

    The first call on a tensor of another device makes a torch group of the same ranks with the backends of all other
    devices. So all ranks make that call.
    """

    def __init__(self) -> None:
        self._found: dict[str, Any] = {}
        self._others: Any = None

    def find(self, group: dist.ProcessGroup, device: str) -> Any:
        """Return the torch group for calls on tensors of device type `device`; None if aiocoll carries them out.

        Args:
            group: the group of these carriers.
            device: such as "cpu".

        Raises:
            ValueError: the group has no backend for the device, or has backend "aio" for another device than the CPU.
        """
        if device not in self._found:
            self._found[device] = self._make(group, device)
        return self._found[device]

    def devices(self, group: dist.ProcessGroup) -> list[str]:
        """Return the device types for which the group has a backend."""
        return list(_configuration(group))

    def destroy(self) -> None:
        """Destroy the internal torch group for calls on tensors that are not on the CPU."""
        others, self._others = self._others, None
        if others is not None:
            with contextlib.suppress(ValueError):  # raised if it was destroyed with torch's default group
                dist.destroy_process_group(others)

    def _make(self, group: dist.ProcessGroup, device: str) -> Any:
        backends = _configuration(group)
        shown = ",".join(f"{kind}:{name}" for kind, name in backends.items())
        if (backends.get(device) == BACKEND) != (device == "cpu"):
            raise ValueError(
                f"the backends of this group are {shown!r}, and {BACKEND!r} carries CPU tensors only: choose 'cpu:aio' "
                f"and another backend for other devices, such as 'cpu:aio,cuda:nccl'"
            )
        if device == "cpu":
            return None
        if device not in backends:
            raise ValueError(
                f"a tensor is on {device}, and the backends of this group are {shown!r}: add a backend for "
                f"{device}, such as 'cpu:aio,cuda:nccl', or use the group that aiocoll.torch.group(pg) returns"
            )
        if self._others is None:
            others = {kind: name for kind, name in backends.items() if name != BACKEND}
            names = set(others.values())
            self._others = dist.new_group(
                dist.get_process_group_ranks(group),
                to_timedelta(group.pg.timeout),
                names.pop() if len(names) == 1 else ",".join(f"{kind}:{name}" for kind, name in others.items()),
                use_local_synchronization=True,
                sort_ranks=False,
            )
        return self._others


def routed(method: C, name: str = "") -> C:
    """Decorate a method so that calls on tensors outside the CPU go to the same method of torch's backend.

    Args:
        method: of a group with `carriers`.
        name: of torch's method; by default that of `method`.
    """
    torch_name = name or method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        carrier = self.carriers.find(self, _device_of(args) or "cpu")
        return method(self, *args, **kwargs) if carrier is None else getattr(carrier, torch_name)(*args, **kwargs)

    return call  # type: ignore[return-value]


def alias(call: C, name: str) -> C:
    """Return the routed method `call` under the name `name`, which other versions of torch use."""
    return routed(call.__wrapped__, name)  # type: ignore[attr-defined, no-any-return]


def _device_of(arguments: Iterable[Any]) -> str | None:
    """Return the device type of the first tensor or `torch.device` in a call's arguments; None without one."""
    for each in arguments:
        if isinstance(each, torch.Tensor):
            return str(each.device.type)
        if isinstance(each, torch.device):
            return str(each.type)
        if isinstance(each, (list, tuple)) and (found := _device_of(each)) is not None:
            return found
    return None


def _configuration(group: dist.ProcessGroup) -> dict[str, str]:
    """Return the backend name for each device type, as the program has configured the group."""
    try:
        pairs = [pair.partition(":") for pair in dist.get_backend_config(group).split(",")]
    except TypeError:  # torch has not registered the group yet
        pairs = []
    return {device: name for device, colon, name in pairs if colon} or {"cpu": BACKEND}
