"""The checkers of schedules (`Proof`, `execute`): they must detect races, deadlocks and unmatched messages."""

import pytest

from aiocoll.algorithms.program import Action, ActionKind, Program, Region

from ..each import each
from .interpreter import execute
from .proof import Proof

TENSOR, SCRATCH = Region(0, 0, 4), Region(1, 0, 4)


def exchange(peer: int, fold_after: tuple[int, ...], step: int = 0, count: int = 4) -> Program:
    """Return a program that exchanges a tensor with `peer`, then folds its own tensor before the received one."""
    actions = (
        Action(ActionKind.SEND, Region(0, 0, count), peer, step),
        Action(ActionKind.RECV, SCRATCH, peer),
        Action(ActionKind.FOLD, TENSOR, sources=(TENSOR, SCRATCH), final=True, after=fold_after),
    )
    return Program(actions, (4,))


def test_schedule_checker_accepts_a_correct_exchange() -> None:
    assert Proof([exchange(1, (0, 1)), exchange(0, (0, 1))]).steps == 1


def test_schedule_checker_finds_a_buffer_that_is_overwritten_before_its_send() -> None:
    with pytest.raises(AssertionError, match=r"rank 1: .*SEND.* races with .*FOLD"):
        Proof([exchange(1, (0, 1)), exchange(0, (1,))])


def test_schedule_checker_finds_a_buffer_that_is_read_before_its_data_arrives() -> None:
    with pytest.raises(AssertionError, match=r"rank 0: .*RECV.* races with .*FOLD"):
        Proof([exchange(1, (0,)), exchange(0, (0, 1))])


@each(
    ("bad", "message"),
    [(exchange(0, (0, 1), step=1), "sent but not received"), (exchange(0, (0, 1), count=3), "two lengths")],
)
def test_schedule_checker_finds_unmatched_messages(bad: Program, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        Proof([exchange(1, (0, 1)), bad])


def test_schedule_with_a_race_gives_different_results_in_different_orders() -> None:
    memory = [[["a"] * 4], [["b"] * 4]]
    programs = [exchange(1, (0, 1)), exchange(0, (1,))]
    results = {str(execute(programs, memory, seed, rendezvous=False)) for seed in range(50)}
    assert len(results) > 1


def test_schedule_checker_finds_a_cycle_of_waiting_actions() -> None:
    def waiting(peer: int) -> Program:
        return Program(
            (Action(ActionKind.RECV, SCRATCH, peer), Action(ActionKind.SEND, TENSOR, peer, after=(0,))), (4,)
        )

    with pytest.raises(AssertionError, match="in a circle"):
        Proof([waiting(1), waiting(0)])
    with pytest.raises(AssertionError, match="deadlock"):
        execute([waiting(1), waiting(0)], [[["a"] * 4], [["b"] * 4]], seed=0, rendezvous=False)
