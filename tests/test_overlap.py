"""The recipe of docs/overlap.md averages gradients, in buckets and one by one; its program says what the page shows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from aiocoll import ProcessGroup

from .pages import code, commands, execute, files, is_shown, shell, write

torch = pytest.importorskip("torch", reason="torch is not installed")
pytestmark = pytest.mark.torch

PAGE = "docs/overlap.md"
WIDTH = 16


@pytest.mark.parametrize("bucket_bytes", [0, 4 * WIDTH * WIDTH, 1 << 30])
@pytest.mark.ranks(2)
async def test_gradients_are_the_averages(pg: ProcessGroup, bucket_bytes: int) -> None:
    overlap = (await execute(files(PAGE)["overlap.py"]))["Overlap"]
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(3)]
    unused = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=False)
    model = torch.nn.ParameterList([unused, *(each for layer in layers for each in layer.parameters())])
    reducer = overlap(pg, model, bucket_bytes)
    for factor in (1, 2):
        # Each layer by itself: the gradient of a weight is the input, that of a bias is 1 for each row.
        x = torch.full((4, WIDTH), float(factor * (pg.rank() + 1)))
        await reducer.backward(sum(layer(x).sum() for layer in layers))
        for layer in layers:
            assert layer.weight.grad.unique().tolist() == [4 * factor * 1.5]
            assert layer.bias.grad.unique().tolist() == [4.0]
        model.zero_grad()
    with pytest.raises(RuntimeError, match="got no gradient"):
        await reducer.backward(layers[0](x).sum())


@pytest.mark.ranks(2)
async def test_ranks_learn_the_same_from_different_data(pg: ProcessGroup) -> None:
    overlap = (await execute(files(PAGE)["overlap.py"]))["Overlap"]

    class Optimizer:
        """The one of torch takes seconds to import."""

        def __init__(self, model: Any) -> None:
            self.model = model
            self.zero_grad = model.zero_grad

        def step(self) -> None:
            for parameter in self.model.parameters():
                parameter.data -= 0.5 * parameter.grad

    model = torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(0.0)
    # At this rate the first step goes all the way to the average of all y, which is 3, and the second stays there.
    batches = [(torch.ones(4, 1), torch.full((4, 1), 2.0 + 2.0 * pg.rank()))] * 2
    loop = code(PAGE, "Overlap with backward", 2)
    names = {"Overlap": overlap, "torch": torch, "optimizer": Optimizer(model)}
    await execute(loop, pg=pg, model=model, batches=batches, **names)
    assert model.weight.item() == 3.0


@pytest.mark.slow
def test_the_program_of_the_page_says_what_it_shows(tmp_path: Path) -> None:
    write(files(PAGE), tmp_path)
    (measure,) = commands(PAGE)
    # A smaller model than the one whose times are on the page.
    said = shell(re.sub(r"8 1024 256.*", "2 32 8", measure), tmp_path)
    assert is_shown(code(PAGE, "How to check it", language="text"), said), said
