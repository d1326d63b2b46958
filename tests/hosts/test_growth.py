"""The loss of rank 0 on several hosts: the rank can be replaced if another process hosts the store."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.hosts.network import Network, Process

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks


async def kill_rank_0(started: list[Process]) -> None:
    for process in started:
        assert await process.next_line() == "ready"
    started[0].send_line()
    code, _ = await started[0].end()
    assert code == -9


async def test_rank_0_can_be_replaced_if_the_launcher_hosts_the_store(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    net = network(3)
    where = {"MASTER_ADDR": net.hosts[0].ipv4, "MASTER_PORT": "29500", "AIOCOLL_STORE": "launcher"}
    launcher = await ranks.start(net.hosts[0], "serve", 0, 3, "env://", **where)
    assert await launcher.next_line() == "ready"
    started = await ranks.start_all(net, "replace_rank_0", "env://", **where)
    started.append(await ranks.start(net.hosts[0], "total", 0, 3, "env://", JOIN="1", **where))
    await kill_rank_0(started[:3])
    assert [await process.result() for process in started[1:]] == [[6.0, 6.0]] * 3
    launcher.send_line()
    assert await launcher.end() == (0, "")


async def test_grow_error_contains_a_remedy_if_lost_rank_0_hosted_the_store(
    network: Callable[[int], Network], ranks: Ranks
) -> None:
    net = network(3)
    started = await ranks.start_all(net, "replace_rank_0")
    await kill_rank_0(started)
    for process in started[1:]:
        assert (await process.result()).endswith(
            "so newcomers cannot find the group. Restart all ranks, with the store in another process: run a "
            "StoreServer in the process that starts the ranks, and set AIOCOLL_STORE=launcher, and MASTER_ADDR and "
            "MASTER_PORT to its address"
        )
