"""Fixtures for tests of the accelerator in C: they skip tests without the accelerator, and choose event loops."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Mapping

import pytest

from aiocoll.native import core, describe_implementation

#: Names of files whose tests run twice: on the event loop of asyncio, and on uvloop.
BOTH = ("test_works.py", "test_works_failing.py")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    """Return the loop factories of asyncio and uvloop for files in `BOTH`; None leaves the choice to other hooks."""
    if item.path.name not in BOTH or importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    uvloop.new_event_loop().close()  # open a loop once: the first loop opens a pipe that libuv never closes
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def _accelerator() -> None:
    """Skip the test if the accelerator in C is not available."""
    if core is None:
        pytest.skip(f"the accelerator in C does not run: {describe_implementation()}")
