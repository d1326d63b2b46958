"""The decorator `each`, which loops over many small cases in one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., None])


def each(names: str | tuple[str, ...], values: Iterable[Any]) -> Callable[[Test], Test]:
    """Run a test once for each value in a loop; `pytest.mark.parametrize` makes a separate test of each value.

    The set-up of thousands of short tests takes longer than the tests themselves. An error note names the failing case.
    """
    cases = list(values)
    fields = (names,) if isinstance(names, str) else names

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(*args: Any, **kwargs: Any) -> None:
            assert cases, f"{test.__name__} has no case"
            for case in cases:
                given = dict(zip(fields, (case,) if isinstance(names, str) else case, strict=True))
                try:
                    test(*args, **kwargs, **given)
                except BaseException as error:
                    error.add_note(", ".join(f"{name} = {value!r:.200}" for name, value in given.items()))
                    raise

        signature = inspect.signature(test)
        others = [parameter for name, parameter in signature.parameters.items() if name not in fields]
        run.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]  # the parameters that pytest passes
        return run  # type: ignore[return-value]

    return decorate
