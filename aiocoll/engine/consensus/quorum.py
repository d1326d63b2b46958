"""The quorum rule: which ranks of a failed group may decide how it continues.

A rank is *away* when it can no longer take part: it has ended in order, or is proven dead. Only a witness proves a
death: a process of the same host that sees the process gone, or the program, which says that it knows
(`ProcessGroup.report_death`). A broken connection proves nothing, and neither does silence. All other ranks are
*living*, whether they can be reached or not.

Ranks decide (`decides`) if they are

    a) all the living ranks of the group, or
    b) more than half of all its ranks, those that are away included, or exactly half with the lowest.

So dead ranks never block living ranks that can all reach each other: after any number of kills the rest continues,
even a single rank. But while a living rank is missing, the dead are counted: they may have decided something with it
before they died. Not counting them in that case would allow two groups to continue:

    ranks 0 1 2 | 3 4 are partitioned; 0, 1, 2 decide to continue, and 0 and 1 are killed.
    2 continues alone. If 3 and 4 were two of three electors, they would continue, too.

Why two decisions about one group cannot differ. Decisions are made by Paxos (`aiocoll.engine.consensus.voter`): a rank
that has promised a ballot accepts nothing of a lower one, and reports with its promise what it has accepted before. A
proposal of a higher ballot repeats what the promises report. This is safe when the quorum P that promises the higher
ballot contains a rank of the quorum Q that has accepted the lower one. Take any two:

- P and Q by (b): two such sets of ranks of one fixed group always have a rank in common.
- P by (a): if none of Q is in P, all of Q is away, and so is the lower ballot's coordinator, which promises and accepts
  what it proposes. No living rank knows what Q decided, except by a message still in flight; and messages of ranks
  that are away are ignored. A rank that receives such a message before it learns of the death accepts no other
  proposal, and without that rank neither (a) nor (b) holds: two sets by (b) again have a rank in common, which would be
  in P.
- Q by (a), P by (b): if none of P is in Q, all of P was away when Q decided. The higher ballot's coordinator promises
  it first of all, so it was away, too, and every rank in Q learned this with the proposal and ignores its messages.

A rank that ends after it has continued elsewhere says so, and is not counted as away. `shrink(assume_dead=...)`
declares ranks away on the program's authority. If that is wrong, and those ranks continue as well, there are two
groups.

A proof of death may be wrong, too. Therefore a rank that learns of its own death does not continue, and (a) waits until
the death is no longer doubted; until then only a majority of the whole job decides. `aiocoll.engine.failure.roster` has
the rules. They keep two groups from continuing after wrong proofs if messages between living ranks arrive within
`DOUBT` seconds: then every rank in (a)'s complement has ended or is out, and the argument above holds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

__all__ = ["connected", "decides", "is_majority"]


def is_majority(ranks: Iterable[int], group: Iterable[int]) -> bool:
    """Whether `ranks` are more than half of `group`, or exactly half with its lowest."""
    everyone = set(group)
    found = everyone & set(ranks)
    twice = 2 * len(found)
    return twice > len(everyone) or (bool(found) and twice == len(everyone) and min(everyone) in found)


def decides(ranks: Collection[int], group: Collection[int], away: Collection[int]) -> bool:
    """Whether `ranks` may decide for `group`, in which the ranks `away` can no longer take part."""
    living = set(group) - set(away)
    return bool(living) and (living <= set(ranks) or is_majority(ranks, group))


def connected(candidates: Iterable[int], lost: Mapping[int, Collection[int]]) -> list[int]:
    """Return the candidates that can all reach each other, in order.

    The rank with the most broken connections is dropped first; of several, the highest.

    Args:
        candidates: ranks that want to continue.
        lost: the ranks that each of them cannot reach.
    """
    left = set(candidates)
    broken = {frozenset((one, other)) for one in left for other in lost.get(one, ()) if other in left and other != one}
    while broken:
        worst = max(left, key=lambda rank: (sum(rank in pair for pair in broken), rank))
        left.remove(worst)
        broken = {pair for pair in broken if worst not in pair}
    return sorted(left)
