"""Optional accelerator in C. `AIOCOLL_NATIVE` determines whether it is used (`docs/native.md`)."""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Final

from aiocoll.native import layout

__all__ = ["IMPLEMENTATION", "core", "describe_implementation"]

_VARIABLE: Final = "AIOCOLL_NATIVE"
#: Version number of the interface between Python and C. An extension module of another version, left by an earlier
#: build, is not used.
_VERSION: Final = 2
_BUILD: Final = "build it by `make native` in a clone, or by `AIOCOLL_NATIVE=1 pip install` (docs/native.md)"


def _load() -> ModuleType:
    """Import the extension module with the accelerator.

    Raises:
        ImportError: the module is not built, or does not fit this version.
    """
    if "t" in sys.abiflags:
        raise ImportError("free-threaded interpreters run pure Python")
    module = import_module("aiocoll.native._core")
    if module.VERSION != _VERSION or any(getattr(layout, name) != value for name, value in module.LAYOUT.items()):
        raise ImportError(f"{module.__file__} was built for another version of aiocoll")
    return module


def _choose() -> tuple[ModuleType | None, str]:
    """Return the extension module, or None and the reason for pure Python."""
    wanted = os.environ.get(_VARIABLE)
    if wanted not in (None, "0", "1"):
        raise ValueError(f"{_VARIABLE}={wanted!r}: must be 1 (require the accelerator in C) or 0 (run pure Python)")
    if wanted == "0":
        return None, f"{_VARIABLE}=0"
    try:
        return _load(), ""
    except ImportError as error:
        reason = "not built" if isinstance(error, ModuleNotFoundError) else str(error)
        if wanted == "1":
            raise ImportError(
                f"{_VARIABLE}=1, but the accelerator in C is not available: {reason}; {_BUILD}"
            ) from error
        return None, reason


if TYPE_CHECKING:
    from aiocoll.native import _core as core  # for type checkers only; None at run time if pure Python runs

    _reason = ""
else:
    core, _reason = _choose()
    """The extension module; None if pure Python runs."""
#: The implementation in use: "pure Python" or "native".
IMPLEMENTATION: Final = "pure Python" if core is None else "native"


def describe_implementation() -> str:
    """Return a line that describes the running implementation: its build target, or the reason for pure Python."""
    if core is None:
        return f"{IMPLEMENTATION} ({_reason})"
    return f"{IMPLEMENTATION} (for {core.BUILT_FOR}; built with {core.BUILT_WITH})"
