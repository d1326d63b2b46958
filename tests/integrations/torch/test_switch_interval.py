"""The switch interval of Python threads, which aiocoll shortens in torch programs."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="needs torch")

from aiocoll.integrations.torch.process import set_switch_interval

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def interval() -> Iterator[None]:
    """Set the switch interval to Python's default of 5 ms during a test."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.005)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("given", "expected"), [(None, 0.0005), ("0", 0.005), ("0.001", 0.001), ("0.1", 0.005)], ids=str
)
def test_python_switch_interval_is_shortened_to_the_value_of_the_environment_variable(
    given: str | None, expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AIOCOLL_SWITCH_INTERVAL", raising=False)
    if given is not None:
        monkeypatch.setenv("AIOCOLL_SWITCH_INTERVAL", given)
    set_switch_interval()
    assert sys.getswitchinterval() == pytest.approx(expected, abs=1e-6)  # Python stores the interval in microseconds


def test_switch_interval_that_is_not_a_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_SWITCH_INTERVAL", "5 ms")
    with pytest.raises(ValueError, match="AIOCOLL_SWITCH_INTERVAL='5 ms' must be a number of seconds"):
        set_switch_interval()
