"""What comes of the control messages of other ranks: each is read, checked, and handed to the part that it concerns."""

from __future__ import annotations

from dataclasses import dataclass

from aiocoll.engine.channels import Channels
from aiocoll.engine.consensus.agreements import Agreements
from aiocoll.engine.control.messages import DATA, PROTOCOL, ControlMessage, Facts, read
from aiocoll.engine.control.star import ControlPlane
from aiocoll.engine.failure.failure_detector import FailureDetector
from aiocoll.engine.failure.refusal import Refusals, cannot_be_taken
from aiocoll.engine.failure.roster import Roster
from aiocoll.engine.groups import Groups
from aiocoll.errors import ProtocolError
from aiocoll.transport.base import Link

__all__ = ["Receiver"]


@dataclass(slots=True)
class Receiver:
    """The part of one endpoint that carries out what other ranks say; the attributes are the other parts."""

    facts: Facts
    control: ControlPlane
    roster: Roster
    failure_detector: FailureDetector
    channels: Channels
    agreements: Agreements
    groups: Groups
    refusals: Refusals

    def receive(self, peer: int, payload: memoryview | None, way: str) -> None:
        """Take a message of `peer` that has come on this way.

        Raises:
            ProtocolError: it does not fit, or an exception was raised by what it says.
        """
        message = read(payload or b"", peer, way, self.facts)
        self._carry_out(peer, message, way == DATA)

    def refuse(self, peer: int, error: Exception | None, link: Link) -> bool:
        """Be done with `peer` if `error` says that what it sent cannot be taken; whether it does."""
        if not cannot_be_taken(error):
            return False
        self.refusals.refuse(peer, error, link)
        return True

    def parting(self) -> ControlMessage:
        """Say which groups this rank has gone on from, and who finds the end behind the data on a link of its own."""
        linked = sorted(link.peer for link in self.channels.links())
        return {"linked": linked, "moved": self.agreements.moved()}

    def _carry_out(self, peer: int, message: ControlMessage, direct: bool) -> None:
        try:
            self._handle(peer, message, direct)
        except ProtocolError:
            raise
        except Exception as error:
            raise ProtocolError(
                f"rank {self.facts.rank} could not take the control message {message['t']!r} of rank {peer}: {error!r}"
            ) from error

    def _handle(self, peer: int, message: ControlMessage, direct: bool) -> None:
        """Do what a message says, which came behind all data if `direct`."""
        kind = message["t"]
        if kind == "relay":
            self.control.tell(message["to"], {"t": "relayed", "from": peer, "note": message["note"]})
        elif kind == "relayed":
            self._handle_relayed(message["from"], message["note"])
        elif kind == "formed":
            self.control.formed()
        elif kind == "end":
            self._finished(peer, message["moved"])
            if not direct:
                self.control.ends(peer, message["linked"], message["moved"])
            self.groups.ended(peer, () if direct else message["linked"])
        elif kind == "ended":
            for rank, _, moved in message["ranks"]:
                self._finished(rank, moved)
            self.control.gone_too([rank for rank, _, _ in message["ranks"]])
            for rank, linked, _ in message["ranks"]:
                self.groups.ended(rank, linked)
        elif kind == "known":
            self.control.parted()
        elif kind == "bye":
            if message["cause"] is not None:
                self.groups.revoked(peer, message["g"], message["cause"])
            if direct or not message["linked"]:
                self.groups.departed(peer, message["g"])
        elif kind == "died":
            self._handle_died(peer, message)
        elif kind == "probe":
            self.control.tell(peer, {"t": "alive"})
        elif kind == "alive":
            self.roster.restored(peer)
        elif kind == "waits":
            self.failure_detector.needed()
        elif kind == "revoke":
            self.groups.revoked(peer, message["g"], message["cause"])
        elif kind == "shrink":
            self.agreements.handle(peer, message)
        else:
            self.groups.handle(peer, message)

    def _finished(self, rank: int, moved: list[int]) -> None:
        """A rank has ended in order; it went on elsewhere from the groups `moved`."""
        self.roster.finished(rank)
        self.agreements.finished(rank, moved)

    def _handle_relayed(self, origin: int, message: ControlMessage) -> None:
        """Take what another rank has said; if it cannot be taken, that is not the fault of the one between."""
        try:
            self._carry_out(origin, message, direct=False)
        except ProtocolError as error:
            self.refusals.refuse(origin, error)

    def _handle_died(self, peer: int, message: ControlMessage) -> None:
        rank, how = message["rank"], message["how"]
        if rank != self.facts.rank:
            self.roster.died(rank, message["detail"], tell=False, how=how)
        elif how == PROTOCOL:
            self.roster.died(peer, message["detail"], tell=False, how=how)
