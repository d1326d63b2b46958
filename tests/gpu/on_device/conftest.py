"""A fixture that runs each test on simulated devices, and on real devices if available."""

from __future__ import annotations

import pytest

from .worlds import REAL, SIMULATED, missing

_MARKS = {"simulated": pytest.mark.slow, **dict.fromkeys(REAL, pytest.mark.gpu)}


@pytest.fixture(params=[pytest.param(kind, marks=_MARKS.get(kind, ())) for kind in (*SIMULATED, *REAL)])
def kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of devices on which the test runs; skip the test if this machine has no such devices."""
    if reason := missing(request.param):
        pytest.skip(reason)
    return str(request.param)
