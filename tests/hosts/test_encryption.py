"""What others see of a job over several hosts: nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from tests.hosts.network import Network

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks

#: What is said by tensors, objects, messages and the store.
SECRETS = (b"a tensor is secret", b"an object is secret", b"a message is secret", b"aiocoll/")


@pytest.mark.parametrize("encryption", ["auto", "none"])
async def test_what_crosses_the_cable(network: Callable[..., Network], ranks: Ranks, encryption: str) -> None:
    """Without encryption the same capture has it all."""
    net = network(2)
    with net.captured(1) as captured:
        started = await ranks.start_all(net, "confide", AIOCOLL_ENCRYPTION=encryption)
        assert [await process.result() for process in started] == [3, 2]
    (crossed,) = captured
    assert len(crossed) > 190_000
    assert [secret in crossed for secret in SECRETS] == [encryption == "none"] * len(SECRETS)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_what_crosses_the_cable_between_copies_of_one_machine(
    network: Callable[..., Network], ranks: Ranks, transport: str
) -> None:
    """They have one identity, so ranks of both believe to be on one host."""
    net = network(2)
    with net.captured(1) as captured:
        started = await ranks.start_all(net, "confide", AIOCOLL_HOST_ID="copied", AIOCOLL_TRANSPORT=transport)
        assert [await process.result() for process in started] == [3, 2]
    (crossed,) = captured
    assert len(crossed) > 190_000
    assert not [secret for secret in SECRETS if secret in crossed]


async def test_ranks_that_do_not_agree(network: Callable[..., Network], ranks: Ranks) -> None:
    """The store, which is reached first, cannot be."""
    net = network(2)
    method = f"tcp://{net.hosts[0].ipv4}:29500"
    for first, second, said in (("none", "tls", "does not speak TLS|reset"), ("tls", "none", "closes the connection")):
        serving = await ranks.start(net.hosts[0], "total", 0, 2, method, AIOCOLL_ENCRYPTION=first)
        failing = await ranks.start(net.hosts[1], "total", 1, 2, method, TIMEOUT="3", AIOCOLL_ENCRYPTION=second)
        _, complaints = await failing.end()
        assert f"is it, too, given encryption='{second}' (AIOCOLL_ENCRYPTION)?" in complaints
        assert any(each in complaints for each in said.split("|"))
        await serving.kill()
