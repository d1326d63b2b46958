"""Schedules that multiply inputs by a factor: each input is scaled once, and pure inputs never change."""

import pytest

from aiocoll.algorithms.scale import scaled
from aiocoll.algorithms.select import ALGORITHMS

from ..each import each
from .cases import Case, supported_world_size
from .interpreter import FINAL, SCALED, execute, leaves
from .proof import Proof

KINDS = ("allreduce", "reduce", "reduce_scatter")


@each("world_size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("kind", "algorithm"), sorted(pair for pair in ALGORITHMS if pair[0] in KINDS))
def test_program_scales_each_input_once_before_its_first_use(kind: str, algorithm: str, world_size: int) -> None:
    world_size = supported_world_size(algorithm, world_size)
    root = world_size // 2
    case = Case(kind, algorithm, world_size, root, count=11, counts=tuple(range(2, world_size + 2)))
    before = case.memory()
    programs = []
    for rank, program in enumerate(case.programs()):
        inputs = before[rank][:world_size] if kind == "reduce_scatter" else before[rank]
        in_place = kind == "allreduce" or (kind == "reduce" and rank == root)
        sizes = {number: len(buffer) for number, buffer in enumerate(inputs)}
        programs.append(scaled(program, sizes, len(before[rank]), in_place))
    Proof(programs)
    after = execute(programs, before, seed=world_size, rendezvous=False)
    for rank, buffers in enumerate(after):
        if kind == "reduce" and rank != root:
            assert buffers == before[rank]
            continue
        assert buffers[:-1] == before[rank][:-1]
        for value in buffers[-1]:
            found = leaves(value)
            assert found.count(FINAL) == 1
            assert found.count(SCALED) == len(found) - 1 - world_size == world_size
