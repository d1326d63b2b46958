"""The pytest plugin, tested in separate pytest processes."""

from __future__ import annotations

import pytest

from .conftest import Project

pytest_plugins = ["pytester"]

GOOD = """
import asyncio
import pytest
import pytest_asyncio
import aiocoll
from aiocoll.testing import InProcessTestCase, skip_if_world_smaller_than, spawn_ranks

@pytest.fixture
def number():
    return 20

@pytest_asyncio.fixture
async def loop_of_fixture():
    return asyncio.get_running_loop()

@pytest.mark.ranks(1, 3)
async def test_sum(pg, number):
    assert await pg.allreduce(number) == number * pg.size()
    assert aiocoll.current_process_group() is pg

@pytest.mark.ranks(2)
@pytest.mark.parametrize("x", [5, 6])
async def test_product(x, pg, loop_of_fixture):
    assert asyncio.get_running_loop() is loop_of_fixture
    assert await pg.allreduce(x) == 2 * x

@pytest.mark.ranks(2, options=aiocoll.GroupOptions(transport="tcp"), timeout=50)
class TestClass:
    async def test_method(self, pg):
        assert self.__class__ is TestClass
        await pg.barrier()

@pytest.mark.ranks(1, 2)
@skip_if_world_smaller_than(2)
async def test_pair(pg):
    await pg.barrier()

@pytest.mark.asyncio
@spawn_ranks(3)
async def test_spawned(pg, number):
    assert await pg.allreduce(number) == 60

class TestUnittest(InProcessTestCase):
    async def test_case(self):
        assert await self.pg.allreduce(1) == 4
"""

OUTCOMES = [
    "PASSED test_it.py::test_sum[[]ranks=1[]]",
    "PASSED test_it.py::test_sum[[]ranks=3[]]",
    "PASSED test_it.py::test_product[[]*5*[]]",
    "PASSED test_it.py::test_product[[]*6*[]]",
    "PASSED test_it.py::TestClass::test_method[[]ranks=2[]]",
    "PASSED test_it.py::test_pair[[]ranks=2[]]",
    "PASSED test_it.py::test_spawned",
    "PASSED test_it.py::TestUnittest::test_case",
    "SKIPPED*: needs at least 2 ranks, the world has 1",
]


@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_marked_test_runs_on_all_ranks_of_each_world_size(project: Project, mode: str) -> None:
    result = project.run(GOOD, mode=mode)
    result.assert_outcomes(passed=8, skipped=1)
    result.stdout.fnmatch_lines(OUTCOMES)


@pytest.mark.slow
def test_xdist_workers_share_the_marked_tests(project: Project) -> None:
    pytest.importorskip("xdist")
    result = project.run(GOOD, "-p", "xdist.plugin", "-n", "2")
    result.assert_outcomes(passed=8, skipped=1)
    result.stdout.fnmatch_lines_random(OUTCOMES)


@pytest.mark.slow
def test_marked_tests_use_the_loops_of_a_loop_factory(project: Project, pytester: pytest.Pytester) -> None:
    pytester.makeconftest("""
import asyncio
class Loop(asyncio.SelectorEventLoop):
    pass
def pytest_asyncio_loop_factories():
    return {"one": Loop, "two": Loop}
""")
    source = """
import asyncio, pytest
@pytest.mark.ranks(2)
async def test_loop(pg):
    assert type(asyncio.get_running_loop()).__name__ == "Loop"
"""
    project.run(source).assert_outcomes(passed=2)


def test_failure_of_a_marked_test_names_the_rank(project: Project) -> None:
    source = """
import pytest
@pytest.mark.ranks(3)
async def test_equal(pg):
    assert pg.rank() != 1, "unlucky"
    await pg.barrier()

@pytest.mark.ranks(2)
async def test_skip(pg):
    pytest.skip("not here")

"""
    result = project.run(source)
    result.assert_outcomes(failed=1, skipped=1)
    result.stdout.fnmatch_lines(["E*AssertionError: unlucky*", "E*rank 1 of 3 failed first", "test_it.py:4: Assert*"])
    result.stdout.no_fnmatch_line("*aiocoll*ranks.py:*")  # the report omits the internal frame that calls the test


def test_ranks_of_a_marked_test_can_be_processes(project: Project) -> None:
    source = """
import os
import pytest
@pytest.fixture
def parent():
    return os.getpid()

@pytest.mark.ranks(2, processes=True)
class TestProcesses:
    async def test_pids(self, pg, parent):
        pids = await pg.allgather_object(os.getpid())
        assert parent not in pids
        assert len(set(pids)) == 2

    async def test_failure(self, pg):
        assert pg.rank() == 0, "unlucky"
"""
    result = project.run(source, mode="auto")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E*AssertionError: unlucky", "E*its traceback on rank 1 of 2:*", "E*failed first"])
    result.stdout.no_fnmatch_line("*aiocoll*processes.py:*")


@pytest.mark.slow
def test_error_explains_an_unsupported_kind_of_test_function(project: Project) -> None:
    source = """
import pytest
@pytest.fixture
def early(pg):
    return pg.rank()

@pytest.mark.ranks(2)
async def test_fixture(early, pg):
    pass

async def test_without_mark(pg):
    pass
"""
    result = project.run(source, mode="auto")
    result.assert_outcomes(errors=2)
    result.stdout.fnmatch_lines(
        [
            "*pg.rank: the groups are made when the test runs; a fixture cannot use them",
            "*the fixture pg needs @pytest.mark.ranks(WORLD_SIZE, ...) on its test",
        ],
    )


PARAMETERS = """
import pytest
from aiocoll import GroupOptions
from aiocoll.distributed import get_debug_level

@pytest.mark.parametrize(
    "size",
    [
        pytest.param(2, marks=pytest.mark.ranks(2, options=GroupOptions(debug="detail"))),
        pytest.param(3, marks=[pytest.mark.ranks(1, 3)]),
    ],
)
async def test_marked_parameters(pg, size):
    assert pg.size() == 2 if size == 2 else pg.size() in (1, 3)
    assert get_debug_level().name == ("DETAIL" if size == 2 else "OFF")

@pytest.mark.ranks(4)
class TestClass:
    @pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.ranks(2)), 4])
    async def test_overriding_parameter(self, pg, size):
        assert pg.size() == size
"""


def test_marks_on_parameters_select_world_size_and_options(project: Project) -> None:
    result = project.run(PARAMETERS)
    result.assert_outcomes(passed=5)
    result.stdout.fnmatch_lines_random(
        [
            "PASSED test_it.py::test_marked_parameters[[]ranks=2-2[]]",
            "PASSED test_it.py::test_marked_parameters[[]ranks=1-3[]]",
            "PASSED test_it.py::test_marked_parameters[[]ranks=3-3[]]",
        ]
    )


@pytest.mark.slow
def test_error_explains_a_parameter_without_a_ranks_mark(project: Project) -> None:
    source = """
import pytest
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.ranks(2)), 4])
async def test_size(pg, size):
    pass
"""
    result = project.run(source)
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*test_size*: has no @pytest.mark.ranks, but other parameters of it do; mark each*"])


WRONG = {
    "def test_it(pg): pass": "@pytest.mark.ranks is for async tests: write `async def`",
    "async def test_it(): pass": "@pytest.mark.ranks needs the fixture pg: take it as an argument",
    "async def test_it(pg): pass": "@pytest.mark.ranks takes world sizes, as in ranks(1, 2, 7), not (2, 0)",
    "async def test_it(*, pg): pass": "'expect_death', 'options', 'processes', 'timeout'], not ['process']",
}
MARKS = {"async def test_it(pg): pass": "2, 0", "async def test_it(*, pg): pass": "2, process=True"}


@pytest.mark.slow
def test_error_explains_a_wrong_ranks_mark(project: Project, pytester: pytest.Pytester) -> None:
    for number, test in enumerate(WRONG):
        source = f"import pytest\n@pytest.mark.ranks({MARKS.get(test, 2)})\n{test}\n"
        pytester.makepyfile(**{f"test_wrong_{number}": source})
    result = project.run("", mode="auto")
    result.assert_outcomes(errors=4)
    for message in WRONG.values():
        assert message in result.stdout.str()


def test_missing_pytest_asyncio_is_reported(project: Project) -> None:
    result = project.run("import pytest\n@pytest.mark.ranks(2)\nasync def test_it(pg): pass\n", asyncio=False)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*async def functions are not natively supported*"])


EXAMPLES = """
import os
import pytest
from hypothesis import given, settings, strategies as st
from aiocoll.testing import skip_if_world_smaller_than

phases = settings.default.phases[:3]  # a failure here is looked for in no smaller example
settings.register_profile("here", deadline=None, max_examples=5, database=None, derandomize=True, phases=phases)
settings.load_profile("here")
seen = []

@pytest.fixture(scope="module")
def scale():
    return 2

@pytest.mark.ranks(1, 2, 3, 4, 7)
@given(x=st.lists(st.integers(), max_size=3), y=st.booleans())
async def test_same(pg, scale, x, y):
    assert await pg.allgather_object((x, y, scale)) == [(x, y, 2)] * pg.size()
    mine = [*x, pg.rank()]
    x.append(pg.rank())
    await pg.barrier()
    assert x == mine
    seen.append(pg.size())

def test_every_example_ran_on_every_rank():
    assert {size: seen.count(size) for size in (1, 2, 3, 4, 7)} == {1: 5, 2: 10, 3: 15, 4: 20, 7: 35}

@pytest.mark.ranks(1, 2)
@given(st.integers())
@skip_if_world_smaller_than(2)
async def test_pair(pg, x):
    assert await pg.allgather_object(x) == [x, x]

@pytest.mark.ranks(2)
class TestClass:
    @given(st.integers())
    async def test_method(self, pg, x):
        assert type(self) is TestClass
        assert await pg.allgather_object(x) == [x, x]

@pytest.mark.ranks(2)
@settings(max_examples=50, phases=settings.get_profile("default").phases[:5])  # all but explanations
@given(st.integers())
async def test_wrong(pg, number):
    assert number < 100 or pg.rank() == 0, "too large"

@pytest.mark.ranks(2)
@given(data=st.data())
async def test_drawing(pg, data):
    pass
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_hypothesis_examples_run_on_all_ranks(project: Project, mode: str) -> None:
    result = project.run(EXAMPLES, "-p", "_hypothesis_pytestplugin", mode=mode)
    result.assert_outcomes(passed=8, skipped=1, failed=2)
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: too large*",
            "E*rank 1 of 2 failed first",
            "E*test_wrong(",
            "E*pg=<the group of each of 2 ranks>,",
            "E*number=100,",
            "data: st.data() would draw a different value on each rank; draw by @given instead",
        ]
    )
    result.stdout.no_fnmatch_line("*Interrupted*")


@pytest.mark.slow
def test_hypothesis_examples_run_in_the_same_persistent_processes(project: Project) -> None:
    source = """
import os
import pytest
from hypothesis import given, settings, strategies as st

phases = settings.default.phases[:5]  # without explanations, for which many more examples are run
settings.register_profile("here", deadline=None, max_examples=10, database=None, derandomize=True, phases=phases)
settings.load_profile("here")
os.environ.setdefault("PARENT", str(os.getpid()))
pids = []

async def check(pg, x):
    found = await pg.allgather_object((os.getpid(), x))
    assert [value for _, value in found] == [x, x]
    pids.append(os.getpid())
    assert set(pids) == {os.getpid()}
    return len(pids)

@pytest.mark.ranks(2, processes=True)
class TestProcesses:
    @given(x=st.integers(0, 9))
    async def test_examples(self, pg, x):
        assert os.getpid() != int(os.environ["PARENT"])
        await check(pg, x)

    @given(x=st.integers())
    async def test_wrong(self, pg, x):
        assert x < 100 or pg.rank() == 0, "too large"
        await pg.barrier()

@pytest.mark.ranks(2, processes=True)
@given(st.integers(0, 9))
async def test_function(pg, x):
    calls = await check(pg, x)
    assert calls <= 10

def test_nothing_ran_here():
    assert pids == []
"""
    result = project.run(source, "-p", "_hypothesis_pytestplugin")
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["E*AssertionError: too large*", "E*its traceback on rank 1 of 2:*", "E*rank 1 of 2 failed first", "E*x=100,"]
    )


@pytest.mark.slow
def test_hypothesis_examples_require_an_async_test(project: Project) -> None:
    source = """
import pytest
from hypothesis import given, strategies as st

@pytest.mark.ranks(2)
@given(st.integers())
def test_it(pg, x):
    pass
"""
    result = project.run(source)
    result.assert_outcomes(errors=1)
    assert "@pytest.mark.ranks is for async tests: write `async def`" in result.stdout.str()
