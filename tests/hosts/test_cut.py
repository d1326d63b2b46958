"""Hosts that are cut off from each other: reports of lost ranks, detection times, and ranks that continue."""

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

#: Seconds within which all ranks must report an unreachable rank.
UNREACHABLE = 6.0
#: Seconds of an outage that ranks must survive.
OUTAGE = 4.0


async def wait_until_ready(started: list[Process]) -> None:
    for process in started:
        assert await process.next_line() == "ready"


async def result_despite_warnings(process: Process) -> Any:
    """Return the result of a rank that may have logged warnings about slow ranks."""
    result = await process.next_line()
    code, complaints = await process.end()
    assert code == 0, complaints
    assert "is gone" not in complaints
    return result


@pytest.mark.parametrize(
    ("what", "lost"), [("reduce_until_failure", ""), ("receive", ""), ("dial", ""), ("dial", "meta l4proto tcp")]
)
async def test_two_ranks_that_are_cut_off_from_each_other_are_reported_lost(
    network: Callable[[int], Network], ranks: Ranks, what: str, lost: str
) -> None:
    """Cut ranks 1 and 2 off from each other, fully or with a firewall that drops only TCP; rank 0 reaches both."""
    net = network(3)
    started = await ranks.start_all(net, what)
    await wait_until_ready(started)
    net.separate(1, 2, lost)
    cut = time.monotonic()
    for process in started:
        process.send_line()
    for report in [await process.result() for process in started]:
        assert report["how"] == "unreachable"
        assert report["ranks"] in ([1], [2])
        assert report["at"] - cut <= UNREACHABLE


async def test_connections_dropped_by_a_firewall_fail_the_group_at_once(
    network: Callable[..., Network], ranks: Ranks
) -> None:
    net = network(3)
    started = await ranks.start_all(net, "reduce_until_failure")
    await wait_until_ready(started)
    net.reset(1, 2)
    cut = time.monotonic()
    for report in [await process.result() for process in started]:
        assert report["ranks"] in ([1], [2])
        assert report["at"] - cut <= 1.0, report


async def test_one_of_two_mutually_cut_off_ranks_continues_with_the_other_ranks(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    """Accept either decision of rank 0, since either of the two ranks may report the loss of the other rank first."""
    net = network(3)
    started = await ranks.start_all(net, "shrink_after_failure")
    await wait_until_ready(started)
    net.separate(1, 2)
    went_on = [await result_despite_warnings(process) for process in started]
    assert went_on in ([[0, 1], [0, 1], None], [[0, 2], None, [0, 2]])


@pytest.mark.skipif(not knows_rto_max(), reason="needs TCP_RTO_MAX_MS (Linux 6.15)")
async def test_short_network_outage_only_delays_calls(network: Callable[[int], Network], ranks: Ranks) -> None:
    net = network(3)
    started = await ranks.start_all(net, "reduce_until_line")
    await wait_until_ready(started)
    net.unplug(1)
    await asyncio.to_thread(threading.Event().wait, OUTAGE)
    net.plug(1)
    started[0].send_line()
    for process in started:
        assert await result_despite_warnings(process) > OUTAGE - 1


async def test_rank_with_a_blocked_loop_is_not_reported_as_an_unreachable_host(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    """Send more data than the kernel buffers of the blocked rank can hold; its host must not count as silent."""
    started = await ranks.start_all(network(3), "block_loop", BLOCKED=str(UNREACHABLE + 1))
    for process, expected in zip(started, [0.0, 7.0, 7.0], strict=True):
        assert await result_despite_warnings(process) == expected
