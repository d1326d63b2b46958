"""The programs of docs/pytorch.md and docs/porting.md, and the output on these pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...pages import code, commands, files, is_shown, shell, write

torch = pytest.importorskip("torch", reason="needs torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PAGE = "docs/pytorch.md"
PORTING = "docs/porting.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(files(PAGE), tmp_path)
    return tmp_path


def test_programs_of_the_pytorch_page_print_the_output_on_the_page(folder: Path) -> None:
    train, errors, both, attached, _ = commands(PAGE)
    assert "weights: " in shell(train, folder)
    for command, shown in (
        (errors, code(PAGE, "Errors", language="text")),
        (both, code(PAGE, "Coroutines next to torch", language="text")),
        (attached, code(PAGE, "A group of your own event loop", language="text")),
    ):
        printed = shell(command, folder)
        assert is_shown(shown, printed), printed


def test_documented_ddp_program_keeps_correct_weights_after_a_rank_is_killed(folder: Path) -> None:
    """Compare with training in one process, whose gradient is 2, the average of the ranks' inputs 1, 2 and 3."""
    weight = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.125, momentum=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        (2 * weight).backward()
        optimizer.step()
    printed = shell(commands(PAGE)[-1], folder)
    shown = code(PAGE, "Training that survives a lost rank", language="text")
    for line in shown.splitlines():
        assert line == "…" or line in printed.splitlines(), printed
    for rank in range(3):
        assert f"[{rank}] weight {weight.item()}" in printed.splitlines(), printed


def test_documented_coroutines_train_with_a_sampler_and_a_data_loader(tmp_path: Path) -> None:
    write(files(PORTING), tmp_path)
    (epochs,) = commands(PORTING)
    printed = shell(epochs, tmp_path)
    assert set(code(PORTING, "What works", language="text").splitlines()) <= set(printed.splitlines()), printed
