"""Awaitable functions with the names of `torch.distributed`, such as ``await dist.all_reduce(t)``.

A thin layer over `ProcessGroup`. The default group is the group of the context (`aiocoll.process_group`, which the
testing kit sets on every rank). Otherwise it is the first group that `init_process_group` has made on this event loop.
There is no ``async_op``: every call that moves data starts at once and returns a `Work`. The first line of a function
names the method of `ProcessGroup` that documents its shapes, costs, errors and algorithm.
"""

from typing import TYPE_CHECKING, NoReturn

from aiocoll.backends import Backend, BackendConfig
from aiocoll.distributed.blocks import coalescing_manager, time_estimator
from aiocoll.distributed.calls import (
    all_gather,
    all_gather_coalesced,
    all_gather_into_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    all_to_all_single,
    barrier,
    broadcast,
    gather,
    monitored_barrier,
    reduce,
    reduce_scatter,
    reduce_scatter_tensor,
    scatter,
)
from aiocoll.distributed.introspection import (
    DebugLevel,
    GroupName,
    get_backend,
    get_backend_config,
    get_debug_level,
    get_default_backend_for_device,
    get_pg_count,
    is_backend_available,
    is_gloo_available,
    is_mpi_available,
    is_nccl_available,
    is_ucc_available,
    is_xccl_available,
    supports_complex,
)
from aiocoll.distributed.objects import (
    all_gather_object,
    broadcast_object_list,
    gather_object,
    recv_object_list,
    scatter_object_list,
    send_object_list,
)
from aiocoll.distributed.p2p import P2POp, batch_isend_irecv, irecv, isend, recv, send
from aiocoll.distributed.ranks import (
    get_global_rank,
    get_group_rank,
    get_node_local_rank,
    get_process_group_ranks,
    get_rank,
    get_world_size,
)
from aiocoll.distributed.subgroups import (
    SHRINK_ABORT,
    SHRINK_DEFAULT,
    new_group,
    new_subgroups,
    new_subgroups_by_enumeration,
    shrink_group,
    split_group,
)
from aiocoll.distributed.world import (
    GroupMember,
    default_pg_timeout,
    destroy_process_group,
    group,
    init_process_group,
    is_available,
    is_initialized,
    is_torchelastic_launched,
)
from aiocoll.elements.ops import ReduceOp
from aiocoll.errors import StoreError as DistStoreError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.store import FileStore, HashStore, PrefixStore, Store, TCPStore
from aiocoll.work import Work

reduce_op = ReduceOp

if not TYPE_CHECKING:  # so that type checkers report unknown names

    def __getattr__(name: str) -> NoReturn:
        raise AttributeError(
            f"aiocoll.distributed has no {name!r}: docs/porting.md lists the names of torch.distributed that it leaves "
            "out, and their replacements"
        )


__all__ = [
    "SHRINK_ABORT",
    "SHRINK_DEFAULT",
    "Backend",
    "BackendConfig",
    "DebugLevel",
    "DistStoreError",
    "FileStore",
    "GroupMember",
    "GroupName",
    "HashStore",
    "P2POp",
    "PrefixStore",
    "ProcessGroup",
    "ReduceOp",
    "Store",
    "TCPStore",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "coalescing_manager",
    "default_pg_timeout",
    "destroy_process_group",
    "gather",
    "gather_object",
    "get_backend",
    "get_backend_config",
    "get_debug_level",
    "get_default_backend_for_device",
    "get_global_rank",
    "get_group_rank",
    "get_node_local_rank",
    "get_pg_count",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "group",
    "init_process_group",
    "irecv",
    "is_available",
    "is_backend_available",
    "is_gloo_available",
    "is_initialized",
    "is_mpi_available",
    "is_nccl_available",
    "is_torchelastic_launched",
    "is_ucc_available",
    "is_xccl_available",
    "isend",
    "monitored_barrier",
    "new_group",
    "new_subgroups",
    "new_subgroups_by_enumeration",
    "recv",
    "recv_object_list",
    "reduce",
    "reduce_op",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
    "send_object_list",
    "shrink_group",
    "split_group",
    "supports_complex",
    "time_estimator",
]
