"""Algorithms of collectives as plain data: the sends, receives and reductions of each rank, in order.

This package has no I/O, no clock and no arrays. `choose` returns the name of an algorithm, `build` creates one rank's
`Program` for it, and the engine carries out the program.
"""

from aiocoll.algorithms.cost import cost, predict
from aiocoll.algorithms.load import Load
from aiocoll.algorithms.machine import Machine, Tuning
from aiocoll.algorithms.program import Action, ActionKind, Program, Region
from aiocoll.algorithms.select import build, choose

__all__ = [
    "Action",
    "ActionKind",
    "Load",
    "Machine",
    "Program",
    "Region",
    "Tuning",
    "build",
    "choose",
    "cost",
    "predict",
]
