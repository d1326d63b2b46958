"""The default group in `aiocoll.distributed`, per context, event loop and thread, and queries about groups."""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

import aiocoll
import aiocoll.distributed as dist
from aiocoll import HashStore, ProcessGroup
from aiocoll.distributed.world import _first_groups
from aiocoll.gpu.provider import provide
from aiocoll.testing import run_processes

from ..ports import free_port
from ..ranks import run_ranks


async def run_as_ranks(world_size: int, fn: Callable[..., Awaitable[Any]], *args: Any) -> list[Any]:
    """Run `fn(store, rank, *args)` once per rank, each in a task that has no default group yet."""
    store = HashStore()
    try:
        return await asyncio.gather(*(fn(store, rank, *args) for rank in range(world_size)))
    finally:
        await store.aclose()


async def test_default_group_requires_init_process_group() -> None:
    assert dist.is_available()
    assert not dist.is_initialized()
    assert dist.group.WORLD is None
    assert dist.GroupMember.WORLD is None
    assert dist.get_pg_count() == 0
    for call in (
        dist.get_rank,
        dist.get_world_size,
        dist.get_backend,
        dist.barrier,
        dist.time_estimator,
        dist.coalescing_manager,
    ):
        with pytest.raises(ValueError, match="no open default group in this context"):
            call()
    with pytest.raises(ValueError, match="no open default group in this context"):
        await dist.destroy_process_group()


async def test_init_process_group_sets_the_default_group_until_destroy_process_group() -> None:
    async def rank_of_two(store: HashStore, rank: int) -> None:
        await dist.init_process_group("aio", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=30),
                                      group_name="job", device_id="cpu")  # fmt: skip
        assert dist.is_initialized()
        assert (dist.get_rank(), dist.get_world_size()) == (rank, 2)
        pg = dist.group.WORLD
        assert pg is not None
        assert (pg.group_name, pg.timeout) == ("job", 30.0)
        assert aiocoll.current_process_group() is pg
        assert await dist.all_reduce(rank + 1) == 3
        with pytest.raises(ValueError, match=r"the default group .* exists already"):
            await dist.init_process_group(store=store, rank=rank, world_size=2)
        await dist.destroy_process_group()
        assert not dist.is_initialized()
        with pytest.raises(ValueError, match="no open default group in this context"):
            dist.all_reduce(1)
        await dist.init_process_group(store=store, rank=rank, world_size=2)
        assert dist.group.WORLD is not pg
        assert await dist.all_reduce(rank) == 1
        await dist.destroy_process_group(dist.group.WORLD)
        assert not dist.is_initialized()

    await run_as_ranks(2, rank_of_two)
    assert not dist.is_initialized()


async def test_task_without_a_default_group_uses_the_first_group_of_its_loop() -> None:
    store = HashStore()

    async def query_default_group() -> tuple[bool, int]:
        return dist.is_initialized(), dist.get_rank() if dist.is_initialized() else -1

    async def init(rank: int) -> ProcessGroup:
        await dist.init_process_group(store=store, rank=rank, world_size=2)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    def task(coroutine: Any) -> asyncio.Task[Any]:
        return asyncio.create_task(coroutine, context=contextvars.Context())

    early = await task(query_default_group())
    first, second = await asyncio.gather(task(init(0)), task(init(1)))
    assert early == (False, -1)
    owner = dist.group.WORLD
    assert owner in (first, second)
    assert await task(query_default_group()) == (True, owner.rank())
    # A task passes its default group to the tasks that it starts.
    with aiocoll.process_group(second):
        assert await asyncio.create_task(query_default_group()) == (True, 1)
        # A task whose default group is closed does not use the loop's first group, which may be another rank's.
        if owner is first:
            await second.shutdown()
            assert await query_default_group() == (False, -1)
    await asyncio.gather(first.shutdown(), second.shutdown())
    assert await task(query_default_group()) == (False, -1)
    await store.aclose()


def test_default_group_is_released_when_its_event_loop_has_ended() -> None:
    async def main() -> None:
        store = HashStore()
        await dist.init_process_group(store=store, rank=0, world_size=1)
        pg = dist.group.WORLD
        assert pg is not None
        assert list(_first_groups.values()) == [pg]
        await pg.shutdown()
        await store.aclose()

    for _ in range(2):
        asyncio.run(main())
    assert len(_first_groups) == 1
    _first_groups.clear()


def call_in_thread(call: Callable[[], Any]) -> Any:
    """Call a function in a new thread that has no context and no event loop."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result(10)


def query_numbers() -> tuple[bool, int, int]:
    return dist.is_initialized(), dist.get_rank(), dist.get_world_size()


async def test_thread_uses_the_default_group_if_the_process_has_one_rank() -> None:
    async with HashStore() as store:
        assert not call_in_thread(dist.is_initialized)
        await dist.init_process_group(store=store, rank=0, world_size=1)
        assert call_in_thread(query_numbers) == (True, 0, 1)
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            call_in_thread(lambda: dist.all_reduce(1))
        await dist.destroy_process_group()
        assert not call_in_thread(dist.is_initialized)
        with pytest.raises(ValueError, match="there is no open default group in this context"):
            call_in_thread(dist.get_rank)


async def test_thread_uses_the_shrunk_group_that_replaced_the_default_group() -> None:
    async def rank(store: HashStore, number: int) -> None:
        await dist.init_process_group(store=store, rank=number, world_size=2)
        pg = dist.group.WORLD
        if number == 0:
            await dist.shrink_group([1])
            assert dist.group.WORLD is not pg
            assert call_in_thread(lambda: dist.group.WORLD) is dist.group.WORLD
        await dist.destroy_process_group()

    await run_as_ranks(2, rank)


async def test_thread_gets_an_error_if_several_ranks_of_the_process_have_default_groups() -> None:
    async def rank(store: HashStore, number: int) -> tuple[int, int]:
        await dist.init_process_group(store=store, rank=number, world_size=2)
        await dist.barrier()
        loop = asyncio.get_running_loop()
        for call in (dist.is_initialized, dist.get_rank, lambda: dist.all_reduce(1)):
            with pytest.raises(RuntimeError, match="2 ranks in this process have a default group"):
                await loop.run_in_executor(None, call)
        inherited = await asyncio.to_thread(dist.get_rank)
        given = await loop.run_in_executor(None, dist.get_rank, dist.group.WORLD)
        await dist.barrier()
        await dist.destroy_process_group()
        return inherited, given

    assert await run_as_ranks(2, rank) == [(0, 0), (1, 1)]


async def test_thread_with_its_own_event_loop_does_not_inherit_the_default_group() -> None:
    async with HashStore() as store:
        await dist.init_process_group(store=store, rank=0, world_size=1)

        async def other() -> tuple[bool, int]:
            return dist.is_initialized(), dist.get_rank() if dist.is_initialized() else -1

        assert call_in_thread(lambda: asyncio.run(other())) == (False, -1)
        await dist.destroy_process_group()


async def test_init_process_group_refuses_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="exclude each other"):
        await dist.init_process_group(init_method="env://", store=HashStore())
    with pytest.raises(ValueError, match=r"backend='gloo' is not known; .*, or leave out backend=: only torch has"):
        await dist.init_process_group("gloo")
    with pytest.raises(ValueError, match="rank is missing"):
        await dist.init_process_group(store=HashStore(), world_size=2)
    with pytest.raises(ValueError, match="cuda:0"):
        await dist.init_process_group("cpu:aio", store=HashStore(), rank=0, world_size=1, device_id=0)
    with pytest.raises(TypeError, match="options"):
        await dist.init_process_group(store=HashStore(), rank=0, world_size=1, pg_options={})  # type: ignore[arg-type]
    assert not dist.is_initialized()


async def test_two_tasks_can_be_ranks_of_two_default_groups() -> None:
    async def work(store: HashStore, rank: int, size: int, unit: int) -> list[int]:
        await dist.init_process_group(store=store, rank=rank, world_size=size)
        got = []
        for turn in range(5):
            assert dist.get_rank() == rank
            got.append(await dist.all_reduce(unit * (rank + turn)))
            await asyncio.sleep(0)
        await dist.destroy_process_group()
        return got

    one, two = await asyncio.gather(run_as_ranks(3, work, 3, 1), run_as_ranks(2, work, 2, 100))
    assert one == [[3 + 3 * turn for turn in range(5)]] * 3
    assert two == [[100 + 200 * turn for turn in range(5)]] * 2


@pytest.mark.ranks(2)
async def test_process_group_context_sets_the_default_group(pg: ProcessGroup) -> None:
    assert dist.group.WORLD is pg
    async with aiocoll.new_group(store=HashStore(), rank=0, world_size=1) as alone:
        with aiocoll.process_group(alone):
            assert dist.get_world_size() == 1
            assert await dist.all_reduce(5) == 5
            # The one-rank group does not change the ranks of the two-rank group `pg`.
            assert dist.get_world_size(pg) == 2
            assert await dist.all_reduce(1, group=pg) == 2
    assert dist.group.WORLD is pg
    dist.group.WORLD = None
    assert not dist.is_initialized()
    dist.group.WORLD = pg
    assert dist.get_rank() == pg.rank()


@pytest.mark.ranks(2)
async def test_pytest_plugin_gives_each_test_rank_a_default_group(pg: ProcessGroup) -> None:
    with pytest.raises(ValueError, match=r"the default group .* exists already"):
        await dist.init_process_group()
    await dist.destroy_process_group()
    assert not dist.is_initialized()


async def init_from_the_environment(pg: ProcessGroup) -> tuple[int, int, int]:
    await dist.barrier()
    return dist.get_rank(), dist.get_world_size(), dist.get_node_local_rank()


@pytest.mark.ranks(3)
async def test_ranks_of_a_group_share_keys_in_the_store_of_the_group(pg: ProcessGroup) -> None:
    assert dist.group.WORLD is not None
    store = dist.group.WORLD.store
    await store.set(f"card/{pg.rank()}", f"here {pg.rank()}")
    assert await store.multi_get([f"card/{rank}" for rank in range(3)]) == [b"here 0", b"here 1", b"here 2"]
    await dist.barrier()
    part = await dist.new_group([0, 1])
    if isinstance(part, ProcessGroup):
        await part.store.set(f"part/{pg.rank()}", "")
        await part.store.wait(["part/0", "part/1"])
        assert await part.store.num_keys() == 2
    await dist.barrier()
    assert await store.num_keys() == 3


async def test_group_sees_no_keys_of_an_earlier_group_on_the_same_store() -> None:
    async with HashStore() as store:
        for _ in range(2):
            async with aiocoll.new_group(store=store, rank=0, world_size=1, name="job") as pg:
                assert await pg.store.list_keys() == []
                await pg.store.set("key", "value")


async def test_dry_run_group_has_a_separate_store() -> None:
    await dist.init_process_group("fake", rank=3, world_size=8)
    assert dist.group.WORLD is not None
    await dist.group.WORLD.store.set("key", "value")
    assert await dist.group.WORLD.store.get("key") == b"value"
    await dist.destroy_process_group()


@pytest.mark.slow
async def test_default_group_works_with_ranks_in_separate_processes() -> None:
    assert await run_processes(2, init_from_the_environment) == [(0, 2, 0), (1, 2, 1)]


async def meet_at_own_address(pg: ProcessGroup, port: int) -> Any:
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    with aiocoll.process_group(None):
        await dist.init_process_group(timeout=timedelta(seconds=20))
        total = await dist.all_reduce(1)
        await dist.destroy_process_group()
    return total


async def test_program_may_set_master_addr_and_master_port_before_init() -> None:
    assert await run_processes(2, meet_at_own_address, free_port()) == [2, 2]


# -- queries about groups


@pytest.mark.ranks(3)
async def test_group_ranks_equal_global_ranks_in_the_default_group(pg: ProcessGroup) -> None:
    assert dist.get_group_rank(pg, 2) == dist.get_global_rank(pg, 2) == 2
    assert dist.get_process_group_ranks() == dist.get_process_group_ranks(pg) == [0, 1, 2]
    for call, words in (
        (lambda: dist.get_group_rank(pg, 3), "global_rank=3"),
        (lambda: dist.get_global_rank(pg, -1), "group_rank=-1"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(TypeError, match="group must be"):
        dist.get_group_rank("world", 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="global_rank must be a rank"):
        dist.get_group_rank(pg, 0.5)  # type: ignore[arg-type]


def test_local_rank_is_read_from_the_launcher_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert dist.get_node_local_rank() == dist.get_node_local_rank(fallback_rank=5) == 3
    monkeypatch.setenv("LOCAL_RANK", "three")
    with pytest.raises(ValueError, match="LOCAL_RANK='three'"):
        dist.get_node_local_rank()
    monkeypatch.delenv("LOCAL_RANK")
    assert dist.get_node_local_rank(fallback_rank=5) == 5
    with pytest.raises(RuntimeError, match="LOCAL_RANK is not in the environment"):
        dist.get_node_local_rank()


def test_torchelastic_launch_is_detected_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert not dist.is_torchelastic_launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    assert dist.is_torchelastic_launched()


async def test_backend_queries_match_the_backends_of_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pg: ProcessGroup) -> None:
        assert dist.get_backend() == dist.get_backend(pg) == dist.Backend.AIO
        assert dist.get_backend_config() == "cpu:aio,cuda:aio"
        assert dist.get_pg_count() == 1

    await run_ranks(2, body)
    assert dist.get_default_backend_for_device("cpu") == "aio"
    assert dist.get_default_backend_for_device("cuda:1") == "nccl"
    with pytest.raises(ValueError, match="device='tpu' has no backend"):
        dist.get_default_backend_for_device("tpu")
    assert dist.is_backend_available("aio")
    assert dist.is_backend_available("cpu:aio")
    assert not dist.is_backend_available("gloo")
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "aiocoll.gpu.cupy_api", raising=False)
    assert not dist.is_backend_available("cpu:aio,cuda:nccl")
    with provide(object(), object()):  # type: ignore[arg-type]
        assert dist.is_backend_available("cpu:aio,cuda:nccl")
        assert dist.is_nccl_available()
    with provide(object()):  # type: ignore[arg-type]
        assert not dist.is_backend_available("nccl")
        assert not dist.is_nccl_available()


@pytest.mark.parametrize("name", ["gloo", "mpi", "ucc", "xccl"])
def test_backend_registered_by_another_library_is_reported_as_available(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_registered = getattr(dist, f"is_{name}_available")
    assert is_registered() is False
    monkeypatch.setattr(dist.Backend, "backend_list", [*dist.Backend.backend_list, name])
    monkeypatch.setitem(dist.Backend.backend_capability, name, ("cpu",))
    assert is_registered() is True


async def test_debug_level_is_off_by_default() -> None:
    async def body(pg: ProcessGroup) -> dist.DebugLevel:
        return dist.get_debug_level()

    assert await run_ranks(1, body) == [dist.DebugLevel.OFF]
    assert dist.get_debug_level() is dist.DebugLevel.OFF


def test_supports_complex_is_true_only_for_sums_averages_and_products() -> None:
    refused = {"MIN", "MAX", "BAND", "BOR", "BXOR", "LAND", "LOR", "LXOR"}
    for name in ("SUM", "AVG", "PRODUCT", *refused):
        assert dist.supports_complex(getattr(dist.ReduceOp, name)) is (name not in refused)
    assert dist.supports_complex(dist.ReduceOp.PREMUL_SUM(2.0))
    assert dist.reduce_op is dist.ReduceOp
