"""Schedules of all algorithms: correct results for every world size and order of events, and their structure."""

import pytest

from aiocoll.algorithms.program import ActionKind
from aiocoll.algorithms.select import ALGORITHMS, IN_SLOTS, build

from ..each import each
from .cases import BARRIERS, IN_RANK_ORDER, REDUCING, REPEATED, Case, cases, supported_world_size
from .interpreter import execute
from .proof import Proof

ALL = sorted({**ALGORITHMS, **IN_SLOTS})
ONE_PLACE = [(kind, name) for kind, name in ALL if kind in ("allreduce", "reduce", "reduce_scatter")]
LOGARITHMIC = ("circulant", "dissemination", "binomial", "knomial", "linear", "chain")


def check_in_any_order(kind: str, algorithm: str, world_size: int) -> None:
    for number, case in enumerate(cases(kind, algorithm, world_size)):
        programs = case.programs()
        Proof(programs)
        eager = execute(programs, case.memory(), seed=number, rendezvous=False)
        case.check(eager)
        # "exchange" needs eager messages. Without them, both sends would wait for the receive of the peer.
        if number % 3 == 0 and algorithm != "exchange":
            assert execute(programs, case.memory(), seed=number + 1, rendezvous=True) == eager


@each("world_size", range(1, 10))
@pytest.mark.parametrize(("kind", "algorithm"), ALL)
def test_program_result_does_not_depend_on_the_order_of_events(kind: str, algorithm: str, world_size: int) -> None:
    check_in_any_order(kind, algorithm, world_size)


@pytest.mark.slow
@each("world_size", range(10, 18))
@pytest.mark.parametrize(("kind", "algorithm"), ALL)
def test_program_result_of_many_ranks_does_not_depend_on_the_order_of_events(
    kind: str, algorithm: str, world_size: int
) -> None:
    check_in_any_order(kind, algorithm, world_size)


@pytest.mark.slow
@each("world_size", [32, 33, 64])
@each(("kind", "algorithm"), [pair for pair in ALL if pair[1] in LOGARITHMIC])
def test_programs_of_many_ranks_compute_the_closed_form_results(kind: str, algorithm: str, world_size: int) -> None:
    counts = tuple(rank % 3 for rank in range(world_size))
    case = Case(kind, algorithm, world_size, root=5, count=2 * world_size - 1, counts=counts)
    programs = case.programs()
    Proof(programs)
    case.check(execute(programs, case.memory(), seed=world_size, rendezvous=True))


@each("world_size", [1, 2, 3, 8, 13])
@each(("kind", "algorithm"), ONE_PLACE)
def test_each_element_has_its_final_reduction_on_one_rank_or_on_every_rank(
    kind: str, algorithm: str, world_size: int
) -> None:
    world_size = supported_world_size(algorithm, world_size)
    count = 3 * world_size + 1
    counts = tuple(3 + (rank == 0) for rank in range(world_size))
    case = Case(kind, algorithm, world_size, root=world_size - 1, count=count, counts=counts)
    completed = [action.region.count for program in case.programs() for action in program.actions if action.final]
    assert sum(completed) == count * (world_size if algorithm in REPEATED and kind == "allreduce" else 1)


@each(("kind", "algorithm"), [pair for pair in ALL if pair[0] in REDUCING])
def test_algorithms_that_keep_rank_order_reduce_with_fold_actions(kind: str, algorithm: str) -> None:
    case = next(case for case in cases(kind, algorithm, 5) if case.count == 97)
    combines = any(action.verb is ActionKind.COMBINE for program in case.programs() for action in program.actions)
    folds = any(action.verb is ActionKind.FOLD for program in case.programs() for action in program.actions)
    assert folds if algorithm in IN_RANK_ORDER else (combines or kind == "exscan")


@each(("kind", "algorithm"), ALL)
def test_programs_have_their_algorithm_name_and_overwrite_no_input(kind: str, algorithm: str) -> None:
    for case in cases(kind, algorithm, 4):
        for rank, (program, buffers) in enumerate(zip(case.programs(), case.memory(), strict=True)):
            assert program.algorithm == algorithm
            written = {action.region.buffer for action in program.actions if action.verb is not ActionKind.SEND}
            if kind == "reduce" and rank != case.root:
                assert 0 not in written
            if kind not in BARRIERS and len(buffers) > 1:
                inputs = {number for number, buffer in enumerate(buffers) if None not in buffer and buffer}
                assert not written & inputs


@each("kind", ["gather", "scatter"])
def test_gather_and_scatter_programs_of_non_root_ranks_use_a_single_buffer(kind: str) -> None:
    for rank in (0, 1, 3):
        program = build(kind, "linear", rank, 4, (1, 2, 3, 4), root=2)
        assert [action.region.buffer for action in program.actions] == [4]


def test_barrier_program_sends_no_elements_and_is_empty_for_one_rank() -> None:
    assert build("barrier", "dissemination", 0, 1).actions == ()
    for rank in range(7):
        actions = build("barrier", "dissemination", rank, 7).actions
        assert [action.verb for action in actions] == [ActionKind.SEND, ActionKind.RECV] * 3
        assert {(action.region.buffer, action.region.start, action.region.stop) for action in actions} == {(0, 0, 0)}


@each("kind", BARRIERS)
def test_no_rank_leaves_a_barrier_before_all_ranks_have_entered(kind: str) -> None:
    for world_size in range(2, 34):
        proof = Proof([build(kind, BARRIERS[kind], rank, world_size) for rank in range(world_size)])
        for rank in range(world_size):
            assert proof.predecessors(rank) | {rank} == set(range(world_size))


def test_ring_allreduce_program_forwards_pieces_and_uses_no_scratch_memory() -> None:
    program = build("allreduce", "ring", 1, 4, 400)
    assert program.scratch == ()
    forwarded = [action for action in program.actions if action.verb is ActionKind.SEND][1:]
    assert [len(action.follow) for action in forwarded] == [1] * 5
    assert not any(action.after for action in program.actions)


def test_ring_allreduce_of_two_ranks_exchanges_array_halves() -> None:
    sends = [action for action in build("allreduce", "ring", 0, 2, 10).actions if action.verb is ActionKind.SEND]
    assert [(action.region.start, action.region.stop) for action in sends] == [(5, 10), (0, 5)]
