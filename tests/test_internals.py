"""What `tests/internals.py` names is there."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from .internals import LIMITS, Limits


def test_every_limit_is_the_same_wherever_it_is_read() -> None:
    for name, places in LIMITS.items():
        assert len({resolve_name(place) for place in places}) == 1, name


def test_a_limit_is_changed_wherever_it_is_read(limits: Limits) -> None:
    limits(linger=0.125, link_window=1)
    assert {resolve_name(place) for place in LIMITS["linger"]} == {0.125}
    assert {resolve_name(place) for place in LIMITS["link_window"]} == {1}


def test_a_limit_that_there_is_not_is_an_error_that_lists_those_there_are(limits: Limits) -> None:
    with pytest.raises(ValueError, match=r"no limits: lingers; there are: .*, linger, link_window, "):
        limits(linger=0.5, lingers=0.5)
