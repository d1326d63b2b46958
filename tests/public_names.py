"""The list of all public names with parameters and defaults; `python -m tests.public_names` records the list.

`tests/test_public_names.py` compares them with `public_names.txt`. The lines of a class have its constructor, methods
and attributes, also inherited from other classes of aiocoll, and the names under ``Attributes:`` in its docstring. They
omit annotations and whether an attribute is a property, since these may change without breaking a program.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import types
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, NewType, get_origin

import aiocoll

RECORD = Path(__file__).with_suffix(".txt")

#: The modules that programs import. Their `__all__` lists the public names.
MODULES = ("aiocoll", "aiocoll.backends", "aiocoll.distributed", "aiocoll.errors", "aiocoll.hooks", "aiocoll.loops",
           "aiocoll.metrics.opentelemetry", "aiocoll.metrics.prometheus", "aiocoll.options", "aiocoll.plugins",
           "aiocoll.store", "aiocoll.testing", "aiocoll.testing.contracts", "aiocoll.typing")  # fmt: skip

#: Classes with a private constructor: programs get instances from calls. These names are looked up in all modules.
HANDED_OUT = ("CallPlan", "CartesianGroup", "Estimate", "FlightRecorder", "GroupStats", "OperationStats", "PeerStats",
              "PlannedCall", "Predicted", "ProcessGroup", "Work")  # fmt: skip

#: The special methods (operators, statements) that count as public names if a class defines them.
OPERATORS = {"__add__", "__aenter__", "__aexit__", "__aiter__", "__await__", "__bool__", "__call__", "__contains__",
             "__enter__", "__eq__", "__exit__", "__getitem__", "__hash__", "__iter__", "__len__", "__or__"}  # fmt: skip


#: Modules that this module does not import: a program, and modules that need CuPy, Ray, Dask or torch.
_LEFT = ("aiocoll.__main__", "aiocoll.gpu.cupy_api", "aiocoll.integrations.", "aiocoll.torch")


def public_names() -> list[str]:
    """Return sorted lines, each with a public name and its parameters."""
    lines = {line for name in MODULES for line in _of_module(importlib.import_module(name))}
    everywhere = _classes()
    for name in HANDED_OUT:
        lines.update(_of_class(f"({name})", everywhere[name]))
    return sorted(lines)


def _of_module(module: ModuleType) -> Iterator[str]:
    for name in module.__all__:
        found = getattr(module, name)
        path = f"{module.__name__}.{name}"
        if not inspect.isclass(found):
            yield path + _parameters(found)
        elif found.__name__ in HANDED_OUT:
            yield path
        elif (home := _home(found)) in (None, path):
            yield path + _parameters(found)
            yield from _of_class(path, found)
        else:
            yield f"{path} = {home}"


def _home(found: type) -> str | None:
    """Return the full name of a class in the first public module that exports the class, or None."""
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            if getattr(module, name) is found:
                return f"{module.__name__}.{name}"
    return None


def _of_class(path: str, cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        if _is_of_package(base):
            for name in [*vars(base), *_documented(base)]:
                if not name.startswith("_") or name in OPERATORS:
                    yield f"{path}.{name}{_parameters(inspect.getattr_static(cls, name, None), method=True)}"


def _documented(cls: type) -> list[str]:
    section = re.search(r"^Attributes:\n((?: .*\n|\n)*)", inspect.cleandoc(cls.__doc__ or "") + "\n", re.MULTILINE)
    return re.findall(r"^    (\w+):", section[1], re.MULTILINE) if section else []


def _parameters(found: Any, *, method: bool = False) -> str:
    """Return the signature of a callable without annotations and `self`, or "" for other objects."""
    if isinstance(found, classmethod | staticmethod):
        method = method and isinstance(found, classmethod)
        found = found.__func__
    elif method and not isinstance(found, types.FunctionType | types.WrapperDescriptorType):
        return ""
    if not callable(found) or (inspect.isclass(found) and not _has_constructor(found)) or _is_for_checkers(found):
        return ""
    parameters = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(found).parameters.values()]
    signature = inspect.Signature(parameters[1:] if method else parameters)
    return re.sub(r"<_\w+\.(\w+): .*?>", r"\1", str(signature))  # shows an enumeration member by its name


def _has_constructor(cls: type) -> bool:
    """Return whether a class of aiocoll defines its constructor, since inherited ones vary with the Python version."""
    return not issubclass(cls, Enum) and any(
        {"__init__", "__new__"} & vars(base).keys() for base in cls.__mro__ if _is_of_package(base)
    )


def _is_for_checkers(found: Any) -> bool:
    """Return whether an object is a type for annotations only: an alias, a union or a protocol."""
    return (
        isinstance(found, NewType | UnionType) or get_origin(found) is not None or getattr(found, "_is_protocol", False)
    )


def _is_of_package(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "aiocoll"


def _classes() -> dict[str, type]:
    """Return all classes that modules of aiocoll define, by name."""
    found = {}
    for info in pkgutil.walk_packages(aiocoll.__path__, "aiocoll."):
        if not info.name.startswith(_LEFT):
            module = importlib.import_module(info.name)
            found.update({name: each for name, each in vars(module).items() if inspect.isclass(each)})
    return {name: cls for name, cls in found.items() if _is_of_package(cls)}


if __name__ == "__main__":
    RECORD.write_text("\n".join(public_names()) + "\n")
