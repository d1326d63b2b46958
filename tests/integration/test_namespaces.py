"""Ranks of one host in separate process namespaces, like containers that share a network."""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING

import pytest

from tests.integration.conftest import LIMIT, PROGRAM
from tests.integration.test_recovery import result

if TYPE_CHECKING:
    from tests.integration.conftest import Ranks

#: Seconds within which a proven death must be reported. Without a proof, the report takes 2.5 s.
AT_ONCE = 2.0

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can create process namespaces"),
    pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare (util-linux) is not installed"),
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has process namespaces"),
]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_death_in_another_process_namespace_is_detected(ranks: Ranks, port: int, victim: int) -> None:
    """Check ranks that do not find each other in /proc: the socket between two ranks identifies the peer's process."""
    env = {"VICTIM": str(victim), "AIOCOLL_TRANSPORT": "unix"}
    # Run the rank as a child of a shell, since SIGKILL has no effect if the first process of a pid namespace sends it
    # to itself.
    inside = ["-c", "import os, sys; os.execvp('unshare', sys.argv[1:])", "unshare", "--pid", "--fork", "--kill-child"]
    command = [*inside, "sh", "-c", '"$@"; exit $?', "sh", sys.executable, PROGRAM, "alone", f"tcp://127.0.0.1:{port}"]
    processes = [ranks.start(*command, str(rank), "2", env=env) for rank in range(2)]
    how, size, took = result(processes[1 - victim])["result"]
    assert (how, size) == ("killed", 1)
    assert took < AT_ONCE
    assert processes[victim].wait(LIMIT) == 128 + 9
