"""Source lines of the user's program at which a thread is blocked, for warnings and errors."""

from __future__ import annotations

import os
from types import FrameType

__all__ = ["line", "place", "skip_package"]

#: Maximum number of source lines in the text: the current line, then its callers.
PLACES = 3
#: The directory of this package.
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
#: Path prefixes of source files that belong to Python or to this package.
_NOT_THEIRS = ("<frozen ", os.path.dirname(os.__file__) + os.sep, _OURS + os.sep)
#: Directories of installed packages, below Python's own directory or in a virtual environment.
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def place(frame: FrameType | None) -> str:
    """Return a text that names the user's source lines that a thread is executing.

    Args:
        frame: the innermost frame, as in `sys._current_frames`.
    """
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    theirs = [each for each in frames[1:] if _is_user_file(each.f_code.co_filename)]
    # If the program itself is installed as a package, or written in C, its lines look like library lines. In that case,
    # use all frames.
    named = [*frames[:1], *(theirs or frames[1:])][:PLACES]
    places = [f"{each.f_code.co_filename}:{each.f_lineno} in {each.f_code.co_name}" for each in named]
    return ", called from ".join(places) or "an unknown place"


def line(frame: FrameType | None) -> str:
    """Return the innermost of the user's source lines that a thread is executing; "" if there is none."""
    innermost = frame
    while frame is not None:
        if _is_user_file(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    # If the program itself is installed as a package, or written in C, its lines look like library lines. In that case,
    # use the innermost frame.
    return "" if innermost is None else f"{innermost.f_code.co_filename}:{innermost.f_lineno}"


def skip_package(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame, from `frame` outwards, that is not in this package."""
    while frame is not None and frame.f_code.co_filename.startswith(_OURS + os.sep):
        frame = frame.f_back
    return frame


def _is_user_file(file: str) -> bool:
    return not file.startswith(_NOT_THEIRS) and not any(folder in file for folder in _INSTALLED)
