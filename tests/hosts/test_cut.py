"""Hosts that are cut off from each other: who is lost, how soon, and who is not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

from tests.hosts.network import Network, Process
from tests.test_sockets import knows_rto_max

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks

#: Seconds within which all ranks must know of one that cannot be reached (contract).
UNREACHABLE = 6.0
#: Seconds of an outage that heals before that (contract).
OUTAGE = 4.0


async def ready(started: list[Process]) -> None:
    for process in started:
        assert await process.told() == "ready"


async def warned(process: Process) -> Any:
    """Return the result of a rank that may have warned of slow ones."""
    result = await process.told()
    code, complaints = await process.end()
    assert code == 0, complaints
    assert "is gone" not in complaints
    return result


@pytest.mark.parametrize(("what", "lost"), [("busy", ""), ("receive", ""), ("dial", ""), ("dial", "meta l4proto tcp")])
async def test_ranks_cut_off_from_each_other_are_lost_to_one_another(
    network: Callable[[int], Network], ranks: Ranks, what: str, lost: str
) -> None:
    """Rank 0, which watches both, reaches both; a firewall that loses only TCP leaves the hosts known to each other."""
    net = network(3)
    started = await ranks.start_all(net, what)
    await ready(started)
    net.separate(1, 2, lost)
    cut = time.monotonic()
    for process in started:
        process.go_on()
    for told in [await process.result() for process in started]:
        assert told["how"] == "unreachable"
        assert told["ranks"] in ([1], [2])
        assert told["at"] - cut <= UNREACHABLE


async def test_connections_dropped_by_a_firewall_fail_the_group_at_once(
    network: Callable[..., Network], ranks: Ranks
) -> None:
    net = network(3)
    started = await ranks.start_all(net, "busy")
    await ready(started)
    net.reset(1, 2)
    cut = time.monotonic()
    for told in [await process.result() for process in started]:
        assert told["ranks"] in ([1], [2])
        assert told["at"] - cut <= 1.0, told


async def test_one_of_two_ranks_cut_off_from_each_other_continues_with_the_rest(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    """Each may have said first that the other is lost; there are two that all others reach, and rank 0 decides."""
    net = network(3)
    started = await ranks.start_all(net, "go_on")
    await ready(started)
    net.separate(1, 2)
    went_on = [await warned(process) for process in started]
    assert went_on in ([[0, 1], [0, 1], None], [[0, 2], None, [0, 2]])


@pytest.mark.skipif(not knows_rto_max(), reason="needs TCP_RTO_MAX_MS (Linux 6.15)")
async def test_short_outage_only_delays_calls(network: Callable[[int], Network], ranks: Ranks) -> None:
    net = network(3)
    started = await ranks.start_all(net, "endure")
    await ready(started)
    net.unplug(1)
    await asyncio.to_thread(threading.Event().wait, OUTAGE)
    net.plug(1)
    started[0].go_on()
    for process in started:
        assert await warned(process) > OUTAGE - 1


async def test_blocked_loop_is_not_an_unreachable_host(network: Callable[[int], Network], ranks: Ranks) -> None:
    """What its kernel does not take any more stays where it is, and no host is silent for that."""
    started = await ranks.start_all(network(3), "block", BLOCKED=str(UNREACHABLE + 1))
    for process, expected in zip(started, [0.0, 7.0, 7.0], strict=True):
        assert await warned(process) == expected
