"""Tests of every init method, and of the errors if ranks do not meet. The ranks are tasks of one event loop."""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aiocoll import (
    GroupOptions,
    HashStore,
    PrefixStore,
    ProcessGroup,
    RendezvousError,
    current_process_group,
    new_group,
    process_group,
)
from aiocoll.security.handshake import ConnKind
from aiocoll.transport.stream.transport import StreamTransport

from ..internals import comm_of, observe_methods
from ..ranks import wait_until

Rank = Callable[[int], Awaitable[Any]]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove the environment variables of launchers and of aiocoll."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") or (
            name.startswith(("AIOCOLL_", "TORCHELASTIC_")) and name != "AIOCOLL_TEST_LOOP"
        ):
            monkeypatch.delenv(name)
    return monkeypatch


@pytest.fixture
def port() -> int:
    """Return the number of a free TCP port."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


async def run_ranks_together(world_size: int, rank: Rank) -> list[Any]:
    async with asyncio.timeout(30):
        return await asyncio.gather(*(rank(number) for number in range(world_size)))


async def check_group(pg: ProcessGroup) -> str:
    assert await pg.allreduce(1) == pg.size()
    assert await pg.allgather_object(pg.rank()) == list(range(pg.size()))
    return pg.group_name


# -- init methods


async def test_store_passed_by_the_caller_is_not_closed() -> None:
    store = HashStore()

    async def rank(rank: int) -> None:
        async with new_group(store=PrefixStore("job", store), rank=rank, world_size=3) as pg:
            assert (pg.rank(), pg.size()) == (rank, 3)
            await check_group(pg)

    await run_ranks_together(3, rank)
    await store.set("still", b"open")
    await store.aclose()


async def test_ranks_meet_by_a_file_url(tmp_path: Path) -> None:
    async def rank(rank: int) -> None:
        async with new_group(init_method=f"file://{tmp_path}/meet?here#now", rank=rank, world_size=3) as pg:
            await check_group(pg)

    await run_ranks_together(3, rank)
    await run_ranks_together(3, rank)  # a second job can use the same file


@pytest.mark.parametrize("transport", ["auto", "unix", "tcp", "shm"])
async def test_ranks_meet_by_a_tcp_url(transport: Any, port: int) -> None:
    async def rank(rank: int) -> None:
        options = GroupOptions(transport=transport)
        async with new_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3, options=options) as pg:
            await check_group(pg)

    await run_ranks_together(3, rank)


async def test_ranks_meet_by_environment_variables(environment: pytest.MonkeyPatch, port: int) -> None:
    environment.setenv("MASTER_ADDR", "127.0.0.1")
    environment.setenv("MASTER_PORT", str(port))
    environment.setenv("WORLD_SIZE", "2")

    async def rank(rank: int) -> None:
        async with new_group(rank=rank) as pg:
            assert pg.size() == 2
            await check_group(pg)

    await run_ranks_together(2, rank)


async def test_rank_and_world_size_come_from_the_environment(environment: pytest.MonkeyPatch, port: int) -> None:
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}.items():
        environment.setenv(name, str(value))
    pg = await new_group()
    assert (pg.rank(), pg.size()) == (0, 1)
    assert await pg.allreduce(3.5) == 3.5
    await pg.shutdown()


async def test_rank_0_can_start_last(port: int) -> None:
    """Start rank 0 last: it hosts the store, for which the other ranks must wait."""
    started_ranks: list[int] = []

    async def rank(rank: int) -> None:
        if rank == 0:
            await wait_until(lambda: len(started_ranks) == 2)
        started_ranks.append(rank)
        async with new_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3) as pg:
            await check_group(pg)

    await run_ranks_together(3, rank)
    assert started_ranks[-1] == 0


async def test_consecutive_groups_can_use_the_same_address(port: int) -> None:
    async def rank(rank: int) -> list[ProcessGroup]:
        kept = []
        for _ in range(4):
            async with new_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=3) as pg:
                await check_group(pg)
                kept.append(pg)  # keep a reference: a closed group must not block the next group
        return kept

    await run_ranks_together(3, rank)


# -- several groups


async def test_groups_of_one_environment_share_endpoint_and_store(port: int) -> None:
    connected: list[tuple[int, int, ConnKind]] = []

    def count(transport: StreamTransport, peer: int, _: Any, kind: ConnKind) -> None:
        connected.append((transport.rank, peer, kind))

    async def rank(rank: int) -> None:
        def make(**more: Any) -> new_group:
            options = GroupOptions(transport="unix")
            return new_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, options=options, **more)

        async with make() as one, make(name="second") as two, make() as three:
            assert comm_of(one).endpoint is comm_of(two).endpoint is comm_of(three).endpoint
            assert [await check_group(pg) for pg in (one, two, three)] == ["world:0", "second", "world:2"]
            with pytest.raises(ValueError, match="name='second' is the name of an open group"):
                await make(name="second")
            await two.barrier()
            await two.shutdown()
            async with make(name="second") as again:
                assert await check_group(again) == "second"
            await check_group(one)

    with pytest.MonkeyPatch.context() as patch:
        observe_methods(patch, StreamTransport, connect=count)
        await run_ranks_together(2, rank)
    assert len(connected) == len(set(connected)) <= 3


async def test_closing_a_group_does_not_affect_other_groups() -> None:
    store = HashStore()

    async def rank(rank: int) -> None:
        one = await new_group(store=store, rank=rank, world_size=2)
        two = await new_group(store=store, rank=rank, world_size=2)
        await one.shutdown()
        await check_group(two)
        if rank == 0:
            two.abort("over")
        await two.wait_revoked()
        async with new_group(store=store, rank=rank, world_size=2) as three:
            await two.shutdown()
            await check_group(three)

    await run_ranks_together(2, rank)
    await store.aclose()


async def test_another_world_size_for_the_same_job_is_refused() -> None:
    store = HashStore()
    async with new_group(store=store, rank=0, world_size=1):
        with pytest.raises(ValueError, match="world_size=2, but other groups of this job have 1 ranks"):
            await new_group(store=store, rank=0, world_size=2)
    await store.aclose()


# -- failures


async def test_rendezvous_error_names_the_missing_ranks() -> None:
    store = HashStore()

    async def rank(rank: int) -> None:
        message = rf"rank {rank} waited 0.2 s for rank\(s\) 1, 3 of 4"
        with pytest.raises(RendezvousError, match=message):
            await new_group(store=store, rank=rank, world_size=4, timeout=0.2)

    await asyncio.gather(rank(0), rank(2))
    await store.aclose()


async def test_rendezvous_error_explains_a_missing_rank_0() -> None:
    store = HashStore()
    with pytest.raises(RendezvousError, match=r"rank 1 waited 0.1 s for rank\(s\) 0 of 2") as raised:
        await new_group(store=store, rank=1, world_size=2, timeout=0.1)
    # The traceback must show neither the `TimeoutError` nor the cancellation inside.
    assert raised.value.__cause__ is None
    assert raised.value.__suppress_context__
    await store.aclose()


async def test_rendezvous_errors_of_both_ranks_name_a_missing_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Prevent all connections between the ranks; each rank first logs a warning, and fails at its timeout."""

    async def reach(*_: Any, **__: Any) -> socket.socket:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr("aiocoll.transport.stream.addresses.reach", reach)
    store = HashStore()
    place = r"127\.0\.0\.1 port \d+"
    expected = [
        rf"rank\(s\) 1 \(at {place}\) have not connected to rank 0 at {place}; check that they "
        r"run and that firewalls permit the connection",
        rf"rank 0 cannot be reached at {place}: it does not answer \(tried for \d\.\d s\)",
    ]

    async def rank(rank: int) -> None:
        message = rf"^rank {rank} of 2 did not meet the others within 1 s: {expected[rank]}$"
        options = GroupOptions(transport="tcp", warn_after=0.5)
        with pytest.raises(RendezvousError, match=message):
            await new_group(store=store, rank=rank, world_size=2, timeout=1.0, options=options)

    await run_ranks_together(2, rank)
    messages = [record.getMessage() for record in caplog.records]
    for number, text in enumerate(expected):
        warning = rf"rank {number} of 2 did not meet the others within 0.5 s: {text}; still waiting"
        assert len([line for line in messages if re.fullmatch(warning, line)]) == 1
    await store.aclose()


async def test_late_rank_is_reported_in_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    options = GroupOptions(warn_after=0.05)
    with pytest.raises(RendezvousError, match=r"rank 0 waited 0\.2 s"):
        await new_group(store=store, rank=0, world_size=2, timeout=0.2, options=options)
    expected = (
        "rank 0 waited 0.05 s for rank(s) 1 of 2: check that they run and use the same master address; still waiting"
    )
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [expected]
    await store.aclose()


async def test_process_that_restarts_as_a_member_rank_is_advised_to_use_join() -> None:
    """Start a process after both ranks have met: it waits for a second rendezvous, which no other rank attends."""
    store = HashStore()

    async def rank(_: int) -> None:
        async with new_group(store=store, world_size=2):
            pass

    await run_ranks_together(2, rank)
    with pytest.raises(
        RendezvousError, match=r"for rank\(s\) 1 of 2: ranks have already met on this store; .* pass join=True"
    ):
        await new_group(store=store, world_size=2, timeout=0.1)
    await store.aclose()


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (3, 3, 4), (3, 4, 3), (4, 3, 3)])
@pytest.mark.parametrize("backwards", [False, True])
async def test_different_world_sizes_are_reported_on_every_rank(sizes: tuple[int, ...], backwards: bool) -> None:
    """Check that every rank fails at once, without waiting for the timeout."""
    store = HashStore()

    async def rank(rank: int) -> Any:
        return await new_group(store=store, rank=rank, world_size=sizes[rank], timeout=600)

    order = sorted(range(len(sizes)), reverse=backwards)
    results = await asyncio.gather(*(rank(number) for number in order), return_exceptions=True)
    named = (
        r"rank \d was started with world_size=(\d), others with world_size=(\d); "
        "start all ranks with the same world_size"
    )
    for each in results:
        assert isinstance(each, RendezvousError)
        match = re.fullmatch(named, str(each))
        assert match is not None, each
        assert {int(size) for size in match.groups()} == set(sizes)
    await store.aclose()


async def test_second_process_with_the_same_rank_is_refused() -> None:
    """Use two store handles on one server, which stand for two processes with the same rank."""
    store = HashStore()
    first = PrefixStore("job", store)
    second = PrefixStore("job", store)

    async def rank(store: Any, rank: int) -> Any:
        return await new_group(store=store, rank=rank, world_size=2, timeout=0.3)

    one, two = await asyncio.gather(rank(first, 1), rank(second, 1), return_exceptions=True)
    assert "rank 1 is taken: another process joined as rank 1" in str(two)
    assert isinstance(one, RendezvousError)
    await store.aclose()


async def test_rendezvous_can_be_cancelled(port: int) -> None:
    """Check that a later rendezvous on the same address succeeds."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await new_group(init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=2)

    async def rank(rank: int) -> None:
        async with new_group(init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2) as pg:
            await check_group(pg)

    await run_ranks_together(2, rank)


async def test_port_0_is_permitted_for_a_single_rank() -> None:
    async with new_group(init_method="tcp://127.0.0.1:0", rank=0, world_size=1) as pg:
        assert await pg.allreduce(1) == 1


@pytest.mark.parametrize("encryption", ["auto", "tls", "none"])
@pytest.mark.parametrize("host", ["0.0.0.0", "0", "::", "::0", "::ffff:0.0.0.0"])
async def test_wildcard_master_address_means_this_host(
    host: str, encryption: str, port: int, environment: pytest.MonkeyPatch
) -> None:
    """Check that ranks connect to loopback if the master address is a wildcard, and so agree on encryption."""
    environment.setenv("MASTER_ADDR", host)
    environment.setenv("MASTER_PORT", str(port))
    options = GroupOptions(job_key="k" * 32, encryption=encryption)

    async def rank(rank: int) -> None:
        async with new_group(rank=rank, world_size=2, options=options, timeout=20) as pg:
            await check_group(pg)

    await run_ranks_together(2, rank)


# -- wrong arguments


@pytest.mark.parametrize(
    ("given", "env", "error", "message"),
    [
        ({"backend": "gloo"}, {}, ValueError, "backend='gloo' is not known; use aio"),
        ({"init_method": "env://", "store": HashStore()}, {}, ValueError, "init_method and store exclude each other"),
        ({"init_method": "mpi://"}, {}, ValueError, "init_method='mpi://': store 'mpi' is not known; use tcp, file, "),
        (
            {"init_method": "here:1"},
            {},
            ValueError,
            "init_method='here:1' must be a URL that begins with one of env://",
        ),
        ({"init_method": "file://there"}, {}, ValueError, "init_method='file://there': the path .* must be absolute"),
        ({"init_method": "tcp://localhost"}, {}, ValueError, "port"),
        *(
            (
                {"init_method": "tcp://[::1]:0", "rank": rank},
                {},
                ValueError,
                r"tcp://\[::1\]:0': port 0 means a free port",
            )
            for rank in (0, 1)
        ),
        ({"name": "a\ud800"}, {}, ValueError, r"name='a\\ud800' is not valid text"),
        ({"init_method": "file:///x", "world_size": None}, {"WORLD_SIZE": "2"}, ValueError, "world_size is missing"),
        (
            {"rank": None},
            {},
            ValueError,
            "rank is missing: give rank= .*, or set RANK in the environment; start .* `aiocoll run`",
        ),
        ({"rank": None}, {"RANK": "first"}, ValueError, "RANK='first' in the environment must be a number"),
        ({"rank": 2}, {}, ValueError, "rank=2, world_size=2: world_size must be positive and rank 0 to"),
        ({"world_size": 0}, {}, ValueError, "rank=0, world_size=0"),
        (
            {},
            {},
            ValueError,
            "MASTER_ADDR and MASTER_PORT missing in the environment: start the ranks with `aiocoll run`",
        ),
        ({}, {"MASTER_ADDR": "::1"}, ValueError, "MASTER_PORT missing in the environment"),
        ({}, {"MASTER_ADDR": "::1", "MASTER_PORT": "x"}, ValueError, "MASTER_PORT='x' .* must be a port number"),
        ({}, {"MASTER_ADDR": "::1", "MASTER_PORT": "1", "AIOCOLL_PORT": "70000"}, ValueError, "70000.*port number"),
        ({"timeout": -1}, {}, ValueError, "timeout=-1: must be >= 0"),
        ({"timeout": "soon"}, {}, TypeError, "timeout must be seconds"),
    ],
)
def test_new_group_names_invalid_arguments_at_the_call(
    given: dict[str, Any],
    env: dict[str, str],
    error: type[Exception],
    message: str,
    environment: pytest.MonkeyPatch,
) -> None:
    for name, value in env.items():
        environment.setenv(name, value)
    with pytest.raises(error, match=message):
        new_group(**{"rank": 0, "world_size": 2, **given})


async def test_torchrun_on_several_hosts_needs_a_port(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("TORCHELASTIC_RUN_ID", "run")
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    environment.setenv("MASTER_PORT", "29500")
    environment.setenv("WORLD_SIZE", "4")
    environment.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(RendezvousError, match="torchrun started ranks on several hosts: set AIOCOLL_PORT"):
        new_group(rank=0)


async def test_options_from_the_environment_are_checked(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("AIOCOLL_TRANSPORT", "carrier pigeon")
    store = HashStore()
    with pytest.raises(ValueError, match="AIOCOLL_TRANSPORT='carrier pigeon': must be one of"):
        await new_group(store=store, rank=0, world_size=1)
    await store.aclose()


# -- the current group


async def test_current_group_belongs_to_a_context() -> None:
    store = HashStore()
    assert current_process_group() is None

    async def inherited() -> ProcessGroup | None:
        return current_process_group()

    async def rank(rank: int) -> None:
        async with new_group(store=store, rank=rank, world_size=2) as pg:
            assert current_process_group() is None
            with process_group(pg) as current:
                assert current is pg
                await pg.barrier()  # after this barrier, the other rank has set its group in its own task
                assert current_process_group() is pg
                assert await asyncio.create_task(inherited()) is pg
                with process_group(None):
                    assert current_process_group() is None
                assert current_process_group() is pg
            assert current_process_group() is None

    await run_ranks_together(2, rank)
    assert current_process_group() is None
    await store.aclose()


async def test_context_manager_of_new_group_closes_the_group() -> None:
    store = HashStore()
    async with new_group(store=store, rank=0, world_size=1) as pg:
        assert (await pg.allreduce(np.ones(2)) == 1).all()
    assert "closed" in repr(pg)
    with pytest.raises(KeyError, match="inside"):
        async with new_group(store=store, rank=0, world_size=1) as pg:
            raise KeyError("inside")
    await store.aclose()
