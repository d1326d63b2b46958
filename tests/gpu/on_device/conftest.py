"""The same tests on the fake device and, where there are any, on real ones."""

from __future__ import annotations

import pytest

from .worlds import KINDS, missing


@pytest.fixture(params=["fake", *(pytest.param(kind, marks=pytest.mark.gpu) for kind in KINDS[1:])])
def kind(request: pytest.FixtureRequest) -> str:
    """Return what arrays are made of; where there is no such device the test is skipped."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return str(request.param)
