"""The same tests on devices that are played and, where there are any, on real ones."""

from __future__ import annotations

import pytest

from .worlds import PLAYED, REAL, missing

_MARKS = {"played": pytest.mark.slow, **dict.fromkeys(REAL, pytest.mark.gpu)}


@pytest.fixture(params=[pytest.param(kind, marks=_MARKS.get(kind, ())) for kind in (*PLAYED, *REAL)])
def kind(request: pytest.FixtureRequest) -> str:
    """Return what arrays are made of; where there is no such device the test is skipped."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return str(request.param)
