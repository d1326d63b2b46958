"""Delayed handshake messages and blocked event loops: no rank loses the link to a live peer."""

from __future__ import annotations

import pytest

from aiocoll.security.handshake import ConnKind

from .simulated_network import Network

#: The number of seeds of the fast test, and of `make soak`.
FEW = 200
MANY = 5000


def simulate(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one or both of two ranks dial, and exchange a message in each direction; check that one link remains."""
    network = Network(seed, ("unix", "shm")[seed % 2])
    kind = (ConnKind.DATA, ConnKind.CONTROL)[seed // 2 % 2]
    dialling = ({0}, {1}, {0, 1}, {0, 1})[seed // 4 % 4]
    with network.installed(monkeypatch):
        low, high = network.ranks
        network.run(low.open(high, kind, dials=0 in dialling), high.open(low, kind, dials=1 in dialling))
        network.settle()
        assert [rank.broken for rank in network.ranks] == [[], []]
        assert [len(rank.links) for rank in network.ranks] == [1, 1]
        assert [rank.received for rank in network.ranks] == [[1], [0]]
    assert network.errors == []


@pytest.mark.parametrize("seeds", [range(FEW), pytest.param(range(FEW, MANY), marks=pytest.mark.soak)], ids=str)
def test_delayed_handshake_loses_no_link(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        try:
            simulate(seed, monkeypatch)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
