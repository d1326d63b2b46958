"""The tables in `tests/internals.py`: every name in them exists."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from .internals import LIMITS, PARTS, Limits, failing, replaced, spied, wrapped


def test_limit_has_the_same_value_in_all_modules_that_read_the_limit() -> None:
    for name, places in LIMITS.items():
        assert len({resolve_name(place) for place in places}) == 1, name


def test_limit_is_changed_in_all_modules_that_read_the_limit(limits: Limits) -> None:
    limits(linger=0.125, link_window=1)
    assert {resolve_name(place) for place in LIMITS["linger"]} == {0.125}
    assert {resolve_name(place) for place in LIMITS["link_window"]} == {1}


def test_unknown_limit_raises_an_error_that_lists_the_known_limits(limits: Limits) -> None:
    with pytest.raises(ValueError, match=r"unknown: lingers; known: .*, linger, link_window, "):
        limits(linger=0.5, lingers=0.5)


def test_all_internal_parts_in_the_table_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in PARTS.items():
        part = resolve_name(place)
        replaced(monkeypatch, **{name: None})
        assert resolve_name(place) is None
        monkeypatch.undo()
        assert resolve_name(place) is part


def test_internal_part_can_be_spied_on_wrapped_and_made_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    place = PARTS["group_id"]
    arguments: list[str] = []
    original = resolve_name(place)("a")
    spied(monkeypatch, group_id=arguments.append)
    assert resolve_name(place)("a") == original
    assert arguments == ["a"]
    wrapped(monkeypatch, group_id=lambda before, text: before(text) + 1)
    assert resolve_name(place)("a") == original + 1
    assert arguments == ["a", "a"]
    failing(monkeypatch, KeyError("planted"), "group_id", "choose")
    with pytest.raises(KeyError, match="planted"):
        resolve_name(place)("a")
    with pytest.raises(ValueError, match=r"unknown: chose; known: .*, choose, "):
        failing(monkeypatch, KeyError("planted"), "chose")
