"""Hypothesis strategies for valid control messages that rank 2 of 3 sends to rank 0 about a group of all ranks."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from aiocoll.engine.control.causes import cause_of
from aiocoll.engine.operations.manifest import Manifest
from aiocoll.engine.operations.signature import Signature, description
from aiocoll.errors import GroupError, PeerLostError

__all__ = ["WORLD", "valid"]

WORLD = 3
#: Placeholder group ids in messages: the group of all ranks, the group of ranks 0 and 1, and an unknown group.
ALL, PAIR, UNMADE = 1001, 1002, 77

CARD = {"library": 22809, "why": "", "bus": "0", "unfinished": False, "float8": True, "ahead": True}

positions = st.integers(0, WORLD - 1)
ranks = st.sets(positions).map(sorted)
groups = st.sampled_from([ALL, ALL, ALL, PAIR, UNMADE, 0, (1 << 32) - 1])
operations = st.sampled_from([0, 1, 2, 3, 1000, 1 << 62, (1 << 63) - 1])
counts = st.lists(st.sampled_from([0, 1, 10, 1 << 40]), max_size=4).map(tuple)
per_rank = st.one_of(st.just(()), st.tuples(*[st.sampled_from([0, 1, 10])] * WORLD))
signatures = st.builds(
    Signature,
    st.sampled_from(["ALLREDUCE", "BARRIER", "SEND", "RECV", "FLUSH"]),
    st.sampled_from([None, "float64", "object"]),
    counts,
    st.one_of(st.none(), positions),
    st.sampled_from([None, "SUM", "AVG"]),
    per_rank,
    per_rank,
    st.sampled_from([None, "detail"]),
    st.none(),
)
flushes = st.builds(
    lambda whole, members: whole._replace(op="FLUSH", members=Manifest(members)),
    signatures,
    st.lists(signatures, max_size=4),
)


@st.composite
def calls(draw: st.DrawFn, rank: st.SearchStrategy[int]) -> dict[str, Any]:
    return description(
        draw(rank),
        draw(st.one_of(signatures, flushes)),
        draw(counts),
        draw(st.sampled_from([None, "key"])),
        draw(st.sampled_from([None, 1, 2, 1 << 40])),
    )


causes = st.builds(
    cause_of,
    st.one_of(
        st.builds(GroupError, st.text(max_size=4), seq=st.sampled_from([None, 1, "key"]), ranks=ranks),
        st.builds(PeerLostError, st.text(max_size=4), how=st.sampled_from(["killed", "left"]), ranks=ranks),
    ),
)
reports = st.fixed_dictionaries(
    {
        "upto": st.integers(0, 5),
        "missing": st.lists(st.integers(0, 5), max_size=3),
        "keyed": st.lists(st.tuples(st.text(max_size=2), st.integers(0, 3)).map(list), max_size=3),
    }
)
outcomes = st.fixed_dictionaries({"members": ranks, "excluded": ranks, "everywhere": reports, "somewhere": reports})
ballots = st.sampled_from([0, 1, 2, 3, 5, 300, (1 << 62) + 2])
lineages = st.lists(st.tuples(groups, st.integers(0, 2), st.sampled_from([None, "name"]), ranks).map(list), max_size=2)
seconds = st.sampled_from([None, 0.0, 1.5, -1.0])
matches = st.tuples(positions, positions, operations).map(list)


def note(kind: str, **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"t": st.just(kind), **fields})


def shrink_note(what: str, **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    ranks_of = st.one_of(st.just([0, 1, 2]), ranks)
    return note("shrink", g=groups, what=st.just(what), ranks=ranks_of, **fields)


direct = st.one_of(
    note("formed"),
    note("known"),
    note("waits"),
    note("end"),
    note("end", linked=ranks),
    note("ended", ranks=st.lists(st.tuples(positions, ranks).map(list), max_size=2)),
    note("died", rank=positions, detail=st.just("why"), how=st.sampled_from(["killed", "unreachable", "protocol"])),
    note("bye", g=groups, cause=st.one_of(st.none(), causes)),
    note("bye", g=groups, cause=st.one_of(st.none(), causes), linked=st.booleans()),
    note("bye", g=groups, cause=st.none(), linked=st.booleans(), name=st.sampled_from(["world:0", "other"])),
    note("revoke", g=groups, cause=causes),
    note("revoke", g=groups, cause=causes, name=st.sampled_from(["world:0", "other"])),
    shrink_note("vote", ballot=ballots, exclude=ranks, completed=reports,
              accepted=st.one_of(st.none(), st.tuples(ballots, outcomes).map(list)),
              dead=st.lists(st.tuples(positions, st.just("why")).map(list), max_size=2)),
    shrink_note("ask", ballot=ballots),
    shrink_note("propose", ballot=ballots, outcome=outcomes),
    shrink_note("accept", ballot=ballots),
    shrink_note("decided", outcome=outcomes),
    shrink_note("refuse", ballot=ballots, cause=causes),
    note("report", g=groups, op=operations, mine=calls(st.just(2)), split=lineages),
    note("report", g=groups, op=operations, mine=calls(positions), asked=st.just(True)),
    note("query", g=groups, op=operations, split=lineages),
    note("absent", g=groups, op=operations, last=st.just("in nothing"), age=seconds, asked=st.just(True)),
    note("status", g=groups, op=operations, missing=ranks.map(list),
         known=st.lists(st.tuples(positions, st.booleans(), st.sampled_from([None, "x"]), seconds,
                                  st.sampled_from([0.0, 2.0]), st.just("")).map(list), max_size=3)),
    note("disagree", g=groups, op=operations, theirs=calls(st.just(2))),
    note("differ", g=groups, one=calls(positions), two=calls(positions)),
    note("device", g=groups, card=st.just(CARD)),
    note("device", g=groups, called=operations, hash=operations, seq=operations),
    note("device", g=groups, halted=operations),
    note("device", g=groups, turn=st.just(True)),
    note("device", g=groups, ready=st.just(True), shares=st.booleans()),
    note("device", g=groups, number=st.integers(0, 2),
         decision=st.just([False, "why", b"", False, False, False, False])),
    note("device", g=groups, crowded=st.just(True)),
    note("device", g=groups, shared=operations),
    note("device", g=groups, slot=operations),
    note("device", g=groups, slot=operations, clock=operations),
    note("device", g=groups, slot=operations, at=operations),
    note("device", g=groups, match=st.one_of(st.none(), matches),
         batches=st.lists(st.tuples(positions, st.integers(0, 9), st.integers(0, 9)).map(list), max_size=2)),
    note("device", g=groups, number=st.integers(0, 2), begin=st.lists(matches, max_size=2)),
)  # fmt: skip
valid = st.one_of(
    direct,
    st.fixed_dictionaries({"t": st.just("relay"), "to": positions, "note": direct}),
    st.fixed_dictionaries({"t": st.just("relayed"), "from": positions, "note": direct}),
)
