"""Replacement of system files, such as files below /proc, by files of a test."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest


def redirect_files(patch: pytest.MonkeyPatch, places: Mapping[str, Path]) -> None:
    """Redirect `open` from some files and directories to others, which need not exist.

    Args:
        patch: ends the redirection.
        places: for each file or directory to redirect, the path to open instead.
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
