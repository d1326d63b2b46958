"""The tables `LIMITS` and `PARTS` of `tests/internals.py`, and the functions that replace their entries."""

from __future__ import annotations

from pkgutil import resolve_name

import pytest

from .internals import (
    LIMITS,
    PARTS,
    Limits,
    make_calls_fail,
    make_methods_fail,
    observe_calls,
    observe_methods,
    replace_parts,
    wrap_methods,
    wrap_parts,
)


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


def test_every_internal_function_in_the_table_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, place in PARTS.items():
        part = resolve_name(place)
        replace_parts(monkeypatch, **{name: None})
        assert resolve_name(place) is None
        monkeypatch.undo()
        assert resolve_name(place) is part


def test_internal_function_can_be_observed_wrapped_and_made_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    place = PARTS["dump_object"]
    arguments: list[str] = []
    original = resolve_name(place)("a")
    observe_calls(monkeypatch, dump_object=arguments.append)
    assert resolve_name(place)("a") == original
    assert arguments == ["a"]
    wrap_parts(monkeypatch, dump_object=lambda before, text: before(text) + b"b")
    assert resolve_name(place)("a") == original + b"b"
    assert arguments == ["a", "a"]
    make_calls_fail(monkeypatch, KeyError("planted"), "dump_object", "choose_algorithm")
    with pytest.raises(KeyError, match="planted"):
        resolve_name(place)("a")
    with pytest.raises(ValueError, match=r"unknown: chose; known: .*, choose_algorithm, "):
        make_calls_fail(monkeypatch, KeyError("planted"), "chose")


def test_method_can_be_observed_wrapped_and_made_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    class Number:
        def plus(self, other: int) -> int:
            return 1 + other

    arguments: list[int] = []
    observe_methods(monkeypatch, Number, plus=lambda _, other: arguments.append(other))
    assert Number().plus(2) == 3
    wrap_methods(monkeypatch, Number, plus=lambda before, number, other: 10 * before(number, other))
    assert Number().plus(3) == 40
    assert arguments == [2, 3]
    make_methods_fail(monkeypatch, KeyError("planted"), Number, "plus")
    with pytest.raises(KeyError, match="planted"):
        Number().plus(4)
    with pytest.raises(AttributeError, match="minus"):
        observe_methods(monkeypatch, Number, minus=print)
    monkeypatch.undo()
    assert Number().plus(2) == 3
