"""Comparisons of arrays and containers by the assertions of test cases."""

# ruff: noqa: PT009 - the assertions are tested

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiocoll.testing import InProcessTestCase
from aiocoll.testing.comparison import find_difference, has_arrays

NAN = float("nan")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.ones(3), np.ones(3)),
        (np.array([NAN, 1.0]), np.array([NAN, 1.0])),
        (np.ones((2, 2)), [[1.0, 1.0], [1.0, 1.0]]),
        (np.array(3), 3),
        ([np.ones(2), np.zeros(2)], [np.ones(2), np.zeros(2)]),
        ((np.ones(2), "x"), [np.ones(2), "x"]),
        ({"a": [np.ones(2)], "b": {"c": np.array(True)}}, {"a": [np.ones(2)], "b": {"c": np.array(True)}}),
        (np.empty(0), np.empty(0)),
        (np.array(["x", "y"]), np.array(["x", "y"])),
        (np.array([1 + 2j]), np.array([1 + 2j])),
    ],
)
def test_equal_values_compare_equal(first: Any, second: Any) -> None:
    assert find_difference(first, second) is None
    assert find_difference(second, first) is None


@pytest.mark.parametrize(
    ("first", "second", "difference"),
    [
        (np.ones(3), np.array([1.0, 2.0, 3.0]), "2 of 3 elements differ, first at (1,): 1.0 and 2.0"),
        (np.array(1), np.array(2), "1 of 1 elements differ, first: 1 and 2"),
        (np.ones(3), np.ones(4), "shapes differ: (3,) and (4,)"),
        (np.ones(3), np.ones((1, 3)), "shapes differ: (3,) and (1, 3)"),
        (np.ones(3), np.ones(3, "float32"), "dtypes differ: float64 and float32"),
        ([np.ones(1)], [np.ones(1)] * 2, "lengths differ: 1 and 2"),
        ({"a": [np.ones(1)]}, {"a": [np.zeros(1)]}, "1 of 1 elements at ['a'][0] differ, first at (0,): 1.0 and 0.0"),
        ({"a": np.ones(1)}, {"b": np.ones(1)}, "keys differ: ['a'] and ['b']"),
        ([np.ones(1), "x"], [np.ones(1), "y"], "values at [1] differ: 'x' and 'y'"),
        (np.array([NAN]), np.array([0.0]), "1 of 1 elements differ, first at (0,): nan and 0.0"),
    ],
)
def test_comparison_error_describes_the_differences(first: Any, second: Any, difference: str) -> None:
    assert find_difference(first, second) == difference


def test_comparison_treats_values_of_different_types_as_different() -> None:
    assert (find_difference(np.ones(2), object()) or "").startswith("values differ in kind: ndarray and object")
    assert find_difference(np.ones(2), None) is not None
    assert find_difference(np.ones(2), "text") is not None


def test_comparison_uses_the_tolerances_of_the_dtype() -> None:
    assert find_difference(np.array([1.0]), np.array([1.0 + 1e-7])) is not None
    assert find_difference(np.array([1.0]), np.array([1.0 + 1e-7]), rtol=1e-6) is None
    assert find_difference([np.array([0.0])], [np.array([1e-7])], atol=1e-6) is None
    assert find_difference(np.array([np.inf, NAN]), np.array([np.inf, NAN]), atol=1e-6) is None
    assert find_difference(np.ones(2), np.ones(2, "float32"), exact_dtype=False) is None


def test_comparison_treats_numpy_scalars_as_numbers() -> None:
    assert not has_arrays(np.float32(1))
    assert has_arrays({"a": [(np.ones(1),)]})
    assert not has_arrays([1, "x", {"a": None}])


class Case(InProcessTestCase):
    world_size = 2

    async def test_assert_equal_compares_arrays(self) -> None:
        ones, zeros = np.ones(2), np.zeros(2)
        self.assertEqual([ones], [ones.copy()])
        self.assertEqual(np.float32(1), np.float64(1))
        self.assertEqual(ones, ones + 1e-9, atol=1e-6)
        self.assertNotEqual([ones], [zeros])
        self.assertNotEqual(1, 2)
        self.assertNotEqualOnRank(ones, zeros, rank=1)
        self.assertNotEqualOnRank(ones, ones, rank=7)
        self.assertEqualOnRank(ones, zeros, rank=7)
        with pytest.raises(AssertionError, match=r"2 of 2 elements differ.* : lucky"):
            self.assertEqual(ones, zeros, "lucky")
        with pytest.raises(AssertionError, match="both are"):
            self.assertNotEqual({"a": ones}, {"a": ones.copy()})
        with pytest.raises(AssertionError):
            self.assertNotEqualOnRank(self.rank, self.rank, rank=self.rank)

    async def test_assert_equal_compares_torch_tensors(self) -> None:
        torch = pytest.importorskip("torch")
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
            x = torch.ones(2, 3, dtype=dtype)
            self.assertEqual([x], [x.clone()])
            self.assertNotEqual({"a": x}, {"a": torch.zeros_like(x)})
        self.assertEqual(torch.ones(2), [1.0, 1.0])
        self.assertEqual(torch.ones(2, requires_grad=True), torch.ones(2))
        self.assertEqual(torch.eye(2).to_sparse(), torch.eye(2))
        with pytest.raises(AssertionError, match=r"dtypes differ: torch.float32 and torch.float64"):
            self.assertEqual(torch.ones(2), torch.ones(2, dtype=torch.float64))
