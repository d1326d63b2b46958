"""Programs of one round, sorted by what is posted, read and folded."""

from __future__ import annotations

import pytest

from aiocoll.algorithms.program import Region
from aiocoll.algorithms.select import ALGORITHMS, IN_SLOTS, build
from aiocoll.engine.operations.round import Contribution, Round, Take

WORLD = 4
SIZES = {"barrier": (), "allgather": ((3,) * WORLD,), "reduce_scatter": ((3,) * WORLD,)}


def rounds(kind: str, algorithm: str) -> list[Round]:
    sizes = SIZES.get(kind, (3,))
    return [Round.of(build(kind, algorithm, rank, WORLD, *sizes, root=1), 8) for rank in range(WORLD)]


@pytest.mark.parametrize(("kind", "algorithm"), IN_SLOTS)
def test_round_of_every_slot_program_pairs_each_contribution_with_a_take(kind: str, algorithm: str) -> None:
    made = rounds(kind, algorithm)
    posted = sorted(
        (rank, reader, contribution.region.count * 8)
        for rank, each in enumerate(made)
        for contribution in (*each.first, *each.last)
        for reader in contribution.readers
    )
    taken = sorted((take.peer, rank, take.nbytes) for rank, each in enumerate(made) for take in each.takes)
    assert posted == taken
    assert posted


def test_round_of_allreduce_posts_once_and_folds_in_rank_order() -> None:
    tensor = Region(0, 0, 3)
    each = rounds("allreduce", "oneshot")[2]
    assert each.first == (Contribution(tensor, (3, 0, 1)),)
    assert [take.peer for take in each.takes] == [0, 1, 3]
    assert (each.fold, each.sources, each.last) == (tensor, (0, 1, tensor, 2), ())


def test_round_of_central_posts_the_result_at_the_end() -> None:
    tensor = Region(0, 0, 3)
    centre, other = rounds("allreduce", "central")[:2]
    assert (centre.first, centre.last) == ((), (Contribution(tensor, (1, 2, 3)),))
    assert (other.first, other.takes, other.fold) == ((Contribution(tensor, (0,)),), (Take(0, 24, tensor),), None)


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [("allreduce", "ring"), ("allreduce", "circulant"), ("allreduce", "pairwise")],
)
def test_round_of_a_program_of_several_rounds_is_refused(kind: str, algorithm: str) -> None:
    assert (kind, algorithm) in ALGORITHMS
    with pytest.raises(ValueError, match=f"algorithm='{algorithm}' has more than one round"):
        rounds(kind, algorithm)
