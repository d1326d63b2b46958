"""Other files in place of files of the system, such as those below /proc."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


def redirect_files(patch: pytest.MonkeyPatch, places: Mapping[str, Path]) -> None:
    """Open other files and directories in place of some; the other one need not exist.

    Args:
        patch: ends the redirection.
        places: the path to open, by the path of a file or directory.
    """
    original = io.open

    def open_redirected(file: Any, *args: Any, **named: Any) -> Any:
        path = os.fspath(file) if isinstance(file, str | os.PathLike) else ""
        for place, other in places.items():
            if path == place or path.startswith(f"{place}/"):
                file = f"{other}{path[len(place) :]}"
        return original(file, *args, **named)

    patch.setattr("builtins.open", open_redirected)
    patch.setattr(io, "open", open_redirected)  # for `Path.read_text`
