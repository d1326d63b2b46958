"""An interpreter that runs schedules on symbolic values, in a random order that `program.py` permits.

A reduction of a and b gives the pair (a, b). The final action wraps a value as ("!", value), scaling as ("*", value).
A result thus shows which inputs were reduced in which order, and whether they were scaled and finished.
"""

from collections import deque
from random import Random

from aiocoll.algorithms.program import Action, ActionKind, Program, Region

FINAL = "!"
SCALED = "*"


class Interpreter:
    """A simulation of all ranks of one collective.

    Args:
        programs: the program of each rank.
        memory: the user's buffers of each rank, as lists of values; written in place.
        seed: seed of the order in which pieces of actions run and messages are delivered.
        rendezvous: whether a send waits until its receive may start, as on a transport without buffering.
    """

    def __init__(self, programs: list[Program], memory: list[list[list]], seed: int, rendezvous: bool) -> None:
        self.programs = programs
        self.memory = [
            [*buffers, *([None] * size for size in program.scratch)]
            for buffers, program in zip(memory, programs, strict=True)
        ]
        self.random = Random(seed)
        self.rendezvous = rendezvous
        self.progress = [[0] * len(program.actions) for program in programs]
        self.done = [[False] * len(program.actions) for program in programs]
        self.links: dict[tuple[int, int], deque] = {}
        self.stash: dict[tuple[int, int, int], list] = {}
        self.receivers: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.senders: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.dependents: list[list[list[int]]] = []
        for rank, program in enumerate(programs):
            self._index(rank, program)

    def _index(self, rank: int, program: Program) -> None:
        dependents: list[list[int]] = [[] for _ in program.actions]
        for index, action in enumerate(program.actions):
            for earlier in (*action.after, *action.follow):
                dependents[earlier].append(index)
            if action.verb is ActionKind.SEND:
                self.senders[rank, action.peer, action.step] = (rank, index)
            elif action.verb in (ActionKind.RECV, ActionKind.COMBINE):
                self.receivers[action.peer, rank, action.step] = (rank, index)
        self.dependents.append(dependents)

    def run(self) -> None:
        """Run actions until none can continue; fail unless every action is complete."""
        ready: list[tuple[int, ...]] = [
            (rank, index) for rank, program in enumerate(self.programs) for index in range(len(program.actions))
        ]
        while ready:
            at = self.random.randrange(len(ready))
            ready[at], ready[-1] = ready[-1], ready[at]
            task = ready.pop()
            if len(task) == 3:
                ready.append(self._deliver(task[1], task[2]))
            else:
                ready.extend(self._advance(*task))
        stuck = [(rank, index) for rank, done in enumerate(self.done) for index, yes in enumerate(done) if not yes]
        assert not stuck, f"deadlock: (rank, action) {stuck[:8]} never completed"
        assert not any(self.stash.values()), "some elements were sent but never received"

    def _deliver(self, source: int, target: int) -> tuple[int, int]:
        step, values = self.links[source, target].popleft()
        self.stash.setdefault((source, target, step), []).extend(values)
        return self.receivers[source, target, step]

    def _startable(self, rank: int, index: int) -> bool:
        return all(self.done[rank][earlier] for earlier in self.programs[rank].actions[index].after)

    def _advance(self, rank: int, index: int) -> list[tuple[int, ...]]:
        """Run some elements of an action if possible; return the actions and deliveries that this may unblock."""
        action = self.programs[rank].actions[index]
        if self.done[rank][index] or not self._startable(rank, index):
            return []
        woken: list[tuple[int, ...]] = []
        low, limit = self.progress[rank][index], self._limit(rank, action)
        if action.verb in (ActionKind.RECV, ActionKind.COMBINE):
            message = (action.peer, rank, action.step)
            woken = [self.senders[message]]
            if message not in self.stash:
                return woken
            limit = min(limit, low + len(self.stash[message]))
        elif (
            self.rendezvous
            and action.verb is ActionKind.SEND
            and not self._startable(*self.receivers[rank, action.peer, action.step])
        ):
            return []
        if low == limit < action.region.count:
            return []
        high = limit if self.random.random() < 0.5 else self.random.randint(min(low + 1, limit), limit)
        self._perform(rank, action, low, high)
        self.progress[rank][index] = high
        self.done[rank][index] = high == action.region.count
        if not self.done[rank][index]:
            woken.append((rank, index))
        if action.verb is ActionKind.SEND:
            woken.append((-1, rank, action.peer))
        return woken + [(rank, later) for later in self.dependents[rank][index]]

    def _limit(self, rank: int, action: Action) -> int:
        follows = [self.progress[rank][earlier] for earlier in action.follow]
        return min(follows, default=action.region.count)

    def _perform(self, rank: int, action: Action, low: int, high: int) -> None:
        buffers = self.memory[rank]

        def read(region: Region) -> list:
            return buffers[region.buffer][region.start + low : region.start + high]

        if action.verb is ActionKind.SEND:
            values = read(action.region) if action.region.count else []
            self.links.setdefault((rank, action.peer), deque()).append((action.step, values))
            return
        operands = [read(source) for source in action.sources]
        if action.verb in (ActionKind.RECV, ActionKind.COMBINE):
            stash = self.stash[action.peer, rank, action.step]
            operands.insert(0 if action.incoming_first else 1, stash[: high - low])
            del stash[: high - low]
        if action.region.count == 0:
            return
        values = operands[0]
        for operand in operands[1:]:
            values = list(zip(values, operand, strict=True))
        if action.verb is ActionKind.SCALE:
            values = [(SCALED, value) for value in values]
        if action.final:
            values = [(FINAL, value) for value in values]
        target = buffers[action.region.buffer]
        assert len(values) == high - low
        assert action.region.start + high <= len(target), "an action writes beyond the end of its buffer"
        target[action.region.start + low : action.region.start + high] = values


def execute(programs: list[Program], memory: list[list[list]], seed: int, rendezvous: bool) -> list[list[list]]:
    """Run all programs on a copy of `memory` and return the user's buffers of all ranks."""
    copied = [[list(buffer) for buffer in buffers] for buffers in memory]
    world = Interpreter(programs, copied, seed, rendezvous)
    world.run()
    return [world.memory[rank][: len(buffers)] for rank, buffers in enumerate(memory)]


def leaves(value: object) -> list:
    """Return the inputs and the markers ("!", "*") in a symbolic value, from left to right."""
    found, pending = [], [value]
    while pending:
        item = pending.pop()
        if isinstance(item, tuple):
            pending.extend(reversed(item))
        else:
            found.append(item)
    return found


def folded(values: list) -> object:
    """Return the left fold of symbolic values as nested pairs, without the marker `FINAL`."""
    result = values[0]
    for value in values[1:]:
        result = (result, value)
    return result
