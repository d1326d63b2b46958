"""`aiocoll run --max-restarts` on several hosts: launchers on one machine that agree through the store of host 0."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from .repairing_programs import ELASTIC, REPAIRING, Ranks, enough, states

if TYPE_CHECKING:
    from tests.cli.conftest import Job, Launch

pytestmark = pytest.mark.slow

Start = Callable[..., "Job"]


@pytest.fixture
def start(launch: Launch, tmp_path: Path, port: int) -> Start:
    """Return a function that starts the launcher of one host."""
    file = tmp_path / "job.key"
    file.touch(mode=0o600)
    file.write_text("0123456789abcdef")

    def start(host: int, *options: object, script: str, args: tuple[object, ...] = (), hosts: int = 2) -> Job:
        where = ("--nnodes", hosts, "--master-addr", "127.0.0.1", "--master-port", port, "--job-key-file", file)
        return launch("--node-rank", host, *where, *options, script=script, args=args)

    return start


FAILS = """
    import asyncio, os, signal, sys
    import aiocoll

    async def main():
        count = int(os.environ["AIOCOLL_RESTART_COUNT"])
        async with aiocoll.new_group() as pg:
            print("start", count, await pg.allreduce(2 ** pg.rank()))
            await pg.barrier()
            if pg.rank() == {rank} and count < {times}:
                {fault}
            await pg.barrier()

    asyncio.run(main())
    print("well")
"""


@pytest.mark.parametrize(
    ("fault", "rank"),
    [
        ("raise ValueError('no data')", 0),
        ("os.kill(os.getpid(), signal.SIGKILL)", 2),
        pytest.param("raise ValueError('no data')", 2, marks=pytest.mark.soak),
        pytest.param("os.kill(os.getpid(), signal.SIGKILL)", 0, marks=pytest.mark.soak),
    ],
)
def test_failure_of_a_rank_restarts_all_ranks_on_all_hosts(start: Start, rank: int, fault: str) -> None:
    script = FAILS.format(rank=rank, times=2, fault=fault)
    options = ("--nproc-list", "2,1", "--max-restarts", 2)
    jobs = [start(host, *options, script=script) for host in (1, 0)]
    one, zero = (job.finish() for job in jobs)
    assert (zero.returncode, one.returncode) == (0, 0), zero.stderr + one.stderr
    lines = sorted((zero.stdout + one.stdout).splitlines())
    assert [line for line in lines if "start" in line] == sorted(
        f"[{each}] start {count} 7" for each in range(3) for count in range(3)
    )
    assert [line for line in lines if "well" in line] == [f"[{each}] well" for each in range(3)]
    failure = "failed: ValueError: no data .*" if "raise" in fault else "was killed by SIGKILL"
    for host, done in enumerate((zero, one)):
        by = "" if host == rank // 2 else rf"host {rank // 2}: rank {rank} {failure}; "
        restarts = [line for line in done.stderr.splitlines() if "started again" in line]
        for number, line in enumerate(restarts, 1):
            expected = rf"aiocoll run: {by}all ranks are started again \(restart {number} of 2\)"
            assert re.fullmatch(expected, line), (expected, line)
        assert len(restarts) == 2


def test_restart_limit_counts_the_restarts_of_all_hosts(start: Start) -> None:
    script = FAILS.format(rank=1, times=9, fault="raise ValueError('no data')")
    jobs = [start(host, "-n", 1, "--max-restarts", 1, script=script) for host in (1, 0)]
    one, zero = (job.finish() for job in jobs)
    assert (zero.returncode, one.returncode) == (1, 1)
    assert sorted((zero.stdout + one.stdout).splitlines()) == [
        f"[{rank}] start {count} 3" for rank in range(2) for count in range(2)
    ]
    assert one.stderr.splitlines()[-1] == "[1] ValueError: no data", "the failed rank does not come last on its host"
    assert re.fullmatch(r"aiocoll run: host 1: rank 1 failed: ValueError: no data \(.*\)", zero.stderr.splitlines()[-1])


def test_restart_includes_a_host_whose_ranks_have_already_ended(start: Start, tmp_path: Path) -> None:
    """Use a program without a group, so that only the launchers can notify each other."""
    script = f"""
        import os, sys
        from pathlib import Path
        count, well = os.environ["AIOCOLL_RESTART_COUNT"], Path({str(tmp_path)!r}, "well")
        print("start", count)
        if os.environ["RANK"] == "1" and count == "0":
            sys.exit(3)
    """
    jobs = [start(host, "-n", 1, "--max-restarts", 1, script=script) for host in (1, 0)]
    one, zero = (job.finish() for job in jobs)
    assert (zero.returncode, one.returncode) == (0, 0)
    assert (zero.stdout, one.stdout) == ("[0] start 0\n[0] start 1\n", "[1] start 0\n[1] start 1\n")
    assert zero.stderr == (
        "aiocoll run: host 1: rank 1 exited with code 3; all ranks are started again (restart 1 of 1)\n"
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_restart_stops_waiting_ranks_on_other_hosts(start: Start, tmp_path: Path, rank: int) -> None:
    """Use a program without a group, so that no group can notify the ranks."""
    script = f"""
        import os, signal, sys
        if os.environ["AIOCOLL_RESTART_COUNT"] == "0":
            print("ready")
            if os.environ["RANK"] == "{rank}":
                open(sys.argv[1]).read()
                sys.exit(3)
            signal.pause()
    """
    os.mkfifo(tmp_path / "fifo")
    jobs = [start(host, "-n", 1, "--max-restarts", 1, script=script, args=(tmp_path / "fifo",)) for host in range(2)]
    for host, job in enumerate(jobs):
        job.read(f"[{host}] ready")
    (tmp_path / "fifo").write_text(".")
    done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [0, 0]
    failed = f"rank {rank} exited with code 3"
    assert done[rank].stderr.splitlines() == [
        f"aiocoll run: {failed}",
        "aiocoll run: all ranks are started again (restart 1 of 1)",
    ]
    assert done[1 - rank].stderr.splitlines() == [
        f"aiocoll run: rank {1 - rank} was ended by the launcher (SIGTERM)",
        f"aiocoll run: host {rank}: {failed}; all ranks are started again (restart 1 of 1)",
    ]


def test_late_host_joins_the_current_restart(start: Start) -> None:
    script = """
        import os, sys
        print("start", os.environ["RANK"], os.environ["AIOCOLL_RESTART_COUNT"])
        if os.environ["AIOCOLL_RESTART_COUNT"] == "0":
            sys.exit(3)
    """
    first = start(0, "-n", 1, "--max-restarts", 1, script=script)
    first.read("[0] start 0 1")
    one, zero = start(1, "-n", 1, "--max-restarts", 1, script=script).finish(), first.finish()
    assert (zero.returncode, one.returncode) == (0, 0)
    assert one.stdout == "[1] start 1 1\n"


@pytest.mark.parametrize(
    "victims", [(0,), (1, 2), *(pytest.param(each, marks=pytest.mark.soak) for each in ((3,), (0, 1)))], ids=str
)
def test_launchers_start_newcomers_of_an_elastic_group_on_each_host(
    start: Start, tmp_path: Path, victims: tuple[int, ...]
) -> None:
    args = (enough(tmp_path),)
    jobs = [start(host, "-n", 2, "--max-restarts", 2, script=ELASTIC, args=args) for host in range(2)]
    hosts = [Ranks(job) for job in jobs]
    for ranks in hosts:
        ranks.read("(member) of 4", 2)
    for rank in victims:
        hosts[rank // 2].kill(rank)
    for host, ranks in enumerate(hosts):
        left = [rank for rank in (2 * host, 2 * host + 1) if rank not in victims]
        times = ranks.read(r"whole after (\S+)", len(left)) if left else []
        assert all(float(time) < 10 for time in times)
    enough(tmp_path).touch()
    done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [0, 0], done
    text = "".join(f"[{rank}] {text}\n" for ranks in hosts for rank, text in ranks.lines)
    found = states(text + done[0].stdout + done[1].stdout)
    assert len(found) == 4
    assert found == found[:1] * 4
    assert found[0]["sum"] == found[0]["steps"] * 15
    lines = sorted(line for each in done for line in each.stderr.splitlines())
    assert [line.partition("; ")[0] for line in lines] == [
        f"aiocoll run: rank {rank} was killed by SIGKILL" for rank in victims
    ]
    numbers = [re.findall(r"newcomer is started in its place \(restart (\d) of 2\)", line) for line in lines]
    assert sorted(numbers) == [[str(1 + i)] for i in range(len(victims))]


def test_loss_of_all_ranks_on_all_hosts_restarts_all_ranks(start: Start, tmp_path: Path) -> None:
    args = (enough(tmp_path),)
    jobs = [start(host, "-n", 1, "--max-restarts", 4, script=REPAIRING, args=args) for host in range(2)]
    hosts = [Ranks(job) for job in jobs]
    for ranks in hosts:
        ranks.read("(member) of 2", 1)
    for rank, ranks in enumerate(hosts):
        ranks.kill(rank)
    for ranks in hosts:
        ranks.read("(member) of 2", 1)
    enough(tmp_path).touch()
    done = [job.finish() for job in jobs]
    assert [each.returncode for each in done] == [0, 0], done
    assert all("all ranks are started again" in each.stderr.splitlines()[-1] for each in done)
    found = states(done[0].stdout + done[1].stdout)
    assert [state["sum"] for state in found] == [found[0]["steps"] * 3] * 2


WAITS = """
    import os, time
    print("ready", os.getpid())
    while True:
        time.sleep(0.05)
"""


def wait_until_ready(job: Job) -> int:
    """Wait until the only rank of a host is ready; return its process."""
    return int(Ranks(job).read(r"ready (\d+)", 1)[0])


@pytest.mark.parametrize("host", [0, 1])
def test_signal_to_one_launcher_ends_the_job_on_all_hosts(start: Start, host: int) -> None:
    jobs = [start(each, "-n", 1, "--max-restarts", 5, script=WAITS) for each in range(2)]
    pids = [wait_until_ready(job) for job in jobs]
    jobs[host].process.send_signal(signal.SIGINT)
    done = [job.finish() for job in jobs]
    assert done[host].returncode == 130
    assert done[host].stderr.splitlines()[-1] == "aiocoll run: stopped by SIGINT"
    assert done[1 - host].returncode == 1
    assert done[1 - host].stderr.splitlines() == [
        f"aiocoll run: rank {1 - host} was ended by the launcher (SIGTERM)",
        f"aiocoll run: host {host} was stopped by SIGINT",
    ]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("host", [0, 1])
def test_signal_to_one_launcher_ends_ranks_that_ignore_it_on_all_hosts(start: Start, host: int) -> None:
    script = f"import signal\nfor n in (2, 15): signal.signal(n, signal.SIG_IGN)\n{textwrap.dedent(WAITS)}"
    options = ("-n", 1, "--max-restarts", 5, "--kill-after", 0.5)
    jobs = [start(each, *options, script=script) for each in range(2)]
    pids = [wait_until_ready(job) for job in jobs]
    jobs[host].process.send_signal(signal.SIGTERM)
    done = [job.finish() for job in jobs]
    assert [done[host].returncode, done[1 - host].returncode] == [143, 1]
    killed, last = done[host].stderr.splitlines()
    assert re.fullmatch(rf"aiocoll run: sent SIGKILL to rank {host}, \d s after SIGTERM", killed)
    assert last == "aiocoll run: stopped by SIGTERM"
    assert done[1 - host].stderr.splitlines() == [
        f"aiocoll run: rank {1 - host} was ended by the launcher (SIGKILL)",
        f"aiocoll run: host {host} was stopped by SIGTERM",
    ]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("host", [0, 1])
def test_death_of_a_launcher_ends_the_job_on_other_hosts(start: Start, host: int) -> None:
    jobs = [start(each, "-n", 1, "--max-restarts", 5, script=WAITS) for each in range(2)]
    pids = [wait_until_ready(job) for job in jobs]
    jobs[host].process.kill()
    done = jobs[1 - host].finish()
    assert done.returncode == 1
    stopped, why = done.stderr.splitlines()
    assert stopped == f"aiocoll run: rank {1 - host} was ended by the launcher (SIGTERM)"
    reason = (
        "its launcher has not reported for 6 s" if host else r"no store at 127\.0\.0\.1:\d+: nothing listens there.*"
    )
    assert re.fullmatch(rf"aiocoll run: host {host} is lost: {reason}", why)
    jobs[host].process.wait()
    assert not Path(f"/proc/{pids[1 - host]}").exists()


WRONG = [
    (("-n", 2, "--max-restarts", 3), "host 1 was started with --nproc-list 2,2 --max-restarts 3, another host with "
     "--nproc-list 1,1 --max-restarts 3: use the same arguments on all hosts"),
    (("-n", 1, "--max-restarts", 2), "host 1 was started with --nproc-list 1,1 --max-restarts 2, another host with "
     "--nproc-list 1,1 --max-restarts 3: use the same arguments on all hosts"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "message"), WRONG, ids=["ranks", "restarts"])
def test_different_restart_options_of_hosts_are_reported(
    start: Start, options: tuple[object, ...], message: str
) -> None:
    first = start(0, "-n", 1, "--max-restarts", 3, script=WAITS)
    wait_until_ready(first)
    done = start(1, *options, script=WAITS).finish()
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"aiocoll run: {message}\n")
    first.process.terminate()
    assert first.finish().returncode == 143


def test_second_launcher_of_a_host_is_refused(start: Start) -> None:
    first = start(0, "-n", 1, "--max-restarts", 3, script=WAITS)
    wait_until_ready(first)
    second = start(1, "-n", 1, "--max-restarts", 3, script=WAITS)
    wait_until_ready(second)
    done = start(1, "-n", 1, "--max-restarts", 3, script=WAITS).finish()
    assert done.returncode == 1
    taken = rf"host number 1 is taken by \S+ \(process {second.process.pid}\)"
    text = rf"aiocoll run: {taken}: give each host its own --node-rank\n"
    assert re.fullmatch(text, done.stderr)
    first.process.terminate()
    assert (first.finish().returncode, second.finish().returncode) == (143, 1)


def test_ctrl_c_ends_a_launcher_that_waits_for_host_0(start: Start) -> None:
    job = start(1, "-n", 1, "--max-restarts", 3, script=WAITS)
    text = job.process.stderr.readline()
    assert re.fullmatch(r"aiocoll run: looking for host 0 at 127\.0\.0\.1 port \d+ for 300 s\n", text)
    job.process.send_signal(signal.SIGINT)
    done = job.finish()
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "aiocoll run: stopped by SIGINT\n")
