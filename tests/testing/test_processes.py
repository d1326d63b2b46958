"""`run_processes`: the features of `run_ranks`, and ranks whose process dies."""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from aiocoll import GroupOptions
from aiocoll.testing import children, run_processes
from tests.ranks import wait_until
from tests.testing import jobs

ROOT = Path(__file__).parents[2]
#: Seconds within which a process must end, on a busy machine too.
LIMIT = 60


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_each_rank_is_a_separate_process(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_JOB_KEY", "the key of another job")
    ranks = await run_processes(2, jobs.describe_rank, "a", 5, loop=loop)
    assert len({rank["pid"] for rank in ranks} | {os.getpid()}) == 3
    for number, rank in enumerate(ranks):
        assert (rank["rank"], rank["size"], rank["args"], rank["loop"]) == (number, 2, ("a", 5), loop)
        assert (rank["parent"], rank["total"]) == (os.getpid(), 1)
        assert rank["variables"] == {"RANK": str(number), "WORLD_SIZE": "2", "AIOCOLL_JOB_KEY": None}


async def test_process_ranks_use_the_given_options() -> None:
    options = GroupOptions(transport="tcp", job_key="a key of sixteen bytes")
    assert [rank["total"] for rank in await run_processes(2, jobs.describe_rank, options=options)] == [1, 1]


@pytest.mark.usefixtures("frames_of_users")
async def test_exception_of_a_process_rank_is_raised_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="lost") as caught:
        await run_processes(3, jobs.fail, "raise")
    trace, first = caught.value.__notes__
    assert trace.startswith("its traceback on rank 1 of 3:\nTraceback")
    assert 'raise KeyError("lost")' in trace
    assert "aiocoll" not in trace
    assert first == "rank 1 of 3 failed first"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("sealed", RuntimeError, "rank 1 of 2 raised tests.testing.jobs.Sealed: no way"),
        ("quit", RuntimeError, "rank 1 of 2 raised SystemExit: 7"),
        ("kill", ChildProcessError, "rank 1 of 2 was killed by SIGKILL"),
        ("exit", ChildProcessError, "rank 1 of 2 exited with code 7"),
        ("crash", ChildProcessError, r"rank 1 of 2 was killed by SIGSEGV\nFatal Python error(.|\n)*in faulty"),
    ],
)
async def test_error_reports_how_each_rank_process_ended(how: str, error: Any, text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        await run_processes(2, jobs.fail, how)
    assert "rank 1 of 2 failed first" in caught.value.__notes__


async def test_result_that_cannot_be_pickled_raises_an_error() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        await run_processes(1, jobs.fail, "return")


@pytest.mark.slow
async def test_timeout_error_shows_the_stack_of_every_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the timeout expire when all ranks hang, and also when only two ranks have reported their stacks."""
    file = tmp_path / "hanging"
    os.mkfifo(file)
    limit, wait, answers = 1000.0, asyncio.wait, []

    async def wait_for_events(
        awaited: Any, *, timeout: float | None = None, return_when: str = asyncio.ALL_COMPLETED
    ) -> Any:
        if timeout == limit:
            timeout = 0
            hanging = asyncio.create_task(wait_until_all_hang(file))
            await wait([*awaited, hanging], return_when=asyncio.FIRST_COMPLETED)
            hanging.cancel()
        elif timeout == children.ANSWER:
            timeout = 0
            answers.extend(awaited)
            await wait_until(lambda: sum(answer.done() for answer in answers) == 2)
        return await wait(awaited, timeout=timeout, return_when=return_when)

    monkeypatch.setattr(asyncio, "wait", wait_for_events)
    with pytest.raises(TimeoutError) as caught:
        await run_processes(4, jobs.hang, str(file), timeout=limit)
    text = str(caught.value)
    assert text.startswith("ranks 0, 1, 2 and 3 of 4 did not end within 1000 s\nrank 0 (process ")
    waits, spins, holds, stopped = (part.split("\n", 1)[1] for part in text.split("\nrank ")[1:])
    assert waits.startswith("  pending: <Work BARRIER seq=1 pending>\n")
    assert "await pg.barrier()" in waits
    assert "thread helper:" in waits
    assert "in wait_for_nothing" in waits
    assert "holding the event loop" in spins
    assert "in hang" in spins
    assert "Fatal Python error: Aborted" in holds
    assert "in hang" in holds
    assert stopped == "  it does not answer, and SIGABRT does not end it: it may be stopped\n"


async def wait_until_all_hang(file: Path) -> None:
    numbers = await numbers_from(file, 8)
    pids = dict(zip(numbers[::2], numbers[1::2], strict=True))
    await wait_until(lambda: state(pids[2]) == "S")
    os.kill(pids[3], signal.SIGSTOP)
    await wait_until(lambda: state(pids[3]) == "T")


async def test_cancelled_run_ends_the_rank_processes_and_their_children(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    os.mkfifo(file)
    running = asyncio.create_task(run_processes(2, jobs.leave_a_child, str(file)))
    processes = [os.pidfd_open(pid) for pid in await numbers_from(file, 4)]
    try:
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        # Children of a rank are killed but not awaited, since they are not children of this process.
        assert all(wait_for_end(process) for process in processes)
    finally:
        for process in processes:
            os.close(process)


def wait_for_end(process: int) -> bool:
    """Wait until a process has ended; its pidfd becomes readable then, for any parent process."""
    return bool(select.select([process], [], [], LIMIT)[0])


async def numbers_from(file: Path, count: int) -> list[int]:
    """Return the first numbers that other processes write to a FIFO."""
    loop, readable, numbers = asyncio.get_running_loop(), asyncio.Event(), list[int]()
    with os.fdopen(os.open(file, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as lines:
        loop.add_reader(lines, readable.set)
        try:
            while len(numbers) < count:
                await readable.wait()
                readable.clear()
                numbers += map(int, (lines.read() or b"").split())
        finally:
            loop.remove_reader(lines)
    return numbers


def state(pid: int) -> str | None:
    """Return the state letter of a process as in proc(5), such as Z for a zombie; None if the process is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return None


PROGRAM = """
import asyncio, os, sys
from aiocoll.testing import run_processes
class Number(int): pass
async def double(pg, x):
    await pg.barrier()
    return Number(2 * x)
async def wait(pg):
    await pg.barrier()
    os.write(1, b"%d\\n" % os.getpid())
    await asyncio.Event().wait()
if __name__ == "__main__":
    if sys.argv[1] == "double":
        print(asyncio.run(run_processes(2, double, Number(21))))
    else:
        asyncio.run(run_processes(2, wait))
"""


@contextmanager
def program(path: Path, what: str) -> Iterator[subprocess.Popen[str]]:
    file = path / "program.py"
    file.write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(file), what],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def test_functions_of_a_script_can_run_on_process_ranks(tmp_path: Path) -> None:
    with program(tmp_path, "double") as process:
        assert process.communicate(timeout=LIMIT)[0] == "[42, 42]\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_rank_processes_do_not_outlive_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    with program(tmp_path, "wait") as process:
        assert process.stdout is not None
        ranks = [os.pidfd_open(int(process.stdout.readline())) for _ in range(2)]
        process.send_signal(number)
        try:
            assert all(wait_for_end(rank) for rank in ranks)
        finally:
            for rank in ranks:
                os.close(rank)
        process.communicate(timeout=LIMIT)


async def test_argument_that_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(TypeError, match="fn must be importable, a function at the top of a module"):
        await run_processes(2, lambda pg: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"fn and its arguments are pickled .* cannot be: cannot pickle 'generator'"):
        await run_processes(2, jobs.describe_rank, (i for i in range(3)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world_size": 0}, ValueError, "world_size=0: give the number of ranks"),
        ({"fn": None}, TypeError, "fn must be an async function"),
        ({"timeout": "1"}, TypeError, "timeout must be seconds"),
        ({"loop": "trio"}, ValueError, "loop='trio': must be 'asyncio' or 'uvloop'"),
    ],
)
async def test_error_names_wrong_arguments_of_the_run(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        await run_processes(**({"world_size": 2, "fn": jobs.describe_rank} | arguments))
