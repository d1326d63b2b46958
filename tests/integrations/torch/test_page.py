"""Programs of docs/pytorch.md and docs/porting.md print what the pages show."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...pages import code, commands, files, is_shown, shell, write

pytest.importorskip("torch", reason="needs torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PAGE = "docs/pytorch.md"
PORTING = "docs/porting.md"


def test_page_shows_the_output_of_its_programs(tmp_path: Path) -> None:
    write(files(PAGE), tmp_path)
    train, errors, both = commands(PAGE)
    assert "weights: " in shell(train, tmp_path)
    for command, shown in (
        (errors, code(PAGE, "Errors", language="text")),
        (both, code(PAGE, "Coroutines next to torch", language="text")),
    ):
        said = shell(command, tmp_path)
        assert is_shown(shown, said), said


def test_coroutines_train_with_a_sampler_and_a_loader(tmp_path: Path) -> None:
    write(files(PORTING), tmp_path)
    (epochs,) = commands(PORTING)
    printed = shell(epochs, tmp_path)
    assert set(code(PORTING, "What works", language="text").splitlines()) <= set(printed.splitlines()), printed
