"""The docs say what the code does: their examples run, and the tables that `docs/generate.py` writes are current."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import aiocoll
import aiocoll.distributed as dist
from aiocoll import ProcessGroup
from docs import generate

from .ranks import run_ranks


def test_every_name_is_what_the_table_says() -> None:
    assert list(generate.wrong_names()) == []


def test_the_table_of_names_is_current() -> None:
    text = generate.PORTING.read_text()
    assert text == generate.replaced(text, generate.names_table()), "run `python docs/generate.py`"


@pytest.mark.parametrize("module", generate.modules())
def test_every_test_of_the_references_is_covered_or_left_out_for_a_reason(module: str) -> None:
    path = generate.ROOT / "tests/reference" / f"{module}.py"
    if not path.exists():
        pytest.skip(f"{module}.py is not written yet")
    functions = {
        node.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    for row in generate.rows():
        if row.module == module:
            assert (row.ours is None) is not (row.left_out is None), f"{row.reference}: put it in COVERS or in LEFT_OUT"
            assert row.ours is None or generate.function_of(row.ours) in functions, f"there is no {row.ours}"
            assert row.left_out is None or len(row.left_out) > 10, f"{row.reference}: say why it is left out"


def test_the_table_of_reference_tests_is_current() -> None:
    listed = [line.split(" | ") for line in generate.REFERENCE_TESTS.read_text().splitlines() if line.startswith("| `")]
    expected = [(f"| `{row.reference}`", generate.first_column(row)) for row in generate.rows()]
    assert [(first, second) for first, second, _ in listed] == expected, "run `python docs/generate.py`"
    wrong = [first for first, _, third in listed if re.search("failed|not run", third)]
    assert not wrong, f"run `python docs/generate.py`: the table has no good result for {wrong}"


async def test_the_ported_example_runs() -> None:
    """As tasks of this loop, which have their groups already."""
    code = re.findall(r"```python\n(.*?)```", generate.PORTING.read_text(), re.DOTALL)[-1]
    code = code.replace("    await dist.init_process_group()\n", "").replace("asyncio.run(main())\n", "")
    assert "async def main" in code
    code = code.replace("    await dist.destroy_process_group()\n", "    return gradient, names\n")
    space: dict[str, Any] = {}
    exec(compile(code, "porting.md", "exec"), space)

    async def body(pg: ProcessGroup) -> None:
        gradient, names = await space["main"]()
        assert dist.is_initialized()
        assert gradient.tolist() == [1.5] * 1000
        assert names == ["rank 0", "rank 1", "rank 2", "rank 3"]

    await run_ranks(4, body)


async def test_the_store_of_the_guide_is_the_one_that_passes_the_contract_and_ranks_meet_there() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (generate.DOCS / "guide.md").read_text(), re.DOTALL)
    store, use = next((code, after) for code, after in pairwise(blocks) if "(KeyValueStore)" in code)
    assert (generate.ROOT / "tests/store/minimal_store.py").read_text().endswith(f'"""\n\n{store}')
    space: dict[str, Any] = {"aiocoll": aiocoll}
    exec(compile(store, "guide.md", "exec"), space)
    first, then = use.replace("...", "sizes.append(await pg.allreduce(1))").split("\n", 1)
    exec(compile(f"{first}\nasync def main(rank, sizes):\n{textwrap.indent(then, '    ')}", "guide.md", "exec"), space)
    sizes: list[int] = []
    await asyncio.gather(*(space["main"](rank, sizes) for rank in range(2)))
    assert sizes == [2, 2]


HANGS = generate.DOCS / "when-something-hangs.md"


def test_the_page_on_hangs_shows_what_its_programs_say(tmp_path: Path) -> None:
    """Numbers aside: which rank is the first and how long it took depend on the machine."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", HANGS.read_text(), re.MULTILINE | re.DOTALL)
    for language, code in blocks:
        if language == "python":
            (tmp_path / code.splitlines()[0].removeprefix("# ")).write_text(code)
    (tmp_path / "aiocoll").write_text(f'#!/bin/sh\nexec {sys.executable} -m aiocoll "$@"\n')
    (tmp_path / "aiocoll").chmod(0o700)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AIOCOLL_")}
    environ = {**kept, "PYTHONPATH": str(generate.ROOT), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    said = ""
    for language, code in blocks:
        if language == "sh":
            done = subprocess.run(code, shell=True, cwd=tmp_path, env=environ, capture_output=True, text=True)
            said += done.stdout + done.stderr
    said = without_numbers(said.replace(f"{tmp_path}/", ""))
    shown = [without_numbers(text) for language, text in blocks if language == "text"]
    for text in (shown[index] for index in (0, 1, 2, 4)):
        pattern = ".*?".join(map(re.escape, text.split("…")))
        assert re.search(pattern, said), f"{text} is not in {said}"


def without_numbers(text: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"[0-9]+(\.[0-9]+)?", "#", text)).strip()
