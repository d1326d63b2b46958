"""Access to the code blocks of README.md, CONTRIBUTING.md and docs/*.md, for the tests that run these blocks.

The rule: a test runs every block of Python and of shell commands, or a comment on the line before excuses the block:
``<!-- not run: needs a GPU -->``, with one of the `EXCUSES`. A test gets blocks from `code`, `files` and `commands`,
with the page and the heading as literals, so that `tests/test_docs.py` finds the blocks that no test uses.
"""

from __future__ import annotations

import ast
import atexit
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]

#: The only accepted reasons for not running a code block.
EXCUSES = (
    "needs a GPU",
    "needs an MPI library",
    "needs Slurm",
    "needs a cluster",
    "installs or runs the whole of it, which takes minutes",
)
_FENCE = re.compile(r"(?:<!-- not run: (.*?) -->\n)?^```(\w+)\n(.*?)^```$|^#+ ([^\n]+)$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"# ([\w/]+\.py)\n")


class Block(NamedTuple):
    """A code block of a page; `number` counts the blocks of the same language under the same heading."""

    page: str
    heading: str
    language: str
    number: int
    code: str
    excuse: str | None

    @property
    def file(self) -> str | None:
        """The file name in the first line of a Python block, or None if the first line has no file name."""
        name = _FILE.match(self.code) if self.language == "python" else None
        return name[1] if name else None


def pages() -> list[str]:
    """Return the repository paths of the pages whose code blocks must be run or excused."""
    top = [name for name in ("README.md", "CONTRIBUTING.md") if (ROOT / name).exists()]
    return [*top, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@cache
def blocks(page: str) -> list[Block]:
    """Return all code blocks of a page, in order."""
    found: list[Block] = []
    heading = ""
    for excuse, language, text, title in _FENCE.findall((ROOT / page).read_text()):
        if title:
            heading = title
        else:
            number = 1 + sum((block.heading, block.language) == (heading, language) for block in found)
            found.append(Block(page, heading, language, number, text, excuse or None))
    return found


def code(page: str, heading: str, number: int = 1, language: str = "python") -> str:
    """Return the text of one code block, by default of the first Python block under the heading."""
    place = (heading, language, number)
    return next(block.code for block in blocks(page) if (block.heading, block.language, block.number) == place)


def files(page: str) -> dict[str, str]:
    """Return the programs of a page by file name: the Python blocks that begin with a file name comment."""
    return {block.file: block.code for block in blocks(page) if block.file is not None and block.excuse is None}


def commands(page: str) -> list[str]:
    """Return the shell blocks of a page, except blocks that are excused from running."""
    return [block.code for block in blocks(page) if block.language == "sh" and block.excuse is None]


def write(programs: dict[str, str], folder: Path) -> None:
    """Write programs, given by file name, to files in a folder."""
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


async def execute(fragment: str, **names: Any) -> dict[str, Any]:
    """Run a code block, which may use `await`, in the namespace `names`; return the namespace."""
    done = eval(compile(fragment, "<page>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if done is not None:
        await done
    return names


def shell(script: str, folder: Path, **environ: str) -> str:
    """Run shell commands of a page in `folder`, with the Python of the test; return their output."""
    # Remove asyncio's debug mode, whose warnings about slow callbacks would change the output.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIOCOLL_", "PYTHONASYNCIO"))}
    path = {"PYTHONPATH": str(ROOT), "PATH": f"{_tools()}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", script], cwd=folder, env=kept | path | environ, capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr


@cache
def _tools() -> str:
    """Return a folder with the commands that pages call, such as `aiocoll` and `pytest`.

    The folder is made once per process: a script that is running could not be overwritten.
    """
    folder = tempfile.mkdtemp(prefix="aiocoll-tools-")
    atexit.register(shutil.rmtree, folder)
    for name, what in (("aiocoll", "-m aiocoll"), ("pytest", "-m pytest"), ("coverage", "-m coverage"), ("python", "")):
        tool = Path(folder, name)
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
        tool.chmod(0o700)
    return folder


def is_shown(shown: str, output: str) -> bool:
    """Return whether `output` contains `shown`, except for numbers, times and spaces; `…` matches any text."""
    pattern = ".*?".join(map(re.escape, without_numbers(shown).split("…")))
    return re.search(pattern, without_numbers(output)) is not None


def without_numbers(text: str) -> str:
    """Return the text on one line, with each number and each duration replaced by `#`."""
    return re.sub(r"\s+", " ", re.sub(r"[0-9]+(\.[0-9]+)?( (µs|ms|s)\b)?", "#", text)).strip()
