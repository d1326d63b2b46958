"""Where a thread is, in lines that the user has written."""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType

__all__ = ["place"]

#: Places named: where the thread is, and who called.
PLACES = 3
#: Files that start with one of these are Python's, or ours.
_NOT_THEIRS = ("<frozen ", os.path.dirname(os.__file__) + os.sep, str(Path(__file__).parents[1]) + os.sep)
#: Folders of what was installed, which lie below Python's files or in an environment of its own.
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def place(frame: FrameType | None) -> str:
    """Name where a thread is, and the lines of the user's that led there.

    Args:
        frame: its innermost one, as `sys._current_frames` has it.
    """
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    theirs = [each for each in frames[1:] if _is_theirs(each.f_code.co_filename)]
    # A program that was itself installed, or one in C, has no line that can be told from a library's.
    named = [*frames[:1], *(theirs or frames[1:])][:PLACES]
    places = [f"{each.f_code.co_filename}:{each.f_lineno} in {each.f_code.co_name}" for each in named]
    return ", called from ".join(places) or "an unknown place"


def _is_theirs(file: str) -> bool:
    return not file.startswith(_NOT_THEIRS) and not any(folder in file for folder in _INSTALLED)
