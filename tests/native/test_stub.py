"""The names and arguments in the type stub of the accelerator."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from aiocoll import native
from aiocoll.native import core

STUB = ast.parse(Path(native.__file__).with_name("_core.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
#: Special methods that the stub must declare; type checkers know all other special methods from `object`.
SPECIAL = {"__init__", "__await__"}


def names_of(body: list[ast.stmt]) -> set[str]:
    """Return the names that the given statements of the type stub define."""
    named = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    return named | {ast.unparse(node.target) for node in body if isinstance(node, ast.AnnAssign)}


def stub_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the dotted name and the syntax node of each function in the stub, except properties."""
    for name, body in {"": STUB.body, **{name: node.body for name, node in CLASSES.items()}}.items():
        for node in body:
            if isinstance(node, ast.FunctionDef) and not node.decorator_list and node.name != "__await__":
                yield f"{name}.{node.name}".strip("."), node


FUNCTIONS = dict(stub_functions())


def object_named(name: str) -> Callable[..., Any]:
    """Return the accelerator's object with a dotted name; for the name of an `__init__`, return the class."""
    made: Any = core
    for part in name.removesuffix(".__init__").split("."):
        made = getattr(made, part)
    return made


def callable_named(name: str) -> Callable[..., Any]:
    """Return a callable that needs no `self` argument: a function, a class, or a bound method."""
    kind, _, method = name.rpartition(".")
    if not kind or method == "__init__":
        return object_named(name)
    made: Any = getattr(core, kind)
    return getattr(made.__new__(made), method)


def accepts_count(function: Callable[..., Any], count: int) -> bool:
    """Return whether a function accepts `count` arguments.

    All arguments are None. Most functions refuse None, but with another error than a wrong number of arguments.
    """
    try:
        function(*[None] * count)
    except Exception as error:
        return "takes" not in str(error)
    return True


def test_accelerator_type_stub_declares_all_names_of_the_module() -> None:
    assert names_of(STUB.body) == {name for name in vars(core) if not name.startswith("__")}


@pytest.mark.parametrize("name", CLASSES)
def test_accelerator_type_stub_declares_all_attributes_of_a_class(name: str) -> None:
    has = {each for each in vars(getattr(core, name)) if not each.startswith("__") or each in SPECIAL}
    assert names_of(CLASSES[name].body) == has


@pytest.mark.parametrize("name", CLASSES)
def test_accelerator_type_stub_marks_final_classes(name: str) -> None:
    is_final = [ast.unparse(each) for each in CLASSES[name].decorator_list] == ["final"]
    try:
        type("Derived", (getattr(core, name),), {})
    except TypeError:
        assert is_final
    else:
        assert not is_final


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accelerator_type_stub_arguments_match_the_docstrings(name: str) -> None:
    arguments = FUNCTIONS[name].args
    named = [each.arg for each in (*arguments.posonlyargs, *arguments.args) if each.arg != "self"]
    shown = inspect.signature(object_named(name)).parameters.values()
    assert named == [each.name for each in shown if each.name != "self"]
    assert len(arguments.defaults) == sum(each.default is not each.empty for each in shown)
    assert {each.kind for each in shown} <= {inspect.Parameter.POSITIONAL_ONLY}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_accepted_number_of_arguments_matches_the_type_stub(name: str) -> None:
    arguments = FUNCTIONS[name].args
    most = sum(each.arg != "self" for each in (*arguments.posonlyargs, *arguments.args))
    least = most - len(arguments.defaults)
    function = callable_named(name)
    # Do not call `configure` with valid arguments, which would change the module for later tests.
    tried = [least - 1, most + 1] if name == "configure" else range(most + 2)
    assert [count for count in tried if count >= 0 and accepts_count(function, count)] == [
        count for count in tried if least <= count <= most
    ]
