"""Removal of a secret from the process environment, including the memory that /proc/PID/environ shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from aiocoll import environment
from aiocoll.environment import take

ROOT = Path(__file__).parents[1]
KEY = "a key that must stay secret \udcff"
RAW = os.fsencode(KEY)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/PID/environ")

#: A program that makes two groups, and then prints where the job key is still visible.
PROGRAM = """
import asyncio, ctypes, os, posix, subprocess, sys
import aiocoll

async def main():
    async with aiocoll.new_group() as pg, aiocoll.new_group() as another:
        assert await pg.allreduce(1) + await another.allreduce(1) == 2
        print("met", flush=True)
        await asyncio.to_thread(sys.stdin.readline)

print("ready", flush=True)
sys.stdin.readline()
asyncio.run(main())
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
child = subprocess.run(["env"], stdout=subprocess.PIPE, check=True).stdout
print("AIOCOLL_JOB_KEY" in os.environ, b"AIOCOLL_JOB_KEY" in posix.environ, libc.getenv(b"AIOCOLL_JOB_KEY"),
      b"AIOCOLL_JOB_KEY" in child, b"AFTER=it" in child, libc.prctl(3, 0, 0, 0, 0))
"""


def start(program: list[str], **variables: str) -> subprocess.Popen[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("AIOCOLL_")}
    return subprocess.Popen(
        [sys.executable, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**kept, "PYTHONPATH": str(ROOT), "BEFORE": "it", "AIOCOLL_JOB_KEY": KEY, "AFTER": "it", **variables},
    )


def environment_block(process: subprocess.Popen[str]) -> bytes:
    return Path(f"/proc/{process.pid}/environ").read_bytes()


@pytest.mark.parametrize("init_method", ["env://", "file"])
def test_job_key_is_removed_from_the_initial_environment_of_a_process(
    tmp_path: Path, port: int, init_method: str
) -> None:
    program = PROGRAM
    if init_method == "file":
        program = program.replace(
            "new_group()", f"new_group(init_method='file://{tmp_path}/meet', rank=0, world_size=1)"
        )
    where = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with start(["-c", program], **where) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        before = environment_block(process)
        assert b"\0AIOCOLL_JOB_KEY=" + RAW + b"\0AFTER=it\0" in before
        process.stdin.write("meet\n")
        process.stdin.flush()
        met = process.stdout.readline()
        after = environment_block(process)
        out, err = process.communicate("leave\n", timeout=60)
    assert (met, process.returncode) == ("met\n", 0), err
    assert after == before.replace(RAW, bytes(len(RAW)))
    assert RAW[:5] not in after
    assert out == "False False None False True 1\n"


def test_job_key_is_removed_from_the_launchers_environment_and_not_passed_to_ranks(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        # Open the FIFO before the test writes, since a FIFO loses its bytes while no process has it open.
        "import os; fifo = os.open(os.environ['FIFO'], os.O_RDWR); print('ready', os.getpid(), flush=True); "
        "os.read(fifo, 1)"
    )
    os.mkfifo(tmp_path / "fifo")
    with start(["-m", "aiocoll", "run", "-n", "2", str(script)], FIFO=str(tmp_path / "fifo")) as process:
        assert process.stdout is not None
        ranks = [process.stdout.readline() for _ in range(2)]
        blocks = [
            environment_block(process),
            *(Path(f"/proc/{line.split()[2]}/environ").read_bytes() for line in ranks),
        ]
        (tmp_path / "fifo").write_bytes(b"..")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    assert len(blocks) == 3
    for each in blocks:
        assert b"BEFORE=it\0" in each
        assert b"AFTER=it\0" in each
        assert RAW not in each


def test_removal_of_a_variable_overwrites_only_entries_with_exactly_its_name() -> None:
    """Start a program whose environment has two entries `SECRET`, and other names that contain `SECRET`."""
    program = """
import os
from aiocoll.environment import take
block = open("/proc/self/environ", "rb").read()
print(take(os.environ, "SECRET"), take(os.environ, "SECRET"), take(os.environ, "NONE"), take(os.environ, "EMPTY") == "")
after = open("/proc/self/environ", "rb").read()
for secret in (b"one", b"two"):
    block = block.replace(b"\\0SECRET=" + secret, b"\\0SECRET=\\0\\0\\0")
print(after == block)
print(*(entry.decode() for entry in after.split(b"\\0") if b"SECRET" in entry))
"""
    entries = ["A=1", "SECRET=one", "MY_SECRET=three", "SECRET_TOO=four", "B=SECRET=five", "EMPTY=", "SECRET=two"]
    execute = (
        "import ctypes, sys\n"
        "def array(words): return (ctypes.c_char_p * (len(words) + 1))(*[word.encode() for word in words], None)\n"
        "ctypes.CDLL(None).execve(sys.argv[1].encode(), array([sys.argv[1], '-c', sys.argv[2]]), array(sys.argv[3:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", execute, sys.executable, program, f"PYTHONPATH={ROOT}", *entries],
        capture_output=True,
        text=True,
        check=True,
    )
    first, second, third = done.stdout.splitlines()
    assert re.fullmatch("(one|two) None None True", first)
    assert second == "True"
    assert third == "SECRET= MY_SECRET=three SECRET_TOO=four B=SECRET=five SECRET="


def test_removal_of_a_variable_from_a_plain_mapping_leaves_the_process_environment_unchanged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        environment, "_overwrite", lambda name: pytest.fail(f"{name} is overwritten in the environment block")
    )
    given = {"A": "1"}
    assert take(given, "A") == "1"
    assert take(given, "A") is None


@pytest.mark.parametrize(
    "stat", [b"1 (x) S", b"1 (x) S " + b"0 " * 60, b"1 (x) S " + b"0 " * 46 + b"4096 8192 0", None]
)
def test_removal_without_a_readable_environment_block_overwrites_nothing(
    monkeypatch: pytest.MonkeyPatch, stat: bytes | None
) -> None:
    """Simulate a block address that is missing, hidden or invalid in /proc/self/stat, and a missing /proc."""
    real = open

    def open_fake(name: str, *args: object, **kwargs: object) -> object:
        if name != "/proc/self/stat":
            return real(name, *args, **kwargs)  # type: ignore[call-overload]
        if stat is None:
            raise FileNotFoundError(name)
        reading, writing = os.pipe()
        os.write(writing, stat)
        os.close(writing)
        return real(reading, "rb")

    monkeypatch.setenv("SECRET", "one")
    monkeypatch.setattr("builtins.open", open_fake)
    assert take(os.environ, "SECRET") == "one"
    assert "SECRET" not in os.environ
