"""The blocks of code on README.md, CONTRIBUTING.md and the pages of docs/, for the tests that run them.

The rule: a test runs every block of Python and of shell commands, or the block is excused, by a comment on the line
before it: ``<!-- not run: needs a GPU -->``, with one of the `EXCUSES`. A test takes blocks by `code`, `files` and
`commands`, with the page and the heading as literals, so that `tests/test_docs.py` finds the blocks that no test takes.
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

#: The only reasons not to run a block.
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
    """A block on a page, and where: the heading it stands under, and its number there among those of its language."""

    page: str
    heading: str
    language: str
    number: int
    code: str
    excuse: str | None

    @property
    def file(self) -> str | None:
        """The name of the program that the block is, if it begins with that."""
        name = _FILE.match(self.code) if self.language == "python" else None
        return name[1] if name else None


def pages() -> list[str]:
    """Return the pages that the rule is for, by their paths in the repository."""
    top = [name for name in ("README.md", "CONTRIBUTING.md") if (ROOT / name).exists()]
    return [*top, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]


@cache
def blocks(page: str) -> list[Block]:
    """Return all blocks of a page, in their order."""
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
    """Return one block: by default the first one of Python under the heading."""
    place = (heading, language, number)
    return next(block.code for block in blocks(page) if (block.heading, block.language, block.number) == place)


def files(page: str) -> dict[str, str]:
    """Return the programs of a page: the blocks of Python whose first line is a comment with the name of a file."""
    return {block.file: block.code for block in blocks(page) if block.file is not None and block.excuse is None}


def commands(page: str) -> list[str]:
    """Return the blocks of shell commands of a page that are not excused."""
    return [block.code for block in blocks(page) if block.language == "sh" and block.excuse is None]


def write(programs: dict[str, str], folder: Path) -> None:
    """Write what `files` has returned."""
    for name, text in programs.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


async def execute(fragment: str, **names: Any) -> dict[str, Any]:
    """Run a block that may await, with the names that it takes for granted; return all its names."""
    done = eval(compile(fragment, "<page>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if done is not None:
        await done
    return names


def shell(script: str, folder: Path, **environ: str) -> str:
    """Run commands of a page in `folder`, in the Python of the test; return what they print."""
    # Debug mode is for our own tests: it warns of what is slow.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIOCOLL_", "PYTHONASYNCIO"))}
    path = {"PYTHONPATH": str(ROOT), "PATH": f"{_tools()}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(
        ["sh", "-c", script], cwd=folder, env=kept | path | environ, capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr


@cache
def _tools() -> str:
    """Return a folder of the commands that pages call, made once: no file is run while it is written."""
    folder = tempfile.mkdtemp(prefix="aiocoll-tools-")
    atexit.register(shutil.rmtree, folder)
    for name, what in (("aiocoll", "-m aiocoll"), ("pytest", "-m pytest"), ("coverage", "-m coverage"), ("python", "")):
        tool = Path(folder, name)
        tool.write_text(f'#!/bin/sh\nexec {sys.executable} {what} "$@"\n')
        tool.chmod(0o700)
    return folder


def is_shown(shown: str, said: str) -> bool:
    """Return whether a text on a page is in what was printed: numbers, times and spaces aside, anything at each `…`."""
    pattern = ".*?".join(map(re.escape, without_numbers(shown).split("…")))
    return re.search(pattern, without_numbers(said)) is not None


def without_numbers(text: str) -> str:
    """Return the text on one line, with `#` for each number and each time."""
    return re.sub(r"\s+", " ", re.sub(r"[0-9]+(\.[0-9]+)?( (µs|ms|s)\b)?", "#", text)).strip()
