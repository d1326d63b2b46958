"""The rules of the house, checked on every file of the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aiocoll"
FILES = sorted(PACKAGE.rglob("*.py"))

#: The layers, lowest first: a module may import rows above its own in this list, and its own folder. A folder stands
#: for all that is in it.
LAYERS: list[set[str]] = [
    {"errors", "log", "numerals", "environment"},
    {"runtime", "unretrieved"},
    {"threads", "loading"},
    {"elements", "codec"},
    {"work", "security", "options", "process", "backends", "dump", "sockets"},
    {"transport", "store", "gpu"},
    {"algorithms"},
    {"engine"},
    {"meeting", "tuning"},
    {"group"},
    {"rendezvous"},
    {"distributed"},
    {"aiocoll"},  # the public names
    {"testing"},
    {"cli"},
    {"__main__"},
]
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}

MAX_FILE = 400
MAX_FUNCTION = 70

#: Loaded on demand or not at all.
HEAVY = ("torch", "cupy", "ml_dtypes", "jax", "scipy", "pytest", "uvloop")

#: What takes a millisecond or more to import, with all that it brings along, and few programs need.
LATER = ("aiocoll.cli", "aiocoll.codec.records", "aiocoll.elements.sparse", "aiocoll.gpu", "aiocoll.group.cuda",
         "aiocoll.group.sparse_reduce", "aiocoll.testing", "argparse", "decimal", "email", "fractions", "http",
         "json", "multiprocessing", "tempfile", "urllib.request", "uuid", "xml", "zoneinfo")  # fmt: skip


def module(path: Path) -> str:
    """Return the dotted name of a file, without `aiocoll.`."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "aiocoll"


MODULES = {module(path): path for path in FILES}


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def nodes(parent: ast.AST, *, types: bool) -> Iterator[ast.AST]:
    """Walk all nodes, with or without those that only a type checker sees."""
    for node in ast.iter_child_nodes(parent):
        if types or not is_type_checking(node):
            yield node
            yield from nodes(node, types=types)


def imports(name: str, *, types: bool = True) -> set[str]:
    """Return the modules of ours that `name` imports, without `aiocoll.`."""
    found = set()
    for node in nodes(tree(name), types=types):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} line {node.lineno}: write the whole name of what you import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner.removeprefix("aiocoll.") in MODULES else str(node.module))
    return {f.removeprefix("aiocoll.") for f in found if f.split(".")[0] == "aiocoll"}


def folder(name: str) -> str:
    return name.split(".")[0]


def functions(name: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree(name)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_every_module_has_its_layer() -> None:
    missing = {folder(name) for name in MODULES} - LEVEL.keys()
    assert not missing, f"put {missing} where they belong in LAYERS"


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name: str) -> None:
    mine = folder(name)
    wrong = {i for i in imports(name) if folder(i) != mine and LEVEL[folder(i)] >= LEVEL[mine]}
    assert not wrong, f"{name} imports {wrong}, which are not below it"


@pytest.mark.parametrize("name", [name for name in MODULES if folder(name) == "algorithms"])
def test_algorithms_import_nothing_of_ours(name: str) -> None:
    assert {folder(i) for i in imports(name)} <= {"algorithms"}
    foreign = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert {str(f).split(".")[0] for f in foreign} <= sys.stdlib_module_names | {"aiocoll"}


def test_the_engine_knows_no_transport() -> None:
    """But what every transport is: a concrete one is in a folder, or is `memory`."""
    engine = {i for name in MODULES if folder(name) == "engine" for i in imports(name) if folder(i) == "transport"}
    assert engine
    assert not {i for i in engine if i.count(".") > 1 or i == "transport.memory"}


def test_no_module_waits_for_itself() -> None:
    TopologicalSorter({name: imports(name, types=False) - {name} for name in MODULES}).prepare()


@pytest.mark.parametrize("name", MODULES)
def test_files_and_functions_stay_small(name: str) -> None:
    assert len(MODULES[name].read_text().splitlines()) <= MAX_FILE
    for function in functions(name):
        body = function.body[1:] if ast.get_docstring(function) is not None else function.body
        lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0  # type: ignore[operator]
        assert lines <= MAX_FUNCTION, f"{name}.{function.name} has {lines} lines"


def defined(name: str, *kinds: type[ast.stmt]) -> set[str]:
    """Return the public names that statements of these kinds define at the top of a module."""
    found = set()
    for node in tree(name).body:
        if not isinstance(node, kinds):
            continue
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
        else:
            found.add(node.name)  # type: ignore[attr-defined]
    return {n for n in found if not n.startswith("_")}


def exported(name: str) -> set[str] | None:
    for node in tree(name).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "__all__":
            names = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            assert len(names) == len(set(names)), f"{name} exports a name twice"
            return set(names)
    return None


@pytest.mark.parametrize("name", [name for name in MODULES if tree(name).body[1:]])
def test_a_module_exports_what_it_defines(name: str) -> None:
    names = exported(name)
    assert names is not None, f"{name} has no __all__"
    code = defined(name, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    assert code <= names, f"{code - names}: export it, or give it an underscore"
    imported = {
        alias.asname or alias.name
        for node in tree(name).body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    strange = names - code - imported - defined(name, ast.Assign, ast.AnnAssign)
    assert not strange, f"{strange}: neither defined nor imported here"


@pytest.mark.parametrize("name", [name for name in MODULES if folder(name) not in ("runtime", "cli", "testing")])
def test_time_and_chance_come_through_the_runtime(name: str) -> None:
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            roots = {node.module} if isinstance(node, ast.ImportFrom) else {alias.name for alias in node.names}
            assert not roots & {"time", "random", "secrets"}, f"line {node.lineno}: take it from a Runtime"
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("urandom", "uuid1", "uuid4"), f"line {node.lineno}: take it from a Runtime"


@pytest.mark.parametrize("name", MODULES)
def test_wait_for_is_not_used(name: str) -> None:
    """It loses results on Python 3.11; `asyncio.timeout` does not."""
    assert not any(isinstance(node, ast.Attribute) and node.attr == "wait_for" for node in ast.walk(tree(name)))


def run(code: str) -> str:
    """Return what a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_public_names_exist() -> None:
    import aiocoll

    missing = [name for name in aiocoll.__all__ if not hasattr(aiocoll, name)]
    assert not missing


def test_importing_it_loads_nothing_heavy_and_starts_nothing() -> None:
    code = f"""
import sys, threading, numpy, pathlib
fds = pathlib.Path("/proc/self/fd")
def count(): return len(list(fds.iterdir())) if fds.exists() else 0
before = count()
import aiocoll
assert count() == before, "a file was opened"
assert threading.active_count() == 1, threading.enumerate()
print(*(name for name in {HEAVY} if name in sys.modules))
"""
    assert run(code) == ""


def test_importing_it_loads_nothing_that_can_wait() -> None:
    code = f"""
import sys, asyncio, numpy
before = set(sys.modules)
import aiocoll
print(*(name for name in {LATER} if name in sys.modules and name not in before))
"""
    assert run(code) == ""


def test_every_module_can_be_imported_alone() -> None:
    left = ("aiocoll", "__main__", "gpu.cupy_api")  # the last needs CuPy
    names = [name for name in MODULES if name not in left and folder(name) != "testing"]
    code = "\n".join(["import importlib", *(f"importlib.import_module('aiocoll.{name}')" for name in names)])
    assert run(code) == ""


def test_one_module_imports_cupy() -> None:
    def is_cupy(node: ast.AST) -> bool:
        if isinstance(node, ast.ImportFrom):
            return (node.module or "").partition(".")[0] == "cupy"
        return isinstance(node, ast.Import) and any(alias.name.partition(".")[0] == "cupy" for alias in node.names)

    assert [name for name in MODULES if any(map(is_cupy, ast.walk(tree(name))))] == ["gpu.cupy_api"]


def test_the_command_and_the_plugin_are_where_the_package_says() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    where, name = project["scripts"]["aiocoll"].split(":")
    assert name in (exported(where.removeprefix("aiocoll.")) or ())
    assert project["entry-points"]["pytest11"]["aiocoll"].removeprefix("aiocoll.") in MODULES


def test_no_file_knows_the_machine_it_was_written_on() -> None:
    machine = re.compile("|".join(("/wo" + "rk/", "/ro" + "ot/", "/ho" + "me/", "/tm" + "p/")))
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and b"\0" not in (data := path.read_bytes()):
            assert not (found := machine.search(data.decode())), f"{name} mentions {found[0]}"
