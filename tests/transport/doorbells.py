"""A model of two ranks that share memory: one rank sends through a ring of one entry, both use eventfd doorbells.

Each step is one load or one store. Stores enter a buffer and leave it for the memory in order, at any later time.
That is the memory model of x86-64 (TSO), which promises no more. A fence waits until the buffer is empty; a system
call also does. The steps are named after the code in `link.py` and `doorbell.py` that they model.
"""

from __future__ import annotations

from typing import Any, NamedTuple

#: Indices of words in the memory: last stamp, taken entries, waiting flag of the writer, two doorbells, two eventfds.
STAMP, TAKEN, WAITING, STATUS, EVENTFD = 0, 1, 2, 3, 5
START = (0, 0, 0, 1, 1, 0, 0)
WRITER, READER = 0, 1
CAPACITY = 1

#: The memory fences of the protocol, each named after the step that follows the fence.
FENCES = ("look again", "look at status", "look at waiting", "look at taken")

#: Steps that the other rank cannot observe. The model takes such steps first, which reduces the number of states.
PRIVATE = frozenset(
    {"attend", "turned", "park", "stamp", "request wakeup", "cancel wakeup", "soon", "write", "deliver", "take"}
)
PRIVATE |= {"out of time", *FENCES}

Memory = tuple[int, ...]
Local = dict[str, Any]


class Case(NamedTuple):
    """The parameters of one exploration of the doorbell model."""

    total: int
    """The number of sent entries."""
    without: str = ""
    """The omitted fence or step."""
    lively: bool = True
    """True if the reader may also reply to what it receives, and may use up its time slice."""


class Blocked(Exception):
    """The exception of a step that cannot be taken yet."""


class Rank:
    """The state of a rank during one step. A step accesses the shared memory at most once."""

    def __init__(self, me: int, local: Local, memory: list[int], buffer: list[tuple[int, int]], case: Case) -> None:
        self.me = me
        self.local = local
        self.memory = memory
        self.buffer = buffer
        self.without = case.without
        self.lively = case.lively

    def load(self, where: int) -> int:
        own = [value for at, value in self.buffer if at == where]
        return own[-1] if own else self.memory[where]

    def store(self, where: int, value: int) -> None:
        self.buffer.append((where, value))

    def drain(self) -> None:
        if self.buffer:
            raise Blocked

    def fence(self, name: str) -> None:
        if name != self.without:
            self.drain()

    def must_ring(self) -> bool:
        """Return whether the rank must ring the peer's doorbell, by the same rule as `PeerDoorbell.ring`."""
        status = self.load(STATUS + 1 - self.me)
        if status & 1 and status != self.local["rung"]:
            self.local["rung"] = status
            return True
        return False


def steps(rank: Rank, total: int) -> list[str]:
    """Take the current step of `rank`; return the steps that can follow."""
    me, local = rank.me, rank.local
    step = local["at"]
    if step == "turn of the loop":
        return turn(rank, total)
    if step == "attend":
        local["awake"] = True
        number = rank.load(STATUS + me) + 1
        rank.store(STATUS + me, number if rank.without != "another number" else number & 1)
        return [local.pop("then")]
    if step == "turned":
        return call(local, "poll", "park")
    if step == "park":
        local["awake"] = False
        number = rank.load(STATUS + me) + 1
        rank.store(STATUS + me, number if rank.without != "another number" else number & 1)
        return ["look again"]
    if step == "look again":
        rank.fence(step)
        return call(local, "poll", "turn of the loop") if rank.without != "last look" else ["turn of the loop"]
    if step == "look at status":
        rank.fence(step)
        return ["status"]
    if step == "status":
        return ["ring" if rank.must_ring() else local.pop("rung then")]
    if step == "ring":
        rank.drain()
        rank.memory[EVENTFD + 1 - me] = 1
        return [local.pop("rung then")]
    return (writer if me == WRITER else reader)(rank, step)


def turn(rank: Rank, total: int) -> list[str]:
    """Return the steps that are due, in which the event loop may choose; raise `Blocked` if the rank sleeps."""
    local = rank.local
    ways = []
    if local["awake"]:
        ways.append("turned")
    if local["soon"]:
        ways.append("soon")
    if rank.memory[EVENTFD + rank.me]:
        ways.append("rung")
    if rank.me == WRITER and local["sent"] + local["kept"] < total:
        ways.append("write")
    if not ways:
        raise Blocked
    return ways


def call(local: Local, step: str, then: str) -> list[str]:
    local["polled then"] = then
    return [step]


def wake(rank: Rank) -> list[str]:
    """Handle a ring of this rank's doorbell, as `Doorbell._on_ring` does."""
    rank.drain()
    rank.memory[EVENTFD + rank.me] = 0
    rank.local["then"] = "turn of the loop"
    return ["turn of the loop"] if rank.local["awake"] else ["attend"]


def writer(rank: Rank, step: str) -> list[str]:
    local = rank.local
    if step == "rung":
        return wake(rank)
    if step == "write":
        local["then"] = "put"
        return ["put"] if local["awake"] else ["attend"]
    if step == "put":
        if not local["kept"] and local["sent"] - rank.load(TAKEN) < CAPACITY:
            local["rung then"] = "turn of the loop"
            return ["stamp"]
        local["kept"] += 1
        return ["request wakeup"]
    if step == "stamp":
        local["sent"] += 1
        rank.store(STAMP, local["sent"])
        return ["look at status"]
    if step == "request wakeup":
        rank.store(WAITING, 1)
        return ["look at taken"]
    if step == "look at taken":
        rank.fence(step)
        local["soon"] = True
        return ["turn of the loop"]
    if step == "soon":
        local["soon"] = False
        return call(local, "poll", "turn of the loop")
    if step == "poll":
        return ["flush"] if local["kept"] else [local.pop("polled then")]
    if step == "flush":
        if local["sent"] - rank.load(TAKEN) >= CAPACITY:
            return [local.pop("polled then")]
        local["kept"] -= 1
        local["rung then"] = "poll" if local["kept"] else "cancel wakeup"
        return ["stamp"]
    assert step == "cancel wakeup"
    rank.store(WAITING, 0)
    return [local.pop("polled then")]


def reader(rank: Rank, step: str) -> list[str]:
    local = rank.local
    if step == "rung":
        return wake(rank)
    if step == "soon":
        local["soon"] = False
        return call(local, "poll", "turn of the loop")
    if step == "poll":
        return ["deliver"] if rank.load(STAMP) == local["next"] else [local.pop("polled then")]
    if step == "deliver":
        # The receiver of a frame may reply at once; to reply, the rank first marks itself as awake.
        local["then"] = "take"
        return ["take"] if local["awake"] or not rank.lively else ["take", "attend"]
    if step == "take":
        local.pop("then", None)
        rank.store(TAKEN, local["next"])
        local["next"] += 1
        return ["more", "out of time"] if rank.lively else ["more"]
    if step == "out of time":
        local["soon"] = True
        return ["look at waiting"]
    if step == "more":
        return ["deliver"] if rank.load(STAMP) == local["next"] else ["look at waiting"]
    if step == "look at waiting":
        rank.fence(step)
        return ["waiting"]
    assert step == "waiting"
    local["rung then"] = local.pop("polled then")
    return ["look at status"] if rank.load(WAITING) else [local.pop("rung then")]


State = tuple[Memory, tuple[tuple[tuple[int, int], ...], ...], tuple[tuple[tuple[str, Any], ...], ...]]


def successors(state: State, case: Case) -> list[State]:
    memory, buffers, locals_ = state
    found: list[State] = []
    for me in (WRITER, READER):
        local, changed, buffer = dict(locals_[me]), list(memory), list(buffers[me])
        step = local["at"]
        try:
            ways = steps(Rank(me, local, changed, buffer, case), case.total)
        except Blocked:
            ways = []
        after = [
            (tuple(changed), replaced(buffers, me, tuple(buffer)), replaced(locals_, me, frozen(local, way)))
            for way in ways
        ]
        if after and step in PRIVATE:
            return after
        found += after
        if buffers[me]:
            (where, value), *rest = buffers[me]
            arrived = list(memory)
            arrived[where] = value
            found.append((tuple(arrived), replaced(buffers, me, tuple(rest)), locals_))
    return found


def frozen(local: Local, step: str) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted({**local, "at": step}.items()))


def replaced(pair: tuple[Any, ...], me: int, value: Any) -> tuple[Any, ...]:
    return (value, pair[1]) if me == WRITER else (pair[0], value)


def explore(case: Case) -> tuple[int, list[State]]:
    """Explore every order of events of the model; return the number of states, and the final states."""
    local = {"at": "attend", "then": "turn of the loop", "awake": False, "soon": False, "rung": 0}
    both = ({**local, "sent": 0, "kept": 0}, {**local, "next": 1})
    first: State = (START, ((), ()), tuple(tuple(sorted(each.items())) for each in both))
    seen, todo, ends = {first}, [first], []
    while todo:
        state = todo.pop()
        after = successors(state, case)
        if not after:
            ends.append(state)
        for each in after:
            if each not in seen:
                seen.add(each)
                todo.append(each)
    return len(seen), ends


def received_count(state: State) -> int:
    """Return the number of ring entries that the reader has received."""
    return int(dict(state[2][READER])["next"]) - 1
