"""Fixtures for tests of the accelerator in C: a skip without the accelerator, and event loops for tests of works."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Callable, Mapping

import pytest

from aiocoll.native import core, describe_implementation

#: Files whose tests run on both event loops, asyncio and uvloop.
BOTH = ("test_works.py", "test_works_failing.py")


def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    """Return both event loop factories for the files in `BOTH`; None leaves the choice to other hooks."""
    if item.path.name not in BOTH or importlib.util.find_spec("uvloop") is None:
        return None
    import uvloop

    uvloop.new_event_loop().close()  # open a loop once: the first loop opens a pipe that libuv never closes
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture(autouse=True)
def _accelerator() -> None:
    """Skip the test if the accelerator does not run."""
    if core is None:
        pytest.skip(f"the accelerator in C does not run: {describe_implementation()}")
