"""Recovery from a killed rank: the other ranks continue as a smaller group, and then with a newcomer."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest

from aiocoll.store import StoreServer
from tests.integration.conftest import KEY, LIMIT, PROGRAM

if TYPE_CHECKING:
    from tests.integration.conftest import Ranks

#: A warning that a rank logs after it was stopped for over a second, if its watchdog runs again before the rank ends.
STALL_WARNING = (
    r"(rank 1: for about \d+\.\d s no other thread of this process could run \(it used \d\.\d s of CPU time\): "
    r"it was stopped, or one call held the GIL\n)?"
)
#: Seconds within which the surviving ranks must have made a new group (contract).
SHRUNK = 2.0
#: Seconds within which all other ranks must be notified of a killed rank (contract).
LOST = 1.0


@pytest.fixture
async def store(ranks: Ranks) -> AsyncIterator[dict[str, str]]:
    """Host the store as launchers do; yield environment variables with the store's address for the ranks."""
    server = StoreServer(key=KEY)
    host, port = server.start()
    yield {"MASTER_ADDR": host, "MASTER_PORT": str(port), "AIOCOLL_STORE": "launcher"}
    await server.aclose()


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "transport"), [(0, "tcp"), (0, "shm"), (1, "unix"), (2, "tcp"), (3, "shm")])
def test_killed_rank_is_replaced_and_the_other_ranks_continue(
    ranks: Ranks, store: dict[str, str], victim: int, transport: str
) -> None:
    env = {**store, "VICTIM": str(victim), "AIOCOLL_TRANSPORT": transport, "WORLD_SIZE": "4"}
    processes = [ranks.start(PROGRAM, "recover", "env://", env={**env, "RANK": str(rank)}) for rank in range(4)]
    processes.append(ranks.start(PROGRAM, "join", "env://", env=env))
    outcomes = [result(process, -9 if number == victim else 0) for number, process in enumerate(processes)]
    assert outcomes.pop() == {"rank": 3, "size": 4, "result": 4}
    for rank in {0, 1, 2, 3} - {victim}:
        took, size = outcomes[rank]["result"]
        assert size == 4
        assert took <= SHRUNK
    assert not list(ranks.temporary.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "transport"), [(0, "tcp"), (0, "shm"), (1, "unix"), (3, "tcp"), (3, "shm")])
def test_death_of_a_rank_during_the_wait_for_newcomers_fails_grow_on_all_ranks(
    ranks: Ranks, store: dict[str, str], victim: int, transport: str
) -> None:
    env = {**store, "VICTIM": str(victim), "AIOCOLL_TRANSPORT": transport}
    results = ranks("lose_growing", "env://", 4, numbers=False, env=env, killed=[victim])
    for rank in {0, 1, 2, 3} - {victim}:
        took, how, lost, size = results[rank]
        assert (how, lost, size) == ("killed", [victim], 3)
        assert took <= LOST


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_death_of_the_store_host_during_the_wait_for_newcomers_fails_grow(ranks: Ranks, port: int, victim: int) -> None:
    results = ranks("lose_growing", f"tcp://127.0.0.1:{port}", 3, env={"VICTIM": str(victim)}, killed=[victim])
    for rank in {0, 1, 2} - {victim}:
        took, how, lost, size = results[rank]
        assert (how, lost, size) == ("killed", [victim], 2)
        assert took <= LOST


@pytest.mark.slow
def test_stopped_and_replaced_rank_is_notified_of_its_exclusion_when_it_continues(
    ranks: Ranks, store: dict[str, str]
) -> None:
    env = {**store, "VICTIM": "1", "WORLD_SIZE": "3"}
    processes = [ranks.start(PROGRAM, "replace", "env://", env={**env, "RANK": str(rank)}) for rank in range(3)]
    processes.append(ranks.start(PROGRAM, "join", "env://", env=env))
    stopped = processes.pop(1)
    assert [result(process)["result"] for process in processes] == [3, 3, 3]
    stopped.send_signal(signal.SIGCONT)
    cause, refusal = result(stopped, expected_stderr=STALL_WARNING)["result"]
    # The other ranks send two notices, one before and one after the agreement, over different links. Either may
    # arrive first.
    assert cause in {
        "ranks 0, 2 of group 'world:0' continued as a new group",
        *(f"group 'world:0' was replaced: rank {rank} called shrink()" for rank in (0, 2)),
    }
    assert refusal.startswith("rank 1 was excluded: ranks 0, 2 continued without it")
    assert not list(ranks.temporary.iterdir())


def result(process: subprocess.Popen[str], code: int = 0, expected_stderr: str = "") -> Any:
    """Wait for a rank to end; return its printed result, and check that its standard error matches."""
    out, err = process.communicate(timeout=LIMIT)
    assert re.fullmatch(expected_stderr, err), err
    assert process.returncode == code
    return json.loads(out) if out else None
