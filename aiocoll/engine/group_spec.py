"""Group specification: the name, timeout, options and device backends with which a group is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from aiocoll.engine.consensus.completed import Completed
from aiocoll.options import GroupOptions

__all__ = ["GroupSpec"]


class GroupSpec(NamedTuple):
    """The properties of a group other than its ranks.

    Attributes:
        name: the same on all ranks; None numbers groups in the order in which they are made.
        timeout: seconds an operation may take by default.
        options: resolved.
        devices: backend by device.
        completed: of a group made by `shrink`: what the old one had completed on all ranks of this one, and on one of
            them at least.
    """

    name: str | None
    timeout: float
    options: GroupOptions
    devices: Mapping[str, str]
    completed: tuple[Completed | None, Completed | None] = (None, None)
