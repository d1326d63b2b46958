"""What the compiler of the hot modules is told about a class; the interpreter need not know (`docs/compiled.md`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["mypyc_attr"]

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(**_):
        """Leave a class as it is."""
        return lambda cls: cls
