"""Tests of a rendezvous by PMI-1 with a simulated launcher. `tests/integration/test_launchers.py` runs real ones."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from aiocoll import (
    AuthenticationError,
    GroupOptions,
    RendezvousError,
    TCPStore,
    new_group,
)
from aiocoll.rendezvous import launchers
from aiocoll.rendezvous.pmi_store import PmiStore, PublishedStore

from ..ports import free_port
from ..ranks import wait_until
from .pmi_launcher import PmiLauncher

LIMIT = 20.0
OPTIONS = GroupOptions.resolve(None, {})
OWN_KEY = b"of this test and no other"


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, PmiStore]]:
    """Yield the PMI stores of the simulated processes by socket descriptor; close the stores after the test."""
    for name in [name for name in os.environ if name.startswith("AIOCOLL_") and name != "AIOCOLL_TEST_LOOP"]:
        monkeypatch.delenv(name)
    made: dict[str, PmiStore] = {}
    monkeypatch.setattr(launchers, "_pmi_stores", made)
    yield made
    for store in made.values():
        store.close()


def store_request(launcher: PmiLauncher, rank: int) -> Any:
    """Return a function that requests the store address from the launcher, as the process of this rank does."""
    return launchers.PMI.address(launcher.environment(rank)).ask


async def find_store(launcher: PmiLauncher, rank: int, key: bytes | None = None, **given: Any) -> PublishedStore:
    options = GroupOptions.resolve(GroupOptions(**given), {})
    found: PublishedStore = await store_request(launcher, rank)(key, options, "", LIMIT)
    return found


async def find_stores(launcher: PmiLauncher, size: int, **given: Any) -> list[Any]:
    async with asyncio.timeout(LIMIT):
        return await asyncio.gather(
            *(find_store(launcher, rank, **given) for rank in range(size)), return_exceptions=True
        )


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_rank_0_publishes_store_address_and_job_key_by_pmi(size: int, stores: dict[str, PmiStore]) -> None:
    async with PmiLauncher(size) as launcher:
        first, *others = found = await find_stores(launcher, size)
        assert all(other == first for other in others)
        assert (first.host, len(first.key)) == ("127.0.0.1", 32)
        assert launcher.entered == size
        commands = [[command.split()[0] for command in of_rank] for of_rank in launcher.commands]
        common = ["init", "get_my_kvsname", "barrier_in", "get", "finalize"]
        assert commands == [[*common[:2], "put", *common[2:]], *[common] * (size - 1)]
        assert all(launcher.is_blocking(rank) for rank in range(size))
        async with TCPStore(found[-1].host, found[-1].port, key=found[-1].key) as store:
            await store.set("a", b"1")
            async with TCPStore(first.host, first.port, key=first.key) as other:
                assert await other.get("a") == b"1"
        with pytest.raises(AuthenticationError):
            await TCPStore(first.host, first.port, key=bytes(32), timeout=5)


async def test_consecutive_groups_send_one_pmi_request(
    stores: dict[str, PmiStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with PmiLauncher(2) as launcher:

        def make_group(rank: int) -> new_group:
            with pytest.MonkeyPatch.context() as patch:
                for name, value in launcher.environment(rank).items():
                    patch.setenv(name, value)
                return new_group(timeout=LIMIT)

        async def ranks() -> list[Any]:
            async def rank(rank: int) -> tuple[int, int, float]:
                async with make_group(rank) as one, make_group(rank) as two:
                    assert await one.allreduce(rank + 1) == 3
                    return two.rank(), two.size(), await two.allreduce(1.5)

            return await asyncio.gather(*map(rank, range(2)))

        assert await ranks() == [(0, 2, 3.0), (1, 2, 3.0)]
        assert await ranks() == [(0, 2, 3.0), (1, 2, 3.0)]
        assert await asyncio.to_thread(asyncio.run, ranks()) == [(0, 2, 3.0), (1, 2, 3.0)]
        assert launcher.entered == 2


async def test_event_loops_of_several_threads_send_one_pmi_request(stores: dict[str, PmiStore]) -> None:
    async with PmiLauncher(2) as launcher:
        started = threading.Barrier(3)

        def request_together() -> PublishedStore:
            started.wait(LIMIT)
            return asyncio.run(find_store(launcher, 1))

        requests = [asyncio.create_task(asyncio.to_thread(request_together)) for _ in range(3)]
        first, *others = await asyncio.gather(find_store(launcher, 0), *requests)
        assert others == [first] * 3
        assert launcher.entered == 2


async def test_cancelled_task_does_not_cancel_the_pmi_request_of_other_tasks(stores: dict[str, PmiStore]) -> None:
    async with PmiLauncher(2) as launcher:
        tasks = [asyncio.create_task(find_store(launcher, 1)) for _ in range(3)]
        await wait_until(lambda: launcher.entered == 1)
        tasks[1].cancel()  # task 1 waits for the request of task 0
        await asyncio.wait([tasks[1]])
        tasks[0].cancel()  # task 2 takes over the request
        await asyncio.wait([tasks[0]])
        assert await find_store(launcher, 0) == await tasks[2]
        assert launcher.entered == 2


async def test_late_processes_at_a_pmi_barrier_are_reported_and_can_still_arrive(
    stores: dict[str, PmiStore], caplog: pytest.LogCaptureFixture
) -> None:
    async with PmiLauncher(2) as launcher:
        options = GroupOptions.resolve(GroupOptions(warn_after=0.05), {})
        with pytest.raises(RendezvousError) as caught:
            await store_request(launcher, 0)(None, options, "", 0.2)
        assert str(caught.value) == (
            "rank 0 waited 0.2 s at the launcher's barrier (PMI): all 2 processes that the launcher started must "
            "make a group, with init_method='env://'"
        )
        assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == [
            "rank 0 waited 0.05 s at the launcher's barrier (PMI): not all 2 processes have arrived; still waiting"
        ]
        first, second = await find_stores(launcher, 2)
        assert first == second
        assert launcher.entered == 2


WRONG = [
    ("init", "cmd=response_to_init rc=-1\n", "sent 'cmd=response_to_init rc=-1' in reply to 'init'"),
    ("init", "cmd=response_to_init pmi_version=1 rc=0", "closed its connection"),
    ("init", "\n", "sent 'no command'"),
    ("init", "\x00\xff=\xfe ===\n", "sent 'no command'"),
    ("init", "x" * 50_000, "a line exceeds 16384 bytes"),
    ("get_my_kvsname", "cmd=my_kvsname rc=0\n", "sent 'cmd=my_kvsname rc=0' in reply to 'get_my_kvsname'"),
    ("get_my_kvsname", "cmd=barrier_out rc=0\n", "sent 'cmd=barrier_out rc=0'"),
    ("get_my_kvsname", "", "closed its connection"),
    ("barrier_in", "", "closed its connection"),
    ("barrier_in", f"cmd=get_result rc=0 value={'5' * 64}\n", "sent 'cmd=get_result rc=0' in reply to 'barrier_in'"),
    ("get", "cmd=get_result rc=1\n", "sent 'cmd=get_result rc=1'"),
    ("get", "cmd=get_result rc=0 value=\n", "sent 'cmd=get_result rc=0'"),
    ("get", "cmd=get_result rc=0 value=xyz\n", "returned an invalid store address"),
    ("get", "cmd=get_result rc=0 value=2020\n", "returned an invalid store address"),
    ("get", f"cmd=get_result rc=0 value={b'ho st 1 0'.hex()}\n", "returned an invalid store address"),
    ("finalize", "cmd=finalize_ack rc=7\n", "in reply to 'finalize'"),
]


@pytest.mark.parametrize(("command", "answer", "message"), WRONG, ids=range(len(WRONG)))
async def test_invalid_pmi_reply_raises_an_error_at_each_call(
    command: str, answer: str, message: str, stores: dict[str, PmiStore]
) -> None:
    async with PmiLauncher(2, {command: answer}) as launcher:
        for _ in range(2):
            _, error = await find_stores(launcher, 2)
            assert isinstance(error, RendezvousError)
            assert message in str(error)
            assert "5555" not in str(error)  # the reply may contain the key
        assert all(launcher.is_blocking(rank) for rank in range(2))
        assert all(len(commands) == len(set(commands)) for commands in launcher.commands)  # no command is sent twice


async def test_closed_pmi_connection_is_reported(stores: dict[str, PmiStore]) -> None:
    async with PmiLauncher(2, {"init": ""}) as launcher:
        with pytest.raises(RendezvousError, match="closed its connection"):
            await find_store(launcher, 1)
        store = PmiStore(launcher.environment(1)["PMI_FD"], 1, 2, True, 0)
        with pytest.raises(RendezvousError, match=r"the connection to the launcher \(PMI\) failed: Broken pipe"):
            await store.find(None, OPTIONS, "", LIMIT)


async def test_error_of_rank_0_is_sent_to_all_ranks_by_pmi(stores: dict[str, PmiStore]) -> None:
    async with PmiLauncher(3) as launcher:
        for _ in range(2):
            first, *others = await find_stores(launcher, 3, bind="192.0.2.7")
            assert isinstance(first, ValueError)
            assert "bind='192.0.2.7': is not an address of this host" in str(first)
            for other in others:
                assert isinstance(other, RendezvousError)
                assert str(other) == f"rank 0 could not serve the store: {first}"


async def test_long_error_of_rank_0_is_truncated_in_pmi_messages(stores: dict[str, PmiStore]) -> None:
    async with PmiLauncher(2) as launcher:
        first, other = await find_stores(launcher, 2, interface="é" * 600)
        assert len(str(first)) > 600
        assert str(first).startswith(str(other).removeprefix("rank 0 could not serve the store: ").rstrip("\ufffd"))
        assert len(str(other)) > 200


async def test_pmi_store_uses_the_given_port(stores: dict[str, PmiStore]) -> None:
    async with PmiLauncher(2) as launcher:
        port = free_port()
        variables = launcher.environment(0) | {"AIOCOLL_PORT": str(port)}
        request = launchers.PMI.address(variables).ask
        assert request is not None
        first, other = await asyncio.gather(request(None, OPTIONS, "", LIMIT), find_store(launcher, 1))
        assert first == other
        assert first.port == port


async def test_given_job_key_is_not_published_by_pmi(stores: dict[str, PmiStore]) -> None:
    async with PmiLauncher(3) as launcher:
        first, one, other = await asyncio.gather(
            find_store(launcher, 0, OWN_KEY), find_store(launcher, 1, OWN_KEY), find_store(launcher, 2)
        )
        assert (first.key, one.key, other.key) == (OWN_KEY, OWN_KEY, None)
        put = next(line for line in launcher.commands[0] if line.startswith("put")).split()[-1]
        assert bytes.fromhex(put).decode() == f"127.0.0.1 {first.port} "


async def test_rank_0_publishes_an_address_that_other_hosts_can_reach(stores: dict[str, PmiStore]) -> None:
    """Check that the options `bind` and `advertise` determine the address, since rank 0 knows no other host."""
    async with PmiLauncher(2) as launcher:
        one_per_host = {"MPI_LOCALNRANKS": "1"}
        options = GroupOptions.resolve(GroupOptions(bind="127.0.0.2", advertise="198.51.100.3"), {})
        first, other = await asyncio.gather(
            *(
                launchers.PMI.address(launcher.environment(rank) | one_per_host).ask(None, options, "", LIMIT)
                for rank in (0, 1)
            )
        )
        assert (first.host, other.host) == ("127.0.0.2", "198.51.100.3")
        assert (first.port, first.key) == (other.port, other.key)


async def test_mpi_library_can_use_the_pmi_connection_afterwards(
    stores: dict[str, PmiStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", ModuleType("mpi4py.MPI"))
    async with PmiLauncher(2) as launcher:
        first, other = await find_stores(launcher, 2)
        assert first == other
        assert [commands[-1] for commands in launcher.commands] == ["get kvs_1_0 aiocoll"] * 2
        assert launcher.is_blocking(0)


def test_pmi_descriptor_that_is_not_a_socket_is_refused() -> None:
    with open(os.devnull) as file, socket.socket() as closed:
        gone = closed.detach()
        os.close(gone)
        for fd in (str(file.fileno()), str(gone), "x", "-1", "9" * 17):
            with pytest.raises(ValueError, match=rf"PMI_FD='{fd}': not a socket that this process inherited"):
                PmiStore(fd, 0, 1, True, 0)
