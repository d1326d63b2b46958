"""The docs say what the code does: their examples run, and the tables that `docs/generate.py` writes are current."""

from __future__ import annotations

import re
from typing import Any

import aiocoll.distributed as dist
from aiocoll import ProcessGroup
from docs import generate

from .ranks import run_ranks


def test_every_name_is_what_the_table_says() -> None:
    assert list(generate.wrong_names()) == []


def test_the_table_of_names_is_current() -> None:
    text = generate.PORTING.read_text()
    assert text == generate.replaced(text, generate.names_table()), "run `python docs/generate.py`"


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
