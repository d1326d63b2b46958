"""The contributors' pages agree with the code: the call drawing, the tables, and all names and paths."""

from __future__ import annotations

import asyncio
import builtins
import gc
import pkgutil
import re
import sys
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest

from aiocoll import ProcessGroup, Work
from aiocoll.engine.control.messages import SHAPES
from aiocoll.native import core
from aiocoll.security.handshake import WIRE_VERSION, ConnKind
from aiocoll.transport.frame import FrameKind
from aiocoll.work import completion_of
from docs import generate

from .internals import replace_parts
from .layers import LAYERS
from .ranks import run_ranks
from .test_house import MODULES, imports

PACKAGE = generate.ROOT / "aiocoll"
FAKES = generate.ROOT / "tests" / "fakes"
PAGE = (generate.DOCS / "architecture.md").read_text()
#: The drawing on docs/architecture.md: the text block that shows the functions of `pg.allreduce(x)`.
DRAWING = next(block for block in re.findall(r"^```text\n(.*?)^```$", PAGE, re.S | re.M) if "pg.allreduce(x)" in block)


def drawn_calls() -> list[str]:
    """Return the functions that the drawing names, each indented by two spaces per calling function."""
    return [found[1][2:] for found in re.finditer(r"^(  +[a-z_.]+: [\w.]+)", DRAWING, re.M)]


class Tree(NamedTuple):
    """The call tree below one call from outside of the package: text lines, and the objects that were called."""

    lines: list[str]
    objects: list[Any]


class Profiler:
    """A profile function (`sys.setprofile`) that records calls of aiocoll's functions as call trees.

    Attributes:
        trees: one tree for each call from outside of the package, in order.
    """

    def __init__(self) -> None:
        self.trees: list[Tree] = []
        self._open: list[FrameType] = []

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("aiocoll.") or module.startswith("aiocoll.testing."):
            return
        if event == "call":
            if not self._open:
                self.trees.append(Tree([], []))
            line = f"{module.removeprefix('aiocoll.')}: {frame.f_code.co_qualname}"
            self.trees[-1].lines.append("  " * len(self._open) + line)
            self.trees[-1].objects.append(frame.f_locals.get("self"))
            self._open.append(frame)
        elif event == "return" and self._open:  # no frame is open if the call began before the profiler
            self._open.pop()

    def lines_of(self, work: Work[Any]) -> list[str]:
        """Return the lines of all call trees that involve the given work or its completion."""
        mine = {id(work), id(completion_of(work))}
        return [line for tree in self.trees if mine & set(map(id, tree.objects)) for line in tree.lines]


async def test_architecture_drawing_shows_the_functions_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record a repeated allreduce on rank 0, over TCP, that waits for rank 1."""
    asyncio.get_running_loop().set_debug(False)  # debug mode watches works that are not awaited
    replace_parts(monkeypatch, is_watching=False)
    waits, ended = asyncio.Event(), asyncio.Event()

    async def body(pg: ProcessGroup) -> list[str]:
        x, message = np.ones(8), np.empty(1)
        await pg.allreduce(x)
        if pg.rank():
            await pg.send(message, 0)
            await waits.wait()
            observer = sys.getprofile()
            sys.setprofile(None)
            work = pg.allreduce(x)
            sys.setprofile(observer)
            await ended.wait()
            await work
            await pg.send(message, 0)
            return []
        await pg.recv(message, 1)  # the link has been read, so the next frame is the first one
        # Keep an operation in flight: the operation timer then runs already, so the recorded call does not start it.
        in_flight = pg.recv(message, 1)
        gc.disable()
        sys.setprofile(profiler)
        try:
            work = pg.allreduce(x)
            asyncio.get_running_loop().call_soon(waits.set)
            assert await work is x
        finally:
            sys.setprofile(None)
            gc.enable()
        ended.set()
        await in_flight
        assert x.tolist() == [4.0] * 8
        return profiler.lines_of(work)

    profiler = Profiler()
    done, _ = await run_ranks(2, body, transport="tcp")
    # The C accelerator makes its works without the Python function `Handle.__init__`, so this line may be missing.
    assert done == [line for line in drawn_calls() if core is None or "work: Handle.__init__" not in line]


def test_engine_packages_import_only_packages_above_them_in_the_table() -> None:
    parts = re.findall(r"^\| `engine/(\w+)/` \|", PAGE, re.M)
    assert sorted(parts) == sorted(path.parent.name for path in PACKAGE.glob("engine/*/__init__.py"))
    for number, part in enumerate(parts):
        modules = [name for name in MODULES if name.startswith(f"engine.{part}.")]
        used = {
            each.split(".")[1] for name in modules for each in imports(name, types=False) if each.startswith("engine.")
        }
        assert modules, part
        assert used <= {"interfaces", *parts[: number + 1]}, part


def test_wire_protocol_page_lists_all_connection_frame_and_message_kinds() -> None:
    page = (generate.DOCS / "wire.md").read_text()
    tables = re.findall(r"^\|---.*\n((?:\|.*\n)+)", page, re.M)
    kinds = [{kind for row in table.splitlines() for kind in re.findall(r"\w+", row.split("|")[1])} for table in tables]
    assert kinds == [set(ConnKind.__members__), set(FrameKind.__members__), set(SHAPES)]
    assert f"describes version {WIRE_VERSION} (`WIRE_VERSION`)" in " ".join(page.split())


#: Each page without its code blocks, which other tests check. The page reference-tests.md is omitted, since it names
#: files of other projects.
PROSE = {
    path.name: re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.S | re.M)
    for path in [generate.ROOT / "README.md", *generate.DOCS.glob("*.md")]
    if path.name != "reference-tests.md"
}
CONTRIBUTORS = {"architecture.md", *re.findall(r"^\| `docs/([\w-]+\.md)` \|", PAGE, re.M)} & PROSE.keys()


def test_file_paths_named_on_the_pages_exist() -> None:
    """Look up each path below the repository root; on contributors' pages also below `aiocoll/`."""
    named = {
        (page, path)
        for page, text in PROSE.items()
        for path in re.findall(r"(?<![\w/.-])((?:aiocoll|bench|docs|examples|tests)/(?!\.venvs)[\w./-]*\w)", text)
    }
    named |= {
        (page, path)
        for page in CONTRIBUTORS
        for path in re.findall(r"`([\w.-]+/[\w./-]*|[\w-]+\.(?:py|md|toml))`", PROSE[page])
    }
    roots = (generate.ROOT, PACKAGE)
    assert {f"{page}: {path}" for page, path in named if not any((root / path).exists() for root in roots)} == set()
    assert len(named) > 100


def test_modules_and_classes_named_on_the_pages_exist() -> None:
    """Check the dotted names and the class names on the pages for contributors."""
    names = {(page, name) for page in CONTRIBUTORS for name in re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", PROSE[page])}
    names = {(page, name) for page, name in names if not name.endswith((".py", ".md", ".toml"))}
    inside = {(page, name) for page, name in names if "." in name and name.split(".")[0] in set().union(*LAYERS)}
    assert {f"{page}: {name}" for page, name in inside if not is_importable(name)} == set()
    assert len(inside) > 20
    sources = [path.read_text() for folder in (PACKAGE, FAKES) for path in folder.rglob("*.py")]
    classes: dict[str, str] = {}
    for text in sources:
        for name in re.findall(r"^class (\w+)", text, re.M):
            classes[name] = classes.get(name, "") + text  # several modules may have a class of this name
    called = {(page, *name.partition(".")[::2]) for page, name in names if re.match("[A-Z][a-z]", name)}
    known = {(page, cls, name) for page, cls, name in called if re.search(rf"\b{name}\b", classes.get(cls, ""))}
    assert {(page, cls) for page, cls, _ in called - known if not hasattr(builtins, cls)} == set()
    assert len(known) > 20


def is_importable(name: str) -> bool:
    """Return whether `aiocoll.<name>` is a module or an object in a module."""
    try:
        pkgutil.resolve_name(f"aiocoll.{name}")
    except (ImportError, AttributeError):
        return False
    return True
