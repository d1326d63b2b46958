"""`kill -USR2` of the launcher or of a rank: ranks print or write dumps, and the job continues."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiocoll.cli.rank import _expects

if TYPE_CHECKING:
    from tests.cli.conftest import Job, Launch

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

#: A script: ranks meet, then all except rank 0 wait in a barrier until rank 0 has read a byte.
SCRIPT = """
import asyncio, os, sys
import aiocoll

async def main():
    async with aiocoll.new_group() as pg:
        if pg.rank() == 0:
            await pg.barrier()
            print("ready", os.getpid())
            byte = await asyncio.to_thread(os.read, os.open(sys.argv[1], os.O_RDWR), 1)
            await pg.barrier()
        else:
            await pg.barrier()
            work = pg.barrier()
            print("ready", os.getpid())
            await work
    print("done")

asyncio.run(main())
"""


def wait_until_ready(job: Job, ranks: int) -> dict[int, int]:
    """Wait until all ranks have printed "ready"; return their processes by rank."""
    found: dict[int, int] = {}
    while len(found) < ranks:
        line = job.process.stdout.readline()
        assert line, job.process.stderr.read()
        if match := re.fullmatch(r"\[(\d+)\] ready (\d+)\n", line):
            found[int(match[1])] = int(match[2])
    return found


def read_until(job: Job, *patterns: str) -> str:
    """Read standard error until all of `patterns` are in it."""
    output = ""
    while not all(re.search(pattern, output) for pattern in patterns):
        line = job.process.stderr.readline()
        assert line, output
        output += line
    return output


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4, *(pytest.param(ranks, marks=pytest.mark.soak) for ranks in (2, 3))])
def test_signal_to_the_launcher_dumps_every_rank_and_the_job_continues(
    launch: Launch, tmp_path: Path, ranks: int
) -> None:
    os.mkfifo(tmp_path / "fifo")
    job = launch("-n", ranks, script=SCRIPT, args=[tmp_path / "fifo"])
    pids = wait_until_ready(job, ranks)
    for _ in range(2):
        job.process.send_signal(signal.SIGUSR2)
        requests = [f"aiocoll run: rank {rank}, process {pid}: dump requested" for rank, pid in pids.items()]
        dumps = [
            rf"\[{rank}\] group 'world:0', rank {rank} of {ranks}, process {pid}, open" for rank, pid in pids.items()
        ]
        waits = [
            rf"\[{rank}\]   pending: BARRIER \(sequence 2\) at .*script\.py:14 in main" for rank in range(1, ranks)
        ]
        read_until(job, *requests, *dumps, *waits)
    (tmp_path / "fifo").write_bytes(b".")
    done = job.finish()
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] done" for rank in range(ranks)]


def test_signal_to_a_rank_dumps_only_that_rank(launch: Launch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    job = launch("-n", 2, script=SCRIPT, args=[tmp_path / "fifo"])
    pids = wait_until_ready(job, 2)
    os.kill(pids[1], signal.SIGUSR2)
    output = read_until(job, r"\[1\] group 'world:0'", "pending: BARRIER")
    assert "[0]" not in output
    (tmp_path / "fifo").write_bytes(b".")
    assert job.finish().returncode == 0


@pytest.mark.slow
def test_dump_is_written_to_the_chosen_directory(launch: Launch, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    job = launch("-n", 2, script=SCRIPT, args=[tmp_path / "fifo"], env={"AIOCOLL_DUMP_DIR": str(tmp_path / "dumps")})
    wait_until_ready(job, 2)
    job.process.send_signal(signal.SIGUSR2)
    read_until(job, "rank 0, .*dump requested", "rank 1, .*dump requested")
    (tmp_path / "fifo").write_bytes(b".")
    done = job.finish()
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(file.name for file in (tmp_path / "dumps").iterdir()) == [
        "dump-world%3A0-0.json",
        "dump-world%3A0-1.json",
    ]


def test_rank_without_a_group_prints_its_stack_on_the_dump_signal(launch: Launch) -> None:
    script = "import os, sys\ndef here():\n    print('ready', os.getpid())\n    os.read(fd, 1)\n"
    os.mkfifo(launch.path / "fifo")
    script += "fd = os.open(sys.argv[1], os.O_RDWR)\nhere()\nprint('done')"
    job = launch("-n", 1, script=script, args=[launch.path / "fifo"])
    wait_until_ready(job, 1)
    job.process.send_signal(signal.SIGUSR2)
    read_until(job, r"\[0\] SIGUSR2: this rank has no open group", r"script\.py\", line [34], in here")
    (launch.path / "fifo").write_bytes(b".")
    done = job.finish()
    assert (done.returncode, done.stdout) == (0, "[0] done\n")


def test_dump_signal_is_not_sent_to_a_rank_that_became_another_program(launch: Launch) -> None:
    """Check that SIGUSR2 is sent neither to a rank without a handler, nor to processes that a rank has started."""
    script = """
        import os, subprocess, sys
        if os.environ["RANK"] == "0":
            os.execvp("cat", ["cat", sys.argv[1]])
        child = subprocess.Popen(["cat", sys.argv[2]])
        print("ready", os.getpid())
        sys.exit(child.wait())
    """
    fifos = [launch.path / "zero", launch.path / "one"]
    for fifo in fifos:
        os.mkfifo(fifo)
    job = launch("-n", 2, script=script, args=fifos)
    with open(fifos[0], "wb"), open(fifos[1], "wb"):  # both ranks read until the files are closed
        job.process.send_signal(signal.SIGUSR2)
        read_until(
            job,
            "rank 0, .*no dump requested: it has no handler for SIGUSR2",
            "rank 1, .*dump requested",
            r"\[1\] SIGUSR2: ",
        )
    done = job.finish()
    assert done.returncode == 0, done.stderr


def test_dump_signal_is_expected_only_by_processes_that_handle_or_ignore_the_signal() -> None:
    old = signal.signal(signal.SIGUSR2, signal.SIG_DFL)
    try:
        assert not _expects(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        assert _expects(os.getpid(), signal.SIGUSR2)
        signal.signal(signal.SIGUSR2, lambda *_: None)
        assert _expects(os.getpid(), signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, old)
