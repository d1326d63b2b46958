"""`aiocoll.torch.Overlap`, which averages gradients during the backward pass, and docs/training.md."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from aiocoll import ProcessGroup

from .pages import code, commands, execute, files, is_shown, shell, write

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

PAGE = "docs/training.md"
WIDTH = 16


@pytest.mark.parametrize("bucket_bytes", [0, 4 * WIDTH * WIDTH, 1 << 30])
@pytest.mark.ranks(2)
async def test_overlap_averages_gradients_of_all_ranks(pg: ProcessGroup, bucket_bytes: int) -> None:
    from aiocoll.torch import Overlap

    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    unused = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    model = torch.nn.ParameterList([unused, *(each for layer in layers for each in layer.parameters())])
    reducer = Overlap(pg, model, bucket_bytes)
    for factor in (1, 2):
        # In one linear layer, the weight gradient is the sum of the input rows, and the bias gradient the row count.
        x = torch.full((4, WIDTH), float(factor * (pg.rank() + 1)))
        await reducer.backward(sum(layer(x).sum() for layer in layers))
        for layer in layers:
            assert layer.weight.grad.unique().tolist() == [4 * factor * 1.5]
            assert layer.bias.grad.unique().tolist() == [4.0]
        model.zero_grad()
    with pytest.raises(RuntimeError, match="have no gradient"):
        await reducer.backward(layers[0](x).sum())


@pytest.mark.ranks(2)
async def test_overlap_trains_equal_weights_from_different_data(pg: ProcessGroup) -> None:
    from aiocoll.torch import Overlap

    class Optimizer:
        """A gradient descent optimizer without `torch.optim`, whose import takes seconds."""

        def __init__(self, model: Any) -> None:
            self.model = model
            self.zero_grad = model.zero_grad

        def step(self) -> None:
            for parameter in self.model.parameters():
                parameter.data -= 0.5 * parameter.grad

    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(0.0)
    # With learning rate 0.5, the first step sets the weight to 3, the average target; the second step has no effect.
    batches = [(torch.ones(4, 1), torch.full((4, 1), 2.0 + 2.0 * pg.rank()))] * 2
    loop = code(PAGE, "Overlap with backward")
    names = {"Overlap": Overlap, "torch": torch, "optimizer": Optimizer(model)}
    await execute(loop, pg=pg, model=model, batches=batches, **names)
    assert model.weight.item() == 3.0


@pytest.mark.ranks(2)
async def test_accumulated_gradients_are_averaged_by_the_next_synchronized_backward(pg: ProcessGroup) -> None:
    from aiocoll.torch import Overlap

    layer = torch.nn.Linear(2, 1, bias=False)
    overlap = Overlap(pg, layer)
    x = torch.full((1, 2), pg.rank() + 1.0)
    with overlap.no_sync():
        await overlap.backward(layer(x).sum())
    assert layer.weight.grad.unique().tolist() == [pg.rank() + 1.0]
    await overlap.backward(layer(x).sum())
    assert layer.weight.grad.unique().tolist() == [3.0]  # the average of 1 + 1 and 2 + 2


@pytest.mark.ranks(2)
async def test_gradients_of_unused_parameters_count_as_zero_or_stay_none(pg: ProcessGroup) -> None:
    from aiocoll.torch import Overlap

    model = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(3)) for _ in range(3)])
    overlap = Overlap(pg, model, find_unused=True)
    loss = model[0].sum() + (model[1].sum() if pg.rank() == 1 else 0.0)
    await overlap.backward(loss)
    assert model[0].grad.tolist() == [1.0] * 3
    assert model[1].grad.tolist() == [0.5] * 3
    assert model[2].grad is None


@pytest.mark.ranks(2)
async def test_overlap_can_compress_gradients_and_broadcast_buffers(pg: ProcessGroup) -> None:
    from aiocoll.torch import Overlap

    layer = torch.nn.Linear(2, 1, bias=False)
    layer.register_buffer("mean", torch.full((2,), float(pg.rank())))
    overlap = Overlap(pg, layer, compress=torch.bfloat16)
    await overlap.backward(layer(torch.full((1, 2), 1.0 + 2**-9 + pg.rank())).sum())
    assert layer.weight.grad.dtype == torch.float32
    assert layer.weight.grad.unique().tolist() == [1.5]  # the compressed gradient has lost 2**-9
    await overlap.broadcast_buffers()
    assert layer.mean.tolist() == [0.0, 0.0]


@pytest.mark.slow
def test_program_of_the_training_page_prints_the_shown_output(tmp_path: Path) -> None:
    write(files(PAGE), tmp_path)
    _, measure = commands(PAGE)
    # Use a smaller model than on the page, to save time.
    output = shell(re.sub(r"8 1024 256.*", "2 32 8", measure), tmp_path)
    assert is_shown(code(PAGE, "How to check the overlap", language="text"), output), output
