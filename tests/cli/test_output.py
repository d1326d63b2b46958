"""Output of the commands: complete on every kind of descriptor, or reported as lost on standard error."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import io
import os
import re
import socket
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import IO

import pytest

from aiocoll.cli.checks import CheckResult
from aiocoll.cli.main import main
from aiocoll.cli.measure import Effort, Timing
from aiocoll.cli.output import OutputRelay
from aiocoll.cli.sink import CommandOutput, OutputLostError, Sink, limit_waits, on_loss
from aiocoll.cli.sweep import sweep
from aiocoll.cli.workload import Case
from aiocoll.machine_load import LoadMeter, MachineLoad
from aiocoll.testing import run_ranks

from ..internals import replace_parts

ROOT = Path(__file__).parents[2]
FULL = Path("/dev/full")
#: Seconds after which a command counts as hung.
LIMIT = 60
SILENT = "import os; open(f'{os.environ[\"FOLDER\"]}/{os.environ[\"RANK\"]}', 'w')"
#: A program that prints more than a pipe holds, and then creates a file, which shows that the rank has ended.
CHATTY = f"for i in range(2000): print('x' * 99)\n{SILENT}"
BOTH = "import sys\nfor i in range(2000): print('x' * 99, file=sys.stderr), print('out')"

needs_full = pytest.mark.skipif(not FULL.exists(), reason="writes to /dev/full")


class EndedCommand:
    """The result of a command that has ended: exit code and standard error."""

    def __init__(self, code: int, stderr: str) -> None:
        self.code = code
        self.stderr = stderr


@contextmanager
def slow_reader(made: Callable[[], tuple[int, int]]) -> Iterator[tuple[int, list[bytes]]]:
    """Yield a small non-blocking descriptor, and the list to which its slow reader appends all data."""
    reading, writing = made()
    os.set_blocking(writing, False)
    received: list[bytes] = []

    def read() -> None:
        while chunk := os.read(reading, 1000):
            received.append(chunk)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield writing, received
    finally:
        os.close(writing)
        reader.join()
        os.close(reading)


def small_pipe() -> tuple[int, int]:
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    return reading, writing


def small_socket() -> tuple[int, int]:
    """Return a socket pair with small buffers, as standard output is in child processes of Node.js."""
    reading, writing = socket.socketpair()
    writing.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return reading.detach(), writing.detach()


# -- sinks


@pytest.mark.parametrize("made", [small_pipe, small_socket])
def test_output_blocks_of_threads_are_not_interleaved_on_non_blocking_descriptors(
    made: Callable[[], tuple[int, int]],
) -> None:
    blocks = [bytes([65 + each]) * 20_000 + b"\n" for each in range(8)]
    with slow_reader(made) as (fd, received):
        sink = Sink(fd, "it", lambda _: None)
        threads = [threading.Thread(target=sink.write, args=(block,)) for block in blocks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (sink.error, sink.lost) == (None, 0)
    assert sorted(b"".join(received).splitlines(keepends=True)) == blocks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EFBIG, errno.EDQUOT, errno.EPIPE, errno.ECONNRESET])
@pytest.mark.parametrize("taken", [0, 1, 7])
def test_write_error_is_reported_once_and_lost_bytes_are_counted(
    number: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Let the write fail at its first byte, or after one or seven bytes."""
    written = []

    def write(fd: int, data: memoryview) -> int:
        if len(written) == taken:
            raise OSError(number, os.strerror(number))
        written.append(bytes(data[:1]))
        return 1

    monkeypatch.setattr(os, "write", write)
    reported: list[Sink] = []
    sink = Sink(9, "it", reported.append)
    assert sink.write(b"0123456789") == 10
    assert sink.write(b"abc") == 3
    assert (b"".join(written), sink.lost) == (b"0123456789"[:taken], 13 - taken)
    assert reported == [sink]
    assert sink.has_no_reader is (number in (errno.EPIPE, errno.ECONNRESET))
    assert sink.trouble == f"it cannot be written ({os.strerror(number)})"


def test_write_that_would_block_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, written = [True, False, True, True, False], []
    reading, writing = os.pipe()

    def write(fd: int, data: memoryview) -> int:
        if refused.pop(0):
            raise BlockingIOError(errno.EAGAIN, "")
        written.append(bytes(data[:2]))
        return 2

    try:
        sink = Sink(writing, "it", lambda _: None)
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", write)
            sink.write(b"0123")
        assert (written, sink.lost, sink.error) == ([b"01", b"23"], 0, None)
    finally:
        os.close(reading)
        os.close(writing)


def test_closed_output_sink_drops_bytes_without_a_report(tmp_path: Path) -> None:
    reported: list[Sink] = []
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    sink = Sink(fd, "it", reported.append, closefd=True)
    sink.write(b"1")
    sink.close()
    sink.close()
    sink.write(b"2")
    assert ((tmp_path / "log").read_bytes(), sink.lost, reported) == (b"1", 1, [])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


# -- the streams of a command


def replace_streams(monkeypatch: pytest.MonkeyPatch, stdout: int | None, stderr: int | None) -> None:
    for name, fd in (("stdout", stdout), ("stderr", stderr)):
        stream = None if fd is None else open(fd, "w", closefd=False)  # noqa: SIM115 - it does not own the descriptor
        monkeypatch.setattr(sys, name, stream)


@needs_full
def test_command_whose_output_is_lost_is_interrupted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    errors = os.open(tmp_path / "errors", os.O_WRONLY | os.O_CREAT)
    full = os.open(FULL, os.O_WRONLY)
    try:
        replace_streams(monkeypatch, full, errors)
        with CommandOutput() as output:
            with pytest.raises(OutputLostError, match="No space left on device"):
                print("1234", flush=True)
            print("56", flush=True)
            assert output.exit_code(0) == 1
            assert output.exit_code(7) == 7
    finally:
        os.close(full)
        os.close(errors)
    line = "aiocoll: standard output cannot be written (No space left on device): 8 bytes lost\n"
    assert (tmp_path / "errors").read_text() == line * 2


def test_closed_output_stream_raises_only_at_a_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    replace_streams(monkeypatch, None, None)
    with CommandOutput() as output:
        assert output.exit_code(0) == 0
        print("diagnosis", file=sys.stderr)  # if stderr is None, print() writes to standard output
        assert output.exit_code(0) == 1
        assert output.exit_code(3) == 3
    assert (sys.stdout, sys.stderr) == (None, None)
    with CommandOutput() as output:
        with pytest.raises(OutputLostError, match="it is closed"):
            print("result", flush=True)
        assert output.exit_code(0) == 1


def test_streams_without_a_file_descriptor_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    with CommandOutput() as output:
        assert (sys.stdout, sys.stderr) == (out, err)
        on_loss(lambda _: None)
        assert output.exit_code(0) == 0


@needs_full
async def test_benchmark_stops_if_its_table_cannot_be_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run one rank, since rank 0 prints the table."""
    full = os.open(FULL, os.O_WRONLY)
    try:
        replace_streams(monkeypatch, full, None)
        cases = [Case("allreduce", 4), Case("allreduce", 8)]
        with pytest.raises(OSError, match=r"standard output cannot be written \(No space left on device\)"):
            await run_ranks(1, sweep, cases, Effort(seconds=0.0, least=1, most=1), True)
    finally:
        os.close(full)


async def test_benchmark_without_a_reader_measures_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        replace_streams(monkeypatch, writing, None)
        cases = [Case("allreduce", 4), Case("allreduce", 8)]
        async with asyncio.timeout(LIMIT):
            found = await run_ranks(2, sweep, cases, Effort(seconds=0.0, least=1, most=1), True)
        assert [len(each) for each in found] == [2, 2]
    finally:
        os.close(writing)


def test_new_pipes_do_not_take_the_numbers_of_closed_standard_streams(tmp_path: Path) -> None:
    """Check that a new pipe does not get descriptor 1, which a child process would use as its standard output."""
    program = f"""if True:
        import os
        from aiocoll.cli.sink import CommandOutput
        with CommandOutput():
            inherited = [os.get_inheritable(fd) for fd in range(3)]
            with open({str(tmp_path / "found")!r}, "w") as file:
                print(min(os.pipe()) > 2, inherited, file=file)
    """
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    closed = ["bash", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, "-c", program]
    subprocess.run(closed, env=env, timeout=LIMIT, check=True)
    assert (tmp_path / "found").read_text() == "True [True, True, True]\n"


# -- commands, in this process

COMMANDS = [
    ["--version"],
    ["run", "--help"],
    ["bench", "--max", "64"],
    ["bench", "--max", "64", "--json"],
    ["doctor"],
    ["doctor", "--json"],
]


@pytest.fixture
def run_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., EndedCommand]:
    """Return a function that runs a command with given descriptors (None: closed) and fake measurements."""

    async def fake_timings(ranks: int, *_: object, **__: object) -> list[list[Timing]]:
        print("\n".join(["a row"] * 1000))  # rank 0 prints a table like this one, larger than a pipe here
        return [[Timing([1000], 0.0, 0)] * 3] * ranks

    found = [CheckResult("host", f"check {number}", "fine") for number in range(1000)]
    replace_parts(monkeypatch, run_bench_processes=fake_timings, run_doctor_checks=lambda *_: found)
    replace_parts(monkeypatch, run_doctor_rendezvous=lambda ranks: ([], CheckResult("ranks", "meeting", "2 met")))
    monkeypatch.setattr(LoadMeter, "lap", lambda _: MachineLoad(0.0, 0.0, 0.0, None))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))  # equal in two outputs that are compared
    errors = tmp_path / "errors"

    def call(argv: list[str], stdout: int | None, *, stderr: int | None = -1) -> EndedCommand:
        with errors.open("wb") as file:
            replace_streams(monkeypatch, stdout, file.fileno() if stderr == -1 else stderr)
            try:
                code = main(argv)
            except SystemExit as end:
                code = int(end.code or 0)
        return EndedCommand(code, errors.read_text())

    return call


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_command_with_closed_output_reports_the_lost_output(
    argv: list[str], run_command: Callable[..., EndedCommand]
) -> None:
    done = run_command(argv, None)
    assert done.code == 1
    assert re.fullmatch(r"aiocoll: standard output cannot be written \(it is closed\): \d+ bytes lost\n", done.stderr)


@needs_full
@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_command_on_a_full_disk_reports_the_lost_output(
    argv: list[str], run_command: Callable[..., EndedCommand]
) -> None:
    with FULL.open("wb") as full:
        done = run_command(argv, full.fileno())
    assert done.code == 1
    lost = r"aiocoll: standard output cannot be written \(No space left on device\): \d+ bytes lost\n"
    assert re.fullmatch(lost, done.stderr)


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_command_whose_output_reader_has_closed_ends_without_a_message(
    argv: list[str], run_command: Callable[..., EndedCommand]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run_command(argv, writing)
    finally:
        os.close(writing)
    assert (done.code, done.stderr) == (0, "")


@pytest.mark.parametrize("made", [small_pipe, small_socket])
@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_command_writes_everything_to_a_non_blocking_descriptor(
    argv: list[str], made: Callable[[], tuple[int, int]], run_command: Callable[..., EndedCommand], tmp_path: Path
) -> None:
    with (tmp_path / "plain").open("wb") as plain:
        expected = run_command(argv, plain.fileno())
    with slow_reader(made) as (fd, received):
        done = run_command(argv, fd)
    assert (done.code, done.stderr) == (expected.code, expected.stderr) == (0, "")
    assert b"".join(received) == (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize("argv", COMMANDS, ids=" ".join)
def test_command_with_closed_standard_error_prints_its_output(
    argv: list[str], run_command: Callable[..., EndedCommand], tmp_path: Path
) -> None:
    with (tmp_path / "out").open("wb") as out:
        assert run_command(argv, out.fileno(), stderr=None).code == 0
    assert (tmp_path / "out").stat().st_size > 50


@needs_full
@pytest.mark.parametrize("argv", [["bench", "--min", "x"], ["trace", "absent"], ["top", "absent"]], ids=" ".join)
def test_wrong_command_line_ends_with_2_even_if_its_error_is_lost(
    argv: list[str], run_command: Callable[..., EndedCommand]
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        with FULL.open("wb") as full:
            for stderr in (None, full.fileno(), writing):
                assert run_command(argv, None, stderr=stderr).code == 2
    finally:
        os.close(writing)


# -- the launcher


def run_launcher(
    folder: Path, program: str, redirect: str, *, ranks: int = 2, stdout: int | IO[bytes] = -1
) -> EndedCommand:
    """Run a program of ranks under the launcher, with shell redirections such as ``>&-``."""
    script = folder / "script.py"
    script.write_text(program)
    argv = [sys.executable, "-m", "aiocoll", "run", "-n", str(ranks), str(script)]
    done = subprocess.run(
        ["bash", "-c", f'exec "$0" "$@" {redirect}', *argv],
        env={**os.environ, "PYTHONPATH": str(ROOT), "FOLDER": str(folder), "PYTHONASYNCIODEBUG": ""},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    return EndedCommand(done.returncode, done.stderr)


def finished_ranks(folder: Path) -> list[str]:
    """Return the ranks whose programs have reached their last line."""
    return sorted(each.name for each in folder.iterdir() if each.name.isdigit())


@pytest.mark.parametrize("redirect", [pytest.param(">&-", marks=pytest.mark.slow), "<&- >&- 2>&-"])
def test_ranks_that_print_nothing_succeed_with_closed_output(redirect: str, tmp_path: Path) -> None:
    done = run_launcher(tmp_path, SILENT, redirect)
    assert (done.code, done.stderr, finished_ranks(tmp_path)) == (0, "", ["0", "1"])


@pytest.mark.parametrize(
    ("redirect", "reason", "ranks"),
    [
        (">&-", "it is closed", 1),
        pytest.param(">&-", "it is closed", 3, marks=pytest.mark.slow),
        pytest.param(">/dev/full", "No space left on device", 2, marks=needs_full),
    ],
)
def test_ranks_finish_although_their_output_is_lost(redirect: str, reason: str, ranks: int, tmp_path: Path) -> None:
    done = run_launcher(tmp_path, CHATTY, redirect, ranks=ranks)
    assert finished_ranks(tmp_path) == [str(rank) for rank in range(ranks)]
    assert done.code == 1
    trouble = f"standard output cannot be written ({reason})"
    assert done.stderr.splitlines() == [
        f"aiocoll run: {trouble}: further output is lost, and the job goes on",
        f"aiocoll: {trouble}: {ranks * 2000 * len('[0] ' + 'x' * 99 + chr(10))} bytes lost",
    ]


@needs_full
@pytest.mark.parametrize("redirect", [pytest.param("2>&-", marks=pytest.mark.slow), "2>/dev/full"])
def test_lost_standard_error_of_ranks_changes_the_exit_code(redirect: str, tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        assert run_launcher(tmp_path, f"{BOTH}\n{SILENT}", redirect, stdout=out).code == 1
    assert finished_ranks(tmp_path) == ["0", "1"]
    assert sorted((tmp_path / "out").read_text().splitlines()) == ["[0] out"] * 2000 + ["[1] out"] * 2000


@needs_full
def test_exit_code_of_a_failed_rank_takes_precedence_over_lost_output(tmp_path: Path) -> None:
    done = run_launcher(tmp_path, "import sys; print('x'); sys.exit(7)", ">/dev/full", ranks=1)
    assert done.code == 7
    assert "standard output cannot be written (No space left on device)" in done.stderr


@pytest.mark.parametrize("made", [small_pipe, pytest.param(small_socket, marks=pytest.mark.slow)])
def test_all_lines_arrive_on_a_non_blocking_descriptor(made: Callable[[], tuple[int, int]], tmp_path: Path) -> None:
    """Use one pipe for standard output and standard error, whose lines must stay whole."""
    with slow_reader(made) as (fd, received):
        done = run_launcher(tmp_path, f"{BOTH}\n{SILENT}", "2>&1", stdout=fd)
    assert (done.code, done.stderr, finished_ranks(tmp_path)) == (0, "", ["0", "1"])
    lines = [f"[{rank}] {text}" for rank in range(2) for text in ("out", "x" * 99) for _ in range(2000)]
    assert sorted(b"".join(received).decode().splitlines()) == sorted(lines)


def test_last_line_without_a_reader_is_reported_as_a_failure(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = run_launcher(tmp_path, f"{SILENT}\nprint('result')", "", ranks=1, stdout=writing)
    finally:
        os.close(writing)
    assert (done.code, "Traceback" in done.stderr, finished_ranks(tmp_path)) == (141, False, ["0"])


# -- readers that are slow or stuck


def bytes_in_pipe(reading: int) -> int:
    """Return the number of unread bytes in a pipe."""
    return int.from_bytes(fcntl.ioctl(reading, termios.FIONREAD, bytes(4)), sys.byteorder)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_drain_waits_for_a_slow_reader_but_not_for_an_open_pipe() -> None:
    """Drain the full pipe of a finished rank while a process left behind by the rank keeps the pipe open."""
    text = b"x" * 99 + b"\n"
    rank_reads, rank_writes = os.pipe()
    os.write(rank_writes, text * 600)
    reading, writing = small_pipe()
    pipe = open(rank_reads, "rb", 0)  # noqa: SIM115 - the relay closes it
    try:
        relay = OutputRelay(b"", pipe, Sink(writing, "it", lambda _: None))
        drain = threading.Thread(target=relay.drain)
        drain.start()
        wait_until(lambda: bytes_in_pipe(reading) == 4096)
        drain.join(0.3)
        assert drain.is_alive()
        received = 0
        while received < 60_000:
            received += len(os.read(reading, 1000))
        drain.join(LIMIT)
        assert not drain.is_alive()
        assert relay.is_alive()
    finally:
        os.close(rank_writes)
        relay.join(LIMIT)
        os.close(reading)
        os.close(writing)


def test_drain_does_not_wait_for_a_process_that_keeps_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    # The patched clock stands still, so only the amount of data can end the drain.
    monkeypatch.setattr("aiocoll.cli.output.time", SimpleNamespace(monotonic=lambda: 0.0))
    rank_reads, rank_writes = os.pipe()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            os.write(rank_writes, b"more\n" * 1000)

    writer = threading.Thread(target=write)
    pipe = open(rank_reads, "rb", 0)  # noqa: SIM115 - the relay closes it
    relay = OutputRelay(b"", pipe, Sink(nowhere, "it", lambda _: None))
    writer.start()
    try:
        relay.drain()
        assert relay.is_alive()
    finally:
        ended.set()
        writer.join()
        os.close(rank_writes)
        relay.join(LIMIT)
        os.close(nowhere)


@pytest.mark.parametrize("has_error", [False, True])
def test_time_limit_also_ends_waits_for_output_that_began_earlier(
    has_error: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Limit the waits while one thread waits to write; a thread that writes to the same pipe must continue, too."""
    reading, writing = small_pipe()
    other = os.dup(writing)
    try:
        replace_streams(monkeypatch, writing, other)
        with CommandOutput() as output:
            on_loss(lambda _: None)
            stuck = threading.Thread(target=sys.stdout.buffer.write, args=(b"x" * 9000,))
            stuck.start()
            wait_until(lambda: bytes_in_pipe(reading) == 4096)
            limit_waits(0.0)
            if has_error:
                print("error", file=sys.stderr)
            stuck.join(LIMIT)
            assert output.exit_code(0) == 1
    finally:
        for fd in (reading, writing, other):
            os.close(fd)


@pytest.mark.parametrize(
    ("errors", "blocking"),
    [(subprocess.STDOUT, True), *(pytest.param(subprocess.PIPE, each, marks=pytest.mark.slow) for each in (0, 1))],
)
def test_launcher_with_a_stuck_reader_can_be_ended(errors: int, blocking: bool, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"{SILENT}\nwhile True: print('more')")
    reading, writing = small_pipe()
    os.set_blocking(writing, blocking)
    argv = [sys.executable, "-m", "aiocoll", "run", "-n", "2", str(script)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "FOLDER": str(tmp_path)}
    process = subprocess.Popen(argv, env=env, stdout=writing, stderr=errors)
    try:
        wait_until(lambda: finished_ranks(tmp_path) == ["0", "1"] and bytes_in_pipe(reading) > 0)
        process.terminate()
        assert process.wait(LIMIT) == 143
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()
        os.close(reading)
        os.close(writing)
