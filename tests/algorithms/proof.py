"""A checker that proves that the ranks' schedules match and have no races, in any order of execution.

Every receive has a send of the same length, and no actions wait in a cycle. If two actions of a rank access the same
elements and one of them writes, they have the order of the program. This order comes from `after` (all of one action
before all of the other), from `follow` (element by element), and from messages (element by element). Messages can also
order two actions of one rank, if the received data depends on the earlier one.
"""

from collections.abc import Iterator

from aiocoll.algorithms.program import Action, ActionKind, Program

RECEIVES = (ActionKind.RECV, ActionKind.COMBINE)


class Proof:
    """A checked set of all ranks' schedules; `steps` is the longest chain of dependent messages."""

    def __init__(self, programs: list[Program]) -> None:
        self.programs = programs
        self.base = [0]
        for program in programs:
            self.base.append(self.base[-1] + len(program.actions))
        self.actions = [action for program in programs for action in program.actions]
        self.ranks = [rank for rank, program in enumerate(programs) for _ in program.actions]
        self._check_form()
        self.sender = self._match()
        self.whole = [0] * len(self.actions)  # bit i: action i is complete before this action starts
        self.aligned = [0] * len(self.actions)  # bit i: element k of action i is done before element k of this action
        self.steps = self._order()
        for rank in range(len(programs)):
            self._check_races(rank)

    def predecessors(self, rank: int) -> set[int]:
        """Return the ranks that always act before `rank` finishes, whatever the order of events."""
        before = 0
        for number in range(self.base[rank], self.base[rank + 1]):
            before |= self.whole[number] | self.aligned[number]
        return {self.ranks[number] for number in range(len(self.actions)) if before >> number & 1}

    def _check_form(self) -> None:
        for program in self.programs:
            for index, action in enumerate(program.actions):
                assert all(0 <= earlier < index for earlier in (*action.after, *action.follow))
                for other in (*action.sources, *(program.actions[earlier].region for earlier in action.follow)):
                    assert other.count == action.region.count, f"unequal lengths in {action}"
                for source in action.sources:
                    is_separate = (
                        source.buffer != action.region.buffer
                        or source.stop <= action.region.start
                        or action.region.stop <= source.start
                    )
                    assert source == action.region or is_separate, f"partial overlap in {action}"

    def _match(self) -> dict[int, int]:
        sends: dict[tuple[int, int, int], int] = {}
        receives: dict[tuple[int, int, int], int] = {}
        for number, action in enumerate(self.actions):
            rank = self.ranks[number]
            if action.verb is ActionKind.SEND:
                assert (rank, action.peer, action.step) not in sends
                sends[rank, action.peer, action.step] = number
            elif action.verb in RECEIVES:
                assert (action.peer, rank, action.step) not in receives
                receives[action.peer, rank, action.step] = number
        assert sends.keys() == receives.keys(), "a message is sent but not received, or received but not sent"
        for source, target, step in sends:
            assert source != target
            assert step == 0 or (source, target, step - 1) in sends, "steps do not count from 0"
            sent, received = (self.actions[side[source, target, step]] for side in (sends, receives))
            assert sent.region.count == received.region.count, "a message has two lengths"
        return {receives[message]: sends[message] for message in sends}

    def _order(self) -> int:
        depth = [0] * len(self.actions)
        following: list[list[int]] = [[] for _ in self.actions]
        waits = [0] * len(self.actions)
        for number in range(len(self.actions)):
            for earlier in {*self._after(number), *self._aligned(number)}:
                following[earlier].append(number)
                waits[number] += 1
        free = [number for number, count in enumerate(waits) if count == 0]
        for number in free:
            for earlier in self._after(number):
                self.whole[number] |= 1 << earlier | self.whole[earlier] | self.aligned[earlier]
                depth[number] = max(depth[number], depth[earlier])
            for earlier in self._aligned(number):
                self.whole[number] |= self.whole[earlier]
                self.aligned[number] |= 1 << earlier | self.aligned[earlier]
                depth[number] = max(depth[number], depth[earlier] + (earlier == self.sender.get(number)))
            for later in following[number]:
                waits[later] -= 1
                if waits[later] == 0:
                    free.append(later)
        assert len(free) == len(self.actions), "the programs wait for each other in a circle"
        return max(depth, default=0)

    def _after(self, number: int) -> Iterator[int]:
        base = self.base[self.ranks[number]]
        return (base + earlier for earlier in self.actions[number].after)

    def _aligned(self, number: int) -> Iterator[int]:
        base = self.base[self.ranks[number]]
        yield from (base + earlier for earlier in self.actions[number].follow)
        if number in self.sender:
            yield self.sender[number]

    def _check_races(self, rank: int) -> None:
        accesses: dict[int, list[tuple[int, int, bool, int]]] = {}
        for index, action in enumerate(self.programs[rank].actions):
            number = self.base[rank] + index
            mine = list(_accesses(action))
            for buffer, start, stop, write in mine:
                for other_start, other_stop, other_write, other in accesses.get(buffer, ()):
                    if other_start < stop and start < other_stop and (write or other_write):
                        ordered = self.whole[number] >> other & 1
                        ordered |= self.aligned[number] >> other & 1 & (start == other_start)
                        assert ordered, f"rank {rank}: {self.actions[other]} races with {action}"
            for buffer, start, stop, write in mine:
                accesses.setdefault(buffer, []).append((start, stop, write, number))


def _accesses(action: Action) -> Iterator[tuple[int, int, int, bool]]:
    for source in action.sources:
        yield source.buffer, source.start, source.stop, False
    region = action.region
    if region.count:
        yield region.buffer, region.start, region.stop, action.verb is not ActionKind.SEND
