"""The backend "aiocoll" for `ray.util.collective`. With this backend, Ray also imports torch if installed."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.collective import types as options
from ray.util.collective.collective_group.base_collective_group import BaseGroup

from aiocoll.blocking import BlockingGroup
from aiocoll.elements.ops import ReduceOp
from aiocoll.rendezvous.tickets import Meeting, Ticket

__all__ = ["Group"]

_OPS = {
    options.ReduceOp.SUM: ReduceOp.SUM,
    options.ReduceOp.PRODUCT: ReduceOp.PRODUCT,
    options.ReduceOp.MIN: ReduceOp.MIN,
    options.ReduceOp.MAX: ReduceOp.MAX,
}


class _Host:
    """A named Ray actor that runs the `Meeting` of a group until all ranks have left the group."""

    def __init__(self, world_size: int) -> None:
        self._meeting = Meeting(world_size, host=ray.util.get_node_ip_address())
        self._meeting.__enter__()
        self._left = 0

    def ticket(self, rank: int) -> Ticket:
        """Return the ticket with which a process joins the group as `rank`."""
        return self._meeting.ticket(rank)

    def leave(self) -> None:
        """Record that a rank has left the group; this actor exits after the last rank."""
        self._left += 1
        if self._left == self._meeting.world_size:
            self._meeting.__exit__()
            ray.actor.exit_actor()


class Group(BaseGroup):  # type: ignore[misc]
    """A group of `ray.util.collective`; each method gets its tensor in a list with one entry."""

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        name = f"aiocoll meeting of {group_name}"
        hosts = ray.remote(num_cpus=0)(_Host)
        self._host = hosts.options(name=name, get_if_exists=True).remote(world_size)
        self._group = BlockingGroup(init_method=ray.get(self._host.ticket.remote(rank)))

    @classmethod
    def backend(cls) -> str:
        """Return the name of the backend."""
        return "AIOCOLL"

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Return True: the backend needs no other package."""
        return True

    def destroy_group(self) -> None:
        """Leave the group, and close it on this rank."""
        self._group.shutdown()
        self._host.leave.remote()

    def allreduce(self, tensor: list[Any], allreduce_options: Any) -> None:
        """Reduce a tensor over all ranks, in place on every rank."""
        self._group.allreduce(tensor[0], _OPS[allreduce_options.reduceOp])

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait until all ranks have called the barrier."""
        self._group.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any) -> None:
        """Reduce a tensor over all ranks, in place on the root."""
        self._group.reduce(tensor[0], reduce_options.root_rank, _OPS[reduce_options.reduceOp])

    def allgather(self, tensor_list: list[list[Any]], tensor: list[Any], allgather_options: Any) -> None:
        """Gather the tensors of all ranks on every rank."""
        self._group.allgather(tensor_list[0], tensor[0])

    def broadcast(self, tensor: list[Any], broadcast_options: Any) -> None:
        """Send the tensor of one rank to all ranks."""
        self._group.broadcast(tensor[0], broadcast_options.root_rank)

    def reducescatter(self, tensor: list[Any], tensor_list: list[list[Any]], reducescatter_options: Any) -> None:
        """Reduce the r-th tensors in the lists of all ranks into the tensor of rank r."""
        self._group.reduce_scatter(tensor[0], tensor_list[0], _OPS[reducescatter_options.reduceOp])

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """Send a tensor to one rank."""
        self._group.send(tensor[0], send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """Receive a tensor from one rank."""
        self._group.recv(tensor[0], recv_options.src_rank)
