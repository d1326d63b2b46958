"""A base class for wrappers, which finds undefined attributes in the wrapped object.

This module imports only the standard library, because `run.py` must work without any package.
"""

from __future__ import annotations

from typing import Any


class Delegate:
    """A wrapper that takes all attributes that it does not define from the wrapped object."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)
