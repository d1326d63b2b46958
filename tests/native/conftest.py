"""Tests of the accelerator in C are skipped where it does not run; its works are tested on both event loops."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Mapping

import pytest

from aiocoll.native import core, describe_implementation

#: Files whose tests run on each event loop that is installed.
BOTH = ("test_works.py", "test_works_failing.py")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    """Give some files both loops; None leaves the choice to the other hooks."""
    if item.path.name not in BOTH or importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    uvloop.new_event_loop().close()  # it opens a pipe that libuv keeps for good
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def _accelerator() -> None:
    """Skip a test where pure Python runs."""
    if core is None:
        pytest.skip(f"the accelerator in C does not run: {describe_implementation()}")
