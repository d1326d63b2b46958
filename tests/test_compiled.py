"""Which modules are compiled, where the package is; what that changes, and what it does not."""

from __future__ import annotations

import ast
import importlib
import re
import weakref
from pathlib import Path

import numpy as np
import pytest

from aiocoll import GroupRevokedError, ProcessGroup
from aiocoll.work import COMPILED

ROOT = Path(__file__).parents[1]
HOOK = (ROOT / "hatch_build.py").read_text()
#: What the build hook compiles; it cannot be imported without hatchling.
MODULES = next(
    ast.literal_eval(node.value)
    for node in ast.parse(HOOK).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODULES"
)


@pytest.mark.parametrize("path", MODULES)
def test_all_of_it_is_compiled_or_nothing(path: str) -> None:
    assert (ROOT / path).is_file()
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    assert str(module.__file__).endswith(".py") == (not COMPILED)


def test_nothing_is_compiled_beside_the_sources() -> None:
    """An editable install or a build in the tree would leave modules that hide the sources."""
    if not COMPILED:
        assert not [*ROOT.glob("*__mypyc*"), *(ROOT / "aiocoll").rglob("*.so")]


@pytest.mark.ranks(1)
async def test_a_work_is_weakly_referenced_or_refuses_it(pg: ProcessGroup) -> None:
    work = pg.allreduce(np.ones(2))
    await work
    if COMPILED:
        with pytest.raises(TypeError, match="cannot create weak reference"):
            weakref.ref(work)
    else:
        assert weakref.ref(work)() is work


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("root", "key"), [("0", None), (0, 5), (True, None), (0, b"key")])
async def test_what_was_not_checked_is_refused_in_our_words(pg: ProcessGroup, root: object, key: object) -> None:
    with pytest.raises(TypeError, match=r"root must be a rank \(int\)|key must be a str"):
        pg.broadcast(np.ones(2), root, key=key)  # type: ignore[arg-type]


@pytest.mark.ranks(1)
async def test_a_rank_may_be_of_another_type_of_integers(pg: ProcessGroup) -> None:
    assert (await pg.broadcast(np.ones(2), np.int64(0))).tolist() == [1, 1]  # type: ignore[arg-type]


@pytest.mark.ranks(1)
async def test_a_later_call_has_the_cause(pg: ProcessGroup) -> None:
    pg.abort("enough")
    with pytest.raises(GroupRevokedError) as raised:
        pg.barrier()
    assert "enough" in str(raised.value.__cause__)


def test_the_page_names_what_is_not_compiled() -> None:
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / "docs" / "compiled.md").read_text().partition("Not compiled")[2])
    assert named
    for name in named:
        assert (ROOT / "aiocoll" / name).is_file()
        assert f"aiocoll/{name}" not in MODULES
