"""Running times of fuzzers: a few hundred fixed examples in `make test`, or a given time in `make soak`."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

#: Seconds of each fuzzer in `make soak`. The variable is removed, since the library refuses unknown variables.
SECONDS = float(os.environ.pop("AIOCOLL_FUZZ_SECONDS", "60"))
#: The number of examples between two checks of the elapsed time.
ROUND = 200

_COMMON: dict[str, Any] = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}


def fuzz(*strategies: Any, examples: int) -> Callable[[Callable[..., None]], Callable[[bool], None]]:
    """Make a test of a property that must hold for all examples of the strategies."""

    def decorate(holds: Callable[..., None]) -> Callable[[bool], None]:
        @pytest.mark.parametrize("long", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["short", "long"])
        def test(long: bool) -> None:
            if not long:
                settings(max_examples=examples, derandomize=True, **_COMMON)(given(*strategies)(holds))()
                return
            began = time.monotonic()
            for number in itertools.count():
                # Define a new function each time, since hypothesis stores the seed on the function.
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
