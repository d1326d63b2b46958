"""Loss of a rank during an allreduce: all other ranks report the number of the lost rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.integration.conftest import Ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "transport"),  # rank 0 is the hub and hosts the store; rank 2 does neither
    [
        (0, "unix"),
        (0, "shm"),
        (2, "tcp"),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in ((0, "tcp"), (2, "unix"), (2, "shm"))),
    ],
)
def test_killed_rank_is_reported_by_all_other_ranks(ranks: Ranks, port: int, victim: int, transport: str) -> None:
    env = {"VICTIM": str(victim), "AIOCOLL_TRANSPORT": transport}
    results = ranks("lose", f"tcp://127.0.0.1:{port}", 4, env=env, killed=[victim])
    for rank in {0, 1, 2, 3} - {victim}:
        name, how, lost, text, cause = results[rank]
        assert (name, how, lost, cause) == ("PeerLostError", "killed", [victim], "PeerLostError")
        assert f"rank {victim} of group 'world:0' is gone: its" in text


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2])
def test_killed_rank_whose_memory_is_still_mapped_is_reported(ranks: Ranks, port: int, victim: int) -> None:
    """Use registered arrays: memory of the killed rank stays readable while other ranks map this memory."""
    env = {"VICTIM": str(victim), "AIOCOLL_TRANSPORT": "shm", "EMPTY": "1"}
    results = ranks("lose", f"tcp://127.0.0.1:{port}", 3, env=env, killed=[victim])
    for rank in {0, 1, 2} - {victim}:
        name, how, lost, _, cause = results[rank]
        assert (name, how, lost, cause) == ("PeerLostError", "killed", [victim], "PeerLostError")


def test_killed_rank_whose_child_keeps_its_connections_is_reported(ranks: Ranks, port: int) -> None:
    results = ranks("lose", f"tcp://127.0.0.1:{port}", 4, env={"VICTIM": "0", "HEIR": "3"}, killed=[0])
    for name, how, lost, text, cause in results[1:]:
        assert (name, how, lost, cause) == ("PeerLostError", "killed", [0], "PeerLostError")
        assert "rank 0 of group 'world:0' is gone: its process is gone" in text


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_rank_that_leaves_early_is_reported_by_all_other_ranks(ranks: Ranks, port: int, victim: int) -> None:
    results = ranks("leave", f"tcp://127.0.0.1:{port}", 4, env={"VICTIM": str(victim)})
    assert results.pop(victim) == "left"
    for name, how, lost, text, cause in results:
        assert (name, how, lost, cause) == ("PeerLostError", "left", [victim], "PeerLostError")
        assert f"needs rank {victim}, which has left" in text
