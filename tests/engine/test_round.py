"""Schedules of one round, converted into posts to shared-memory slots, reads of slots, and reductions."""

from __future__ import annotations

import pytest

from aiocoll.algorithms.program import Action, ActionKind, Program, Region
from aiocoll.algorithms.select import ALGORITHMS, IN_SLOTS, Lanes, build, lanes
from aiocoll.engine.operations.round import Contribution, Round, Take
from aiocoll.transport.shared_memory import MIDDLE_SLOTS, SMALL_SLOTS

WORLD = 4
SIZES = {"barrier": (), "allgather": ((3,) * WORLD,), "reduce_scatter": ((3,) * WORLD,)}


#: The size of a small slot in bytes.
SMALL = 64


def rounds(kind: str, algorithm: str, world: int = WORLD, small: int = SMALL) -> list[Round]:
    sizes = tuple(size[:world] if isinstance(size, tuple) else size for size in SIZES.get(kind, (3,)))
    ways = lanes(kind, algorithm, world)
    return [Round.of(build(kind, algorithm, rank, world, *sizes, root=1), 8, ways, small) for rank in range(world)]


@pytest.mark.parametrize("small", [0, SMALL])
@pytest.mark.parametrize("world", [2, 3, WORLD])
@pytest.mark.parametrize(("kind", "algorithm"), IN_SLOTS)
def test_every_posted_contribution_of_a_slot_program_is_read_once(
    kind: str, algorithm: str, world: int, small: int
) -> None:
    """Check that the writer and the reader of each contribution choose the same lane and the same slots."""
    made = rounds(kind, algorithm, world, small)
    posted = sorted(
        (rank, reader, contribution.nbytes, *contribution[3:])
        for rank, each in enumerate(made)
        for contribution in (*each.first, *each.last)
        for reader in contribution.readers
    )
    taken = sorted((take.peer, rank, take.nbytes, *take[3:]) for rank, each in enumerate(made) for take in each.takes)
    assert posted == taken
    assert posted
    several = [each for round_ in made for each in (*round_.first, *round_.last) if len(each.readers) > 1]
    assert all(each.is_common for each in several)


@pytest.mark.parametrize(("kind", "algorithm"), IN_SLOTS)
def test_group_of_two_ranks_does_not_use_the_common_lane(kind: str, algorithm: str) -> None:
    """Check that two pairs of ranks with one rank in common never wait for each other's slots."""
    for each in rounds(kind, algorithm, 2):
        assert not any(part.is_common for part in (*each.first, *each.last, *each.takes))


@pytest.mark.parametrize("kind", ["reduce", "reduce_scatter"])
def test_blocks_for_one_reader_use_the_lane_of_the_reader(kind: str) -> None:
    for each in rounds(kind, "oneshot"):
        assert not any(part.is_common for part in (*each.first, *each.takes))


def test_contribution_longer_than_a_small_slot_uses_a_middle_slot() -> None:
    for small, slots in ((24, (0, SMALL_SLOTS)), (23, (SMALL_SLOTS, MIDDLE_SLOTS))):
        for each in rounds("allreduce", "oneshot", small=small):
            assert {(part.first_slot, part.slots) for part in (*each.first, *each.takes)} == {slots}


def test_allreduce_through_slots_posts_once_and_folds_in_rank_order() -> None:
    each = rounds("allreduce", "oneshot")[2]
    assert each.first == (Contribution(0, 24, (3, 0, 1), True, 0, SMALL_SLOTS),)
    assert [take.peer for take in each.takes] == [0, 1, 3]
    assert (each.fold, each.own, each.moves, each.last) == (0, ((2, 0),), (), ())


def test_central_allreduce_through_slots_posts_the_result_at_the_end() -> None:
    centre, other = rounds("allreduce", "central")[:2]
    assert (centre.first, centre.last) == ((), (Contribution(0, 24, (1, 2, 3), True, 0, SMALL_SLOTS),))
    assert other.first == (Contribution(0, 24, (0,), False, 0, SMALL_SLOTS),)
    assert other.takes == (Take(0, 24, 3, True, 0, SMALL_SLOTS),)
    assert (other.fold, other.moves) == (None, ((0, 0),))


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [("allreduce", "ring"), ("allreduce", "circulant"), ("allreduce", "pairwise")],
)
def test_slot_execution_of_a_program_with_several_rounds_is_refused(kind: str, algorithm: str) -> None:
    assert (kind, algorithm) in ALGORITHMS
    with pytest.raises(ValueError, match=f"algorithm='{algorithm}' has more than one round|a round uses whole arrays"):
        rounds(kind, algorithm)


@pytest.mark.parametrize(
    "action",
    [
        Action(ActionKind.SEND, Region(0, 1, 3), 1),
        Action(ActionKind.RECV, Region(0, 1, 3), 1),
        Action(ActionKind.COPY, Region(1, 0, 2), sources=(Region(0, 1, 3),)),
        Action(ActionKind.FOLD, Region(0, 1, 3), sources=(Region(1, 0, 2),)),
    ],
)
def test_slot_execution_of_a_program_on_a_part_of_an_array_is_refused(action: Action) -> None:
    with pytest.raises(ValueError, match="a round uses whole arrays"):
        Round.of(Program((action,)), 8, Lanes(first=False, last=False), SMALL)
