"""Many small cases in one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., None])


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test once for each value, in a loop; like `pytest.mark.parametrize`, which makes a test of each.

    Thousands of tests of a millisecond take longer to set up than to run. An error names the case in a note.
    """
    cases = list(values)
    taken = (names,) if isinstance(names, str) else names

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            assert cases, f"{test.__name__} has no case"
            for case in cases:
                given = dict(zip(taken, (case,) if isinstance(names, str) else case, strict=True))
                try:
                    test(*args, **kwargs, **given)
                except BaseException as error:
                    error.add_note(", ".join(f"{name} = {value!r:.200}" for name, value in given.items()))
                    raise

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in taken]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # what pytest fills in
        return run  # type: ignore[return-value]

    return decorate
