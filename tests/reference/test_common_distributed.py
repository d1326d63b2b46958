"""Tests of `aiocoll.testing`, with an equivalent for each feature of torch's test harness."""

from __future__ import annotations

import asyncio
import os
import unittest
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import scipy.sparse

from aiocoll import FileStore, GroupError, ProcessGroup, TCPStore, current_process_group
from aiocoll.store import StoreServer
from aiocoll.testing import (
    InProcessTestCase,
    MultiProcessTestCase,
    requires_gpu,
    requires_module,
    run_ranks,
    run_virtual,
    skip_if_world_is_odd,
    skip_if_world_smaller_than,
    spawn_ranks,
)

from ..internals import replace_parts, set_limits

COVERS = {
    "skip_if_no_gpu": "test_skip_if_no_gpu_needs_a_gpu_per_rank",
    "skip_if_small_worldsize": "test_skip_if_small_worldsize_needs_enough_ranks",
    "skip_if_odd_worldsize": "test_skip_if_odd_worldsize_needs_an_even_number_of_ranks",
    "import_transformers_or_skip": "test_requires_module_skips_a_test_if_the_module_is_missing",
    "at_least_x_gpu": "test_skip_if_lt_x_gpu_needs_x_gpus",
    "skip_if_lt_x_gpu": "test_skip_if_lt_x_gpu_needs_x_gpus",
    "create_tcp_store": "test_create_tcp_store",
    "find_free_port": "test_create_tcp_store",
    "TIMEOUT_OVERRIDE": "test_timeout_error_shows_the_stack_of_a_hung_process",
    "get_timeout": "test_timeout_error_shows_the_stack_of_a_hung_process",
    "MultiProcessTestCase.world_size": "test_each_rank_of_a_multi_process_test_is_a_separate_process",
    "MultiProcessTestCase.join_or_run": "test_each_rank_of_a_multi_process_test_is_a_separate_process",
    "MultiProcessTestCase.run_test": "test_error_on_a_rank_is_reported_as_the_error_of_the_test",
    "MultiProcessTestCase._check_return_codes": "test_error_names_the_rank_whose_process_exits_early",
    "MultiProcessTestCase._get_timedout_process_traceback": "test_timeout_error_shows_the_stack_of_a_hung_process",
    "MultiProcessTestCase._event_listener": "test_timeout_error_shows_the_stack_of_a_hung_process",
    "MultiProcessTestCase._join_processes": "test_timeout_error_shows_the_stack_of_a_hung_process",
    "MultiProcessTestCase.tearDown": "test_multi_process_tests_leave_no_process_behind",
    "MultiProcessTestCase._spawn_processes": "test_ported_test_case_provides_is_master_and_file_name",
    "MultiProcessTestCase.is_master": "test_ported_test_case_provides_is_master_and_file_name",
    "MultiProcessTestCase.file_name": "test_ported_test_case_provides_is_master_and_file_name",
    "MultiProcessTestCase.skip_return_code_checks": "test_exit_code_in_expect_death_passes_the_test",
    "MultiProcessTestCase._check_no_test_errors": "test_exit_code_in_expect_death_passes_the_test",
    "run_subtests": "test_subtests_of_a_multi_process_test_run_on_the_same_ranks",
    "spawn_threads_and_init_comms": "test_spawn_ranks_runs_the_test_on_each_rank",
    "MultiThreadedTestCase.world_size": "test_in_process_test_case_sets_up_and_tears_down_each_rank",
    "MultiThreadedTestCase.join_or_run": "test_in_process_test_case_sets_up_and_tears_down_each_rank",
    "MultiThreadedTestCase.perThreadSetUp": "test_in_process_test_case_sets_up_and_tears_down_each_rank",
    "MultiThreadedTestCase.perThreadTearDown": "test_in_process_test_case_sets_up_and_tears_down_each_rank",
    "MultiThreadedTestCase.run_test_with_threaded_pg": "test_in_process_test_case_sets_up_and_tears_down_each_rank",
    "MultiThreadedTestCase._join_threads": "test_timeout_error_names_the_rank_that_does_not_end",
    "MultiThreadedTestCase._check_return_codes": "test_error_notes_name_all_failed_ranks",
    "MultiThreadedTestCase.assertEqualOnRank": "test_assert_on_rank_compares_only_on_the_given_rank",
    "MultiThreadedTestCase.assertNotEqualOnRank": "test_assert_on_rank_compares_only_on_the_given_rank",
    "MultiProcContinousTest.world_size": "test_continuous_test_case_keeps_its_group_between_tests",
    "MultiProcContinousTest.setUpClass": "test_continuous_test_case_keeps_its_group_between_tests",
    "MultiProcContinousTest.tearDownClass": "test_multi_process_tests_leave_no_process_behind",
    "MultiProcContinousTest.run_rank": "test_continuous_test_case_keeps_its_group_between_tests",
    "simple_sparse_reduce_tests, sparse_dims": "test_simple_sparse_reduce_tests_of_sparse_dimensions",
    "simple_sparse_reduce_tests, dense_dims": "test_simple_sparse_reduce_tests_of_dense_dimensions",
}

_TORCH_DEVICES = "chooses among torch's device backends, which are options of a group here"
_REGISTERED = "the backend does not exist unless the test registers it"
_SKIPS = "a test skips by `skipTest` or a decorator; a rank that exits fails it (`test_skip_on_a_rank_skips_the_test`)"
_RPC = "chooses a transport of torch's RPC"
_TORCH = "a torch module"
_COMPILER = "sets up torch's compiler"
LEFT_OUT = {
    "TestSkip": _SKIPS,
    "TEST_SKIPS": _SKIPS,
    "DistTestCases": "lists the gaps of torch's backends; here every transport has every call",
    "require_n_gpus_for_nccl_backend": _TORCH_DEVICES,
    "nccl_skip_if_lt_x_gpu": _TORCH_DEVICES,
    "verify_ddp_error_logged": "reads the log of DistributedDataParallel",
    "with_nccl_blocking_wait": "sets a switch of torch's NCCL wrapper",
    "with_dist_debug_levels": "`pytest.param(..., marks=pytest.mark.ranks(2, options=GroupOptions(debug=...)))`",
    "requires_gloo": _REGISTERED,
    "requires_mpi": _REGISTERED,
    "requires_ucc": _REGISTERED,
    "requires_nccl": "`pytest.mark.skipif(not dist.is_nccl_available(), reason=...)`",
    "requires_nccl_version": "compares the version of NCCL when the tests run; aiocoll has no such skip",
    "skip_if_rocm_multiprocess": "concerns the ROCm builds of torch",
    "skip_if_win32": "tests with processes run on Linux only",
    "retry_on_connect_failures": "port 0 takes a free port, so no attempt fails for a taken port",
    "TIMEOUT_DEFAULT": "`timeout` of a class or a mark; AIOCOLL_TEST_TIMEOUT_SCALE multiplies all limits",
    "create_device": "makes a network device of Gloo",
    "captured_output": "`capsys` of pytest",
    "init_multigpu_helper": "divides GPUs among the processes of torch's NCCL tests",
    "initialize_temp_directories": "`tmp_path` of pytest",
    "cleanup_temp_dir": "`tmp_path` of pytest",
    "DEFAULT_WORLD_SIZE": "`world_size` of a class, which is 4 here, too",
    "MultiProcessTestCase.MAIN_PROCESS_RANK": "`rank` of the instance that drives the ranks is -1 here, too",
    "MultiProcessTestCase.TEST_ERROR_EXIT_CODE": "errors travel as exceptions, with their tracebacks",
    "MultiProcessTestCase.setUp": "the rank runs `setUp`, and `asyncSetUp` with its group",
    "MultiThreadedTestCase.MAIN_THREAD_RANK": "`rank` of the instance that drives the ranks is -1 here, too",
    "MultiThreadedTestCase.setUp": "the rank runs `setUp`, and `asyncSetUp` with its group",
    "MultiThreadedTestCase.tearDown": "the rank runs `asyncTearDown`, and `tearDown`",
    "MultiThreadedTestCase._spawn_threads": "may stay, and does nothing: the test itself starts the ranks",
    "MultiProcContinousTest.rdvz_file": "ranks meet without a file",
    "MultiProcContinousTest.backend_str": "there is one backend: `options` of the class choose the rest",
    "MultiProcContinousTest.opts": "`options` of the class, a `GroupOptions`",
    "has_efa": _RPC,
    "tp_transports": _RPC,
    "SaveForwardInputsModule": _TORCH,
    "SaveForwardInputsModel": _TORCH,
    "_dynamo_dist_per_rank_init": _COMPILER,
    "DynamoDistributedSingleProcTestCase": _COMPILER,
    "DynamoDistributedMultiProcTestCase": _COMPILER,
}


def run(*cases: unittest.TestCase) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.TestSuite(cases).run(result)
    return result


async def skip_reason(skip: Callable[[Any], Any], world_size: int) -> str | None:
    """Return the reason for which the decorator `skip` skips a test, or None if the test runs."""

    @skip
    async def test(pg: ProcessGroup) -> None: ...

    try:
        await run_ranks(world_size, test)
    except unittest.SkipTest as skipped:
        return str(skipped)
    return None


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_parts(monkeypatch, gpu_count=lambda: 2)


@pytest.mark.usefixtures("two_gpus")
async def test_skip_if_no_gpu_needs_a_gpu_per_rank() -> None:
    assert await skip_reason(requires_gpu(), 2) is None
    assert await skip_reason(requires_gpu(), 3) == "needs 3 CUDA devices, there are 2"


@pytest.mark.usefixtures("two_gpus")
async def test_skip_if_lt_x_gpu_needs_x_gpus() -> None:
    assert await skip_reason(requires_gpu(2), 4) is None
    assert await skip_reason(requires_gpu(3), 1) == "needs 3 CUDA devices, there are 2"


async def test_skip_if_small_worldsize_needs_enough_ranks() -> None:
    assert await skip_reason(skip_if_world_smaller_than(3), 2) == "needs at least 3 ranks, the world has 2"
    assert await skip_reason(skip_if_world_smaller_than(3), 3) is None


async def test_skip_if_odd_worldsize_needs_an_even_number_of_ranks() -> None:
    assert await skip_reason(skip_if_world_is_odd(), 3) == "needs an even number of ranks, the world has 3"
    assert await skip_reason(skip_if_world_is_odd(), 4) is None


async def test_requires_module_skips_a_test_if_the_module_is_missing() -> None:
    assert await skip_reason(requires_module("unittest"), 1) is None
    missing = "needs no_such_module: No module named 'no_such_module'"
    assert await skip_reason(requires_module("no_such_module"), 1) == missing


async def test_create_tcp_store() -> None:
    """Check that a store server takes a free port by default, so that tests need not find a port."""
    server = StoreServer(key=b"k" * 32)
    host, port = server.start()
    try:
        async with TCPStore(host, port, key=b"k" * 32) as store:
            await store.set("key", b"value")
            assert await store.get("key") == b"value"
    finally:
        await server.aclose()


class PortedTestCase(MultiProcessTestCase):
    """A sample test case with torch's `_spawn_processes` and `file_name`; its ranks use a `FileStore`."""

    __test__ = False
    world_size = 2

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    async def names(self) -> None:
        assert self.is_master == (self.rank == 0)
        async with FileStore(self.file_name, self.world_size) as store:
            await store.set(str(self.rank), b"here")
            await store.wait([str(1 - self.rank)], 30)


class ExitingTestCase(MultiProcessTestCase):
    """A sample test case whose rank 1 exits with code 7, as `expect_death` declares."""

    __test__ = False
    world_size = 2
    expect_death = {1: 7}  # noqa: RUF012

    async def exits(self) -> None:
        if not self.is_master:
            os._exit(7)


def test_ported_test_case_provides_is_master_and_file_name() -> None:
    assert run(PortedTestCase("names")).wasSuccessful()


def test_exit_code_in_expect_death_passes_the_test() -> None:
    assert run(ExitingTestCase("exits")).wasSuccessful()


class Continuous(MultiProcessTestCase):
    """Sample test cases that the fixture `outcome` runs in the same three processes."""

    __test__ = False
    world_size = 3
    continuous = True
    group: str | None = None

    async def place(self) -> None:
        pids = await self.pg.allgather_object(os.getpid())
        assert len(set(pids)) == 3
        assert os.getppid() not in pids
        assert await self.pg.broadcast_object(self.rank == 0, 0)
        Continuous.group = self.pg.group_name

    async def same_group(self) -> None:
        assert Continuous.group == self.pg.group_name
        await self.pg.barrier()

    async def subtests(self) -> None:
        for root in range(3):
            with self.subTest(root=root):
                assert await self.pg.broadcast_object(self.rank, root) == root
                assert root < 2, "unlucky"

    async def skip(self) -> None:
        self.skipTest("no use")

    async def error(self) -> None:
        if self.rank == 1:
            raise KeyError("lost")
        await self.pg.barrier()

    async def exit(self) -> None:
        if self.rank == 1:
            os._exit(7)
        await self.pg.barrier()

    async def hang(self) -> None:
        if self.rank == 2:
            while True:  # this loop blocks the event loop
                pass
        await self.pg.barrier()


@pytest.fixture(scope="module")
def outcome() -> dict[str, str | None]:
    """Return the report of each failed or skipped test of `Continuous`, and None for passed tests."""
    names = ["place", "same_group", "subtests", "skip", "error", "hang", "exit"]
    cases = [Continuous(name) for name in names]
    cases[names.index("hang")].timeout = 0.5
    with pytest.MonkeyPatch.context() as patch:
        set_limits(patch, testing_release_timeout=0.2)
        result = run(*cases)
    texts = [*result.skipped, *result.failures, *result.errors]
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)
    return dict.fromkeys(names) | {case.id().rpartition(".")[2]: text for case, text in texts}


@pytest.mark.slow
def test_each_rank_of_a_multi_process_test_is_a_separate_process(outcome: dict[str, str]) -> None:
    assert outcome["place"] is None


def test_continuous_test_case_keeps_its_group_between_tests(outcome: dict[str, str]) -> None:
    assert outcome["same_group"] is None


def test_subtests_of_a_multi_process_test_run_on_the_same_ranks(outcome: dict[str, str]) -> None:
    assert "AssertionError: unlucky" in outcome["subtests"]
    assert "in the part root=2" in outcome["subtests"]


def test_skip_on_a_rank_skips_the_test(outcome: dict[str, str]) -> None:
    assert outcome["skip"] == "no use"


def test_error_on_a_rank_is_reported_as_the_error_of_the_test(outcome: dict[str, str]) -> None:
    assert "KeyError: 'lost'\nits traceback on rank 1 of 3:\nTraceback" in outcome["error"]
    assert "rank 1 of 3 failed first" in outcome["error"]


def test_error_names_the_rank_whose_process_exits_early(outcome: dict[str, str]) -> None:
    assert "ChildProcessError: rank 1 of 3 exited with code 7" in outcome["exit"]


def test_timeout_error_shows_the_stack_of_a_hung_process(outcome: dict[str, str]) -> None:
    waits, *_, hangs = outcome["hang"].split("\nrank ")[1:]
    assert "ranks 0, 1 and 2 of 3 did not end within 0.5 s" in outcome["hang"]
    assert "pending: <Work BARRIER" in waits
    assert "holding the event loop" in hangs
    assert "while True:" in hangs or "pass" in hangs


@pytest.mark.usefixtures("outcome")
def test_multi_process_tests_leave_no_process_behind() -> None:
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@spawn_ranks(4)
async def test_spawn_ranks_runs_the_test_on_each_rank(pg: ProcessGroup) -> None:
    assert current_process_group() is pg
    assert await pg.allreduce(1) == 4


class InProcessTests(InProcessTestCase):
    """Sample test cases that the tests below run with ranks in this process."""

    __test__ = False
    world_size = 3

    async def asyncSetUp(self) -> None:
        self.ranks = await self.pg.allgather_object(self.rank)

    async def asyncTearDown(self) -> None:
        await self.pg.barrier()
        self.ranks.clear()

    async def steps(self) -> None:
        assert self.ranks == [0, 1, 2]

    async def assertions(self) -> None:
        self.assertEqualOnRank(self.rank, 0)
        self.assertEqualOnRank(self.rank, 2, rank=2)
        self.assertNotEqualOnRank(self.rank, 0, rank=1)

    async def wrong_equal(self) -> None:
        self.assertEqualOnRank(self.rank, 5, rank=2)

    async def wrong_not_equal(self) -> None:
        self.assertNotEqualOnRank(self.rank, 1, rank=1)


def test_in_process_test_case_sets_up_and_tears_down_each_rank() -> None:
    assert run(InProcessTests("steps")).wasSuccessful()


def test_assert_on_rank_compares_only_on_the_given_rank() -> None:
    assert run(InProcessTests("assertions")).wasSuccessful()
    first, second = (text for _, text in run(InProcessTests("wrong_equal"), InProcessTests("wrong_not_equal")).failures)
    assert "AssertionError: 2 != 5\nrank 2 of 3 failed first" in first
    assert "AssertionError: 1 == 1\nrank 1 of 3 failed first" in second


def test_timeout_error_names_the_rank_that_does_not_end() -> None:
    async def hang(pg: ProcessGroup) -> None:
        if pg.rank() == 1:
            await asyncio.Event().wait()

    with pytest.raises(TimeoutError, match="rank 1 of 3 did not end within 300 s"):
        run_virtual(3, hang, timeout=300)


async def test_error_notes_name_all_failed_ranks() -> None:
    async def fail(pg: ProcessGroup) -> None:
        try:
            await pg.barrier()
            if pg.rank() == 0:
                raise KeyError("first")
            await pg.barrier()
        except GroupError:
            if pg.rank() == 2:
                raise ValueError("second") from None
            raise

    with pytest.raises(KeyError, match="first") as caught:
        await run_ranks(3, fail)
    assert caught.value.__notes__ == ["rank 0 of 3 failed first", "rank 2 of 3 failed too: ValueError: second"]


# -- sparse arrays: rank r has ones at the indices 0 to r of the first dimension, and at index 0 of other dimensions


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("sparse_dims", [1, 2])
async def test_simple_sparse_reduce_tests_of_sparse_dimensions(pg: ProcessGroup, sparse_dims: int) -> None:
    size = pg.size()
    held = pg.rank() + 1
    coords = (np.arange(held), *[np.zeros(held, np.int64)] * (sparse_dims - 1))
    array = scipy.sparse.coo_array((np.ones(held), coords), shape=(size,) * sparse_dims)
    await pg.allreduce(array)
    expected = np.zeros((size,) * sparse_dims)
    expected[(slice(None), *[0] * (sparse_dims - 1))] = range(size, 0, -1)
    assert array.nnz == size
    assert np.array_equal(array.toarray(), expected)


@pytest.mark.torch
@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize(("sparse_dims", "dense_dims"), [(1, 0), (2, 0), (3, 0), (1, 1), (1, 2), (1, 3)])
async def test_simple_sparse_reduce_tests_of_dense_dimensions(
    pg: ProcessGroup, sparse_dims: int, dense_dims: int
) -> None:
    size = pg.size()
    torch = pytest.importorskip("torch", reason="torch is not installed: its sparse tensors are not tested")
    held, block = pg.rank() + 1, [2] * dense_dims
    indices = torch.cat([torch.arange(held)[None], torch.zeros((sparse_dims - 1, held), dtype=torch.int64)])
    with torch.sparse.check_sparse_tensor_invariants(True):
        tensor = torch.sparse_coo_tensor(indices, torch.ones([held, *block]), [size] * sparse_dims + block)
    await pg.allreduce(tensor)
    expected = torch.zeros([size] * sparse_dims + block)
    for place in range(size):
        expected[(place, *[0] * (sparse_dims - 1))] = size - place
    assert tensor._nnz() == size
    assert torch.equal(tensor.to_dense(), expected)
