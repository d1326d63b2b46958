"""Values of the fixture `way`: the algorithm of sparse reductions, and the thread that computes them."""

from __future__ import annotations

import pytest

#: The values with which every test runs: "gather" or "dense" algorithm, in the event loop or a worker thread.
WAYS = ("gather-loop", "dense-thread")
#: The other values, for slow tests and for tests marked with `every_way`.
OTHER_WAYS = ("gather-thread", "dense-loop")
#: Runs a test in each way.
every_way = pytest.mark.parametrize("way", [*WAYS, *OTHER_WAYS], indirect=True)
