"""A simulator that runs schedules message by message on a modelled machine, to check the formulas of `predict`.

Every rank has one processor and a link with two directions. A message takes the sender's processor for the overhead,
its link for beta per byte, travels, takes the receiver's link and processor, and is reduced there at gamma per byte.
A processor or link serves pieces in the order in which they become ready.
"""

from collections import defaultdict
from heapq import heappop, heappush

from aiocoll.algorithms.machine import PIECE, Machine
from aiocoll.algorithms.program import Action, ActionKind, Program

from .proof import RECEIVES

#: A piece of an action: the rank, the index of the action in its program, and the index of the piece.
Place = tuple[int, int, int]


class SimulatedMachine:
    """A simulated run of all ranks' schedules; an element is one byte, and `seconds` is the total time."""

    def __init__(self, programs: list[Program], machine: Machine) -> None:
        self.programs = programs
        self.machine = machine
        self.free: dict[tuple[str, int], float] = defaultdict(float)  # when a processor or link direction becomes free
        self.waits: dict[Place, int] = {}
        self.ready: dict[Place, float] = defaultdict(float)
        self.followers: dict[Place, list[Place]] = defaultdict(list)
        self.queue: list[tuple[float, Place]] = []
        self.seconds = 0.0
        self._connect()
        while self.queue:
            at, place = heappop(self.queue)
            self._complete(place, self._serve(at, place))
        assert not any(self.waits.values())

    def _pieces(self, action: Action) -> int:
        return max(-(-action.region.count // PIECE), 1)

    def _connect(self) -> None:
        sends = {
            (rank, action.peer, action.step): (rank, index)
            for rank, program in enumerate(self.programs)
            for index, action in enumerate(program.actions)
            if action.verb is ActionKind.SEND
        }
        for rank, program in enumerate(self.programs):
            for index, action in enumerate(program.actions):
                for piece in range(self._pieces(action)):
                    before = [(rank, index, piece - 1)] if piece else []
                    before += [(rank, other, self._pieces(program.actions[other]) - 1) for other in action.after]
                    before += [(rank, other, piece) for other in action.follow]
                    if action.verb in RECEIVES:
                        before.append((*sends[action.peer, rank, action.step], piece))
                    self._wait((rank, index, piece), before)

    def _wait(self, place: Place, before: list[Place]) -> None:
        self.waits[place] = len(before)
        for other in before:
            self.followers[other].append(place)
        if not before:
            heappush(self.queue, (0.0, place))

    def _complete(self, place: Place, at: float) -> None:
        self.seconds = max(self.seconds, at)
        for other in self.followers[place]:
            travel = self.machine.alpha - 2 * self.machine.overhead if other[0] != place[0] else 0.0
            self.ready[other] = max(self.ready[other], at + travel)
            self.waits[other] -= 1
            if not self.waits[other]:
                heappush(self.queue, (self.ready[other], other))

    def _serve(self, at: float, place: Place) -> float:
        """Simulate one piece of an action, which is ready at time `at`; return its completion time."""
        rank, index, piece = place
        action = self.programs[rank].actions[index]
        nbytes = min(action.region.count - piece * PIECE, PIECE)
        overhead = self.machine.overhead if piece == 0 else 0.0
        if action.verb is ActionKind.SEND:
            at = self._use("processor", rank, at, overhead)
            return self._use("out", rank, at, nbytes * self.machine.beta)
        work = nbytes * max(len(action.sources) - (action.verb is ActionKind.FOLD), 1) * self.machine.gamma
        if action.verb in RECEIVES:
            # The receiver gets the bytes while the sender sends them, unless another message occupies the receiver's
            # link.
            start = max(at - nbytes * self.machine.beta, self.free["in", rank])
            at = self.free["in", rank] = max(start + nbytes * self.machine.beta, at)
            work = overhead + (work if action.verb is ActionKind.COMBINE else 0.0)
        return self._use("processor", rank, at, work)

    def _use(self, what: str, rank: int, at: float, seconds: float) -> float:
        end = self.free[what, rank] = max(at, self.free[what, rank]) + seconds
        return end
