"""Receiver of control messages: it checks them and passes them to the parts of the endpoint."""

from __future__ import annotations

from typing import NamedTuple

from aiocoll.engine.channels import Channels
from aiocoll.engine.consensus.agreements import Agreements
from aiocoll.engine.control.messages import DATA, PROTOCOL, ControlMessage, JobFacts, read
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.failure.failure_detector import FailureDetector
from aiocoll.engine.failure.refusal import Refusals, is_data_error
from aiocoll.engine.failure.roster import Roster
from aiocoll.engine.groups import Groups
from aiocoll.errors import ProtocolError
from aiocoll.transport.base import Link

__all__ = ["Receiver"]

#: Kinds of messages that are processed even if the sender was declared dead. "shrink": the agreement replies with its
#: decision. "relay" and "relayed": the original sender is checked instead of the relaying rank.
PROCESSED_FROM_DEAD = frozenset({"shrink", "relay", "relayed"})


class Receiver(NamedTuple):
    """The receiver of control messages of one endpoint; its attributes are the parts that handle the messages."""

    facts: JobFacts
    control: ControlPlane
    roster: Roster
    failure_detector: FailureDetector
    channels: Channels
    agreements: Agreements
    groups: Groups
    refusals: Refusals

    def receive(self, peer: int, payload: memoryview | None, path: str) -> None:
        """Handle a message that `peer` sent; `path` is the kind of link on which it arrived.

        Raises:
            ProtocolError: the message is invalid, or handling it raised an exception.
        """
        message = read(payload or b"", peer, path, self.facts)
        self._dispatch(peer, message, path == DATA)

    def refuse(self, peer: int, error: Exception | None, link: Link) -> bool:
        """Reject `peer` if `error` was caused by an unacceptable message; return whether `peer` was rejected."""
        if not is_data_error(error):
            return False
        self.refusals.refuse(peer, error, link)
        return True

    def make_end_fields(self) -> ControlMessage:
        """Return the fields of the notice of this rank's end: its data links, and the groups that have a successor."""
        linked = sorted(link.peer for link in self.channels.links())
        return {"linked": linked, "moved": self.agreements.moved_groups()}

    def _dispatch(self, peer: int, message: ControlMessage, direct: bool) -> None:
        try:
            self._handle(peer, message, direct)
        except ProtocolError:
            raise
        except Exception as error:
            raise ProtocolError(
                f"rank {self.facts.rank} could not handle control message {message['t']!r} of rank {peer}: {error!r}"
            ) from error

    def _handle(self, peer: int, message: ControlMessage, direct: bool) -> None:
        """Handle a checked message.

        `direct` is True if the message arrived on the data link, after all data.
        """
        kind = message["t"]
        if (detail := self._own_death(message)) is not None:
            self.roster.on_own_death(detail, peer)
        elif kind == "died" and message["rank"] == peer:
            self.roster.on_rank_out(peer, message["detail"])
        if kind not in PROCESSED_FROM_DEAD and self.roster.is_ignored(peer):
            return
        if kind == "relay":
            self.control.send(message["to"], {"t": "relayed", "from": peer, "note": message["note"]})
        elif kind == "relayed":
            self._handle_relayed(message["from"], message["note"])
        elif kind == "formed":
            self.control.on_formed()
        elif kind == "end":
            self._finished(peer, message["moved"])
            if not direct:
                self.control.departure.on_end(peer, message["linked"], message["moved"])
            self.groups.on_rank_end(peer, () if direct else message["linked"], direct)
        elif kind == "ended":
            for rank, _, moved in message["ranks"]:
                self._finished(rank, moved)
            self.control.remove_ranks([rank for rank, _, _ in message["ranks"]])
            for rank, linked, _ in message["ranks"]:
                self.groups.on_rank_end(rank, linked)
        elif kind == "known":
            self.control.departure.finish()
        elif kind == "bye":
            self.groups.on_goodbye(peer, message, direct)
        elif kind == "died":
            self._handle_died(peer, message)
        elif kind == "probe":
            self.control.send(peer, {"t": "alive"})
        elif kind == "alive":
            self.roster.record_return(peer)
        elif kind == "waits":
            self.failure_detector.check_awaited()
        elif kind == "revoke":
            self.groups.on_revocation(peer, message)
        elif kind == "shrink":
            self.agreements.handle(peer, message)
        else:
            self.groups.handle(peer, message, direct)

    def _own_death(self, message: ControlMessage) -> str | None:
        """Return the reason for which the sender declared this rank dead; None if the sender did not declare this."""
        kind, me = message["t"], self.facts.rank
        if kind == "died":
            return message["detail"] if message["rank"] == me and message["how"] == "killed" else None
        if kind == "shrink":
            return next((detail for rank, detail in message["dead"] if rank == me), None)
        if kind in ("bye", "revoke"):
            return self.groups.own_death(message["cause"])
        return None

    def _finished(self, rank: int, moved: list[int]) -> None:
        """Record that a rank has ended, after it had continued in the successors of the groups `moved`."""
        self.roster.record_end(rank)
        self.agreements.record_moved(rank, moved)

    def _handle_relayed(self, origin: int, message: ControlMessage) -> None:
        """Handle a relayed message. Its origin, not the relaying rank, is to blame for an unacceptable message."""
        try:
            self._dispatch(origin, message, direct=False)
        except ProtocolError as error:
            self.refusals.refuse(origin, error)

    def _handle_died(self, peer: int, message: ControlMessage) -> None:
        rank, how = message["rank"], message["how"]
        if rank != self.facts.rank:
            self.roster.record_loss(rank, message["detail"], notify=False, how=how)
        elif how == PROTOCOL:
            self.roster.record_loss(peer, message["detail"], notify=False, how=how)
