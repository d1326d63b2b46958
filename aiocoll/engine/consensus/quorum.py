"""Quorum rule: which ranks of a failed group may decide how it continues.

A rank is *away* when it can no longer take part: it ended in order, or its death is proven. Only a witness proves a
death. A witness is a process of the same host that sees the other process gone, or the program itself
(`ProcessGroup.report_death`). A broken connection and silence prove nothing. All other ranks are *living*, reachable
or not.

A set of ranks decides (`can_decide`) if it contains

    a) all the living ranks of the group, or
    b) more than half of all its ranks, including those that are away, or exactly half with the lowest rank.

So dead ranks never block living ranks that can all reach each other: after any number of kills the rest continues,
even a single rank. But while a living rank is missing, dead ranks are counted: they may have decided something with
that rank before they died. Without them in the count, two groups could continue:

    Ranks 0 1 2 | 3 4 are partitioned. Ranks 0, 1 and 2 decide to continue, then 0 and 1 are killed.
    Rank 2 continues alone. If 3 and 4 counted as two of three voters, they would continue, too.

Two decisions about one group cannot differ. Proof: decisions are made by Paxos (`aiocoll.engine.consensus.voter`).
A rank that has promised a ballot accepts no proposal of a lower one. With its promise it reports its last accepted
proposal. A proposal of a higher ballot repeats the reported one. This is safe when the quorum P that promises the
higher ballot contains a rank of the quorum Q that accepted the lower one. Take any two quorums:

- P and Q by (b): two such sets of ranks of one fixed group always have a rank in common.
- P by (a): suppose that P contains no rank of Q. Then all of Q is away, and so is the coordinator of the lower ballot,
  because a coordinator promises and accepts its own proposals. No living rank knows the decision of Q, except from a
  message in flight, and messages from ranks that are away are ignored. A rank that receives such a message before it
  learns of the death accepts no other proposal. Without that rank neither (a) nor (b) holds: two sets by (b) have a
  rank in common, which would be in P.
- Q by (a), P by (b): suppose that Q contains no rank of P. Then all of P was away when Q decided. The coordinator of
  the higher ballot promises it before all others, so it was away, too. Every rank in Q learned this with the proposal
  and ignores its messages.

A rank that ends after it has continued elsewhere reports that, and does not count as away. `shrink(assume_dead=...)`
declares ranks away on the program's authority. If the program is wrong and those ranks continue as well, two groups
exist.

A proof of death may be wrong, too. Therefore a rank that learns of its own death does not continue, and (a) waits
until the death is no longer doubted. Until then only a majority of the whole job decides. The rules are in
`aiocoll.engine.failure.roster`. If messages between living ranks arrive within `DOUBT` seconds, these rules keep two
groups from continuing after a wrong proof. By then every rank outside the set of (a) has ended or knows of its death,
and the proof above holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

__all__ = ["can_decide", "connected", "is_majority"]


def is_majority(ranks: Iterable[int], group: Iterable[int]) -> bool:
    """Return whether `ranks` are more than half of `group`, or exactly half with its lowest rank."""
    everyone = set(group)
    found = everyone & set(ranks)
    twice = 2 * len(found)
    return twice > len(everyone) or (bool(found) and twice == len(everyone) and min(everyone) in found)


def can_decide(ranks: Collection[int], group: Collection[int], away: Collection[int]) -> bool:
    """Return whether `ranks` may decide for `group`, in which the ranks `away` can no longer take part."""
    living = set(group) - set(away)
    return bool(living) and (living <= set(ranks) or is_majority(ranks, group))


def connected(candidates: Iterable[int], lost: Mapping[int, Collection[int]]) -> list[int]:
    """Drop candidates until all remaining candidates can reach each other; return these in ascending order.

    The rank with the most broken connections is dropped first. Of several such ranks, the highest is dropped.

    Args:
        candidates: ranks that voted to continue.
        lost: for each candidate, the ranks that it cannot reach.
    """
    left = set(candidates)
    broken = {frozenset((one, other)) for one in left for other in lost.get(one, ()) if other in left and other != one}
    while broken:
        worst = max(left, key=lambda rank: (sum(rank in pair for pair in broken), rank))
        left.remove(worst)
        broken = {pair for pair in broken if worst not in pair}
    return sorted(left)
