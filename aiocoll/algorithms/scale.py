"""PREMUL_SUM in any program: additional actions scale this rank's inputs before all other actions.

Cost: no steps, no bytes, and one pass over the input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aiocoll.algorithms.program import Action, ActionKind, Program, Region

__all__ = ["scaled"]


def scaled(program: Program, inputs: Mapping[int, int], users: int, in_place: bool) -> Program:
    """Return a copy of `program` that reads scaled copies of its inputs.

    Args:
        program: any reduction of one rank.
        inputs: element counts of the buffers to scale, by buffer number.
        users: number of the caller's buffers. Scratch buffers get the following numbers.
        in_place: if True, write over the inputs, which are also the outputs. If False, write to additional scratch
            buffers.

    Invariant: every action of the old program starts after the scaling of all inputs.
    """
    first = users + len(program.scratch)
    target = {buffer: buffer if in_place else first + k for k, buffer in enumerate(inputs)}
    scaling = tuple(
        Action(ActionKind.SCALE, Region(target[buffer], 0, count), sources=(Region(buffer, 0, count),))
        for buffer, count in inputs.items()
    )
    shift = len(scaling)

    def moved(region: Region) -> Region:
        return replace(region, buffer=target.get(region.buffer, region.buffer))

    def later(action: Action) -> Action:
        after = tuple(index + shift for index in action.after)
        follow = tuple(index + shift for index in action.follow)
        return action._replace(
            region=moved(action.region) if action.verb is ActionKind.SEND else action.region,
            sources=tuple(moved(source) for source in action.sources),
            after=after or tuple(range(shift)),
            follow=follow,
        )

    scratch = () if in_place else tuple(inputs.values())
    actions = scaling + tuple(later(action) for action in program.actions)
    return Program(actions, program.scratch + scratch, program.algorithm)
