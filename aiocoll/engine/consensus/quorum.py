"""The one rule that says which ranks of a failed group may decide how it goes on.

A rank is *away* when it can take no part any more: it has ended in order, or is proven dead. Only a witness proves a
death: a process of its own host that sees its process gone, or whoever started it. A broken connection proves nothing,
and neither does silence. All other ranks are *living*, whether they can be reached or not.

Ranks decide (`decides`) if they are

    a) all the living ranks of the group, or
    b) more than half of all its ranks, those that are away included, or exactly half with the lowest.

So the dead never hold up those who all still see each other: after any number of kills the rest goes on, a single rank
too. But as long as a living rank is missing, the dead are counted: they may have decided something with it before they
died. To leave them out then is how two groups come to be that both go on:

    ranks 0 1 2 | 3 4 are cut off from each other; 0, 1, 2 decide to go on, and 0 and 1 are killed.
    2 goes on alone. Were 3 and 4 two of three electors, they would go on, too.

Why two decisions about one group cannot differ. Decisions are made by Paxos (`aiocoll.engine.consensus.voter`): a rank
that has promised a ballot accepts nothing of a lower one, and reports with its promise what it has accepted before. A
proposal of a higher ballot repeats what the promises report. This is safe when the quorum P that promises the higher
ballot contains a rank of the quorum Q that has accepted the lower one. Take any two:

- P and Q by (b): two such sets of ranks of one fixed group always have a rank in common.
- P by (a): if none of Q is in P, all of Q is away, and so is the lower ballot's coordinator, which promises and accepts
  what it proposes. Nobody who lives knows what Q decided, except by a message that is still on its way; and messages of
  ranks that are away are not heard. Whoever hears such a message before it learns of the death accepts no other
  proposal, and without it neither (a) nor (b) is met: two sets by (b) again have a rank in common, which would be in P.
- Q by (a), P by (b): if none of P is in Q, all of P was away when Q decided. The higher ballot's coordinator promises
  it first of all, so it was away, too, and everybody in Q has learnt this with the proposal: what it says is not heard.

A rank that ends after it has gone on elsewhere says so, and is not counted as away. `shrink(assume_dead=...)` makes
ranks away by the program's word. If that is wrong, and those ranks go on as well, there are two groups.
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
    """Whether `ranks` may decide for `group`, of which the ranks `away` can take no part any more."""
    living = set(group) - set(away)
    return bool(living) and (living <= set(ranks) or is_majority(ranks, group))


def connected(candidates: Iterable[int], lost: Mapping[int, Collection[int]]) -> list[int]:
    """Return the candidates that can all reach each other, in order.

    The rank with the most broken connections is left out first, and of several the highest.

    Args:
        candidates: who wants to go on.
        lost: which ranks each of them does not reach.
    """
    left = set(candidates)
    broken = {frozenset((one, other)) for one in left for other in lost.get(one, ()) if other in left and other != one}
    while broken:
        worst = max(left, key=lambda rank: (sum(rank in pair for pair in broken), rank))
        left.remove(worst)
        broken = {pair for pair in broken if worst not in pair}
    return sorted(left)
