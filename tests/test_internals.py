"""The tables in `tests/internals.py`: every name in them exists."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from .internals import LIMITS, PARTS, Limits, make_calls_fail, observe_calls, replace_parts, wrap_parts


def test_limit_is_the_same_wherever_it_is_read() -> None:
    for name, places in LIMITS.items():
        assert len({resolve_name(place) for place in places}) == 1, name


def test_limit_is_changed_wherever_it_is_read(limits: Limits) -> None:
    limits(linger=0.125, link_window=1)
    assert {resolve_name(place) for place in LIMITS["linger"]} == {0.125}
    assert {resolve_name(place) for place in LIMITS["link_window"]} == {1}


def test_unknown_limit_is_an_error_that_lists_the_known_ones(limits: Limits) -> None:
    with pytest.raises(ValueError, match=r"unknown: lingers; known: .*, linger, link_window, "):
        limits(linger=0.5, lingers=0.5)


def test_internal_parts_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in PARTS.items():
        part = resolve_name(place)
        replace_parts(monkeypatch, **{name: None})
        assert resolve_name(place) is None
        monkeypatch.undo()
        assert resolve_name(place) is part


def test_internal_part_can_be_watched_wrapped_and_made_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    place = PARTS["is_own_address"]
    arguments: list[str] = []
    assert resolve_name(place)("127.0.0.1") is True
    observe_calls(monkeypatch, is_own_address=arguments.append)
    assert resolve_name(place)("127.0.0.1") is True
    assert arguments == ["127.0.0.1"]
    wrap_parts(monkeypatch, is_own_address=lambda before, host: not before(host))
    assert resolve_name(place)("127.0.0.1") is False
    assert arguments == ["127.0.0.1"] * 2
    make_calls_fail(monkeypatch, KeyError("planted"), "is_own_address", "choose_algorithm")
    with pytest.raises(KeyError, match="planted"):
        resolve_name(place)("127.0.0.1")
    with pytest.raises(ValueError, match=r"unknown: chose; known: .*, choose_algorithm, "):
        make_calls_fail(monkeypatch, KeyError("planted"), "chose")
