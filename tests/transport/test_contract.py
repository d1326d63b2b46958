"""The link contract, run for every kind of link of the package."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from aiocoll.runtime import Runtime
from aiocoll.testing.contracts import LinkContract, MakeLinks

from .links import KINDS, make_ends


class TestLinks(LinkContract):
    @pytest.fixture(params=KINDS)
    async def make_links(self, request: pytest.FixtureRequest) -> MakeLinks:
        return partial(make_ends, request.param, Runtime.of(asyncio.get_running_loop()))

    @pytest.fixture
    def copies_frames(self, request: pytest.FixtureRequest) -> bool:
        return bool(request.node.callspec.params["make_links"] == "memory")
