"""`aiocoll run --log-dir`: the output of each rank in files of its own."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiocoll.cli import main
from aiocoll.cli.logs import LogFile

if TYPE_CHECKING:
    from tests.cli.conftest import Launch


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of the one job in a folder."""
    (job,) = folder.iterdir()
    return {str(file.relative_to(job)): file.read_bytes() for file in job.rglob("*") if file.is_file()}


def test_each_rank_has_a_file_for_each_stream(launch: Launch, tmp_path: Path) -> None:
    script = """
        import os, sys
        rank = os.environ["RANK"]
        os.write(1, b"out " + rank.encode() + b"\\n\\xff no newline at the end")
        print("err", rank, file=sys.stderr)
    """
    logs = tmp_path / "new" / "logs"
    done = launch("-n", 2, "--log-dir", logs, script=script, text=False).finish()
    assert done.returncode == 0
    assert sorted(done.stdout.splitlines()) == sorted(
        line
        for rank in (b"0", b"1")
        for line in (b"[%s] out %s" % (rank, rank), b"[%s] \xff no newline at the end" % rank)
    )
    first, *errors = done.stderr.splitlines()
    (job,) = logs.iterdir()
    assert first == f"aiocoll run: output of the ranks is kept in {job}".encode()
    assert sorted(errors) == [b"[0] err 0", b"[1] err 1"]
    assert contents(logs) == {
        f"restart-0/rank-{rank}.{stream}": text
        for rank in range(2)
        for stream, text in {"out": b"out %d\n\xff no newline at the end" % rank, "err": b"err %d\n" % rank}.items()
    }


def test_only_their_user_can_read_them(launch: Launch, tmp_path: Path) -> None:
    """Whatever is the mask, and also where the folder was there before."""
    logs = tmp_path / "logs"
    logs.mkdir()
    logs.chmod(0o777)
    before = os.umask(0)
    try:
        assert main.main(["run", "-n", "1", "--log-dir", str(logs), launch.write("print(1)")]) == 0
        assert main.main(["run", "-n", "1", "--log-dir", str(tmp_path / "new"), launch.write("print(1)")]) == 0
    finally:
        os.umask(before)
    for folder in (logs, tmp_path / "new"):
        (job,) = folder.iterdir()
        modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (job, *job.rglob("*"))}
        assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in modes}
        assert len(modes) == 4
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700


@pytest.mark.slow
def test_each_start_has_files_and_each_job_a_folder(launch: Launch, tmp_path: Path) -> None:
    """An exception that ends a rank comes last in its file, after what it wrote before."""
    script = """
        import os, sys
        count = os.environ["AIOCOLL_RESTART_COUNT"]
        print("start", count)
        if os.environ["RANK"] == "1" and count != "2":
            print("before", file=sys.stderr)
            raise ValueError(f"no data {count}")
    """
    for _ in range(2):
        done = launch("-n", 2, "--max-restarts", 2, "--log-dir", tmp_path / "logs", script=script).finish()
        assert done.returncode == 0, done.stderr
    jobs = sorted((tmp_path / "logs").iterdir())
    assert len(jobs) == 2
    assert all(re.fullmatch(r"\d{8}-\d{6}-\w+", job.name) for job in jobs)
    for job in jobs:
        for count in range(3):
            folder = job / f"restart-{count}"
            assert (folder / "rank-1.out").read_text() == f"start {count}\n"
            assert (folder / "rank-0.err").read_text() == ""
            lines = (folder / "rank-1.err").read_text().splitlines()
            if count == 2:
                assert lines == []
                continue
            assert lines[:2] == ["before", "Traceback (most recent call last):"]
            assert lines[-1] == f"ValueError: no data {count}"


def test_a_folder_that_cannot_be_made_is_explained(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main.main(["run", "-n", "1", "--log-dir", str(tmp_path / "file"), launch.write("")])
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == (
        f"aiocoll run: error: --log-dir {tmp_path / 'file'}: File exists; give a folder in which you can make others"
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="writes to /dev/full")
def test_a_full_disk_ends_the_file_and_not_the_job() -> None:
    said: list[str] = []
    log = LogFile(Path("/dev/full"), said.append)
    log.write(b"1")
    log.write(b"2")
    assert said == ["/dev/full cannot be written (No space left on device): it lacks what comes from now on"]
    log.close()


def test_a_file_that_cannot_be_made_is_told_of(tmp_path: Path) -> None:
    said: list[str] = []
    log = LogFile(tmp_path / "absent" / "file", said.append)
    log.write(b"1")
    log.close()
    assert said == [
        f"{tmp_path / 'absent' / 'file'} cannot be written (No such file or directory): it lacks what comes from now on"
    ]
