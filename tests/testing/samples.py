"""Test cases for `test_cases`, in a module that a process can import. pytest does not collect this module."""

# ruff: noqa: PT009 - these are unittest test cases

from __future__ import annotations

import asyncio
import os
import signal
import sys
import unittest
from typing import Any

import numpy as np

from aiocoll import FileStore, GroupOptions, current_process_group
from aiocoll.testing import InProcessTestCase, MultiProcessTestCase, skip_if_world_is_odd, skip_if_world_smaller_than

#: Events of this process, in order.
seen: list[Any] = []


class Steps(InProcessTestCase):
    world_size = 2

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        seen.append("setUpClass")

    def setUp(self) -> None:
        self.record_event("setUp")
        self.addCleanup(self.record_event, "cleanup")

    async def asyncSetUp(self) -> None:
        self.total = await self.pg.allreduce(self.rank)
        self.record_event("asyncSetUp")
        self.addAsyncCleanup(self.record_event_later, "async cleanup")

    async def test_event_is_recorded_between_setup_and_teardown(self) -> None:
        assert current_process_group() is self.pg
        assert self.total == 1
        self.record_event("test")

    async def asyncTearDown(self) -> None:
        await self.pg.barrier()
        self.record_event("asyncTearDown")

    def tearDown(self) -> None:
        self.record_event("tearDown")

    def record_event(self, what: str) -> None:
        if self.rank == 1:
            seen.append(what)

    async def record_event_later(self, what: str) -> None:
        self.record_event(what)


class EveryOutcome:
    """The same sample tests for both kinds of ranks, one test for each outcome."""

    world_size = 3
    options = GroupOptions(transport="tcp")

    async def test_equal_arrays_pass(self: Any) -> None:
        self.assertEqual(await self.pg.allreduce(self.rank), 3)
        array = await self.pg.broadcast(np.full(4, self.rank), 2)
        self.assertEqual(array, np.full(4, 2))
        self.assertEqualOnRank(array, np.full(4, self.rank), rank=2)
        self.assertNotEqualOnRank(array, np.full(4, self.rank), rank=1)

    def test_plain_function_runs_on_each_rank(self: Any) -> None:
        self.assertEqual(current_process_group().size(), 3)

    async def test_unequal_values_on_rank_1_fail(self: Any) -> None:
        if self.rank == 1:
            self.assertEqual(1, 2, "unlucky")
        await self.pg.barrier()

    async def test_key_error_on_rank_2_is_an_error(self: Any) -> None:
        with self.subTest("second", n=2):
            if self.rank == 2:
                raise KeyError("lost")
            await self.pg.barrier()

    async def test_skip_on_rank_1_skips_the_test(self: Any) -> None:
        if self.rank == 1:
            self.skipTest("not here")
        await self.pg.barrier()

    @skip_if_world_smaller_than(4)
    async def test_world_below_4_ranks_skips_the_test(self: Any) -> None:
        raise AssertionError

    @unittest.skip("not today")
    async def test_skip_decorator_skips_the_test(self: Any) -> None:
        raise AssertionError

    @unittest.expectedFailure
    async def test_failure_is_expected(self: Any) -> None:
        raise AssertionError

    async def test_returned_value_is_an_error(self: Any) -> object:
        return 5


class InProcess(EveryOutcome, InProcessTestCase):
    pass


class MultiProcess(EveryOutcome, MultiProcessTestCase):
    continuous = True


class OwnProcesses(MultiProcessTestCase):
    world_size = 2

    async def test_each_rank_has_its_own_pid(self) -> None:
        pids = await self.pg.allgather_object(os.getpid())
        assert len(set(pids)) == 2
        assert os.getppid() not in pids
        assert self.pg.group_name == "world:0"

    async def test_key_error_on_rank_1_is_an_error(self) -> None:
        if self.rank == 1:
            raise KeyError("lost")
        await self.pg.barrier()


class Continuous(MultiProcessTestCase):
    """Sample tests that run in the order of their names; each reads the state that the previous test has left."""

    world_size = 3
    continuous = True
    allow_unretrieved = True
    timeout = 20.0
    before: tuple[int, str] = (0, "")

    async def test_1_process_and_group_are_recorded(self) -> None:
        await self.record_event()

    async def test_2_process_and_group_are_reused_until_rank_1_fails(self) -> None:
        assert Continuous.before == (os.getpid(), self.pg.group_name)
        if self.rank == 1:
            raise KeyError("lost")
        await asyncio.Event().wait()  # only the end of the test ends this wait

    async def test_3_group_is_new_after_a_failure(self) -> None:
        assert Continuous.before[0] == os.getpid()
        assert Continuous.before[1] != self.pg.group_name
        await self.record_event()

    async def test_4_rank_0_leaves_a_pending_operation(self) -> None:
        assert Continuous.before == (os.getpid(), self.pg.group_name)
        if self.rank == 0:
            Continuous.left = self.pg.recv(np.empty(1), 1)

    async def test_5_group_is_new_after_a_pending_operation(self) -> None:
        assert Continuous.before[0] == os.getpid()
        assert Continuous.before[1] != self.pg.group_name
        await self.pg.barrier()

    async def test_6_rank_2_is_killed(self) -> None:
        if self.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        await self.pg.barrier()

    async def test_7_processes_are_new_after_a_death(self) -> None:
        assert Continuous.before == (0, "")
        await self.record_event()

    async def record_event(self) -> None:
        assert await self.pg.allreduce(1) == 3
        Continuous.before = os.getpid(), self.pg.group_name


class ContinuousForgetting(MultiProcessTestCase):
    world_size = 2
    continuous = True
    timeout = 20.0

    async def test_1_forgotten_mismatch_revokes_the_group(self) -> None:
        self.pg.allreduce(np.ones(3 + self.rank))
        await self.pg.wait_revoked()

    async def test_2_forgotten_mismatch_is_pending_at_the_end(self) -> None:
        self.pg.allreduce(np.ones(3 + self.rank))

    async def test_3_allreduce_works_after_forgotten_calls(self) -> None:
        assert await self.pg.allreduce(1) == 2


class Ported(MultiProcessTestCase):
    """Sample tests that use methods of torch's test cases."""

    world_size = 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    async def test_exit_with_code_0_passes(self) -> None:
        if self.is_master:
            sys.exit(0)

    async def test_exit_with_code_86_is_an_error(self) -> None:
        if self.is_master:
            sys.exit(86)

    async def test_ranks_meet_in_a_store_at_file_name(self) -> None:
        async with FileStore(self.file_name, self.world_size) as store:
            await store.set(str(self.rank), b"here")
            await store.wait([str(1 - self.rank)], 30)


class PortedInProcess(InProcessTestCase):
    world_size = 2

    def setUp(self) -> None:
        self._spawn_threads()

    test_exit_with_code_0_passes, test_exit_with_code_86_is_an_error, test_ranks_meet_in_a_store_at_file_name = (
        Ported.test_exit_with_code_0_passes,
        Ported.test_exit_with_code_86_is_an_error,
        Ported.test_ranks_meet_in_a_store_at_file_name,
    )


class Dying(MultiProcessTestCase):
    world_size = 2

    @property
    def expect_death(self) -> Any:  # type: ignore[override]
        return {0: 7} if self._testMethodName == "test_rank_0_exits_as_expected" else {1: signal.SIGKILL}

    async def test_rank_0_exits_as_expected(self) -> None:
        if self.rank == 0:
            os._exit(7)

    async def test_rank_1_is_killed_as_expected(self) -> None:
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    async def test_rank_1_lives_unexpectedly(self) -> None:
        pass


class ContinuousDying(MultiProcessTestCase):
    world_size = 1
    continuous = True
    expect_death = {0: 7}  # noqa: RUF012

    async def test_expected_death_is_refused_before_this_runs(self) -> None:
        raise AssertionError


class Hanging(MultiProcessTestCase):
    world_size = 2
    continuous = True

    async def test_0_barrier_completes(self) -> None:
        await self.pg.barrier()

    async def test_1_rank_1_hangs(self) -> None:
        if self.rank == 0:
            await self.pg.barrier()
        else:
            await asyncio.Event().wait()

    async def test_2_barrier_completes_after_a_hang(self) -> None:
        await self.pg.barrier()


@skip_if_world_is_odd()
class Odd(MultiProcessTestCase):
    world_size = 3
    continuous = True

    async def test_odd_world_is_skipped_before_this_runs(self) -> None:
        raise AssertionError


class Forgetful(MultiProcessTestCase):
    continuous = True

    @classmethod
    def setUpClass(cls) -> None:
        pass

    async def test_missing_ranks_are_reported_before_this_runs(self) -> None:
        raise AssertionError
