"""Pure descriptions of collectives: what each rank sends, receives and reduces, in which order.

No I/O, no clock, no arrays: `choose` names an algorithm, `build` writes one rank's `Program` for it, and the engine
carries it out.
"""

from aiocoll.algorithms.cost import cost
from aiocoll.algorithms.schedule import Action, Program, Region, Verb
from aiocoll.algorithms.select import build, choose

__all__ = ["Action", "Program", "Region", "Verb", "build", "choose", "cost"]
