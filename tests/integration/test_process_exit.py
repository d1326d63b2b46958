"""Programs that end with pending calls: the ending rank prints only its own error, and its peer gets an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .conftest import LIMIT, Ranks

PENDING_WORKS = str(Path(__file__).with_name("pending_works.py"))
OPEN_GROUPS = str(Path(__file__).with_name("open_groups.py"))

#: For each kind of end: the exit code of rank 1, and the last line of its standard error.
EXITS = {
    "raise": (3, ""),
    "interrupt": (-2, "KeyboardInterrupt"),
    "interrupt twice": (-2, "KeyboardInterrupt"),
    "interrupt shutdown": (-2, "KeyboardInterrupt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", EXITS)
def test_ending_rank_prints_only_its_own_error_and_its_peer_is_notified(how: str, ranks: Ranks, port: int) -> None:
    processes = [ranks.start(PENDING_WORKS, how, f"tcp://127.0.0.1:{port}", str(rank)) for rank in range(2)]
    (out, err), (_, last) = [process.communicate(timeout=LIMIT) for process in processes]
    code, words = EXITS[how]
    assert processes[1].returncode == code
    check_stderr(last, words)
    assert (processes[0].returncode, err) == (0, "")
    assert out in ("GroupError None [1]\n", "PeerLostError left [1]\n"), out


def test_pending_works_print_nothing_after_their_failure_was_reported(ranks: Ranks, port: int) -> None:
    processes = [ranks.start(PENDING_WORKS, "leave", f"tcp://127.0.0.1:{port}", str(rank)) for rank in range(2)]
    (out, err), (_, last) = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert out.startswith("CollectiveTimeoutError None ")
    assert err == ""
    assert last == ""


def test_interrupted_rendezvous_prints_only_keyboard_interrupt(ranks: Ranks, port: int) -> None:
    process = ranks.start(PENDING_WORKS, "interrupt rendezvous", f"tcp://127.0.0.1:{port}", "0")
    _, last = process.communicate(timeout=LIMIT)
    assert process.returncode == -2
    check_stderr(last, "KeyboardInterrupt")


def check_stderr(stderr: str, words: str) -> None:
    """Check that the last line of standard error is `words`, and that asyncio and aiocoll report no pending calls."""
    assert stderr.strip().rpartition("\n")[2] == words
    for noise in ("ignored", "never retrieved", "destroyed", "never awaited", "Warning"):
        assert noise not in stderr, stderr


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_event_loops_that_end_with_open_groups_leave_no_descriptors_and_threads(
    transport: str, ranks: Ranks, port: int
) -> None:
    """Run two processes, so that the groups have watchdog threads and shared memory."""
    env = {"AIOCOLL_TRANSPORT": transport, "PYTHONWARNINGS": "always::ResourceWarning"}
    processes = [ranks.start(OPEN_GROUPS, f"tcp://127.0.0.1:{port}", str(rank), env=env) for rank in range(2)]
    for rank, process in enumerate(processes):
        out, err = process.communicate(timeout=LIMIT)
        assert process.returncode == 0, err
        found = json.loads(out)
        assert found == [found[0]] * 5
        assert found[0][1] == 1
        assert err.count(f"ResourceWarning: group 'world:0' was not shut down on rank {rank}: ") == 5, err
        assert "unclosed" not in err
        assert "destroyed" not in err
