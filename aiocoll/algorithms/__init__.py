"""Pure descriptions of collectives: what each rank sends, receives and reduces, in which order.

No I/O, no clock, no arrays: `choose` names an algorithm, `build` writes one rank's `Program` for it, and the engine
carries it out.
"""

from aiocoll.algorithms.cost import cost, predict
from aiocoll.algorithms.load import Load
from aiocoll.algorithms.machine import Machine, Tuning
from aiocoll.algorithms.program import Action, Program, Region, Verb
from aiocoll.algorithms.select import build, choose

__all__ = [
    "Action",
    "Load",
    "Machine",
    "Program",
    "Region",
    "Tuning",
    "Verb",
    "build",
    "choose",
    "cost",
    "predict",
]
