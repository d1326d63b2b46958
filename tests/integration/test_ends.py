"""A program that ends in the middle of things: quietly on its own side, with a named error on the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import LIMIT, Ranks

ENDING = str(Path(__file__).with_name("ending.py"))

#: What rank 1 exits with, and the last word on its stderr.
ENDS = {
    "raise": (3, ""),
    "interrupt": (-2, "KeyboardInterrupt"),
    "interrupt twice": (-2, "KeyboardInterrupt"),
    "interrupt shutdown": (-2, "KeyboardInterrupt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ENDS)
def test_the_one_that_ends_is_quiet_and_the_other_one_knows(how: str, ranks: Ranks, port: int) -> None:
    processes = [ranks.start(ENDING, how, f"tcp://127.0.0.1:{port}", str(rank)) for rank in range(2)]
    (out, err), (_, last) = [process.communicate(timeout=LIMIT) for process in processes]
    code, words = ENDS[how]
    assert processes[1].returncode == code
    check(last, words)
    assert (processes[0].returncode, err) == (0, "")
    assert out in ("GroupError None [1]\n", "PeerLostError left [1]\n"), out


def test_works_left_behind_are_quiet_when_another_told_of_the_cause(ranks: Ranks, port: int) -> None:
    processes = [ranks.start(ENDING, "leave", f"tcp://127.0.0.1:{port}", str(rank)) for rank in range(2)]
    (out, err), (_, last) = [process.communicate(timeout=LIMIT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert out.startswith("CollectiveTimeoutError None ")
    assert err == ""
    assert last == ""


def test_an_interrupted_rendezvous_is_quiet_too(ranks: Ranks, port: int) -> None:
    process = ranks.start(ENDING, "interrupt rendezvous", f"tcp://127.0.0.1:{port}", "0")
    _, last = process.communicate(timeout=LIMIT)
    assert process.returncode == -2
    check(last, "KeyboardInterrupt")


def check(stderr: str, words: str) -> None:
    """One traceback of the program's own, and nothing about what it left behind."""
    assert stderr.strip().rpartition("\n")[2] == words
    for noise in ("ignored", "never retrieved", "destroyed", "nobody looked", "Warning"):
        assert noise not in stderr, stderr
