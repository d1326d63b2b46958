"""Test cases of all collectives: element counts, initial buffers, and checks of the buffers after the call."""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

from aiocoll.algorithms.program import Program
from aiocoll.algorithms.select import build

from .interpreter import FINAL, folded, leaves

ROOTED = frozenset({"reduce", "broadcast", "gather", "scatter"})
PER_RANK = frozenset({"allgather", "gather", "scatter", "reduce_scatter"})
REDUCING = frozenset({"allreduce", "reduce", "reduce_scatter", "scan", "exscan"})
BARRIERS = {"barrier": "dissemination", "monitored_barrier": "linear"}
IN_RANK_ORDER = frozenset({"oneround", "oneshot", "central", "bruck", "pairwise", "linear", "fold"})
REPEATED = frozenset({"exchange", "oneround", "oneshot", "bruck"})


def supported_world_size(algorithm: str, world_size: int) -> int:
    """Return `world_size`, or 2 if `algorithm` supports only two ranks."""
    return 2 if algorithm == "exchange" else world_size


@dataclass(frozen=True)
class Case:
    """A collective call: kind, algorithm, ranks, and one element count, one count per rank, or an alltoall matrix."""

    kind: str
    algorithm: str
    world_size: int
    root: int
    count: int
    counts: tuple[int, ...] = ()
    matrix: tuple[tuple[int, ...], ...] = ()
    hosts: tuple[int, ...] = ()

    def programs(self) -> list[Program]:
        """Build the program of this call for every rank."""
        return [
            build(
                self.kind, self.algorithm, rank, self.world_size, *self._sizes(rank), root=self.root, hosts=self.hosts
            )
            for rank in range(self.world_size)
        ]

    def _sizes(self, rank: int) -> tuple:
        if self.kind in BARRIERS:
            return ()
        if self.kind == "alltoall":
            return self.matrix[rank], tuple(row[rank] for row in self.matrix)
        return (self.counts,) if self.kind in PER_RANK else (self.count,)

    def memory(self) -> list[list[list]]:
        """Return the initial user buffers of all ranks: unique numbers in inputs, None in outputs."""
        return [self._buffers(rank) for rank in range(self.world_size)]

    def _buffers(self, rank: int) -> list[list]:
        world = range(self.world_size)
        if self.kind in ("allreduce", "reduce", "broadcast", "scan", "exscan"):
            return [_names(rank, 0, self.count)]
        if self.kind in ("allgather", "gather"):
            mine = _names(rank, self.world_size, self.counts[rank])
            has_buffers = self.kind == "allgather" or rank == self.root
            return [*([None] * self.counts[peer] if has_buffers else [] for peer in world), mine]
        if self.kind in ("scatter", "reduce_scatter"):
            has_buffers = self.kind == "reduce_scatter" or rank == self.root
            inputs = [_names(rank, peer, self.counts[peer]) if has_buffers else [] for peer in world]
            return [*inputs, [None] * self.counts[rank]]
        if self.kind == "alltoall":
            inputs = [_names(rank, peer, self.matrix[rank][peer]) for peer in world]
            return [*inputs, *([None] * self.matrix[peer][rank] for peer in world)]
        return []

    def check(self, after: list[list[list]]) -> None:
        """Assert that all ranks' buffers after the call hold the expected results."""
        for rank, buffers in enumerate(after):
            if self.kind in REDUCING:
                self._check_reduction(rank, buffers, after)
            else:
                assert buffers == self._moved_buffers(rank)

    def _moved_buffers(self, rank: int) -> list[list]:
        """Return the buffers that `rank` must have after a collective without a reduction, such as broadcast."""
        world, before = range(self.world_size), self.memory()
        if self.kind == "broadcast":
            return before[self.root]
        if self.kind in ("allgather", "gather"):
            holds = self.kind == "allgather" or rank == self.root
            return [*(before[peer][-1] if holds else [] for peer in world), before[rank][-1]]
        if self.kind == "scatter":
            return [*before[rank][:-1], before[self.root][rank]]
        if self.kind == "alltoall":
            return [*before[rank][: len(world)], *(before[peer][rank] for peer in world)]
        return []

    def _check_reduction(self, rank: int, buffers: list[list], after: list[list[list]]) -> None:
        before = self.memory()
        if self.kind == "reduce_scatter":
            assert buffers[:-1] == before[rank][:-1], "an input was written"
            contributions = [before[peer][rank] for peer in range(self.world_size)]
        else:
            contributions = [before[peer][0] for peer in range(self.world_size)]
        if self.kind == "scan":
            contributions = contributions[: rank + 1]
        elif self.kind == "exscan":
            contributions = contributions[:rank]
        if (self.kind == "reduce" and rank != self.root) or not contributions:
            assert buffers == before[rank], "a tensor that must not change was written"
            return
        if self.kind == "allreduce":
            assert buffers == after[0], "the ranks have different results"
        for value, *inputs in zip(buffers[-1], *contributions, strict=True):
            self._check_value(value, inputs)

    def _check_value(self, value: object, inputs: list) -> None:
        if self.kind in ("scan", "exscan"):
            assert [leaf for leaf in leaves(value) if leaf != FINAL] == inputs
            if self.algorithm == "fold":
                assert value == (FINAL, folded(inputs))
        elif self.algorithm in IN_RANK_ORDER:
            assert value == (FINAL, folded(inputs))
        else:
            found = leaves(value)
            assert value[0] == found[0] == FINAL
            assert sorted(found[1:]) == inputs


def _names(rank: int, buffer: int, count: int) -> list[int]:
    start = (rank * 1000 + buffer) * 1000
    return list(range(start, start + count))


def cases(kind: str, algorithm: str, world_size: int) -> Iterator[Case]:
    """Yield cases: up to 6 ranks with every count and root, more ranks with each count and root at least once."""
    world_size = supported_world_size(algorithm, world_size)
    counts = sorted({0, 1, max(world_size - 1, 0), world_size, world_size + 1, 97})
    if kind in BARRIERS:
        counts = [0]
    roots = range(world_size) if kind in ROOTED else range(1)
    pairs = [(count, root) for count in counts for root in roots]
    if world_size > 6:
        longest = max(len(counts), len(roots))
        pairs = [(counts[turn % len(counts)], roots[turn % len(roots)]) for turn in range(longest)]
    for count, root in pairs:
        yield from _sized(kind, algorithm, world_size, root, count)


def _sized(kind: str, algorithm: str, world_size: int, root: int, count: int) -> Iterator[Case]:
    if kind not in PER_RANK and kind != "alltoall":
        yield Case(kind, algorithm, world_size, root, count)
        return
    random = Random(count)
    even = tuple((part + 1) * count // world_size - part * count // world_size for part in range(world_size))
    uneven = tuple(random.choice((0, 0, 1, 2, count % 7)) for _ in range(world_size))
    single = tuple(count if part == count % world_size else 0 for part in range(world_size))
    splits = (even, uneven, single)
    for counts in splits if world_size <= 6 else splits[(count + root) % 3 :][:1]:
        if kind == "alltoall":
            matrix = tuple(tuple(random.sample(counts, world_size)) for _ in range(world_size))
            yield Case(kind, algorithm, world_size, root, count, matrix=matrix)
        else:
            yield Case(kind, algorithm, world_size, root, count, counts=counts)
