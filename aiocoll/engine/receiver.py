"""What comes of the control messages of other ranks: each is read, checked, and handed to the part that it concerns."""

from __future__ import annotations

from dataclasses import dataclass

from aiocoll.engine.channels import Channels
from aiocoll.engine.consensus.agreements import Agreements
from aiocoll.engine.control.messages import DATA, PROTOCOL, Facts, Note, read
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

    def hear(self, peer: int, payload: memoryview | None, way: str) -> None:
        """Take a note of `peer` that has come on this way.

        Raises:
            ProtocolError: it does not fit, or an exception was raised by what it says.
        """
        note = read(payload or b"", peer, way, self.facts)
        self._carry_out(peer, note, way == DATA)

    def refuse(self, peer: int, error: Exception | None, link: Link) -> bool:
        """Be done with `peer` if `error` says that what it sent cannot be taken; whether it does."""
        if not cannot_be_taken(error):
            return False
        self.refusals.refuse(peer, error, link)
        return True

    def parting(self) -> Note:
        """Say which groups this rank has gone on from, and who finds the end behind the data on a link of its own."""
        linked = sorted(link.peer for link in self.channels.links())
        return {"linked": linked, "moved": self.agreements.moved()}

    def _carry_out(self, peer: int, note: Note, direct: bool) -> None:
        try:
            self._handle(peer, note, direct)
        except ProtocolError:
            raise
        except Exception as error:
            raise ProtocolError(
                f"rank {self.facts.rank} could not take the control message {note['t']!r} of rank {peer}: {error!r}"
            ) from error

    def _handle(self, peer: int, note: Note, direct: bool) -> None:
        """Do what a note says, which came behind all data if `direct`."""
        kind = note["t"]
        if kind == "relay":
            self.control.tell(note["to"], {"t": "relayed", "from": peer, "note": note["note"]})
        elif kind == "relayed":
            self._heard_passed_on(note["from"], note["note"])
        elif kind == "formed":
            self.control.formed()
        elif kind == "end":
            self._finished(peer, note["moved"])
            if not direct:
                self.control.ends(peer, note["linked"], note["moved"])
            self.groups.ended(peer, () if direct else note["linked"])
        elif kind == "ended":
            for rank, _, moved in note["ranks"]:
                self._finished(rank, moved)
            self.control.gone_too([rank for rank, _, _ in note["ranks"]])
            for rank, linked, _ in note["ranks"]:
                self.groups.ended(rank, linked)
        elif kind == "known":
            self.control.parted()
        elif kind == "bye":
            if note["cause"] is not None:
                self.groups.revoked(peer, note["g"], note["cause"])
            if direct or not note["linked"]:
                self.groups.departed(peer, note["g"])
        elif kind == "died":
            self._heard_died(peer, note)
        elif kind == "probe":
            self.control.tell(peer, {"t": "alive"})
        elif kind == "alive":
            self.roster.restored(peer)
        elif kind == "waits":
            self.failure_detector.needed()
        elif kind == "revoke":
            self.groups.revoked(peer, note["g"], note["cause"])
        elif kind == "shrink":
            self.agreements.heard(peer, note)
        else:
            self.groups.heard(peer, note)

    def _finished(self, rank: int, moved: list[int]) -> None:
        """A rank has ended in order; it went on elsewhere from the groups `moved`."""
        self.roster.finished(rank)
        self.agreements.finished(rank, moved)

    def _heard_passed_on(self, origin: int, note: Note) -> None:
        """Take what another rank has said; if it cannot be taken, that is not the fault of the one between."""
        try:
            self._carry_out(origin, note, direct=False)
        except ProtocolError as error:
            self.refusals.refuse(origin, error)

    def _heard_died(self, peer: int, note: Note) -> None:
        rank, how = note["rank"], note["how"]
        if rank != self.facts.rank:
            self.roster.died(rank, note["detail"], tell=False, how=how)
        elif how == PROTOCOL:
            self.roster.died(peer, note["detail"], tell=False, how=how)
