"""`aiocoll run --max-restarts` on one host: lost ranks are replaced, or all ranks are started again."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiocoll.cli import main

from ..internals import Limits
from .repairing_programs import ELASTIC, REPAIRING, Ranks, enough, states

if TYPE_CHECKING:
    from tests.cli.conftest import Launch

pytestmark = pytest.mark.slow

SIZE = 3
#: Seconds from a kill until the group has its full size again; about 0.5 s on idle cores.
WITHIN = 10.0


def killed_line(rank: int, number: int, of: int) -> str:
    return (
        f"aiocoll run: rank {rank} was killed by SIGKILL; a newcomer is started in its place (restart {number} of {of})"
    )


def check_sums(output: str, size: int = SIZE) -> None:
    found = states(output)
    assert len(found) == size, output
    assert found == found[:1] * size, "the ranks have different states"
    assert found[0]["sum"] == found[0]["steps"] * (2**size - 1) > 0


@pytest.mark.parametrize(
    "victims", [(0,), (1, 2), *(pytest.param(each, marks=pytest.mark.soak) for each in ((1,), (2,), (0, 1)))], ids=str
)
def test_launcher_starts_newcomers_for_lost_ranks_of_an_elastic_group(
    launch: Launch, tmp_path: Path, victims: tuple[int, ...]
) -> None:
    job = launch("-n", SIZE, "--max-restarts", 2, script=ELASTIC, args=[enough(tmp_path)])
    ranks = Ranks(job)
    ranks.read("(member) of 3", SIZE)
    first = list(ranks.started)
    ranks.kill(*victims)
    times = ranks.read(r"whole after (\S+)", SIZE - len(victims))
    assert max(map(float, times)) < WITHIN
    enough(tmp_path).touch()
    done = job.finish()
    assert done.returncode == 0, done.stderr
    check_sums("".join(f"[{rank}] {text}\n" for rank, text in ranks.lines) + done.stdout)
    lines = sorted(re.sub(r"restart \d", "restart K", line) for line in done.stderr.splitlines())
    assert lines == [killed_line(rank, 0, 2).replace("restart 0", "restart K") for rank in victims]
    assert sorted(first) == [(rank, [str(rank), str(rank), None, "0"]) for rank in range(SIZE)]
    newcomers = ranks.started[SIZE:]
    assert sorted(rank for rank, _ in newcomers) == list(victims)
    assert [environment[:3] for _, environment in newcomers] == [[None, str(rank), "1"] for rank, _ in newcomers]
    assert sorted(environment[3] for _, environment in newcomers) == [str(1 + i) for i in range(len(victims))]


def test_elastic_group_survives_the_consecutive_loss_of_all_initial_ranks(launch: Launch, tmp_path: Path) -> None:
    """Kill each initial rank, one after the other, and one newcomer."""
    job = launch("-n", SIZE, "--max-restarts", 4, script=ELASTIC, args=[enough(tmp_path)])
    ranks = Ranks(job)
    ranks.read("(member) of 3", SIZE)
    for rank in (1, 0, 2, 0):
        ranks.kill(rank)
        assert max(map(float, ranks.read(r"whole after (\S+)", SIZE - 1))) < WITHIN
    enough(tmp_path).touch()
    done = job.finish()
    assert done.returncode == 0, done.stderr
    check_sums("".join(f"[{rank}] {text}\n" for rank, text in ranks.lines) + done.stdout)
    assert done.stderr.splitlines() == [killed_line(rank, 1 + i, 4) for i, rank in enumerate((1, 0, 2, 0))]


def test_newcomer_that_is_lost_before_it_joins_is_replaced(launch: Launch, tmp_path: Path) -> None:
    """Let the newcomer for rank 1 die when it starts; the next newcomer joins."""
    dies = "    if os.environ['AIOCOLL_RESTART_COUNT'] == '1': os.kill(os.getpid(), 9)\n"
    script = REPAIRING.replace("    asyncio.run(main())", f"{dies}    asyncio.run(main())")
    job = launch("-n", SIZE, "--max-restarts", 2, script=script, args=[enough(tmp_path)])
    ranks = Ranks(job)
    ranks.read("(member) of 3", SIZE)
    ranks.kill(1)
    ranks.read(r"whole after (\S+)", SIZE - 1)
    enough(tmp_path).touch()
    done = job.finish()
    assert (done.returncode, done.stderr.splitlines()) == (0, [killed_line(1, 1, 2), killed_line(1, 2, 2)])
    check_sums("".join(f"[{rank}] {text}\n" for rank, text in ranks.lines) + done.stdout)


def test_launcher_restarts_all_ranks_after_the_loss_of_all_ranks(launch: Launch, tmp_path: Path) -> None:
    """Allow one restart, which covers all ranks."""
    job = launch("-n", SIZE, "--max-restarts", 1, script=REPAIRING, args=[enough(tmp_path)])
    ranks = Ranks(job)
    ranks.read("(member) of 3", SIZE)
    ranks.kill(0, 1, 2)
    ranks.read("(member) of 3", SIZE)
    enough(tmp_path).touch()
    done = job.finish()
    assert done.returncode == 0, done.stderr
    check_sums("".join(f"[{rank}] {text}\n" for rank, text in ranks.lines) + done.stdout)
    assert done.stderr.splitlines()[-1] == "aiocoll run: all ranks are started again (restart 1 of 1)"
    assert sorted(ranks.started[SIZE:]) == [(rank, [str(rank), str(rank), None, "1"]) for rank in range(SIZE)]


def test_launcher_restarts_waiting_newcomers_after_the_loss_of_all_members(launch: Launch, tmp_path: Path) -> None:
    """Kill rank 0, the only member, while a newcomer for rank 1 waits for a group."""
    script = REPAIRING.replace(
        "        pg = await become_a_rank()", "        print('comes')\n        pg = await become_a_rank()"
    )
    script = script.replace(
        "                pg, state = await whole(pg, state)",
        "                print('has lost')\n                await asyncio.to_thread(lambda: open(sys.argv[2]).read())",
    )
    os.mkfifo(launch.path / "fifo")
    job = launch("-n", 2, "--max-restarts", 2, script=script, args=[enough(tmp_path), launch.path / "fifo"])
    ranks = Ranks(job)
    ranks.read("(member) of 2", 2)
    ranks.kill(1)
    ranks.read("(comes|has lost)", 2)
    ranks.kill(0)
    ranks.read("(member) of 2", 2)
    enough(tmp_path).touch()
    done = job.finish()
    assert done.returncode == 0, done.stderr
    check_sums(done.stdout, 2)
    lines = done.stderr.splitlines()
    assert lines[0] == killed_line(1, 1, 2)
    assert lines[-1] == "aiocoll run: all ranks are started again (restart 2 of 2)"


def test_failure_after_the_last_restart_ends_the_job(launch: Launch, tmp_path: Path) -> None:
    job = launch("-n", SIZE, "--max-restarts", 1, script=REPAIRING, args=[enough(tmp_path)])
    ranks = Ranks(job)
    ranks.read("(member) of 3", SIZE)
    ranks.kill(1)
    ranks.read(r"whole after (\S+)", SIZE - 1)
    ranks.kill(1)
    done = job.finish()
    assert done.returncode == 137
    lines = done.stderr.splitlines()
    assert (lines[0], lines[-1]) == (killed_line(1, 1, 1), "aiocoll run: rank 1 was killed by SIGKILL")
    assert len(ranks.started) == SIZE + 1


def test_rank_that_raises_is_replaced_and_its_traceback_is_printed(launch: Launch, tmp_path: Path) -> None:
    script = REPAIRING.replace(
        "total = await", "if os.environ.get('RANK') == '2' and state['steps'] == 5: raise ValueError('no data')\n"
        "                total = await",
    )  # fmt: skip
    job = launch("-n", SIZE, "--max-restarts", 1, script=script, args=[enough(tmp_path)])
    ranks = Ranks(job)
    ranks.read(r"whole after (\S+)", SIZE - 1)
    enough(tmp_path).touch()
    done = job.finish()
    lines = done.stderr.splitlines()
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(
        r"aiocoll run: rank 2 failed: ValueError: no data \(.*script\.py:\d+ in main\); a newcomer is started in its "
        r"place \(restart 1 of 1\)",
        lines[0],
    )
    assert (lines[1], lines[-1]) == ("[2] Traceback (most recent call last):", "[2] ValueError: no data")
    check_sums("".join(f"[{rank}] {text}\n" for rank, text in ranks.lines) + done.stdout)


def test_rank_that_ends_with_success_is_not_replaced(
    launch: Launch, limits: Limits, capfd: pytest.CaptureFixture[str]
) -> None:
    """Let one rank end while the other continues."""
    limits(run_replace_after=0)
    script = launch.write("""
        import asyncio, os, select
        import aiocoll
        from aiocoll.launcher import report_elastic

        async def main():
            async with aiocoll.new_group() as pg:
                report_elastic()
                pids = await pg.allgather_object(os.getpid())
                other = os.pidfd_open(pids[0]) if pg.rank() else None
                await pg.barrier()
            return other

        if (other := asyncio.run(main())) is not None:
            select.select([other], [], [])
    """)
    assert main.main(["run", "-n", "2", "--max-restarts", "3", script]) == 0
    assert capfd.readouterr() == ("", "")


def test_waiting_newcomer_is_stopped_when_the_other_ranks_end(launch: Launch) -> None:
    """Let rank 0 exit when the newcomer for rank 1 has started."""
    script = """
        import asyncio, os, signal, sys
        import aiocoll
        from aiocoll.launcher import report_elastic

        async def main():
            if "AIOCOLL_JOIN" in os.environ:
                print("joins")
            pg = await aiocoll.new_group()
            report_elastic()
            await pg.barrier()
            if pg.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.to_thread(lambda: open(sys.argv[1]).read())
            os._exit(0)

        asyncio.run(main())
    """
    os.mkfifo(launch.path / "fifo")
    job = launch("-n", 2, "--max-restarts", 3, script=script, args=[launch.path / "fifo"])
    job.read("[1] joins")
    (launch.path / "fifo").write_text(".")
    done = job.finish()
    assert (done.returncode, done.stderr.splitlines()) == (
        0,
        [
            killed_line(1, 1, 3),
            "aiocoll run: stopped rank 1: the other ranks have ended, so it cannot join them any more",
        ],
    )


def test_dump_can_be_requested_from_newcomers(launch: Launch, tmp_path: Path) -> None:
    job = launch("-n", 2, "--max-restarts", 1, script=REPAIRING, args=[enough(tmp_path)])
    ranks = Ranks(job)
    ranks.read("(member) of 2", 2)
    ranks.kill(1)
    ranks.read(r"whole after (\S+)", 1)
    job.process.send_signal(signal.SIGUSR2)
    text = ""
    while not re.search(rf"\[1\] group .* process {ranks.pids[1]}, open", text):
        line = job.process.stderr.readline()
        assert line, text
        text += line
    assert f"aiocoll run: rank 1, process {ranks.pids[1]}: dump requested" in text
    enough(tmp_path).touch()
    assert job.finish().returncode == 0


# -- programs that do not repair their group

FAILS = """
    import os, signal, sys
    count = int(os.environ["AIOCOLL_RESTART_COUNT"])
    print("start", count)
    if count < {times} and os.environ["RANK"] == "1":
        {fault}
    print("well")
"""


@pytest.mark.parametrize("fault", ["import absent_module", "os.kill(os.getpid(), signal.SIGKILL)", "sys.exit(3)"])
def test_launcher_restarts_all_ranks_of_a_program_that_is_not_elastic(launch: Launch, fault: str) -> None:
    done = launch("-n", 2, "--max-restarts", 3, script=FAILS.format(times=2, fault=fault)).finish()
    assert done.returncode == 0, done.stderr
    starts = [line for line in done.stdout.splitlines() if "start" in line]
    assert sorted(starts) == sorted(f"[{rank}] start {count}" for rank in range(2) for count in range(3))
    assert done.stdout.splitlines().count("[1] well") == 1
    restarts = [line for line in done.stderr.splitlines() if "started again" in line]
    assert restarts == [f"aiocoll run: all ranks are started again (restart {number} of 3)" for number in (1, 2)]


def test_program_that_cannot_start_is_restarted_up_to_the_limit(launch: Launch) -> None:
    done = launch("-n", 2, "--max-restarts", 2, script=FAILS.format(times=9, fault="import absent_module")).finish()
    assert done.returncode == 1
    assert [line for line in done.stdout.splitlines() if "[1]" in line] == [f"[1] start {count}" for count in range(3)]
    lines = done.stderr.splitlines()
    assert [line for line in lines if "failed first" in line] == ["aiocoll run: rank 1 failed first; exit code 1:"] * 3
    assert lines[-1] == "[1] ModuleNotFoundError: No module named 'absent_module'"


def test_failure_without_restarts_ends_the_job(launch: Launch, tmp_path: Path) -> None:
    """Use a group that could repair itself if restarts were allowed."""
    job = launch("-n", 2, script=REPAIRING, args=[enough(tmp_path)])
    ranks = Ranks(job)
    ranks.read("(member) of 2", 2)
    ranks.kill(1)
    done = job.finish()
    assert (done.returncode, done.stderr.splitlines()[-1]) == (137, "aiocoll run: rank 1 was killed by SIGKILL")
    assert len(ranks.started) == 2


def test_store_is_empty_after_a_restart_of_all_ranks(launch: Launch) -> None:
    """Check keys, queues, and the counter of connected workers."""
    script = """
        import asyncio, os
        from aiocoll.options import job_key
        from aiocoll.store import TCPStore

        async def main():
            where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            key, job = job_key(os.environ, None), os.environ["AIOCOLL_JOB_ID"]
            async with TCPStore(*where, world_size=2, key=key, job=job, timeout=20) as store:
                print(await store.num_keys(), await store.queue_len("q"))
                await store.set("seen" + os.environ["RANK"], b"")
                await store.wait(["seen0", "seen1"])
                await store.queue_push("q", b"1")
                await store.set("pushed" + os.environ["RANK"], b"")
                await store.wait(["pushed0", "pushed1"])
            if os.environ["AIOCOLL_RESTART_COUNT"] == "0":
                raise SystemExit(1)

        asyncio.run(main())
    """
    done = launch("-n", 2, "--max-restarts", 1, script=script).finish()
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    # The second rank may find the key that the first rank has set.
    assert {line.split(" ", 1)[1] for line in lines} <= {"0 0", "1 0"}
    assert {line for line in lines[2:] if line.endswith("0 0")}, lines


def test_restarted_ranks_meet_at_the_same_port(launch: Launch) -> None:
    script = """
        import asyncio, os, signal
        import aiocoll

        async def main():
            async with aiocoll.new_group() as pg:
                print(os.environ["MASTER_PORT"], await pg.allreduce(2 ** pg.rank()))
                await pg.barrier()
                if pg.rank() == 0 and os.environ["AIOCOLL_RESTART_COUNT"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
                await pg.barrier()

        asyncio.run(main())
    """
    done = launch("-n", 3, "--max-restarts", 1, script=script).finish()
    assert done.returncode == 0, done.stderr
    words = [line.split()[1:] for line in done.stdout.splitlines()]
    assert len(words) == 6
    assert {total for _, total in words} == {"7"}
    assert len({port for port, _ in words}) == 1


# -- the end of a job


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_launcher_ends_the_job_without_a_restart(
    launch: Launch, tmp_path: Path, number: signal.Signals
) -> None:
    job = launch("-n", 2, "--max-restarts", 5, script=REPAIRING, args=[enough(tmp_path)])
    ranks = Ranks(job)
    ranks.read("(member) of 2", 2)
    job.process.send_signal(number)
    done = job.finish()
    assert (done.returncode, done.stderr.splitlines()[-1]) == (128 + number, f"aiocoll run: stopped by {number.name}")
    assert "started again" not in done.stderr
    assert "started" not in done.stdout
    assert not [pid for pid in ranks.pids.values() if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize("moment", ["started again", "start"])
def test_ctrl_c_during_a_restart_ends_the_job(launch: Launch, moment: str) -> None:
    """Send Ctrl-C when the launcher has reported a restart, or when a restarted rank runs."""
    script = 'import os\nprint("start", os.getpid(), flush=True)\nraise SystemExit(os.environ["RANK"] == "0")'
    job = launch("-n", 2, "--max-restarts", 1000, script=script)
    pipe = job.process.stderr if moment == "started again" else job.process.stdout
    seen = 0
    while seen < 6:
        line = pipe.readline()
        assert line
        seen += moment in line
    job.process.send_signal(signal.SIGINT)
    done = job.finish()
    assert (done.returncode, done.stderr.splitlines()[-1]) == (130, "aiocoll run: stopped by SIGINT")
    for pid in re.findall(r"start (\d+)", done.stdout):
        assert not Path(f"/proc/{pid}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="waits for an end by a pidfd")
@pytest.mark.parametrize("elastic", [False, True])
def test_children_of_a_failed_rank_are_killed(launch: Launch, elastic: bool) -> None:
    script = """
        import asyncio, os, subprocess, sys
        import aiocoll
        from aiocoll.launcher import report_elastic

        async def main():
            pg = await aiocoll.new_group()
            if sys.argv[2] == "True":
                report_elastic()
            if "AIOCOLL_JOIN" not in os.environ:
                await pg.barrier()
            if os.environ.get("RANK") == "1" and os.environ["AIOCOLL_RESTART_COUNT"] == "0":
                null = subprocess.DEVNULL
                command = [sys.executable, "-c", "import signal; signal.pause()"]
                left = subprocess.Popen(command, stdout=null, stderr=null)
                print("left", left.pid)
                await asyncio.to_thread(lambda: open(sys.argv[1]).read())
                os._exit(1)
            if os.environ["AIOCOLL_RESTART_COUNT"] == "0":
                try:
                    await pg.barrier()
                except aiocoll.GroupError:
                    pg = await (await pg.shrink()).grow(1)
            await pg.barrier()
            print("well")
            await pg.shutdown()

        asyncio.run(main())
    """
    if not elastic:
        script = script.replace("except aiocoll.GroupError", "except ZeroDivisionError")
    os.mkfifo(launch.path / "fifo")
    job = launch("-n", 2, "--max-restarts", 1, script=script, args=[launch.path / "fifo", elastic])
    ranks = Ranks(job)
    (left,) = ranks.read(r"left (\d+)", 1)
    fd = os.pidfd_open(int(left))
    try:
        (launch.path / "fifo").write_text(".")
        ranks.read("(well)", 2)
        assert select.select([fd], [], [], 10)[0] == [fd], "the child was not killed"
    finally:
        os.close(fd)
    assert job.finish().returncode == 0


def test_report_of_an_elastic_group_is_accepted_only_from_the_rank_itself(launch: Launch) -> None:
    """Report an elastic group in a forked child, in a spawned child, and without a launcher: all are ignored."""
    script = """
        import multiprocessing, os, sys
        from aiocoll.launcher import report_elastic

        def fail():
            report_elastic()

        if __name__ == "__main__":
            child = os.fork()
            if not child:
                report_elastic()
                os._exit(0)
            os.waitpid(child, 0)
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                pool.apply(fail)
            print("start")
            if os.environ["RANK"] == "1":
                sys.exit(os.environ["AIOCOLL_RESTART_COUNT"] == "0")
    """
    done = launch("-n", 2, "--max-restarts", 1, script=script).finish()
    assert done.stderr.splitlines()[-1] == "aiocoll run: all ranks are started again (restart 1 of 1)"
    assert (done.returncode, len(done.stdout.splitlines())) == (0, 4)


WRONG = [
    (["--max-restarts", "-1"], "argument --max-restarts: -1 is negative"),
    (["--max-restarts", "many"], "argument --max-restarts: 'many' must be a whole number"),
]


@pytest.mark.parametrize(("args", "message"), WRONG, ids=["-1", "many"])
def test_error_explains_an_invalid_number_of_restarts(
    args: list[str], message: str, launch: Launch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main(["run", "-n", "1", *args, launch.write("")])
    assert f"aiocoll run: error: {message}" in capsys.readouterr().err
