"""The table covers everything and keeps what ops need."""

import pytest

from aiocoll.algorithms import build, choose
from aiocoll.algorithms.select import ALGORITHMS, RULES

from .cases import IN_RANK_ORDER, REDUCING, REPEATED

KIB, MIB = 1024, 1024 * 1024
SIZES = [0, 1, 8, KIB, 8 * KIB, 32 * KIB, 32 * KIB + 1, 64 * KIB, 256 * KIB, 256 * KIB + 1, MIB, 16 * MIB, 2**33]
WORLDS = [1, 2, 3, 4, 5, 8, 16, 17, 64, 1000]


def test_rules_and_functions_name_the_same_algorithms() -> None:
    assert {(kind, rule.algorithm) for kind, rules in RULES.items() for rule in rules} == set(ALGORITHMS)


@pytest.mark.parametrize("kind", RULES)
def test_every_case_has_an_algorithm_that_keeps_what_the_op_needs(kind: str) -> None:
    for nbytes in SIZES:
        for world_size in WORLDS:
            for ordered in (False, True):
                for portable in (False, True):
                    name = choose(kind, nbytes, world_size, ordered=ordered, portable=portable)
                    assert (kind, name) in ALGORITHMS
                    assert not ordered or kind not in REDUCING or name in IN_RANK_ORDER
                    assert portable or kind != "allreduce" or name not in REPEATED


@pytest.mark.parametrize(("kind", "algorithm"), sorted(ALGORITHMS))
def test_every_algorithm_is_chosen_for_something(kind: str, algorithm: str) -> None:
    assert any(
        choose(kind, nbytes, world_size, ordered=ordered) == algorithm
        for nbytes in SIZES
        for world_size in WORLDS
        for ordered in (False, True)
    )


@pytest.mark.parametrize(
    ("nbytes", "world_size", "ordered", "portable", "expected"),
    [
        (256 * KIB, 2, False, True, "exchange"),
        (256 * KIB, 2, True, True, "oneround"),
        (8, 1, False, True, "oneround"),
        (32 * KIB, 4, False, True, "oneround"),
        (4, 5, False, True, "bruck"),
        (MIB, 4, False, True, "circulant"),
        (16 * MIB, 4, False, True, "ring"),
        (4, 4, True, True, "oneround"),
        (4, 4, True, False, "pairwise"),
        (4, 16, True, True, "bruck"),
        (16 * MIB, 4, True, True, "pairwise"),
        (4, 2, False, False, "ring"),
        (MIB, 2, False, True, "ring"),
        (MIB, 2, True, True, "pairwise"),
        (4, 5, False, False, "circulant"),
    ],
)
def test_allreduce_choices(nbytes: int, world_size: int, ordered: bool, portable: bool, expected: str) -> None:
    assert choose("allreduce", nbytes, world_size, ordered=ordered, portable=portable) == expected


def test_bad_names_are_explained() -> None:
    with pytest.raises(ValueError, match=r"kind='reduce_all' is not a collective; use one of allreduce, reduce,"):
        choose("reduce_all", 4, 2)
    with pytest.raises(ValueError, match=r"algorithm='rind' is not known for kind='allreduce'; use one of .*ring"):
        build("allreduce", "rind", 0, 2, 4)
    with pytest.raises(ValueError, match=r"kind='reduce_all' is not a collective; use one of allreduce, reduce,"):
        build("reduce_all", "ring", 0, 2, 4)
