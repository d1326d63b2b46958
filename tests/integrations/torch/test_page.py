"""The programs of docs/pytorch.md run, and say what the page shows."""

from __future__ import annotations

from pathlib import Path

import pytest

from ...pages import code, commands, files, is_shown, shell, write

pytest.importorskip("torch", reason="needs torch")

pytestmark = [pytest.mark.torch, pytest.mark.slow]

PAGE = "docs/pytorch.md"


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
