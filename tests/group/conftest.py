"""Pytest fixtures for tests of process groups."""

from __future__ import annotations

import pytest

from aiocoll.group import sparse_reduce

from ..internals import Limits
from .sparse_ways import OTHER_WAYS, WAYS


@pytest.fixture(params=[*WAYS, *(pytest.param(way, marks=pytest.mark.slow) for way in OTHER_WAYS)])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, limits: Limits) -> str:
    """Force the algorithm of sparse reductions, and whether the event loop or a worker thread computes them."""
    algorithm, place = request.param.split("-")
    monkeypatch.setattr(sparse_reduce, "is_dense_faster", lambda *_: algorithm == "dense")
    limits(max_sparse_inline=-1 if place == "thread" else 1 << 30)
    return str(request.param)
