"""Hundreds of clients without the job key, from another host, while ranks meet and work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.hosts.conftest import PORT
from tests.hosts.network import MIB, Network, Process

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks

TARGETS, FLOODING_CLIENTS, RELAY, MISBEHAVING_CLIENTS = (
    str(Path(__file__).with_name(f"{name}.py"))
    for name in ("flood_targets", "flooding_clients", "relay", "misbehaving_clients")
)
#: The ports of the ranks that work, and of the ranks that meet.
WORK, MEET = 31000, 31001
#: Maximum seconds of a client's connection, of a rendezvous, and of one event loop iteration of a rank.
LONGEST, MEETING, TURN = 5.0, 2.0, 0.02
#: Maximum memory growth in bytes of a rank, and of a store, where each TLS client takes 256 KiB.
RANK_MEMORY, STORE_MEMORY = 32 * MIB, 96 * MIB


class Job:
    """A store, two working ranks that connect through the attacker's host, and two ranks that meet."""

    def __init__(self, network: Network, ranks: Ranks, encryption: str) -> None:
        self._network = network
        self._ranks = ranks
        self._encryption = encryption

    async def start(self) -> list[str]:
        """Start all processes; return the first bytes of each connection, which the attacker's host has recorded."""
        one, _, three = self._network.hosts
        relay = await self._ranks.start_program(
            three, RELAY, json.dumps([(port, one.ipv4, port) for port in (PORT, WORK)])
        )
        await self.serve()
        assert await relay.next_line() == "ready"
        self.working = [
            await self._start_target(0, "work", WORK, AIOCOLL_ADVERTISE=three.ipv4),
            await self._start_target(1, "work", WORK, MASTER_ADDR=three.ipv4),
        ]
        self.meeting = [await self._start_target(rank, "meet", MEET) for rank in range(2)]
        for process in (*self.working, *self.meeting):
            assert await process.next_line() == "ready"
        relay.send_line()
        return list(await relay.next_line())

    async def serve(self) -> None:
        """Start the store without ranks."""
        self.store = await self._start_target(0, "serve", HOST=self._network.hosts[0].ipv4)
        assert await self.store.next_line() == "ready"

    async def meet(self, times: int) -> list[float]:
        """Let two ranks meet `times` times; return the seconds of each rendezvous."""
        ranks = [await self._start_target(rank, "meet", MEET, TIMES=str(times)) for rank in range(2)]
        first, _ = [await rank.result() for rank in ranks]
        return list(first)

    async def _start_target(self, rank: int, what: str, port: int = 0, **env: str) -> Process:
        hosts = self._network.hosts
        place = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": hosts[0].ipv4,
            "MASTER_PORT": str(PORT),
            "AIOCOLL_STORE": "launcher",
            "AIOCOLL_PORT_RANGE": f"{port}-{port}",
            "AIOCOLL_ENCRYPTION": self._encryption,
        }
        return await self._ranks.start_program(hosts[rank], TARGETS, what, **place | env)

    async def flood(self, recorded: list[str], each: int, processes: int, at_once: int) -> dict[str, list[float]]:
        """Start `each` clients per kind of misbehaviour, listener and process; return the results of each kind."""
        listeners = [(0, PORT), *((host, port) for host in range(2) for port in (WORK, MEET))]
        places = [(self._network.hosts[host].ipv4, port, self._encryption != "none") for host, port in listeners]
        given = json.dumps({"places": places, "each": each, "at_once": at_once, "recorded": recorded})
        strangers = [
            await self._ranks.start_program(self._network.hosts[2], FLOODING_CLIENTS, given) for _ in range(processes)
        ]
        found: dict[str, list[float]] = {}
        for process in strangers:
            assert await process.next_line() == "ready"
        for process in strangers:
            for kind, (count, longest, most) in (await process.result()).items():
                before = found.get(kind, [0, 0, 0])
                found[kind] = [before[0] + count, max(before[1], longest), max(before[2], most)]
        return found

    async def end(self) -> tuple[Any, list[Any], list[float]]:
        """End all processes; return the costs of the store and of the working ranks, and the rendezvous durations."""
        for process in (self.working[0], self.meeting[0]):
            process.send_line()
        worked = [await process.result() for process in self.working]
        met = [await process.result() for process in self.meeting]
        self.store.send_line()
        return await self.store.result(), worked, met[0]


def check(found: dict[str, list[float]], store: Any, worked: list[Any], met: list[float]) -> None:
    stayed = {kind: longest for kind, (_, longest, _) in found.items()}
    assert max(stayed.values()) <= LONGEST, stayed
    assert len(met) >= 3
    assert max(met) <= MEETING, met
    for most, cost in (STORE_MEMORY, store), *((RANK_MEMORY, each) for each in worked):
        (files, memory), (files_after, memory_after) = cost["before"], cost["after"]
        assert files_after <= files
        assert memory_after - memory <= most
    for cost in worked:
        assert cost["turn"] <= TURN
        assert cost["longest"] <= MEETING


@pytest.mark.parametrize("encryption", ["auto", pytest.param("none", marks=pytest.mark.soak)])
async def test_unauthenticated_clients_of_every_kind_do_not_disturb_ranks(
    network: Callable[..., Network], ranks: Ranks, encryption: str
) -> None:
    job = Job(network(3), ranks, encryption)
    recorded = await job.start()
    found = await job.flood(recorded, each=8, processes=1, at_once=1000)
    assert sum(count for count, _, _ in found.values()) == 8 * 22 * 5
    check(found, *await job.end())


@pytest.mark.parametrize("conduct", ["hold", "repeat", "flood", "half open"])
async def test_unauthenticated_clients_with_every_behaviour_do_not_disturb_a_rendezvous(
    network: Callable[..., Network], ranks: Ranks, conduct: str
) -> None:
    """Let clients without the job key connect from another host to the store and each rank while ranks meet."""
    net = network(3)
    places = [(net.hosts[0].ipv4, PORT), *((net.hosts[rank].ipv4, MEET) for rank in range(2))]
    job = Job(net, ranks, "auto")
    await job.serve()
    stranger = await ranks.start_program(net.hosts[2], MISBEHAVING_CLIENTS, conduct, json.dumps(places))
    assert await stranger.next_line() == "ready"
    met = await job.meet(20)
    assert max(met) <= MEETING, met
    stranger.send_line()
    visits = await stranger.result()
    assert min(visits[1:]) >= 1, f"strangers did not visit every rank: {visits}"


@pytest.mark.soak
@pytest.mark.parametrize("encryption", ["auto", "none"])
async def test_ten_thousand_unauthenticated_clients_do_not_disturb_ranks(
    network: Callable[..., Network], ranks: Ranks, encryption: str, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(network(3), ranks, encryption)
    recorded = await job.start()
    found = await job.flood(recorded, each=46, processes=2, at_once=3000)
    count = sum(count for count, _, _ in found.values())
    assert count >= 10_000
    store, worked, met = await job.end()
    with capsys.disabled():
        print(
            f"\n{encryption}: {count} strangers, none longer than {max(each[1] for each in found.values()):.2f} s; "
            f"{len(met)} meetings meanwhile, the longest {1e3 * max(met):.0f} ms; the longest turn of a rank's loop "
            f"{1e3 * max(each['turn'] for each in worked):.1f} ms"
        )
    check(found, store, worked, met)
