"""A rank of several training programs: `python -m tests.integrations.torch.training BACKEND RANK FOLDER`.

Each program returns tensors that must be equal, bit by bit, over aio and over Gloo.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

SIZE = 2
STEPS = 10
PROGRAMS: dict[str, Callable[[], list[Tensor]]] = {}


def program(function: Callable[[], list[Tensor]]) -> Callable[[], list[Tensor]]:
    """Register a training program under the name of its function."""
    PROGRAMS[function.__name__] = function
    return function


def net(normed: bool = False) -> nn.Module:
    torch.manual_seed(1)
    middle: nn.Module = nn.BatchNorm1d(32) if normed else nn.ReLU()
    return nn.Sequential(nn.Linear(16, 32), middle, nn.Linear(32, 8))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(7 + dist.get_rank())
    return [torch.randn(4, 16, generator=generator) for _ in range(STEPS)]


def train(model: nn.Module, optimizer: Any = None) -> list[Tensor]:
    """Train for `STEPS` steps; return the model's parameters and buffers."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return [full(each) for each in model.state_dict().values()]


def full(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach().clone()


@program
def ddp() -> list[Tensor]:
    return train(DistributedDataParallel(net()))


@program
def ddp_with_a_sampler_and_loader_workers() -> list[Tensor]:
    data = torch.randn(40, 16, generator=torch.Generator().manual_seed(7))
    sampler = DistributedSampler(data)  # type: ignore[arg-type]
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1)  # type: ignore[arg-type]
    model = DistributedDataParallel(net())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            model(batch).square().mean().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@program
def ddp_with_buffers_and_unused_parameters() -> list[Tensor]:
    model = net(normed=True)
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    return train(DistributedDataParallel(model, find_unused_parameters=True))


@program
def ddp_without_synchronization_in_some_steps() -> list[Tensor]:
    model = DistributedDataParallel(net(), gradient_as_bucket_view=True, bucket_cap_mb=1)
    for number, batch in enumerate(batches()):
        if number % 2:
            model(batch).square().mean().backward()
        else:
            with model.no_sync():
                model(batch).square().mean().backward()
    return [each.grad.clone() for each in model.parameters() if each.grad is not None]


@program
def powersgd() -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

    model = DistributedDataParallel(net())
    state = PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5)
    model.register_comm_hook(state, powerSGD_hook)
    return train(model)


@program
def fp16_hook() -> list[Tensor]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DistributedDataParallel(net())
    model.register_comm_hook(None, fp16_compress_hook)
    return train(model)


@program
def zero() -> list[Tensor]:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(net())
    return train(model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01))


@program
def fsdp_with_a_checkpoint() -> list[Tensor]:
    import torch.distributed.checkpoint as checkpoint
    from torch.distributed.fsdp import fully_shard

    folder = [str(FOLDER / "checkpoint")]
    dist.broadcast_object_list(folder)
    model = fully_shard(net())
    trained = train(model)
    checkpoint.save(model.state_dict(), checkpoint_id=folder[0])
    other = fully_shard(net())
    state = other.state_dict()
    checkpoint.load(state, checkpoint_id=folder[0])
    other.load_state_dict(state)
    return trained + [full(each) for each in other.state_dict().values()]


@program
def hybrid_sharding() -> list[Tensor]:
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (SIZE, 1), mesh_dim_names=("replicate", "shard"))
    return train(fully_shard(net(), mesh=mesh))


@program
def tensor_parallel() -> list[Tensor]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (SIZE,))
    model = parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
    return [full(each) for each in model.parameters()]


@program
def dtensor() -> list[Tensor]:
    from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(5)
    left = distribute_tensor(torch.randn(6, 8), mesh, [Shard(0)])
    right = distribute_tensor(torch.randn(8, 6), mesh, [Shard(1)])
    found = [left @ right.redistribute(mesh, [Replicate()]), left.redistribute(mesh, [Shard(1)]), left.sum(0)]
    assert any(isinstance(place, Partial) for place in found[2].placements)
    return [full(each) for each in found]


@program
def functional_collectives() -> list[Tensor]:
    import torch.distributed._functional_collectives as functional

    x = torch.arange(8.0) + 10 * dist.get_rank()
    world = dist.group.WORLD
    found = [
        functional.all_reduce(x, "sum", world),
        functional.all_gather_tensor(x, 0, world),
        functional.reduce_scatter_tensor(x, "avg", 0, world),
        functional.all_to_all_single(x, [4, 4], [4, 4], world),
        functional.broadcast(x, 1, world),
        *functional.all_reduce_coalesced([x, 2 * x], "max", world),
    ]
    return [functional.wait_tensor(each).clone() for each in found]


@program
def compiled() -> list[Tensor]:
    import torch.distributed._functional_collectives as functional

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(x: Tensor) -> Tensor:
        return (
            functional.all_reduce(x * 2, "sum", dist.group.WORLD)
            + functional.all_gather_tensor(x, 0, dist.group.WORLD).sum()
        )

    return [step(torch.arange(6.0) + dist.get_rank())]


@program
def messages() -> list[Tensor]:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    x, y, z = torch.full((5,), float(rank)), torch.empty(5), torch.empty(3)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, other), dist.P2POp(dist.irecv, y, other)]):
        work.wait()
    if rank:
        dist.send(torch.arange(3.0), 0, tag=4)
        return [y]
    source = dist.recv(z, tag=4)
    return [y, z, torch.tensor(source)]


@program
def pipeline() -> list[Tensor]:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    rank = dist.get_rank()
    torch.manual_seed(2)
    stages = [nn.Linear(16, 16), nn.Linear(16, 8)]
    stage = PipelineStage(stages[rank], rank, SIZE, torch.device("cpu"))
    losses: list[Tensor] = []
    schedule = ScheduleGPipe(stage, 2, loss_fn=lambda out, target: (out - target).square().mean())
    x = torch.randn(4, 16)
    for _ in range(STEPS):
        if rank == 0:
            schedule.step(x)
        else:
            schedule.step(target=torch.zeros(4, 8), losses=losses)
    return [each.grad.clone() for each in stages[rank].parameters() if each.grad is not None]


@program
def objects() -> list[Tensor]:
    rank = dist.get_rank()
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, {"rank": rank, "tensor": torch.full((2,), float(rank))})
    sent: list[Any] = [gathered[0], "text"] if rank == 0 else [None, None]
    dist.broadcast_object_list(sent)
    got: list[Any] = [None]
    dist.scatter_object_list(got, [1, 2] if rank == 0 else None)
    return [*(each["tensor"] for each in gathered), sent[0]["tensor"], torch.tensor(got[0])]


@program
def edges() -> list[Tensor]:
    """Return the results of calls with unusual arguments that few backends accept."""
    rank = dist.get_rank()
    expanded = torch.full((1,), rank + 1.0).expand(4)
    dist.all_reduce(expanded)
    twice = torch.empty(3)
    dist.all_gather([twice, twice], torch.full((3,), float(rank)))
    transposed = torch.arange(12.0).reshape(3, 4).t()
    dist.all_reduce(transposed)
    sparse = (torch.eye(3) * (rank + 1)).to_sparse()
    dist.all_reduce(sparse)
    halves = torch.full((3,), 0.5 + rank).bfloat16()
    dist.all_reduce(halves)
    return [expanded.clone(), twice, transposed, sparse.to_dense(), halves]


def main(backend: str, rank: int) -> None:
    """Run all training programs on this rank, and save their results."""
    if backend == "aio":
        import aiocoll.torch  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group(backend, init_method=f"file://{FOLDER}/store", rank=rank, world_size=SIZE)
    found: dict[str, Any] = {}
    for name, run in PROGRAMS.items():
        try:
            found[name] = run()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    torch.save(found, FOLDER / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    FOLDER = Path(sys.argv[3])
    main(sys.argv[1], int(sys.argv[2]))
