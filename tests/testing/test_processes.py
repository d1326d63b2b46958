"""`run_processes`: the same as `run_ranks`, and what only processes can do: die."""

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
from tests.testing import jobs

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
async def test_each_rank_is_a_process(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOCOLL_JOB_KEY", "the key of another job")
    ranks = await run_processes(2, jobs.its_place, "a", 5, loop=loop)
    assert len({rank["pid"] for rank in ranks} | {os.getpid()}) == 3
    for number, rank in enumerate(ranks):
        assert (rank["rank"], rank["size"], rank["args"], rank["loop"]) == (number, 2, ("a", 5), loop)
        assert (rank["parent"], rank["total"]) == (os.getpid(), 1)
        assert rank["variables"] == {"RANK": str(number), "WORLD_SIZE": "2", "AIOCOLL_JOB_KEY": None}


async def test_options_are_theirs() -> None:
    options = GroupOptions(transport="tcp", job_key="a key of sixteen bytes")
    assert [rank["total"] for rank in await run_processes(2, jobs.its_place, options=options)] == [1, 1]


async def test_an_exception_arrives_with_its_traceback() -> None:
    with pytest.raises(KeyError, match="lost") as caught:
        await run_processes(3, jobs.fail, "raise")
    trace, first = caught.value.__notes__
    assert trace.startswith("its traceback on rank 1 of 3:\nTraceback")
    assert 'raise KeyError("lost")' in trace
    assert "aiocoll" not in trace
    assert first == "rank 1 of 3 failed first"


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
async def test_every_end_of_a_rank_is_told(how: str, error: Any, text: str) -> None:
    with pytest.raises(error, match=text) as caught:
        await run_processes(2, jobs.fail, how)
    assert "rank 1 of 2 failed first" in caught.value.__notes__


async def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises((AttributeError, pickle.PicklingError), match="lambda"):
        await run_processes(1, jobs.fail, "return")


async def test_a_timeout_tells_where_every_rank_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(children, "ANSWER", 0.5)
    with pytest.raises(TimeoutError) as caught:
        await run_processes(4, jobs.hang, timeout=4)  # less than it takes to find the stopped rank dead
    text = str(caught.value)
    assert text.startswith("ranks 0, 1, 2 and 3 of 4 did not end within 4 s\nrank 0 (process ")
    waits, spins, holds, stopped = (part.split("\n", 1)[1] for part in text.split("\nrank ")[1:])
    assert waits.startswith("  pending: <Work BARRIER seq=1 pending>\n")
    assert "await pg.barrier()" in waits
    assert "thread helper:" in waits
    assert "in wait_for_nothing" in waits
    assert "holding the event loop" in spins
    assert "in hang" in spins
    assert "Fatal Python error: Aborted" in holds
    assert "in hang" in holds
    assert stopped == "  it does not answer, and is not even able to abort: it may be stopped\n"


async def test_cancelling_it_ends_the_processes_and_what_they_started(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    os.mkfifo(file)
    lines = os.fdopen(os.open(file, os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0)
    with lines:
        running = asyncio.create_task(run_processes(2, jobs.leave_a_child, str(file)))
        readable = asyncio.Event()
        asyncio.get_running_loop().add_reader(lines, readable.set)
        pids: list[int] = []
        while len(pids) < 4:
            await readable.wait()
            readable.clear()
            pids += map(int, (lines.read() or b"").split())
        asyncio.get_running_loop().remove_reader(lines)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    assert not [pid for pid in pids if alive(pid)]


def alive(pid: int) -> bool:
    """Whether there is such a process; one that has ended and that nobody has waited for yet counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


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


def test_functions_of_a_script_can_be_run(tmp_path: Path) -> None:
    with program(tmp_path, "double") as process:
        assert process.communicate(timeout=60)[0] == "[42, 42]\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_processes_do_not_outlive_their_parent(tmp_path: Path, number: signal.Signals) -> None:
    with program(tmp_path, "wait") as process:
        assert process.stdout is not None
        ranks = [os.pidfd_open(int(process.stdout.readline())) for _ in range(2)]
        process.send_signal(number)
        try:
            # Readable when the process has ended, whoever its parent is by then.
            assert all(select.select([rank], [], [], 60)[0] for rank in ranks)
        finally:
            for rank in ranks:
                os.close(rank)
        process.communicate(timeout=60)


async def test_what_cannot_be_pickled_is_refused() -> None:
    with pytest.raises(TypeError, match="fn must be importable, a function at the top of a module"):
        await run_processes(2, lambda pg: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match=r"fn and its arguments travel .* these cannot: cannot pickle 'generator'"):
        await run_processes(2, jobs.its_place, (i for i in range(3)))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"world_size": 0}, ValueError, "world_size=0: give the number of ranks"),
        ({"fn": None}, TypeError, "fn must be an async function"),
        ({"timeout": "1"}, TypeError, "timeout must be seconds"),
        ({"loop": "trio"}, ValueError, "loop='trio': must be 'asyncio' or 'uvloop'"),
    ],
)
async def test_wrong_arguments_are_named(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        await run_processes(**({"world_size": 2, "fn": jobs.its_place} | arguments))
