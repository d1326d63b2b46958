"""A fixture that runs each test on simulated devices and on real ones, if available."""

from __future__ import annotations

import pytest

from .worlds import REAL, SIMULATED, missing

_MARKS = {"simulated": pytest.mark.slow, **dict.fromkeys(REAL, pytest.mark.gpu)}


@pytest.fixture(params=[pytest.param(kind, marks=_MARKS.get(kind, ())) for kind in (*SIMULATED, *REAL)])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of devices and arrays; skip the test if this machine does not have it."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return str(request.param)
