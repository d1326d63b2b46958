"""`aiocoll run` with real processes: environment, output, signals and exit codes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from aiocoll.cli import main
from aiocoll.shipped import COMMANDS

from ..internals import Limits
from ..pages import ROOT

if TYPE_CHECKING:
    from tests.cli.conftest import Launch

#: A script that waits in a loop, since `signal.pause` would miss a signal that arrives just before the call.
WAIT = "import time\nprint('ready')\nwhile True:\n    time.sleep(0.05)\n"


def last_line(text: str) -> str:
    return text.splitlines()[-1]


def test_environment_of_a_rank_contains_its_rank_and_the_world_size(launch: Launch) -> None:
    done = launch("-n", 3, script="import os, json; print(json.dumps(dict(os.environ)))").finish()
    assert done.returncode == 0
    assert done.stderr == ""
    lines = sorted(done.stdout.splitlines())
    ranks = [json.loads(line.removeprefix(f"[{rank}] ")) for rank, line in enumerate(lines)]
    assert len(ranks) == 3
    for rank, env in enumerate(ranks):
        assert (env["RANK"], env["WORLD_SIZE"]) == (str(rank), "3")
        assert (env["LOCAL_RANK"], env["LOCAL_WORLD_SIZE"]) == (str(rank), "3")
        assert (env["NODE_RANK"], env["GROUP_RANK"]) == ("0", "0")
        assert (env["MASTER_ADDR"], env["AIOCOLL_STORE"]) == ("127.0.0.1", "launcher")
        assert int(env["MASTER_PORT"]) > 0
        assert "AIOCOLL_JOB_KEY" not in env
    assert len({(env["MASTER_PORT"], env["AIOCOLL_JOB_ID"]) for env in ranks}) == 1


def test_job_id_can_be_chosen(launch: Launch) -> None:
    script = "import os; print(os.environ['AIOCOLL_JOB_ID'])"
    assert launch("-n", 1, script=script, env={"AIOCOLL_JOB_ID": "train"}).finish().stdout == "[0] train\n"


def test_launcher_refuses_unusable_ca_files(launch: Launch) -> None:
    files = {"AIOCOLL_TLS_CA": "/no/ca", "AIOCOLL_TLS_CERTIFICATE": "/no/cert"}
    done = launch("-n", 1, script="", env=files).finish()
    assert done.returncode == 2
    assert "tls_ca='/no/ca' is given without tls_key (AIOCOLL_TLS_KEY)" in done.stderr
    more = {"AIOCOLL_TLS_KEY": "/no/key", "AIOCOLL_ENCRYPTION": "tls", "AIOCOLL_JOB_ID": "train"}
    done = launch("-n", 1, script="", env=files | more).finish()
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "aiocoll run: tls_ca='/no/ca': cannot be read (No such file or directory)\n"


def test_script_receives_its_arguments_unchanged(launch: Launch) -> None:
    done = launch(
        "-n", 1, script="import sys; print(sys.argv[1:])", args=("--lr", "0.1", "-n", "7", "--", "x y")
    ).finish()
    assert done.stdout == "[0] ['--lr', '0.1', '-n', '7', '--', 'x y']\n"


def test_module_runs_under_the_launcher_as_under_python_m(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(__name__, sys.argv[1:])")
    done = launch("-n", 2, "-m", "program", "--flag").finish()
    assert sorted(done.stdout.splitlines()) == ["[0] __main__ ['--flag']", "[1] __main__ ['--flag']"]


def test_each_output_line_is_prefixed_with_the_rank_and_keeps_its_stream(launch: Launch) -> None:
    script = """
        import os, sys
        rank = int(os.environ["RANK"])
        for i in range(200):
            print(f"out {rank} {i}")
            print(f"err {rank} {i}", file=sys.stderr)
        os.write(1, b"\\n\\xff\\r!\\nno newline at the end")
    """
    done = launch("-n", 3, script=script, text=False).finish()
    for name, stream in (("out", done.stdout), ("err", done.stderr)):
        lines = stream.split(b"\n")
        assert lines.pop() == b""
        for rank in range(3):
            mine = [line for line in lines if line.startswith(b"[%d] " % rank)]
            assert mine[:200] == [f"[{rank}] {name} {rank} {i}".encode() for i in range(200)]
            tail = [b"[%d] " % rank, b"[%d] \xff\r!" % rank, b"[%d] no newline at the end" % rank]
            assert mine[200:] == (tail if name == "out" else [])


def test_long_output_line_of_a_rank_is_split(launch: Launch) -> None:
    done = launch("-n", 1, script="print('x' * 200_000)").finish()
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all(line.startswith("[0] x") for line in lines)
    assert sum(len(line) - len("[0] ") for line in lines) == 200_000


def test_first_failure_of_a_rank_stops_the_other_ranks_and_is_printed_last(launch: Launch) -> None:
    script = """
        import os, signal, sys, time
        fd = os.open(sys.argv[1], os.O_RDWR)
        if os.environ["RANK"] == "2":
            for _ in range(3):  # wait until the other ranks are ready
                os.read(fd, 1)
            sys.exit(3)
        signal.signal(signal.SIGTERM, lambda *_: (print("got SIGTERM"), sys.exit(5)))
        os.write(fd, b".")
        while True:
            time.sleep(0.05)
    """
    os.mkfifo(launch.path / "fifo")
    done = launch("-n", 4, script=script, args=(launch.path / "fifo",)).finish()
    assert done.returncode == 3
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] got SIGTERM" for rank in (0, 1, 3)]
    assert last_line(done.stderr) == "aiocoll run: rank 2 exited with code 3"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, 137), (signal.SIGSEGV, 139), (signal.SIGTERM, 143)])
def test_killed_rank_is_named_with_its_signal(launch: Launch, number: signal.Signals, code: int) -> None:
    script = (
        "import os, signal\nif os.environ['RANK'] == '1': os.kill(os.getpid(), int(os.environ['N']))\nsignal.pause()"
    )
    done = launch("-n", 2, script=script, env={"N": str(int(number))}).finish()
    assert done.returncode == code
    assert last_line(done.stderr) == f"aiocoll run: rank 1 was killed by {number.name}"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="numbers of real-time signals")
def test_signal_without_a_name_is_reported_by_its_number(launch: Launch) -> None:
    done = launch("-n", 1, script="import os; os.kill(os.getpid(), 40)").finish()
    assert done.returncode == 168
    assert last_line(done.stderr) == "aiocoll run: rank 0 was killed by signal 40"


def test_uncaught_exception_is_printed_with_the_rank_that_raised(launch: Launch) -> None:
    done = launch("-n", 1, script="raise ValueError('no good')").finish()
    assert done.returncode == 1
    script = launch.path / "script.py"
    assert done.stderr.splitlines() == [
        "aiocoll run: rank 0 failed first; exit code 1:",
        "[0] Traceback (most recent call last):",
        f'[0]   File "{script}", line 1, in <module>',
        "[0]     raise ValueError('no good')",
        "[0] ValueError: no good",
    ]


def test_ranks_that_ignore_the_end_of_the_job_are_killed(
    launch: Launch, limits: Limits, capfd: pytest.CaptureFixture[str]
) -> None:
    limits(run_grace_period=0.1)
    script = launch.write("""
        import os, signal, sys
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        fd = os.open(sys.argv[1], os.O_RDWR)
        if os.environ["RANK"] == "0":
            os.read(fd, 1)
            sys.exit(9)
        os.write(fd, b".")
        while True:
            signal.pause()
    """)
    os.mkfifo(launch.path / "fifo")
    assert main.main(["run", "-n", "2", script, str(launch.path / "fifo")]) == 9
    assert last_line(capfd.readouterr().err) == "aiocoll run: rank 0 exited with code 9"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_launcher_forwards_a_signal_to_the_ranks_and_returns_its_exit_code(
    launch: Launch, number: signal.Signals
) -> None:
    job = launch("-n", 2, script=WAIT)
    job.read("[0] ready", "[1] ready")
    job.process.send_signal(number)
    done = job.finish()
    assert done.returncode == 128 + number
    assert last_line(done.stderr) == f"aiocoll run: stopped by {number.name}"


HANDLES = """
    import os, signal, sys, time
    seen = []
    def on_signal(number, frame):
        seen.append(signal.Signals(number).name)
        print(seen[-1])
        if number == signal.SIGTERM:
            print(*seen)
            os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    print("ready")
    while True:
        time.sleep(0.05)
"""


def test_ctrl_c_in_a_terminal_reaches_each_rank_once(launch: Launch) -> None:
    terminal, slave = pty.openpty()
    adopt = f"import os, sys; os.open({os.ttyname(slave)!r}, os.O_RDWR); os.execv(sys.argv[1], sys.argv[1:])"
    job = launch("-n", 2, script=HANDLES, before=(sys.executable, "-c", adopt), start_new_session=True)
    try:
        job.read("[0] ready", "[1] ready")
        os.write(terminal, b"\x03")
        job.read("[0] SIGINT", "[1] SIGINT")
        job.process.terminate()
        done = job.finish()
    finally:
        os.close(terminal)
        os.close(slave)
    assert done.returncode == 0, "a rank did not exit with 0"
    assert sorted(line for line in done.stdout.splitlines() if " SIGINT" in line) == [
        "[0] SIGINT SIGTERM",
        "[1] SIGINT SIGTERM",
    ]


def test_second_ctrl_c_kills_the_ranks(launch: Launch) -> None:
    job = launch("-n", 2, script=HANDLES)
    job.read("[0] ready", "[1] ready")
    job.process.send_signal(signal.SIGINT)
    job.read("[0] SIGINT", "[1] SIGINT")
    assert job.process.stderr.readline() == (
        "aiocoll run: waiting for rank 0-1 to end after SIGINT; SIGKILL follows in 29 s, or at once after a second "
        "Ctrl-C\n"
    )
    job.process.send_signal(signal.SIGINT)
    done = job.finish()
    assert done.returncode == 130
    assert last_line(done.stderr) == "aiocoll run: stopped by SIGINT"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ties a process to its parent")
def test_ranks_are_killed_with_their_launcher(launch: Launch) -> None:
    job = launch("-n", 2, script="import os\nprint('pid', os.getpid())\n" + WAIT)
    job.read("[0] ready", "[1] ready")
    fds = [os.pidfd_open(int(pid)) for pid in re.findall(r"pid (\d+)", job.seen)]
    assert len(fds) == 2
    try:
        job.process.kill()
        job.process.wait(10)
        for fd in fds:
            assert select.select([fd], [], [], 10)[0] == [fd], "a rank outlived its launcher"
    finally:
        for fd in fds:
            os.close(fd)


@pytest.mark.skipif(sys.platform != "linux", reason="waits for an end by a pidfd")
def test_launcher_does_not_wait_for_a_process_that_a_rank_left_running(
    launch: Launch, capfd: pytest.CaptureFixture[str]
) -> None:
    script = launch.write("""
        import subprocess, sys
        left = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        print(left.pid)
        left.returncode = 0  # avoids a warning about a running child
    """)
    assert main.main(["run", "-n", "1", script]) == 0
    pid = int(capfd.readouterr().out.removeprefix("[0] "))
    with suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        try:
            assert select.select([fd], [], [], 10)[0] == [fd], "the process was not killed"
        finally:
            os.close(fd)
    for thread in threading.enumerate():
        if thread.name.startswith("output"):
            thread.join(10)  # reads until the process has ended


def test_job_ends_when_the_reader_of_its_output_closes(launch: Launch) -> None:
    job = launch("-n", 2, script="while True: print('more')")
    job.read("[0] more")
    assert job.process.stdout is not None
    job.process.stdout.close()
    assert job.process.wait(20) == 141
    assert job.process.stderr is not None
    assert job.process.stderr.read().splitlines() == ["aiocoll run: stopped by SIGPIPE"]


KEY = """
    import hashlib, os
    from aiocoll.options import job_key
    start = open("/proc/self/environ", "rb").read() + open("/proc/self/cmdline", "rb").read()
    key = job_key(os.environ, None)
    for form in (key, key.hex().encode()):
        assert form not in start
    assert "AIOCOLL_JOB_KEY_FD" not in os.environ and "AIOCOLL_JOB_KEY_FILE" not in os.environ
    print(len(key), hashlib.sha256(key).hexdigest())
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_launcher_passes_the_job_key_to_ranks_only_through_a_pipe(launch: Launch, tmp_path: Path) -> None:
    def keys(*args: Any, **kwargs: Any) -> set[str]:
        done = launch("-n", 2, *args, script=KEY, **kwargs).finish()
        assert done.returncode == 0, done.stderr
        return {line[len("[0] ") :] for line in done.stdout.splitlines()}

    (made,) = keys()
    assert made.startswith("32 ")
    assert keys() != {made}
    file = tmp_path / "job.key"
    file.write_text("from a file, 25 characters\n")
    file.chmod(0o600)
    (read,) = keys("--job-key-file", file)
    assert read.startswith("26 ")
    assert keys(env={"AIOCOLL_JOB_KEY": "from a file, 25 characters"}) == {read}
    assert keys(env={"AIOCOLL_JOB_KEY_FILE": str(file)}) == {read}


MEET = """
    import asyncio, os
    from aiocoll.options import job_key
    from aiocoll.store import TCPStore
    async def main():
        key = job_key(os.environ, None)
        where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        async with TCPStore(*where, key=key, job=os.environ["AIOCOLL_JOB_ID"]) as store:
            await store.set(os.environ["RANK"], os.environ["NODE_RANK"].encode())
            print(*(await store.multi_get(list(map(str, range(int(os.environ["WORLD_SIZE"])))))))
            await store.set("done" + os.environ["RANK"], b"")
            await store.wait(["done" + str(rank) for rank in range(int(os.environ["WORLD_SIZE"]))])
    asyncio.run(main())
"""


@pytest.mark.slow
def test_launcher_hosts_the_store_of_the_ranks(launch: Launch) -> None:
    done = launch("-n", 3, script=MEET).finish()
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] b'0' b'0' b'0'" for rank in range(3)], done.stderr


@pytest.mark.slow
def test_launchers_of_several_hosts_meet_at_host_0(launch: Launch, tmp_path: Path, port: int) -> None:
    file = tmp_path / "job.key"
    file.write_text("0123456789abcdef")
    file.chmod(0o600)
    where = ("--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", port, "--job-key-file", file)
    other = launch("-n", 2, "--node-rank", 1, *where, script=MEET)
    done = launch("-n", 2, *where, script=MEET).finish()
    assert sorted(done.stdout.splitlines()) == ["[0] b'0' b'0' b'1' b'1'", "[1] b'0' b'0' b'1' b'1'"], done.stderr
    assert sorted(other.finish().stdout.splitlines()) == ["[2] b'0' b'0' b'1' b'1'", "[3] b'0' b'0' b'1' b'1'"]


USAGE = [
    (["script"], r"missing: the number of ranks \(-n N, or --nproc-list N,N,... for several hosts\); for example: "),
    (["-n", "0", "script"], "argument -n/--nproc: 0 is not a positive number"),
    (["-n", "x", "script"], "argument -n/--nproc: 'x' must be a whole number"),
    (["-n", "2"], "missing: SCRIPT; for example: aiocoll run -n 2 train.py$"),
    (["-n", "2", "-m"], "missing: MODULE after -m; for example"),
    ([], r"missing: the number of ranks \(.*\) and SCRIPT; for example: aiocoll run -n 2 train.py$"),
    (["-n", "2", "--nproc-per-node", "2", "script"], "unknown argument: --nproc-per-node"),
    (["-n", "2", "--kill-after", "inf", "script"], "argument --kill-after: inf must be a finite number of seconds"),
    (["-n", "2", "--kill-after", "-1", "script"], "argument --kill-after: -1 must be a finite number of seconds"),
    (["-n", "2", "absent.py"], r"absent\.py: no such file; to run a module, write -m before its name"),
    (["-n", "2", "--node-rank", "1", "script"], "--node-rank 1: must be from 0 to 0, one less than --nnodes"),
    (["-n", "2", "--nnodes", "2", "script"], "--master-addr: needed with several hosts"),
    (["-n", "2", "--nnodes", "2", "--master-addr", "h", "script"], "pass --job-key-file job.key"),
    (["-n", "2", "--master-port", "65536", "script"], "--master-port 65536: must be from 1 to 65535"),
    (["-n", "2", "--nnodes", "2", "--master-addr", "h", "--master-port", "0", "script"], "--master-port 0: must be"),
    (["-n", "2", "--job-key-file", "absent", "script"], "--job-key-file='absent': cannot be opened"),
]


@pytest.mark.parametrize(("args", "message"), USAGE, ids=[str(i) for i in range(len(USAGE))])
def test_launcher_explains_wrong_arguments(
    args: list[str], message: str, launch: Launch, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AIOCOLL_JOB_KEY", "AIOCOLL_JOB_KEY_FILE"):
        monkeypatch.delenv(name, raising=False)
    script = launch.write("")
    with pytest.raises(SystemExit) as caught:
        main.main(["run", *(script if arg == "script" else arg for arg in args)])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert re.search(f"^aiocoll run: error: .*{message}", error, re.MULTILINE), error
    assert error.startswith("usage: aiocoll run ")
    assert last_line(error) == "aiocoll run --help lists all arguments"


@pytest.mark.parametrize("command", ["bench", "doctor", "top", "trace"])
def test_error_for_an_unknown_option_shows_the_usage_of_the_subcommand(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main([command, *(["file"] if command == "trace" else []), "--unknown"])
    usage, *_, error, hint = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: aiocoll {command}")
    assert error == f"aiocoll {command}: error: unknown argument: --unknown"
    assert hint == f"aiocoll {command} --help lists all arguments"


def test_launcher_accepts_two_dashes_before_the_program(launch: Launch) -> None:
    done = launch("-n", 1, "--", launch.write("import sys; print(sys.argv[1:])"), "--", "-x").finish()
    assert done.stdout == "[0] ['--', '-x']\n"


def test_launcher_explains_a_port_that_is_already_in_use(
    launch: Launch, capsys: pytest.CaptureFixture[str], port: int
) -> None:
    with socket.create_server(("127.0.0.1", port)):
        assert main.main(["run", "-n", "1", "--master-port", str(port), launch.write("")]) == 1
    assert f"aiocoll run: the store cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_help_and_a_missing_command_show_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main.main([])
    assert "the following arguments are required: COMMAND" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main.main(["run", "--help"])
    assert "aiocoll run (-n N | --nproc-list N,N,...) [options] (SCRIPT | -m MODULE) [ARG ...]" in " ".join(
        capsys.readouterr().out.split()
    )


def test_command_line_page_lists_every_subcommand() -> None:
    commands, codes = (ROOT / "docs" / "command-line.md").read_text().split("## Ending a job")[0].split("## Exit codes")
    assert set(re.findall(r"^\| `aiocoll (\w+)` \|", commands, re.MULTILINE)) == set(COMMANDS)
    assert set(COMMANDS) <= set(re.findall(r"`(\w+)`", codes))
