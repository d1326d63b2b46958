"""Base classes of unittest test cases whose tests run on all ranks. pytest also runs them.

    class TestSums(InProcessTestCase):
        world_size = 3

        async def test_sum(self):
            self.assertEqual(await self.pg.allreduce(self.rank), 3)

The instance that unittest makes only controls the ranks. Each rank has its own instance, which runs `setUp`,
`asyncSetUp`, the test, `asyncTearDown`, `tearDown` and the cleanups.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import os
import tempfile
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from datetime import timedelta
from typing import Any, ClassVar, Literal

from aiocoll.group.process_group import ProcessGroup
from aiocoll.options import GroupOptions
from aiocoll.testing.comparison import find_difference, has_arrays
from aiocoll.testing.deaths import Death
from aiocoll.testing.frames import trim
from aiocoll.testing.loops import loop_factory, portable_loop
from aiocoll.testing.persistent_ranks import PersistentRanks
from aiocoll.testing.processes import run_team
from aiocoll.testing.ranks import run_ranks, time_limit
from aiocoll.testing.skips import skip_early
from aiocoll.testing.team import Team, pickled

__all__ = ["InProcessTestCase", "MultiProcessTestCase", "RanksTestCase"]

__unittest = True  # makes unittest omit the frames of this module from its reports


class RanksTestCase(unittest.TestCase):
    """The common base class of `InProcessTestCase` (ranks are tasks) and `MultiProcessTestCase` (ranks are processes).

    Attributes:
        world_size: number of ranks.
        timeout: seconds for a test with all its ranks; None waits forever.
        options: options of the groups.
        loop: the event loop of the ranks.
        allow_unretrieved: a rank may return without having retrieved the failure of a call, as for `run_ranks`.
        rank: rank of this instance; -1 in the instance that controls the ranks.
        pg: the group of this rank.
        file_name: path of a file that the ranks may create and share; it is removed after the test.
    """

    world_size: ClassVar[int] = 4
    timeout: float | timedelta | None = 120.0
    options: ClassVar[GroupOptions | None] = None
    loop: ClassVar[Literal["asyncio", "uvloop"]] = "asyncio"
    allow_unretrieved: bool = False
    rank: int = -1
    pg: ProcessGroup
    file_name: str

    def __init__(self, methodName: str = "runTest") -> None:
        super().__init__(methodName)

    @property
    def is_master(self) -> bool:
        """Return whether this is rank 0."""
        return self.rank == 0

    def run(self, result: unittest.TestResult | None = None) -> unittest.TestResult | None:
        """Run the test on all ranks."""
        with self._driving():
            return super().run(result)

    def debug(self) -> None:
        """Run the test on all ranks, and let its exception propagate."""
        with self._driving():
            super().debug()

    async def asyncSetUp(self) -> None:
        """Prepare the test on each rank, with the group `self.pg`; override as needed."""

    async def asyncTearDown(self) -> None:
        """Clean up after the test on each rank; override as needed."""

    def addCleanup(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> None:
        """Register a function to call after the test on this rank, in reverse order of registration."""
        self._exits.callback(function, *args, **kwargs)

    def addAsyncCleanup(self, function: Callable[..., Awaitable[Any]], /, *args: Any, **kwargs: Any) -> None:
        """Register an async function to await after the test on this rank, in reverse order of all registrations."""
        self._exits.push_async_callback(function, *args, **kwargs)

    async def enterAsyncContext(self, manager: Any) -> Any:
        """Enter an asynchronous context on this rank until the end of the test."""
        return await self._exits.enter_async_context(manager)

    @contextmanager
    def subTest(self, msg: object = None, **params: Any) -> Iterator[None]:
        """Name a part of the test in failure reports. A failure in it ends the test, because other ranks may wait."""
        try:
            yield
        except Exception as error:
            what = ", ".join([*([] if msg is None else [str(msg)]), *(f"{name}={params[name]!r}" for name in params)])
            error.add_note(f"in the part {what}")
            raise

    def assertEqual(
        self,
        first: Any,
        second: Any,
        msg: Any = None,
        *,
        atol: float | None = None,
        rtol: float | None = None,
        exact_dtype: bool = True,
    ) -> None:
        """Check that two values are equal: arrays of any library, lists, tuples and dicts of them, or other objects.

        Arrays are compared exactly, and NaNs are equal. The assertion of torch has tolerances that depend on the dtype.

        Args:
            first: a value; an array equals a list of its elements.
            second: a value, as `first`.
            msg: text added to the failure.
            atol: absolute tolerance for arrays.
            rtol: tolerance relative to `second`.
            exact_dtype: whether arrays of different dtypes differ.
        """
        if has_arrays(first) or has_arrays(second):
            difference = find_difference(first, second, rtol=rtol or 0.0, atol=atol or 0.0, exact_dtype=exact_dtype)
            if difference is not None:
                self.fail(self._formatMessage(msg, difference))
        else:
            super().assertEqual(first, second, msg)  # noqa: PT009

    def assertNotEqual(self, first: Any, second: Any, msg: Any = None) -> None:
        """Check that two values differ; they may be of any kind that `assertEqual` accepts."""
        if has_arrays(first) or has_arrays(second):
            if find_difference(first, second) is None:
                self.fail(self._formatMessage(msg, f"both are {first!r}"))
        else:
            super().assertNotEqual(first, second, msg)  # noqa: PT009

    def assertEqualOnRank(self, first: Any, second: Any, msg: Any = None, *, rank: int = 0) -> None:
        """Check on one rank that two values are equal, as `assertEqual` does."""
        if self.rank == rank:
            self.assertEqual(first, second, msg)  # noqa: PT009

    def assertNotEqualOnRank(self, first: Any, second: Any, msg: Any = None, *, rank: int = 0) -> None:
        """Check on one rank that two values differ, as `assertNotEqual` does."""
        if self.rank == rank:
            self.assertNotEqual(first, second, msg)  # noqa: PT009

    @contextmanager
    def _driving(self) -> Iterator[None]:
        """In the block, replace the test method, `setUp` and `tearDown` by functions that run the test on all ranks."""
        name = self._testMethodName
        test = getattr(self, name)

        @functools.wraps(test)
        def on_all_ranks() -> None:
            __tracebackhide__ = True
            skip_early(self.world_size, test, type(self))
            try:
                with tempfile.TemporaryDirectory(prefix="aiocoll-") as folder:
                    self.file_name = os.path.join(folder, "shared")
                    self._run_on_all_ranks()
            except BaseException as error:
                raise trim(error)  # noqa: B904 - it is the same exception

        mine = {name: on_all_ranks, "setUp": _nothing, "tearDown": _nothing}
        before = {name: self.__dict__[name] for name in mine if name in self.__dict__}
        self.__dict__.update(mine)
        try:
            yield
        finally:
            for name in mine:
                del self.__dict__[name]
            self.__dict__.update(before)

    def _run_on_all_ranks(self) -> None:
        raise NotImplementedError("derive from InProcessTestCase or MultiProcessTestCase")

    def _spawn_processes(self) -> None:
        """Do nothing: torch's test cases call this in `setUp` to start processes, but the ranks already run."""

    _spawn_threads = _spawn_processes

    async def _run_here(self, pg: ProcessGroup, file_name: str) -> None:
        """Run the test, with set-up and cleanups, on this rank."""
        self.rank, self.pg, self.file_name = pg.rank(), pg, file_name
        async with AsyncExitStack() as self._exits, self._set_up():
            await _finished(getattr(self, self._testMethodName)())

    @asynccontextmanager
    async def _set_up(self) -> AsyncIterator[None]:
        self.setUp()
        try:
            await self.asyncSetUp()
            try:
                yield
            finally:
                await self.asyncTearDown()
        finally:
            self.tearDown()


class InProcessTestCase(RanksTestCase):
    """A test case whose ranks are tasks of one event loop, as in `run_ranks`. They start within 1 ms."""

    def _run_on_all_ranks(self) -> None:
        with asyncio.Runner(loop_factory=loop_factory(self.loop)) as runner:
            runner.run(
                run_ranks(
                    self.world_size,
                    _on_rank,
                    type(self),
                    self._testMethodName,
                    self.file_name,
                    options=self.options,
                    timeout=self.timeout,
                    allow_unretrieved=self.allow_unretrieved,
                )
            )


class MultiProcessTestCase(RanksTestCase):
    """A test case whose ranks are processes, as in `run_processes`; the class must be importable.

    Attributes:
        continuous: start the processes once, in `setUpClass`, and run all tests of the class in them. A test uses the
            group of the test before it, or a new one if that test failed or left a call pending. Ranks that hang or die
            are replaced before the next test.
        expect_death: ranks that must die in each test, and how, as for `run_processes`; not with `continuous`.
    """

    continuous: ClassVar[bool] = False
    expect_death: Mapping[int, Death] | None = None
    _persistent_ranks: ClassVar[PersistentRanks | None] = None

    @classmethod
    def setUpClass(cls) -> None:
        """Start the processes that run all tests of the class, if `continuous` is set."""
        super().setUpClass()
        if cls.continuous:
            world_size = cls().world_size  # torch's test cases define it as a property
            skip_early(world_size, cls)
            cls._persistent_ranks = PersistentRanks(
                cls,
                world_size,
                options=cls.options,
                loop=portable_loop(cls.loop),
                allow_unretrieved=cls.allow_unretrieved,
            )
            cls.addClassCleanup(cls._persistent_ranks.close)
            cls._persistent_ranks.start()

    def _run_on_all_ranks(self) -> None:
        cls = type(self)
        args = cls, self._testMethodName, self.file_name
        if not self.continuous:
            with asyncio.Runner() as runner:
                runner.run(self._run_once(*args))
        elif self.expect_death is not None:
            raise ValueError("expect_death needs new processes for each test; set continuous = False")
        elif self._persistent_ranks is None:
            raise RuntimeError(f"{cls.__name__}.setUpClass must call super().setUpClass(), which starts the ranks")
        else:
            self._persistent_ranks.call(pickled(_on_rank, args), time_limit(self.timeout))

    async def _run_once(self, *args: Any) -> None:
        """Run the test in new processes, one per rank."""
        team = Team(
            self.world_size,
            type(self),
            loop=portable_loop(self.loop),
            options=self.options,
            expect_death=self.expect_death,
            allow_unretrieved=self.allow_unretrieved,
        )
        await run_team(team, self.timeout, _on_rank, *args)


async def _on_rank(pg: ProcessGroup, cls: type[RanksTestCase], name: str, file_name: str) -> None:
    try:
        await cls(name)._run_here(pg, file_name)
    except SystemExit as error:
        if error.code not in (None, 0):
            error.add_note("every exit code but 0 fails the test; to skip it, call self.skipTest(reason)")
            raise


async def _finished(result: Any) -> None:
    if inspect.isawaitable(result):
        result = await result
    if result is not None:
        raise TypeError(f"a test must return None, not {type(result).__name__}")


def _nothing() -> None:
    pass
