"""The control messages between ranks. Each kind has a schema, checked before a message has any effect.

A message is a msgpack map. `SHAPES` lists the kinds of messages, the paths on which each may arrive, and its fields: to
add a field, add it there. Rules that depend on sender and receiver are in `_RULES`. `read` checks both. Other code uses
only messages that have passed `read`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from aiocoll.elements.records import LONGEST_NAME
from aiocoll.engine.control.shapes import (
    Check,
    SchemaError,
    Scope,
    any_of,
    data,
    describe_value,
    fields,
    group_rank,
    integer,
    job_rank,
    list_of,
    none_or,
    one_of,
    per_rank,
    rank_list,
    rank_order,
    refuse,
    row,
    seconds,
    text,
)
from aiocoll.errors import ProtocolError

__all__ = [
    "CALLED",
    "CONTROL",
    "DATA",
    "DEVICE",
    "NAMED",
    "PROTOCOL",
    "RELAYED",
    "SHAPES",
    "ControlMessage",
    "JobFacts",
    "read",
]

ControlMessage = dict[str, Any]

#: The paths by which messages arrive: on a control link, on a data link after all data, or relayed by another rank.
CONTROL, DATA, RELAYED = "a control link", "a data link", "another rank's behalf"
#: The kind of messages about CUDA devices.
DEVICE = "device"
#: The value of `PeerLostError.how` for a rank that sent an invalid message.
PROTOCOL = "protocol"

#: Maximum depth of nested group splits. Every message about an operation of the innermost group lists all these splits.
LEVELS = 256
#: Maximum number of calls in one coalescing block, far more than any program makes.
MEMBERS = 1 << 20
#: Maximum length in bytes of the store prefix of a grown group. `meeting.growth` makes prefixes of about 30 bytes.
MAX_KEY = 256
#: Maximum length in bytes of the unique id of an NCCL communicator. NCCL uses 128 bytes.
UNIQUE_ID = 1024
_U16, _U32, _U62, _U63, _U64 = 1 << 16, 1 << 32, 1 << 62, 1 << 63, 1 << 64


class JobFacts(NamedTuple):
    """Facts about the job against which received messages are checked: this rank, the number of ranks, the groups.

    Attributes:
        rank: this rank, numbered as in the job.
        world_size: number of ranks in the job.
        ranks_of: returns the ranks of a group that contains this rank and a peer, numbered as in the job; None for any
            other group.
    """

    rank: int
    world_size: int
    ranks_of: Callable[[int, int], Sequence[int] | None]


def read(payload: bytes | memoryview, peer: int, path: str, facts: JobFacts) -> ControlMessage:
    """Decode and check a message of `peer` that arrived on the path `path`.

    Raises:
        ProtocolError: the message is invalid on this path. The text contains the reason.
    """
    try:
        message = msgpack.unpackb(payload)
        _check(message, peer, path, facts)
    except ValueError as error:
        why = str(error) if isinstance(error, SchemaError) else repr(error)
        raise ProtocolError(f"rank {peer} sent an invalid control message on {path}: {why}") from error
    found: ControlMessage = message
    return found


def _check(message: Any, peer: int, path: str, facts: JobFacts) -> None:
    kind = message.get("t") if type(message) is dict else None
    shape = SHAPES.get(kind) if type(kind) is str else None
    if shape is None:
        raise SchemaError(f"unknown kind {describe_value(kind)}")
    if path not in shape.paths:
        raise SchemaError(f"{kind!r} is not allowed on {path}")
    identity = message.get("g")
    ranks = facts.ranks_of(identity, peer) if type(identity) is int else None
    try:
        shape.check(message, Scope(facts.world_size, None if ranks is None else len(ranks)))
        for rule in _RULES.get(str(kind), ()):
            rule(message, peer, path, facts)
    except SchemaError as error:
        raise SchemaError(f"{kind!r}: {error}") from None


# -- schemas of values


def _members(value: Any, scope: Scope) -> None:
    _MEMBERS(value, scope)
    listed_calls = sum(run["count"] for run in value["runs"])
    if listed_calls != value["listed"] or listed_calls > value["size"]:
        raise SchemaError(
            f"runs: the counts add up to {listed_calls} calls, but listed={value['listed']} and size={value['size']}"
        )


_COUNT = integer(_U63)
_TRUE = one_of(True)
_BOOL = one_of(False, True)
_TEXT = text()
_GROUP = integer(_U62)

_CALL: dict[str, Check] = {
    "device": text(64),
    "dtype": none_or(text(LONGEST_NAME)),
    "counts": none_or(list_of(_COUNT)),
    "sends": none_or(per_rank),
    "receives": none_or(per_rank),
    "root": none_or(group_rank),
    "reduce": none_or(_TEXT),
}
_MEMBERS = fields(
    size=integer(MEMBERS),
    listed=integer(MEMBERS),
    rest=integer(_U32),
    runs=list_of(fields(_CALL, op=_TEXT, count=integer(MEMBERS, 1))),
)
#: The fields of a call's description (see `aiocoll.engine.operations.signature.description`): the required ones here,
#: and the optional ones below.
NAMED: dict[str, Check] = {"rank": group_rank, "op": _TEXT, "seq": none_or(integer(_U64)), "key": none_or(_TEXT)}
CALLED: dict[str, Check] = {
    **_CALL,
    "shape": list_of(_COUNT),
    "members": none_or(_members),
    "debug": none_or(text(64)),
}
_DESCRIPTION = fields({**CALLED, "src": none_or(group_rank), "dst": group_rank, "tag": integer(_U32)}, **NAMED)
#: The schema of an error as plain data; see `aiocoll.engine.control.causes.cause_of`.
_CAUSE = fields(
    kind=text(64),
    text=_TEXT,
    op=none_or(_TEXT),
    seq=none_or(any_of(integer(_U64), _TEXT)),
    group=none_or(_TEXT),
    ranks=list_of(integer(_U32)),
    how=none_or(text(64)),
)
#: The schema of a report on completed operations; see `aiocoll.engine.consensus.completed`.
_REPORT = fields(
    upto=integer(_U63, -1),
    missing=list_of(_COUNT),
    keyed=list_of(row(_TEXT, _COUNT)),
)
_BALLOT = integer(_U63)
_OUTCOME = fields(
    members=rank_list, excluded=rank_list, everywhere=none_or(_REPORT), somewhere=none_or(_REPORT), grown=text(MAX_KEY)
)
_CANDIDACY: dict[str, Check] = {
    "exclude": fields(exclude=rank_list, completed=_REPORT, lost=rank_list),
    "grown": fields(grown=text(MAX_KEY), lost=rank_list),
    "failed": fields(failed=_TEXT, successor=text(MAX_KEY), lost=rank_list),
}
_LINEAGE = list_of(row(_GROUP, integer(_U32), none_or(_TEXT), rank_order), LEVELS)
_OPERATION = integer(_U63)
_HOW = one_of("killed", "stopped", "unreachable", PROTOCOL)


def _group_message(optional: Mapping[str, Check] | None = None, /, **required: Check) -> Check:
    return fields({"split": _LINEAGE, **(optional or {})}, t=_TEXT, g=_GROUP, **required)


def _candidacy(value: Any, scope: Scope) -> None:
    inner = next((check for name, check in _CANDIDACY.items() if type(value) is dict and name in value), None)
    if inner is None:
        raise SchemaError(f"candidacy: {describe_value(value)} is not a valid candidacy")
    inner(value, scope)


def _shrink_message(**required: Check) -> Check:
    dead = list_of(row(job_rank, _TEXT))
    return fields(t=_TEXT, g=_GROUP, n=_COUNT, ranks=rank_order, what=_TEXT, dead=dead, assumed=rank_list, **required)


def _device_message(**required: Check) -> Check:
    return fields(t=_TEXT, g=_GROUP, **required)


#: The schemas of messages about a shrinking group, by the field `what`; see `aiocoll.engine.consensus.voter`.
_SHRINK: dict[str, Check] = {
    "vote": _shrink_message(
        ballot=_BALLOT,
        candidacy=none_or(_candidacy),
        accepted=none_or(row(_BALLOT, _OUTCOME)),
    ),
    "ask": _shrink_message(ballot=_BALLOT),
    "propose": _shrink_message(ballot=_BALLOT, outcome=_OUTCOME),
    "accept": _shrink_message(ballot=_BALLOT),
    "decided": _shrink_message(outcome=_OUTCOME),
    "refuse": _shrink_message(ballot=_BALLOT, cause=_CAUSE),
}
_MATCH = row(group_rank, group_rank, integer(_U64))
#: The schemas of messages about devices. Each key is a field that only this kind of message has; see
#: `aiocoll.gpu.calls`.
_DEVICE: dict[str, Check] = {
    "card": _device_message(
        card=fields(library=integer(_U32), why=_TEXT, bus=text(256), unfinished=_BOOL, float8=_BOOL, ahead=_BOOL)
    ),
    "turn": _device_message(turn=_TRUE),
    "ready": _device_message(ready=_TRUE, shares=_BOOL),
    "decision": _device_message(
        number=integer(_U63), decision=row(_BOOL, _TEXT, data(UNIQUE_ID), _BOOL, _BOOL, _BOOL, _BOOL)
    ),
    "match": _device_message(match=none_or(_MATCH), batches=list_of(row(group_rank, integer(_U32), integer(_U16)), 2)),
    "begin": _device_message(number=integer(_U63), begin=list_of(_MATCH)),
    "called": _device_message(called=_COUNT, hash=integer(_U64), seq=integer(_U63)),
    "confirmed": _device_message(confirmed=_COUNT),
    "pace": _device_message(
        number=integer(_U63), pace=one_of("ahead", "halt", "through", "placed"), through=_COUNT, upto=_COUNT
    ),
    "halted": _device_message(halted=_COUNT),
    "crowded": _device_message(crowded=_TRUE),
    "shared": _device_message(shared=integer(_U63)),
    "slot": fields({"clock": _COUNT, "at": _COUNT}, t=_TEXT, g=_GROUP, slot=integer(_U63)),
    "compare": _device_message(compare=list_of(integer(_U64)), position=_COUNT),
    "differs": _device_message(differs=_DESCRIPTION, position=_COUNT),
}


def _shrink(value: Any, scope: Scope) -> None:
    what = value.get("what")
    inner = _SHRINK.get(what) if isinstance(what, str) else None
    if inner is None:
        raise SchemaError(f"what: unknown value {describe_value(what)}")
    inner(value, scope)


def _device(value: Any, scope: Scope) -> None:
    inner = next((check for name, check in _DEVICE.items() if name in value), None)
    if inner is None:
        raise SchemaError("no field that identifies the kind of device message")
    inner(value, scope)


class _Shape(NamedTuple):
    """The schema of one kind of message, and the paths (data link, control link, relay) on which it may arrive."""

    check: Check
    paths: frozenset[str]


def _shape(check: Check, *paths: str) -> _Shape:
    return _Shape(check, frozenset(paths))


def _check_relayed(value: Any, scope: Scope) -> None:
    """Check that a relayed message is a map. Its content is checked later, as a message of the original sender."""
    if type(value) is not dict:
        refuse(value, "a note")


SHAPES: dict[str, _Shape] = {
    # Messages of the control plane, see `aiocoll.engine.control.star`.
    "relay": _shape(fields(t=_TEXT, to=job_rank, note=_check_relayed), CONTROL),
    "relayed": _shape(fields(t=_TEXT, note=_check_relayed, **{"from": job_rank}), CONTROL),
    "formed": _shape(fields(t=_TEXT), CONTROL),
    "known": _shape(fields(t=_TEXT), CONTROL),
    "waits": _shape(fields(t=_TEXT), CONTROL),
    "probe": _shape(fields(t=_TEXT), CONTROL),
    "alive": _shape(fields(t=_TEXT), CONTROL),
    "end": _shape(fields({"linked": rank_list}, t=_TEXT, moved=list_of(_GROUP)), CONTROL, DATA),
    "ended": _shape(fields(t=_TEXT, ranks=list_of(row(job_rank, rank_list, list_of(_GROUP)))), CONTROL, RELAYED),
    "died": _shape(fields(t=_TEXT, rank=job_rank, detail=_TEXT, how=_HOW), CONTROL, DATA, RELAYED),
    # Messages about a group, which this rank may not have made yet.
    "bye": _shape(
        fields({"linked": _BOOL, "name": _TEXT}, t=_TEXT, g=_GROUP, cause=none_or(_CAUSE)), CONTROL, DATA, RELAYED
    ),
    "revoke": _shape(fields({"name": _TEXT}, t=_TEXT, g=_GROUP, cause=_CAUSE), CONTROL, RELAYED),
    "shrink": _shape(_shrink, CONTROL, RELAYED),
    DEVICE: _shape(_device, CONTROL, DATA, RELAYED),
    # Messages about operations, see `aiocoll.engine.failure.stall_inspector` and `mismatch`.
    "report": _shape(_group_message({"asked": _TRUE}, op=_OPERATION, mine=_DESCRIPTION), CONTROL, RELAYED),
    "query": _shape(_group_message(op=_OPERATION), CONTROL, RELAYED),
    "absent": _shape(_group_message(op=_OPERATION, last=_TEXT, age=none_or(seconds), asked=_TRUE), CONTROL, RELAYED),
    "status": _shape(
        _group_message(
            op=_OPERATION,
            missing=list_of(group_rank),
            known=list_of(row(group_rank, _BOOL, none_or(_TEXT), none_or(seconds), seconds, _TEXT)),
        ),
        CONTROL,
        RELAYED,
    ),
    "disagree": _shape(fields(t=_TEXT, g=_GROUP, op=integer(_U64), theirs=_DESCRIPTION), CONTROL, DATA, RELAYED),
    "differ": _shape(fields(t=_TEXT, g=_GROUP, one=_DESCRIPTION, two=_DESCRIPTION), CONTROL, DATA, RELAYED),
}

# -- rules about sender and receiver

Rule = Callable[[ControlMessage, int, str, JobFacts], None]


def _relay(message: ControlMessage, peer: int, path: str, facts: JobFacts) -> None:
    to = message["to"]
    if to in (facts.rank, peer):
        raise SchemaError(f"to: this rank must not relay messages of rank {peer} to rank {to}")
    # The hub checks a message before it relays the message, so that it never relays an invalid one.
    _check(message["note"], peer, RELAYED, facts._replace(rank=to))


def _relayed(message: ControlMessage, peer: int, path: str, facts: JobFacts) -> None:
    origin = message["from"]
    if origin in (facts.rank, peer):
        raise SchemaError(f"from: rank {peer} must not relay messages of rank {origin} to this rank")
    _check(message["note"], origin, RELAYED, facts)


def _formed(message: ControlMessage, peer: int, path: str, facts: JobFacts) -> None:
    if peer:
        raise SchemaError("only rank 0 may send this message")


def _check_linked(message: ControlMessage, peer: int, path: str, facts: JobFacts) -> None:
    """Check that a message has the field `linked` (the sender's data links), unless it arrived on a data link."""
    if (path == DATA) == ("linked" in message):
        raise SchemaError(f"linked: not allowed on {path}" if path == DATA else "linked is missing")


def _ended(message: ControlMessage, peer: int, path: str, facts: JobFacts) -> None:
    ranks = [rank for rank, _, _ in message["ranks"]]
    if facts.rank in ranks or len(set(ranks)) < len(ranks):
        raise SchemaError(f"ranks: {ranks} contains the receiving rank {facts.rank}, or the same rank twice")


def _check_own_call(message: ControlMessage, peer: int, path: str, facts: JobFacts) -> None:
    """Check that the call described in a message is the sender's own."""
    ranks = facts.ranks_of(message["g"], peer)
    call = message["mine"] if "mine" in message else message["theirs"]
    if ranks is not None and ranks[call["rank"]] != peer:
        raise SchemaError(f"rank: the call is of rank {call['rank']} of the group, not of the sender")


def _splits(message: ControlMessage, peer: int, path: str, facts: JobFacts) -> None:
    for _, _, _, ranks in message.get("split", ()):
        if peer not in ranks or facts.rank not in ranks:
            raise SchemaError(f"split: ranks {peer} and {facts.rank} are not both in a group of {ranks}")


def _agreement(message: ControlMessage, peer: int, path: str, facts: JobFacts) -> None:
    ranks, known = message["ranks"], facts.ranks_of(message["g"], peer)
    if peer not in ranks or facts.rank not in ranks or (known is not None and list(known) != ranks):
        raise SchemaError(f"ranks: {ranks} are not the ranks of the group")
    # The coordinator of a ballot is the rank `ballot % world_size`. Only the message `ask` may name a ballot of any
    # coordinator.
    if message["what"] not in ("ask", "decided"):
        coordinator = facts.rank if message["what"] in ("vote", "accept") else peer
        if message["ballot"] % facts.world_size != coordinator:
            raise SchemaError(f"ballot: {message['ballot']} does not belong to coordinator {coordinator}")
    outcomes = [message.get("outcome"), (message.get("accepted") or (0, None))[1]]
    for outcome in filter(None, outcomes):
        if not outcome["members"] or not set(ranks).issuperset(outcome["members"] + outcome["excluded"]):
            raise SchemaError(f"members: {outcome['members']} is empty, or contains ranks outside the group")
        if not outcome["grown"] and None in (outcome["everywhere"], outcome["somewhere"]):
            raise SchemaError("outcome: the report of completed operations is missing; a shrinking group requires it")
    candidacy = message.get("candidacy") or {}
    named = {*candidacy.get("exclude", ()), *candidacy["lost"]} if candidacy else set()
    if not set(ranks).issuperset(named.union(message["assumed"], (rank for rank, _ in message["dead"]))):
        raise SchemaError("exclude, lost, assumed or dead: some of these ranks are not in the group")


_RULES: dict[str, Iterable[Rule]] = {
    "relay": [_relay],
    "relayed": [_relayed],
    "formed": [_formed],
    "end": [_check_linked],
    "bye": [_check_linked],
    "ended": [_ended],
    "report": [_check_own_call, _splits],
    "disagree": [_check_own_call],
    "query": [_splits],
    "absent": [_splits],
    "status": [_splits],
    "shrink": [_agreement],
}
