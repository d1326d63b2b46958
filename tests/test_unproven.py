"""The limit on connections that have not proven the job key yet."""

from __future__ import annotations

import pytest

from aiocoll.security.unproven_connections import MIN_PLACES, UnprovenConnections


@pytest.mark.parametrize(("world_size", "places"), [(0, MIN_PLACES), (4, MIN_PLACES), (1000, 2000)])
def test_new_connection_beyond_the_limit_closes_the_oldest_unauthenticated_connection(
    world_size: int, places: int
) -> None:
    away: list[int] = []
    unproven: UnprovenConnections[int] = UnprovenConnections(world_size, away.append)
    for each in range(places + 3):
        unproven.admit(each)
    assert away == [0, 1, 2]
    assert len(unproven) == places


def test_authenticated_connection_is_not_closed_for_new_connections() -> None:
    away: list[int] = []
    unproven: UnprovenConnections[int] = UnprovenConnections(0, away.append)
    for each in range(MIN_PLACES):
        unproven.admit(each)
    for each in (0, 1, 0, -1):
        unproven.release(each)
    assert (0 in unproven, 2 in unproven) == (False, True)
    for each in range(3):
        unproven.admit(MIN_PLACES + each)
    assert away == [2]
