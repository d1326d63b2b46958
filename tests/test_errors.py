"""Pickling of aiocoll's errors with all attributes, and with their tracebacks if tblib is installed."""

from __future__ import annotations

import copyreg
import pickle
from types import TracebackType

import pytest

from aiocoll import errors

NAMES = [name for name in errors.__all__ if name != "AiocollError"]


def make_error(name: str) -> errors.AiocollError:
    kind = getattr(errors, name)
    if not issubclass(kind, errors.GroupError):
        found: errors.AiocollError = kind("rank 3 is gone")
        return found
    how = {"how": "left"} if kind is errors.PeerLostError else {}
    return kind("rank 3 is gone", op="ALLREDUCE", seq=7, group="world:0", ranks=[3], **how)


@pytest.mark.parametrize("name", NAMES)
def test_errors_can_be_pickled(name: str) -> None:
    error = make_error(name)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))


@pytest.mark.parametrize("name", NAMES)
def test_errors_can_be_pickled_with_their_tracebacks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    support = pytest.importorskip("tblib.pickling_support", reason="tblib is not installed")
    try:
        raise make_error(name) from ValueError("a cause")
    except errors.AiocollError as raised:
        error = raised
    for kind in type(error), ValueError, TracebackType:
        monkeypatch.setitem(copyreg.dispatch_table, kind, copyreg.dispatch_table.get(kind))
    support.install(error, error.__cause__)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), str(again), vars(again)) == (type(error), str(error), vars(error))
    assert str(again.__cause__) == "a cause"
    assert again.__traceback__ is not None
