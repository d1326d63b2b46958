"""The decorator `tests.each.each`: every case of the loop runs, and an error names the failing case."""

import pytest

from .each import each

seen: list[tuple[int, str]] = []


@pytest.mark.parametrize("letter", "ab")
@each("number", (1, 2))
def test_each_decorator_works_in_parametrised_tests(number: int, letter: str) -> None:
    seen.append((number, letter))
    assert seen[-number:][0] == (1, letter)


def test_error_in_a_test_with_each_decorator_names_the_failing_case() -> None:
    @each(("one", "two"), [(1, 1), (1, 2)])
    def test(one: int, two: int) -> None:
        assert one == two

    with pytest.raises(AssertionError) as caught:
        test()  # type: ignore[call-arg]
    assert caught.value.__notes__ == ["one = 1, two = 2"]


def test_each_decorator_without_cases_raises_an_error() -> None:
    @each("one", [])
    def test(one: int) -> None:
        raise LookupError

    with pytest.raises(AssertionError, match="test has no case"):
        test()  # type: ignore[call-arg]
