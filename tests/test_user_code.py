"""User code that raises a `BaseException`: only its operation fails, while group and event loop continue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiocoll
from aiocoll import GroupOptions, ProcessGroup, ReduceOp, StoreError
from aiocoll.distributed.map_result import map_result
from aiocoll.errors import SerializationError
from aiocoll.log import logger
from aiocoll.store import HashStore
from aiocoll.testing import run_ranks as run_all
from aiocoll.testing.virtual import run_virtual
from aiocoll.user_code import UserCodeError, contain, describe
from aiocoll.work import completion_of

from .each import each
from .group.test_raising_ops import CALLS, COUNTS, failure
from .ranks import LINKS, options, run_ranks
from .store.minimal_store import MinimalStore


class Silent(Exception):
    """An exception whose `__str__` raises an error."""

    def __str__(self) -> str:
        raise asyncio.CancelledError("no text")


#: Exceptions that have a special meaning for tasks, generators or the process, and one whose `__str__` fails.
CONTROL = (asyncio.CancelledError, GeneratorExit, StopIteration, BaseException, Silent)
FATAL = (KeyboardInterrupt, SystemExit)


def function_raising(error: type[BaseException]) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise error("for a test")

    return call


# -- reduce functions


@pytest.mark.parametrize("error", CONTROL)
@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("world_size", [2, 3])
async def test_exception_in_a_reduce_function_fails_its_operation_on_every_rank(
    world_size: int, transport: str, error: type[BaseException]
) -> None:
    """Run the failing reduce function in every kind of collective, with small and large arrays."""

    async def rank(pg: ProcessGroup, kind: str, count: int) -> None:
        op = ReduceOp.custom(function_raising(error), name="f")
        raised = await failure(CALLS[kind](pg, op, count))
        assert f"its reduce function raised {error.__name__}" in str(raised)
        if raised.ranks == (pg.rank(),):
            assert type(raised.__cause__) is error

    for kind in CALLS:
        for count in COUNTS:
            await run_ranks(world_size, rank, kind, count, transport=transport)


@pytest.mark.parametrize("culprit", [0, 1])
def test_exception_in_a_reduce_function_fails_its_operation_at_once(culprit: int) -> None:
    """Use a virtual clock to show that the operation fails long before its timeout."""

    async def rank(pg: ProcessGroup) -> float:
        op = ReduceOp.custom(function_raising(asyncio.CancelledError) if pg.rank() == culprit else np.add, name="f")
        start = asyncio.get_running_loop().time()
        await failure(pg.allreduce(np.ones(4), op, timeout=100))
        return asyncio.get_running_loop().time() - start

    assert max(run_virtual(2, rank, seed=1)) < 1


# -- hooks


class Hook:
    """A hook that raises an error in `on_start` or `on_end`."""

    def __init__(self, when: str, error: type[BaseException]) -> None:
        self.calls = 0
        self._when = when
        self._error = error

    def on_start(self, info: Any) -> None:
        self._call("on_start")

    def on_end(self, info: Any) -> None:
        self._call("on_end")

    def _call(self, when: str) -> None:
        if when == self._when:
            self.calls += 1
            raise self._error("for a test")


class HookWithProperties:
    """A hook whose methods are properties that raise an error once the hook has been added."""

    def __init__(self, when: str, error: type[BaseException]) -> None:
        self.calls = 0
        self._when = when
        self._error = error

    @property
    def on_start(self) -> Callable[[Any], None]:
        return self._read("on_start")

    @property
    def on_end(self) -> Callable[[Any], None]:
        return self._read("on_end")

    def _read(self, when: str) -> Callable[[Any], None]:
        if when == self._when and self._ready:
            self.calls += 1
            raise self._error("for a test")
        return lambda _: None

    _ready = False


@pytest.mark.parametrize("when", ["on_start", "on_end"])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("kind", [Hook, HookWithProperties])
async def test_hook_that_raises_is_removed_and_logged(
    kind: Any, size: int, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def rank(pg: ProcessGroup, error: type[BaseException]) -> None:
        hook = kind(when, error)
        pg.add_hook(hook)
        hook._ready = True
        for _ in range(2):
            assert await pg.allreduce(1, timeout=5) == size
        await pg.allgather_object(pg.rank())
        assert hook.calls == 1

    for error in CONTROL:
        caplog.clear()
        await run_ranks(size, rank, error)
        removed = [record for record in caplog.records if "the hook is removed" in record.getMessage()]
        assert len(removed) == size
        assert all(f"{kind.__name__}.{when} raised" in record.getMessage() for record in removed)


# -- KeyboardInterrupt and SystemExit


FATAL_PLACES: dict[str, Callable[[ProcessGroup, type[BaseException]], Awaitable[Any]]] = {
    "reduce function": lambda pg, error: pg.allreduce(np.ones(4), ReduceOp.custom(function_raising(error), name="f")),
    "large reduction": lambda pg, error: pg.allreduce(
        np.ones(400_003), ReduceOp.custom(function_raising(error), name="f")
    ),
    "on_start": lambda pg, error: allreduce_with_hook(pg, "on_start", error),
    "on_end": lambda pg, error: allreduce_with_hook(pg, "on_end", error),
}


def allreduce_with_hook(pg: ProcessGroup, when: str, error: type[BaseException]) -> Awaitable[Any]:
    pg.add_hook(Hook(when, error))
    return pg.allreduce(np.ones(4))


@pytest.mark.parametrize("transport", LINKS)
@pytest.mark.parametrize("place", FATAL_PLACES)
@each("fatal", FATAL)
def test_system_exit_in_user_code_ends_the_loop_and_fails_the_operation(
    place: str, transport: str, fatal: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    """Check that `asyncio.run` raises the exception after the cancelled tasks have closed their groups."""
    works: list[Any] = []
    store = HashStore()

    async def rank(number: int) -> None:
        async with aiocoll.new_group(
            store=store, rank=number, world_size=2, options=options(transport), timeout=10
        ) as pg:
            if number == 0:
                works.append(FATAL_PLACES[place](pg, fatal))
                await works[0]
            elif "reduc" in place:
                count = 4 if place == "reduce function" else 400_003
                await pg.allreduce(np.ones(count), ReduceOp.custom(np.add, name="f"))
            else:
                await pg.allreduce(np.ones(4))

    async def main() -> None:
        await asyncio.wait([asyncio.create_task(rank(number)) for number in range(2)])

    with pytest.raises(fatal, match="for a test"):
        asyncio.run(main())
    caplog.clear()  # the traceback in a record keeps the memory of its frames
    assert works[0].done()
    if "reduc" in place:
        assert f"its reduce function raised {fatal.__name__}: for a test" in str(works[0].exception())


@each("fatal", FATAL)
def test_system_exit_in_a_worker_threads_user_code_is_raised_by_the_event_loop(fatal: type[BaseException]) -> None:
    async def main() -> None:
        with pytest.raises(UserCodeError) as caught:
            await asyncio.to_thread(raise_contained, fatal)
        contain(caught.value)
        contain(caught.value)  # the second time, no exception is passed to the loop
        await asyncio.Event().wait()

    with pytest.raises(fatal):
        asyncio.run(main())


def test_event_loop_raises_each_system_exit_of_user_code_once() -> None:
    with asyncio.Runner() as runner:
        carriers = []

        async def fail(*errors: BaseException) -> None:
            carriers.extend(contain(error) for error in errors)
            await asyncio.Event().wait()

        with pytest.raises(SystemExit, match="first"):
            runner.run(fail(SystemExit("first"), SystemExit("second")))
        runner.run(asyncio.sleep(0))  # check that the second exception is not raised later
        with pytest.raises(KeyboardInterrupt, match="third"):
            runner.run(fail(KeyboardInterrupt("third")))

        async def fail_again() -> None:
            for carrier in carriers[:1]:
                assert contain(carrier) is carrier
            await asyncio.sleep(0)

        runner.run(fail_again())


def raise_contained(error: type[BaseException]) -> None:
    try:
        raise error("for a test")
    except BaseException as raised:
        raise contain(raised) from None


@each("fatal", FATAL)
def test_system_exit_in_user_code_without_an_event_loop_is_raised(fatal: type[BaseException]) -> None:
    with pytest.raises(fatal):
        contain(fatal("for a test"))


# -- objects


class Unreadable:
    """An object that raises an error when it is unpickled."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        return raise_error, (self.error,)


def raise_error(error: type[BaseException]) -> Any:
    raise error("for a test")


class Unwritable:
    """An object that raises an error when it is pickled."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> tuple[Any, ...]:
        raise self.error("for a test")


@pytest.mark.parametrize("error", CONTROL)
@pytest.mark.parametrize("padding", [0, 100_000])  # decoded at once, or in steps
async def test_object_that_cannot_be_unpickled_fails_only_its_own_call(
    error: type[BaseException], padding: int
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        work = pg.broadcast_object([bytes(padding), Unreadable(error)] if pg.rank() == 0 else None, 0, timeout=5)
        if pg.rank() == 0:
            await work
        else:
            with pytest.raises(SerializationError, match=f"not a valid object .{error.__name__}: "):
                await work
        assert await pg.allreduce(1) == 2

    await run_all(2, rank, options=GroupOptions(allow_pickle=True))


@pytest.mark.parametrize("error", CONTROL)
async def test_object_that_cannot_be_pickled_is_refused_before_the_operation_starts(error: type[BaseException]) -> None:
    async def rank(pg: ProcessGroup) -> None:
        with pytest.raises(SerializationError, match=r"cannot send obj\[0\]: pickle cannot encode .*Unwritable: "):
            pg.allgather_object([Unwritable(error)])
        assert await pg.allgather_object(pg.rank()) == [0, 1]

    await run_all(2, rank, options=GroupOptions(allow_pickle=True))


# -- result conversions, done callbacks, log handlers, stores


@pytest.mark.parametrize("error", [*CONTROL, ValueError])
@pytest.mark.ranks(1, 2)
async def test_exception_in_a_result_conversion_fails_its_work(pg: ProcessGroup, error: type[BaseException]) -> None:
    work = map_result(pg.allreduce(1), function_raising(error))
    with pytest.raises(error if issubclass(error, Exception) and error is not StopIteration else UserCodeError):
        await work
    assert await pg.allreduce(1) == pg.size()


@pytest.mark.parametrize("error", CONTROL)
@pytest.mark.ranks(2, 3)
async def test_result_that_cannot_be_written_back_fails_its_work(pg: ProcessGroup, error: type[BaseException]) -> None:
    """Replace the function that copies the result to a noncontiguous array by a function that raises."""
    work = pg.allreduce(np.ones(6)[::2])  # a noncontiguous array, so the result is copied back
    completion = completion_of(work)
    assert completion.unwrap is not None
    completion.unwrap = function_raising(error)
    with pytest.raises(error if issubclass(error, Silent) else UserCodeError):
        await work
    assert await pg.allreduce(1) == pg.size()


@pytest.mark.parametrize("error", CONTROL)
@pytest.mark.ranks(2)
async def test_exception_in_a_done_callback_reaches_the_exception_handler_of_the_loop(
    pg: ProcessGroup, error: type[BaseException]
) -> None:
    loop = asyncio.get_running_loop()
    raised: list[type[BaseException]] = []
    work = pg.allreduce(1)
    if pg.rank() == 0:
        loop.set_exception_handler(lambda _, context: raised.append(type(context["exception"])))
        work.add_done_callback(function_raising(error))
    assert await work == 2
    assert await pg.allreduce(1) == 2  # this call takes another loop iteration
    assert raised == ([error] if pg.rank() == 0 else [])


class Handler(logging.Handler):
    """A log handler that raises an error for every record."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def emit(self, record: logging.LogRecord) -> None:
        raise self.error("for a test")


@pytest.mark.parametrize("error", [*CONTROL, ValueError])
async def test_exception_in_a_log_handler_fails_no_operation(
    error: type[BaseException], capsys: pytest.CaptureFixture[str]
) -> None:
    async def rank(pg: ProcessGroup) -> None:
        pg.add_hook(Hook("on_end", ArithmeticError))
        assert await pg.allreduce(1, timeout=5) == 2  # the removal of the hook is logged
        assert await pg.allreduce(1, timeout=5) == 2

    handler = Handler(error)
    logging.getLogger("aiocoll").addHandler(handler)
    try:
        await run_ranks(2, rank)
        logger.error("in no group")
    finally:
        logging.getLogger("aiocoll").removeHandler(handler)
    assert f"{error.__name__}: " in capsys.readouterr().err


class Cancelling(MinimalStore):
    """A store that raises `CancelledError` at a chosen read, as a cancelled future of a lost connection does."""

    left = 0

    async def read(self, name: str) -> bytes | None:
        self.left -= 1
        if not self.left:
            raise asyncio.CancelledError("the connection was closed")
        return await super().read(name)


@pytest.mark.parametrize("left", [1, 2, 3])
async def test_cancelled_error_raised_by_a_store_becomes_a_store_error(left: int) -> None:
    async with Cancelling({}) as store:
        store.left = left
        expected = r"Cancelling raised CancelledError: .* in .*\(\), although nothing cancelled the call"
        with pytest.raises(StoreError, match=expected):
            await aiocoll.new_group(store=store, rank=0, world_size=1, timeout=5)


async def test_wait_at_a_store_can_be_cancelled() -> None:
    async with HashStore() as store:
        waiting = asyncio.ensure_future(store.get("never"))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_exception_whose_str_method_fails_is_formatted_safely() -> None:
    assert describe(KeyError("a")) == "KeyError: 'a'"
    assert describe(KeyError()) == "KeyError"
    assert describe(Silent()) == "Silent: <str() of it failed>"
