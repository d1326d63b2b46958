"""What stands in for another thing. It imports nothing, as `run.py` has to say what is missing."""

from __future__ import annotations

from typing import Any


class Through:
    """Something in place of another, which does all that it does not do itself."""

    def __init__(self, other: Any) -> None:
        self._other = other

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)
