"""Groups that this rank has left, recorded until nothing about them can arrive any more.

A rank leaves a group without waiting for the other members, so their frames and messages may still arrive. These must
not be taken for those of a group that this rank has not made yet. And while they may arrive, no other group of this
rank may have the same id.

Every member says goodbye twice: on its data link, behind its last frame, and on the control plane, behind its last
message. Both arrive in order. So after both goodbyes of a member nothing about the group arrives from it, and after
those of all members the record is dropped. Ranks that have ended, or are proven dead, send nothing more either. A peer
breaks the protocol if it is more than `unmade_groups.GROUPS` groups ahead, so that many records wait for a peer that
lags behind, and one for each group that it keeps open.

Two things are not in order: a goodbye is lost if its sender is unreachable for a while, and a message that travels
through the hub may be overtaken by a goodbye on a direct link. So the number of records is bounded by `RECORDS`, and
messages about the last `RECENT` groups whose records were dropped are ignored.

A frame has only the id of its group. If two groups have one id, its sender decides: a frame belongs to a group only if
its sender is a member that has not said goodbye to it. A member cannot use the id for another group before that, since
it has a record of the group itself, until this rank has said goodbye, too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

__all__ = ["RECENT", "RECORDS", "ClosedGroups", "Farewells"]

#: Records of closed groups; some 500 bytes each. What is normal are a few, so these are left by peers that were
#: unreachable: one for each group that was closed meanwhile.
RECORDS = 65_536
#: Groups whose records were dropped last. The hub relays a message in milliseconds, or after a second if its loop is
#: blocked; no rank closes this many groups in that time.
RECENT = 4096


class Farewells:
    """The goodbyes of one group's members.

    Args:
        name: of the group, as messages have it; None if it is not known.
        ranks: its members, numbered as in the job.

    Attributes:
        name, ranks: as given.
        frames: members whose last frame has arrived.
        notes: members whose last message on the control plane has arrived.
    """

    __slots__ = ("frames", "name", "notes", "ranks")

    def __init__(self, name: str | None, ranks: Collection[int]) -> None:
        self.name = name
        self.ranks = ranks
        self.frames: set[int] = set()
        self.notes: set[int] = set()

    def mark(self, rank: int, frames: bool, notes: bool) -> None:
        """Record a goodbye of a member: behind its last frame, its last message, or both."""
        if frames:
            self.frames.add(rank)
        if notes:
            self.notes.add(rank)

    def is_meant(self, rank: int, name: str | None) -> bool:
        """Return whether a message of `rank` with the group's id is about this group."""
        return rank in self.ranks and (name is None or self.name is None or name == self.name)


class _Record(Farewells):
    """A closed group; here `frames` and `notes` are the members of which there are more to come."""

    __slots__ = ()

    @property
    def is_complete(self) -> bool:
        return not self.frames and not self.notes


class ClosedGroups:
    """The closed groups of one endpoint.

    Args:
        dropped: called with the id and the members of a group whose record was dropped.
    """

    def __init__(self, dropped: Callable[[int, Collection[int]], None]) -> None:
        self._dropped = dropped
        #: Several only if their ids collide.
        self._records: dict[int, list[_Record]] = {}
        self._recent: dict[int, str | None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def close(self, identity: int, farewells: Farewells, members: Iterable[int]) -> None:
        """Record that this rank has left a group; `members` may still send something."""
        others = set(members)
        record = _Record(farewells.name, farewells.ranks)
        record.frames, record.notes = others - farewells.frames, others - farewells.notes
        self._records.setdefault(identity, []).append(record)
        self._drop_complete(identity)
        if len(self._records) > RECORDS:
            oldest = next(iter(self._records))
            for each in self._records[oldest]:
                each.frames.clear()
                each.notes.clear()
            self._drop_complete(oldest)

    def is_known(self, identity: int) -> bool:
        """Return whether this rank has left a group with that id, as far as it remembers."""
        return identity in self._records or identity in self._recent

    def name(self, identity: int) -> str | None:
        """Return the name of a closed group of which something may still arrive; None if there is none."""
        return next((record.name or "?" for record in self._records.get(identity, ())), None)

    def reuse(self, identity: int) -> None:
        """A new group has the id of one whose record was dropped."""
        self._recent.pop(identity, None)

    def sends_frames(self, identity: int, peer: int) -> bool:
        """Return whether a frame of `peer` is for a closed group."""
        return any(peer in record.frames for record in self._records.get(identity, ()))

    def sends_notes(self, identity: int, peer: int, direct: bool, name: str | None = None) -> bool:
        """Return whether a message of `peer` is about a closed group; `direct` if it came behind frames."""
        for record in self._records.get(identity, ()):
            if peer in (record.frames if direct else record.notes) and record.is_meant(peer, name):
                return True
        return identity in self._recent and name in (None, self._recent[identity])

    def mark(self, identity: int, rank: int, name: str | None, frames: bool, notes: bool) -> bool:
        """Record a goodbye of a member; return whether it was about a closed group."""
        for record in self._records.get(identity, ()):
            awaited = (frames and rank in record.frames) or (notes and rank in record.notes)
            if awaited and record.is_meant(rank, name):
                if frames:
                    record.frames.discard(rank)
                if notes:
                    record.notes.discard(rank)
                self._drop_complete(identity)
                return True
        return self.sends_notes(identity, rank, frames, name)

    def end(self, ranks: Collection[int], frames: bool = True, notes: bool = True) -> None:
        """Record that nothing more arrives from these ranks about any group."""
        for identity, records in list(self._records.items()):
            for record in records:
                if frames:
                    record.frames.difference_update(ranks)
                if notes:
                    record.notes.difference_update(ranks)
            self._drop_complete(identity)

    def _drop_complete(self, identity: int) -> None:
        records = self._records[identity]
        complete = [record for record in records if record.is_complete]
        if not complete:
            return
        records[:] = [record for record in records if not record.is_complete]
        if not records:
            del self._records[identity]
        for record in complete:
            self._recent[identity] = record.name
            self._dropped(identity, record.ranks)
        while len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
