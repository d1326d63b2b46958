"""`aiocoll run --log-dir`, which writes the output of each rank to separate files."""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from aiocoll.cli import main
from aiocoll.cli.logs import Logs

if TYPE_CHECKING:
    from tests.cli.conftest import Launch


def contents(folder: Path) -> dict[str, bytes]:
    """Return the contents of the log files of the only job in a folder, by path."""
    (job,) = folder.iterdir()
    return {str(file.relative_to(job)): file.read_bytes() for file in job.rglob("*") if file.is_file()}


def test_log_directory_has_one_file_per_rank_and_stream(launch: Launch, tmp_path: Path) -> None:
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


def test_log_files_are_readable_only_by_their_user(launch: Launch, tmp_path: Path) -> None:
    """Check a new directory and an existing one, with a umask that forbids nothing."""
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
def test_log_directory_has_one_folder_per_job_and_separate_files_per_restart(launch: Launch, tmp_path: Path) -> None:
    """Check that a traceback follows the earlier output of its rank."""
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


def test_error_explains_a_log_directory_that_cannot_be_created(
    launch: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="2"):
        main.main(["run", "-n", "1", "--log-dir", str(tmp_path / "file"), launch.write("")])
    error = capsys.readouterr().err.splitlines()[-2]
    assert error == (
        f"aiocoll run: error: --log-dir {tmp_path / 'file'}: File exists; choose a directory where you can create "
        "subdirectories"
    )


def test_job_continues_if_a_log_file_cannot_be_written(launch: Launch, tmp_path: Path) -> None:
    """Limit the launcher's files to 1 KiB; its standard output is a pipe and has no limit."""
    script = "for _ in range(200): print('x' * 99)"
    limited = ["bash", "-c", 'ulimit -f 1; exec "$0" "$@"']
    done = launch("-n", 2, "--log-dir", tmp_path / "logs", script=script, before=limited).finish()
    assert done.returncode == 1
    assert sorted(done.stdout.splitlines()) == sorted(f"[{rank}] {'x' * 99}" for rank in range(2) for _ in range(200))
    (job,) = (tmp_path / "logs").iterdir()
    first, *errors = done.stderr.splitlines()
    assert first == f"aiocoll run: output of the ranks is kept in {job}"
    trouble = "cannot be written (File too large): later output is missing from it"
    assert sorted(errors) == [f"aiocoll run: {job}/restart-0/rank-{rank}.out {trouble}" for rank in range(2)]
    assert [(job / "restart-0" / f"rank-{rank}.out").stat().st_size for rank in range(2)] == [1024, 1024]


def test_log_file_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    reported: list[str] = []
    logs = Logs(str(tmp_path), reported.append)
    assert logs.complete
    (logs.path / "restart-0").write_text("not a folder")
    out, err = logs.open(0, 3)
    out.write(b"1")
    assert not logs.complete
    trouble = "cannot be written (Not a directory): later output is missing from it"
    assert reported == [
        f"{logs.path}/restart-0 cannot be made (File exists)",
        *(f"{logs.path}/restart-0/rank-3.{stream} {trouble}" for stream in ("out", "err")),
    ]
    out.close()
    err.close()
