"""Dump files, to which flight recorders write the last operations of a rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

#: A program that writes a dump with process id 1, as in containers. With a second argument, it exits before it renames
#: the temporary file.
WRITE = """
import os, sys
from aiocoll.dump.files import write_json
path, is_killed = sys.argv[1], len(sys.argv) > 2
os.getpid = lambda: 1
if is_killed:
    os.replace = lambda *_: os._exit(9)
write_json(path, {"written": True})
"""


def test_leftover_file_of_a_killed_process_does_not_block_a_dump(tmp_path: Path) -> None:
    path = tmp_path / "dump.json"
    for arguments, code in ((["killed"], 9), ([], 0)):
        done = subprocess.run(
            [sys.executable, "-c", WRITE, str(path), *arguments], stderr=subprocess.PIPE, text=True, timeout=60
        )
        assert (done.returncode, done.stderr) == (code, "")
    assert json.loads(path.read_text()) == {"written": True}
    assert len(list(tmp_path.iterdir())) == 2
