"""Ways in which a sparse reduction is calculated, for tests with the fixture `way`."""

from __future__ import annotations

import pytest

#: Ways that every test uses: the algorithm of the reduction, and whether the loop or a thread calculates.
WAYS = ("gather-loop", "dense-thread")
#: Further ways, for slow tests and those marked with `every_way`.
OTHER_WAYS = ("gather-thread", "dense-loop")
#: Runs a test in each way.
every_way = pytest.mark.parametrize("way", [*WAYS, *OTHER_WAYS], indirect=True)
