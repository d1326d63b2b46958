"""The failures that the launcher reports: the first cause last, with its traceback, and other ranks in one line."""

from __future__ import annotations

import math
import os
import py_compile
import re
import signal
import subprocess
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiocoll.cli import main
from aiocoll.cli.rank import Exit, Report
from aiocoll.cli.verdict import RankOutcome, find_culprit, summarize_ends

from ..internals import Limits

if TYPE_CHECKING:
    from tests.cli.conftest import Launch

#: A script: ranks meet, then rank 1 runs `fault` and the other ranks run `other`.
SCRIPT = """
import asyncio, ctypes, os, signal, sys
import aiocoll

def deeper():
    {fault}

async def main():
    async with aiocoll.new_group() as pg:
        await pg.barrier()
        if pg.rank() == 1:
            deeper()
        {other}

asyncio.run(main())
"""
BARRIER = "await pg.barrier()"


def blocks(err: str) -> list[list[str]]:
    """Split standard error into sections, each of which begins with a line of the launcher."""
    found: list[list[str]] = []
    for line in err.splitlines():
        if line.startswith("aiocoll run:") or not found:
            found.append([])
        found[-1].append(line)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 7, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (3, 4))])
def test_launcher_prints_the_full_traceback_of_the_raising_rank_last(launch: Launch, ranks: int) -> None:
    script = SCRIPT.format(fault="raise ValueError('no data')", other=BARRIER)
    done = launch("-n", ranks, script=script).finish()
    assert done.returncode == 1
    *others, last = blocks(done.stderr)
    assert last[:2] == ["aiocoll run: rank 1 failed first; exit code 1:", "[1] Traceback (most recent call last):"]
    assert last[-1] == "[1] ValueError: no data"
    assert "[1]     deeper()" in last
    assert all(line.startswith("[1] ") for line in last[1:])
    assert done.stderr.count("no data") == len([line for line in last if "no data" in line]), (
        "another rank shows the error of rank 1"
    )
    # Rank 1 may fail while the others are still in the first barrier.
    place = re.escape(f"{launch.path / 'script.py'}:") + "(10|13) in main"
    for (line,) in others:
        ends = rf"failed in consequence: Group(Revoked)?Error \({place}\)|(was|were) ended by the launcher \(SIGTERM\)"
        assert re.fullmatch(rf"aiocoll run: ranks? [\d, -]+ ({ends})", line), line


FAULTS = {
    "sys.exit(3)": (3, "rank 1 exited with code 3"),
    "sys.exit('no such file')": (1, "rank 1 exited with code 1"),
    "os._exit(4)": (4, "rank 1 exited with code 4"),
    "os.kill(os.getpid(), signal.SIGKILL)": (137, "rank 1 was killed by SIGKILL"),
    "ctypes.string_at(0)": (139, "rank 1 was killed by SIGSEGV"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_rank_that_ends_without_a_traceback_is_blamed(launch: Launch, fault: str) -> None:
    done = launch("-n", 3, script=SCRIPT.format(fault=fault, other=BARRIER)).finish()
    code, words = FAULTS[fault]
    assert done.returncode == code
    *others, one = [line for line in done.stderr.splitlines() if line.startswith("aiocoll run:")]
    assert one == f"aiocoll run: {words}"
    ends = r"failed in consequence: \w+Error \(.*script\.py:\d+ in main\)|(was|were) ended by the launcher \(SIGTERM\)"
    assert {re.fullmatch(rf"aiocoll run: ranks? (0, 2|0|2) ({ends})", line) is None for line in others} == {False}


REACTIONS = {
    "a handler that exits": "try: await pg.barrier()\n        except aiocoll.GroupError: sys.exit(9)",
    "an error made of another": "try: await pg.barrier()\n        except aiocoll.GroupError as e: raise OSError from e",
    "a mistake in a handler": "try: await pg.barrier()\n        except aiocoll.GroupError: return {}['absent']",
    "a group of tasks": "async with asyncio.TaskGroup() as tasks: tasks.create_task(pg.barrier().join())",
    "a handled error before": "try: {}['absent']\n        except KeyError: await pg.barrier()",
    "the error itself": "await pg.barrier()",
}


#: Rank 1 ends only when no other rank holds the pipe open, so that the launcher notices the other ends first.
ENDING = """
import select
others = os.environ['RANK'] != '1'
held = os.open(sys.argv[1], os.O_RDWR if others else os.O_RDONLY | os.O_NONBLOCK)
try:
    asyncio.run(main())
finally:
    if not others:
        writers = select.poll()
        writers.register(held, 0)
        writers.poll()
"""


@pytest.mark.slow
@pytest.mark.parametrize("reaction", REACTIONS)
def test_rank_that_fails_because_of_another_rank_is_not_blamed(
    launch: Launch, limits: Limits, capfd: pytest.CaptureFixture[str], reaction: str
) -> None:
    """Let rank 1 fail by itself, but let its process end last."""
    limits(run_release_timeout=30)
    script = SCRIPT.format(fault="raise ValueError('no data')", other=REACTIONS[reaction])
    script = script.replace("asyncio.run(main())", ENDING)
    os.mkfifo(launch.path / "fifo")
    assert main.main(["run", "-n", "3", launch.write(script), str(launch.path / "fifo")]) == 1
    *others, last = blocks(capfd.readouterr().err)
    assert last[0] == "aiocoll run: rank 1 failed first; exit code 1:"
    assert last[-1] == "[1] ValueError: no data"
    ranks = re.findall(r"^aiocoll run: ranks? ([02, ]+) ", "\n".join(line for block in others for line in block), re.M)
    assert sorted(", ".join(ranks).split(", ")) == ["0", "2"]


@pytest.mark.slow
def test_rank_that_fails_before_the_rendezvous_is_blamed(launch: Launch, tmp_path: Path) -> None:
    for source, error in {
        "import absent_module": "[1] ModuleNotFoundError: No module named 'absent_module'",
        "x = = 1": "[1] SyntaxError: invalid syntax",
    }.items():
        (tmp_path / "part.py").write_text(source)
        script = "import os\nif os.environ['RANK'] == '1': import part\n" + SCRIPT.format(fault="pass", other=BARRIER)
        done = launch("-n", 2, script=script).finish()
        *others, last = blocks(done.stderr)
        assert (done.returncode, last[0]) == (1, "aiocoll run: rank 1 failed first; exit code 1:")
        assert f'[1]   File "{tmp_path / "part.py"}", line 1' in "\n".join(last)
        assert last[-1] == error
        assert [block[0] for block in others] == ["aiocoll run: rank 0 was ended by the launcher (SIGTERM)"]


@pytest.mark.slow
def test_error_of_a_script_that_cannot_be_loaded_looks_as_printed_by_python(launch: Launch) -> None:
    done = launch("-n", 1, script="x = = 1").finish()
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        "aiocoll run: rank 0 failed first; exit code 1:",
        f'[0]   File "{launch.path / "script.py"}", line 1',
        "[0]     x = = 1",
        "[0]         ^",
        "[0] SyntaxError: invalid syntax",
    ]
    done = launch("-n", 1, "-m", "absent_module").finish()
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "aiocoll run: rank 0 exited with code 1"
    assert "[0] " in done.stderr
    assert "No module named absent_module" in done.stderr


@pytest.mark.slow
def test_launcher_prints_the_first_reporting_rank_last_if_no_rank_failed_by_itself(launch: Launch) -> None:
    """Let rank 1 exit with code 0 while the other ranks wait for it."""
    done = launch("-n", 3, script=SCRIPT.format(fault="os._exit(0)", other=BARRIER)).finish()
    assert done.returncode == 1
    *others, last = blocks(done.stderr)
    assert re.match(
        r"aiocoll run: rank [02] was the first to report a failure, and none here failed by itself; exit code 1:",
        last[0],
    )
    assert "rank 1" in last[-1]
    assert "aiocoll run: rank 1 exited with code 0" in (block[0] for block in others)


STUCK = """
    import asyncio, os, signal, sys, time
    import aiocoll

    async def main():
        if os.environ["RANK"] == "1":
            with open(sys.argv[1], "w") as fifo:
                fifo.write(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            with open(sys.argv[1]) as fifo:
                pid = fifo.read()
            while open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "T":
                await asyncio.sleep(0.01)
            raise aiocoll.CollectiveTimeoutError("rank 1 does not come")

    asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_launcher_prints_a_stopped_rank_last_if_the_stop_made_other_ranks_fail(
    launch: Launch, limits: Limits, capfd: pytest.CaptureFixture[str]
) -> None:
    limits(run_release_timeout=0.2, run_grace_period=0.2)
    os.mkfifo(launch.path / "fifo")
    assert main.main(["run", "-n", "2", launch.write(STUCK), str(launch.path / "fifo")]) == 1
    *others, error, last = capfd.readouterr().err.splitlines()
    assert "aiocoll run: rank 0 was the first to report a failure; exit code 1:" in others
    assert error == "[0] aiocoll.errors.CollectiveTimeoutError: rank 1 does not come"
    assert re.fullmatch(
        r"aiocoll run: rank 1 was stuck: process \d+ stopped, by SIGSTOP or a debugger; "
        r"it was ended by the launcher \(SIGKILL\)",
        last,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="finds unix sockets of the ranks through /proc")
def test_last_output_line_shows_where_a_rank_blocks_its_event_loop(launch: Launch) -> None:
    script = SCRIPT.format(fault="import time; time.sleep(600)", other="await pg.barrier(timeout=2)")
    done = launch("-n", 3, script=script).finish()
    assert done.returncode == 1
    place = re.escape(f"{launch.path / 'script.py'}:6 in deeper, called from {launch.path / 'script.py'}:12 in main")
    assert re.fullmatch(
        rf"aiocoll run: rank 1 was stuck: event loop blocked for [23]\.\d s, at {place}, called from .*; "
        r"it was ended by the launcher \(SIGTERM\)",
        done.stderr.splitlines()[-1],
    )


def test_death_by_a_signal_that_the_launcher_has_not_sent_is_reported_as_a_failure(launch: Launch) -> None:
    """Let rank 1 handle SIGTERM by killing itself with SIGKILL, as another process might."""
    script = """
        import os, signal, sys, time
        if os.environ["RANK"] == "1":
            signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            open(sys.argv[1], "w").close()
            while True:
                time.sleep(0.05)
        open(sys.argv[1]).read()
        sys.exit(3)
    """
    os.mkfifo(launch.path / "fifo")
    done = launch("-n", 2, script=script, args=[launch.path / "fifo"]).finish()
    assert done.stderr.splitlines() == [
        "aiocoll run: rank 1 was killed by SIGKILL",
        "aiocoll run: rank 0 exited with code 3",
    ]


@pytest.mark.slow
def test_launcher_of_another_host_names_the_first_report_of_its_ranks(
    launch: Launch, tmp_path: Path, port: int
) -> None:
    file = tmp_path / "job.key"
    file.write_text("0123456789abcdef")
    file.chmod(0o600)
    where = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "--job-key-file", file)
    script = SCRIPT.format(fault="raise ValueError('no data')", other=BARRIER)
    other = launch("-n", 1, "--node-rank", 1, *where, script=script.replace("== 1", "== 0"))
    done = launch("-n", 1, *where, script=script.replace("== 1", "== 0")).finish()
    assert done.stderr.splitlines()[-1] == "[0] ValueError: no data"
    (last,) = blocks(other.finish().stderr)
    assert last[0].startswith("aiocoll run: rank 1 was the first to report a failure")
    assert re.match(r"\[1\] aiocoll\.errors\..*rank 0.*no data", last[-1])


INTERRUPTED = """
    import asyncio, os, time

    async def main():
        print("ready")
        await asyncio.Event().wait()

    if os.environ["RANK"] != "2":
        asyncio.run(main())
    print("ready"); time.sleep(600)
"""


@pytest.mark.parametrize("options", [(), ("--verbose",)])
def test_ctrl_c_prints_one_line_per_interrupted_source_line_and_tracebacks_on_request(
    launch: Launch, options: tuple[str, ...]
) -> None:
    """Interrupt ranks 0 and 1 in an await, and rank 2 in a program without an event loop."""
    job = launch(*options, "-n", 3, script=INTERRUPTED)
    job.read("[0] ready", "[1] ready", "[2] ready")
    job.process.send_signal(signal.SIGINT)
    done = job.finish()
    assert done.returncode == 130
    lines = done.stderr.splitlines()
    script = launch.path / "script.py"
    words = [line for line in lines if line.startswith("aiocoll run:")]
    assert words[0] == f"aiocoll run: ranks 0-1 were interrupted at {script}:6 in main"
    assert words[1:] == [
        f"aiocoll run: rank 2 was interrupted at {script}:10 in <module>",
        "aiocoll run: stopped by SIGINT",
    ]
    shown = [line for line in lines if line not in words]
    assert [line for line in shown if line.endswith("KeyboardInterrupt")] == [
        f"[{rank}] KeyboardInterrupt" for rank in range(3) if options
    ]
    assert bool(shown) == bool(options)
    assert shown == sorted(shown, key=lambda line: line[:3]), "tracebacks of several ranks are mixed"


def test_traceback_of_a_failure_before_ctrl_c_is_still_printed(launch: Launch, tmp_path: Path) -> None:
    """Send the signal when rank 0 has failed, while its interpreter waits for a thread."""
    script = """
        import sys, threading
        threading.Thread(target=lambda: open(sys.argv[1]).read()).start()
        raise ValueError('no data')
    """
    os.mkfifo(tmp_path / "fifo")
    job = launch("-n", 1, script=script, args=[tmp_path / "fifo"])
    assert job.process.stderr.readline() == "aiocoll run: failed, but still running: rank 0\n"
    job.process.send_signal(signal.SIGINT)
    (tmp_path / "fifo").write_text(".")
    done = job.finish()
    assert done.returncode == 130
    assert done.stderr.splitlines()[-2:] == ["[0] ValueError: no data", "aiocoll run: stopped by SIGINT"]


def test_launcher_prints_a_mismatch_once_with_both_calls(launch: Launch) -> None:
    script = """
        import asyncio
        import aiocoll
        import numpy as np

        async def main():
            async with aiocoll.new_group() as pg:
                if pg.rank() == 1:
                    await pg.allreduce(np.ones(7))
                else:
                    await pg.allreduce(np.ones(10))

        asyncio.run(main())
    """
    done = launch("-n", 2, script=script).finish()
    assert done.returncode == 1
    assert done.stderr.count("Collectives differ") == 1
    assert done.stderr.count("rank 1 called ALLREDUCE(shape=[7]") == 1
    assert done.stderr.count("rank 0 called ALLREDUCE(shape=[10]") == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("aiocoll run:")]
    rank = 0 if "rank 0 was the first" in lines[1] else 1
    line = 9 if rank == 0 else 11  # the line of the other rank's call
    place = f"{launch.path / 'script.py'}:{line} in main"
    assert lines == [
        f"aiocoll run: rank {1 - rank} failed: CollectiveMismatchError ({place})",
        f"aiocoll run: ranks made different calls; rank {rank} was the first to report it; exit code 1:",
    ]


def test_launcher_prints_an_equal_error_of_all_ranks_once(
    launch: Launch, limits: Limits, capfd: pytest.CaptureFixture[str]
) -> None:
    limits(run_release_timeout=30)
    script = launch.write("raise ValueError('no data')")
    assert main.main(["run", "-n", "3", script]) == 1
    others, *lines = capfd.readouterr().err.splitlines()
    assert re.fullmatch(
        rf"aiocoll run: ranks (0-1|0, 2|1-2) failed too: ValueError \({re.escape(script)}:1 in <module>\)", others
    )
    assert re.fullmatch(r"aiocoll run: rank [012] failed first; exit code 1:", lines[0])
    assert re.fullmatch(r"\[[012]\] ValueError: no data", lines[-1])


@pytest.mark.slow
def test_tracebacks_that_ranks_print_are_not_interleaved(launch: Launch) -> None:
    """Let the ranks print their tracebacks line by line in turn."""
    script = """
        import os, sys, traceback
        rank, turns = int(os.environ['RANK']), sys.argv[1:]
        mine, next_one = os.open(turns[rank], os.O_RDWR), os.open(turns[(rank + 1) % 3], os.O_RDWR)
        try:
            raise ValueError('no data')
        except ValueError:
            lines = traceback.format_exc().splitlines(True)
        if rank == 0:
            os.write(mine, b'.')
        for line in ['before\\n', *lines]:
            os.read(mine, 1)
            sys.stderr.write(line)
            os.write(next_one, b'.')
    """
    turns = [launch.path / f"turn{rank}" for rank in range(3)]
    for turn in turns:
        os.mkfifo(turn)
    done = launch("-n", 3, script=script, args=turns).finish()
    ranks = [line[:3] for line in done.stderr.splitlines() if "before" not in line]
    assert sorted(set(ranks)) == ["[0]", "[1]", "[2]"]
    assert len([1 for a, b in pairwise(ranks) if a != b]) == 2, done.stderr


@pytest.mark.slow
def test_failing_rank_can_finish_its_exit_handlers(launch: Launch) -> None:
    """Let rank 1 wait at exit until the launcher has ended rank 0: the launcher sends rank 1 no signal."""
    script = """
        import atexit, os, signal, sys
        print(os.environ['RANK'], end=' ready\\n')
        def tidy():
            print('tidied up')
        if os.environ['RANK'] == '1':
            fifo = open(sys.argv[1])
            def on_exit():
                fifo.read()  # until the launcher has ended rank 0
                tidy()
            atexit.register(on_exit)
            raise ValueError('no data')
        held = os.open(sys.argv[1], os.O_WRONLY)
        signal.pause()
    """
    os.mkfifo(launch.path / "fifo")
    done = launch("-n", 2, script=script, args=[launch.path / "fifo"]).finish()
    assert "[1] tidied up" in done.stdout
    assert done.stderr.splitlines()[0] == "aiocoll run: rank 0 was ended by the launcher (SIGTERM)"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "[1] ValueError: no data")


@pytest.mark.slow
def test_rank_that_exits_when_the_launcher_ends_it_is_not_blamed(launch: Launch) -> None:
    """Let rank 1 miss a barrier and exit by SIGTERM; the other rank fails first, by its timeout."""
    script = """
import asyncio, signal, sys, time
import aiocoll

async def main():
    async with aiocoll.new_group() as pg:
        await pg.barrier()
        if pg.rank() == 1:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
            while True:
                await asyncio.sleep(0.05)
        await pg.barrier(timeout=0.1)

asyncio.run(main())
"""
    done = launch("-n", 2, script=script).finish()
    *others, last = blocks(done.stderr)
    assert others[-1] == ["aiocoll run: rank 1 exited with code 5"]
    assert last[0] == (
        "aiocoll run: rank 0 was the first to report a timeout: it waited for rank 1 of group 'world:0'; exit code 1:"
    )
    assert "CollectiveTimeoutError" in last[-1]
    assert done.returncode == 1


@pytest.mark.slow
def test_failed_rank_whose_process_does_not_end_is_reported(launch: Launch) -> None:
    """Let a thread keep the interpreter of a failed rank alive; the job ends when the thread ends."""
    script = """
        import sys, threading
        threading.Thread(target=lambda: open(sys.argv[1]).read()).start()
        raise ValueError('no data')
    """
    os.mkfifo(launch.path / "fifo")
    job = launch("-n", 1, script=script, args=[launch.path / "fifo"])
    reported = [job.process.stderr.readline() for _ in range(5)]
    assert reported[0] == "aiocoll run: failed, but still running: rank 0\n"
    assert reported[-1] == "[0] ValueError: no data\n"
    (launch.path / "fifo").write_text(".")
    done = job.finish()
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, "[0] ValueError: no data")


def test_processes_spawned_by_a_rank_can_import_the_main_program(launch: Launch) -> None:
    script = """
        import multiprocessing, os

        def square(x):
            return x * x

        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                print(pool.map(square, [1, 2, 3]))
    """
    done = launch("-n", 1, script=script).finish()
    assert (done.returncode, done.stdout) == (0, "[0] [1, 4, 9]\n"), done.stderr


# -- module names and import paths of the program, equal to those under Python itself

PLACE = """
import json, sys, __main__
class Here: pass
def own(): return Here
print(json.dumps([__name__, __file__, sys.argv, sys.path[0], __spec__ and __spec__.name, __package__,
                  __main__ is sys.modules['__main__'], __main__.Here is own(), __builtins__.__name__,
                  type(__loader__).__name__, sorted(name for name in globals() if not name.startswith('__'))]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["script", "relative", "link", "pyc", "archive", "module", "package"])
def test_program_under_the_launcher_has_the_module_names_that_python_provides(
    launch: Launch, tmp_path: Path, form: str
) -> None:
    (tmp_path / "place.py").write_text(PLACE)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "__main__.py").write_text(PLACE)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "place.py").symlink_to(tmp_path / "place.py")
    py_compile.compile(str(tmp_path / "place.py"), str(tmp_path / "place.pyc"))
    with zipfile.ZipFile(tmp_path / "place.pyz", "w") as archive:
        archive.writestr("__main__.py", PLACE)
    command = {
        "script": [str(tmp_path / "place.py")],
        "relative": ["place.py"],
        "link": ["links/place.py"],
        "pyc": ["place.pyc"],
        "archive": ["place.pyz"],
        "module": ["-m", "place"],
        "package": ["-m", "pack"],
    }[form] + ["-x", "y z"]
    plain = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=True)
    done = launch("-n", 1, *command).finish()
    assert done.stdout == f"[0] {plain.stdout}", done.stderr


def test_failure_of_a_forked_child_is_not_reported_as_a_failure_of_the_rank(launch: Launch) -> None:
    script = """
        import os, sys
        child = os.fork()
        if not child:
            raise ValueError('of the child')
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        print('fine')
    """
    done = launch("-n", 1, script=script).finish()
    assert (done.returncode, done.stdout) == (0, "[0] fine\n"), done.stderr
    assert done.stderr.splitlines()[-1] == "[0] ValueError: of the child"


def test_excepthook_that_a_program_has_set_is_called(launch: Launch) -> None:
    script = (
        "import sys\nsys.excepthook = lambda *a: print('hooked', a[1], file=sys.stderr)\nraise ValueError('no data')"
    )
    done = launch("-n", 1, script=script).finish()
    lines = done.stderr.splitlines()
    assert (lines[0], lines[-1], done.returncode) == ("[0] hooked no data", "[0] ValueError: no data", 1)


def make_outcome(rank: int, time: float, error: str = "", *, degree: int = 0, signalled: int = 0) -> RankOutcome:
    """Return the outcome of a rank that failed by an exception, or by a signal."""
    report = (
        Report(rank, time, degree, None, error, f"a.py:{rank} in main", [], "world:0", "Traceback") if error else None
    )
    return RankOutcome(rank, report, Exit(rank, time + 1, -signalled if signalled else 1, False))


LOST = "aiocoll.errors.PeerLostError: rank 2 is lost"
DIFFER = "aiocoll.errors.CollectiveMismatchError: Collectives differ: rank 0 called A; rank 2 called B"


@pytest.mark.parametrize(
    ("outcomes", "stuck", "expected"),
    [
        (
            [make_outcome(0, 2.0, LOST, degree=2), make_outcome(1, 1.0, "ValueError: no data")],
            {},
            ["rank 1 failed first: ValueError: no data (a.py:1 in main)",
             "rank 0 failed in consequence: PeerLostError (a.py:0 in main)"],
        ),
        (
            [make_outcome(0, 2.0, LOST, degree=2), make_outcome(2, 1.0, signalled=9)],
            {},
            ["rank 2 was killed by SIGKILL", "rank 0 failed in consequence: PeerLostError (a.py:0 in main)"],
        ),
        (
            [make_outcome(0, 2.0, LOST, degree=2), make_outcome(2, 3.0, signalled=9)],
            {2: "process 7 stopped"},
            ["rank 2 was stuck: process 7 stopped; it was killed by SIGKILL",
             f"rank 0 was the first to report a failure: {LOST} (a.py:0 in main)"],
        ),
        (
            [make_outcome(0, 2.0, DIFFER, degree=2), make_outcome(2, 3.0, DIFFER, degree=2)],
            {},
            [f"ranks made different calls: {DIFFER} (a.py:0 in main)",
             "rank 2 failed: CollectiveMismatchError (a.py:2 in main)"],
        ),
    ],
    ids=["exception", "killed", "stopped", "mismatch"],
)  # fmt: skip
def test_summary_of_a_failed_job_begins_with_the_cause(
    outcomes: list[RankOutcome], stuck: dict[int, str], expected: list[str]
) -> None:
    by_rank = {outcome.rank: outcome for outcome in outcomes}
    to_blame = find_culprit({rank: each for rank, each in by_rank.items() if rank not in stuck}, math.inf)
    assert to_blame is not None
    assert list(summarize_ends(by_rank, to_blame, stuck)) == expected
