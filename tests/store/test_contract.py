"""The store contract, run for every store of the package."""

from types import FunctionType

import pytest

from aiocoll.testing.contracts import StoreContract

from .conftest import UNLIMITED, every_store

#: Names of contract tests that run on all variants of stores even if slow tests are not selected.
EVERY = (
    "test_set_then_get_from_another_handle",
    "test_get_waits_for_a_later_set",
    "test_delete_key",
    "test_queue_pop_waits_and_each_item_goes_to_one",
    "test_limits",
)


class TestStores(StoreContract):
    @pytest.fixture
    def keeps_order(self, request: pytest.FixtureRequest) -> bool:
        return base_kind(request) not in (*UNLIMITED, "minimal")

    @pytest.fixture
    def limits_entries(self, request: pytest.FixtureRequest) -> bool:
        return base_kind(request) not in UNLIMITED

    @pytest.fixture
    def close_store(self):
        return lambda store: getattr(store, "_store", store).aclose()


def base_kind(request: pytest.FixtureRequest) -> str:
    """Return the kind of the store under test, without the "prefix-" of a variant."""
    kind: str = request.node.callspec.params["open_store"]
    return kind.removeprefix("prefix-")


def copy_of(function: FunctionType) -> FunctionType:
    """Return a copy of a function, so that the copy can have its own pytest marks."""
    return FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )


for name in EVERY:
    setattr(TestStores, name, every_store(copy_of(getattr(StoreContract, name))))
