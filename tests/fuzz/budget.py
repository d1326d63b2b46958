"""A decorator for fuzz tests: fixed examples in `make test`, or random examples for a given time in `make soak`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

#: The duration of each fuzz test in `make soak`, in seconds. The environment variable is removed, since aiocoll refuses
#: `AIOCOLL_` variables that it does not know.
SECONDS = float(os.environ.pop("AIOCOLL_FUZZ_SECONDS", "60"))
#: The number of examples that hypothesis runs between two checks of the elapsed time.
ROUND = 200

_COMMON: dict[str, Any] = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}


def fuzz(*strategies: Any, examples: int) -> Callable[[Callable[..., None]], Callable[[bool], None]]:
    """Turn a function that checks one example into a test of many examples, drawn from `strategies`."""

    def decorate(holds: Callable[..., None]) -> Callable[[bool], None]:
        @pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["short", "long"])
        def test(long: bool) -> None:
            if not long:
                settings(max_examples=examples, derandomize=True, **_COMMON)(given(*strategies)(holds))()
                return
            began = time.monotonic()
            for number in itertools.count():
                # Define a new function for each seed, since hypothesis stores the seed on the function.
                def check_example(drawn: tuple[Any, ...]) -> None:
                    holds(*drawn)

                seed(number)(settings(max_examples=ROUND, **_COMMON)(given(st.tuples(*strategies))(check_example)))()
                if time.monotonic() - began >= SECONDS:
                    print(f"{holds.__name__}: {(number + 1) * ROUND} examples, {time.monotonic() - began:.0f} s")
                    return

        test.__name__ = holds.__name__
        test.__doc__ = holds.__doc__
        return test

    return decorate
