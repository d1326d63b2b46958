"""Groups that this rank has left, recorded while messages about them may still arrive.

A rank leaves a group without waiting for the other members, so their frames and messages may still arrive. This rank
must not mistake them for frames of a group that it has not made yet. As long as they may arrive, no other group of
this rank may have the same id.

Every member sends two goodbyes: one on its data link after its last frame, and one on the control plane after its
last message. Both arrive in order. So after both goodbyes, the member sends nothing more about the group. The record
is dropped after the goodbyes of all members. Ranks that have ended, or whose death is proven, send nothing more
either. A peer that is more than `unmade_groups.GROUPS` groups ahead breaks the protocol. So a peer that lags behind
keeps at most that many records waiting, and one for each group that it keeps open.

Two cases break the order. A goodbye is lost if its sender is unreachable for a while. A message relayed by the hub may
arrive after a goodbye on a direct link. So the number of records is limited to `RECORDS`, and messages about the
last `RECENT` groups whose records were dropped are ignored.

A frame carries only the id of its group. If two groups have the same id, the sender decides. A frame belongs to a
group only if its sender is a member that has not sent its goodbye. Before that, a member cannot use the id for another
group, since it keeps a record of the group itself until this rank has sent its goodbye.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

__all__ = ["RECENT", "RECORDS", "ClosedGroups", "Goodbyes"]

#: Maximum number of records of closed groups, of about 500 bytes each. Usually there are a few. A record stays until
#: all members have sent a goodbye, which an unreachable peer never sends.
RECORDS = 65_536
#: Number of group ids remembered after their records were dropped, for late messages. The hub relays a message within
#: milliseconds, or within a second if its loop is blocked. No rank closes this many groups in that time.
RECENT = 4096


class Goodbyes:
    """The goodbyes that this rank has received from the members of one group.

    Args:
        name: the group's name as sent in messages; None if it is unknown.
        ranks: the group's members, numbered as in the job.

    Attributes:
        name, ranks: as given.
        frames: members whose last frame has arrived.
        notes: members whose last control message has arrived.
    """

    __slots__ = ("frames", "name", "notes", "ranks")

    def __init__(self, name: str | None, ranks: Collection[int]) -> None:
        self.name = name
        self.ranks = ranks
        self.frames: set[int] = set()
        self.notes: set[int] = set()

    def mark(self, rank: int, frames: bool, notes: bool) -> None:
        """Record a member's goodbye: no more frames (`frames`) or control messages (`notes`) of this member follow."""
        if frames:
            self.frames.add(rank)
        if notes:
            self.notes.add(rank)

    def matches(self, rank: int, name: str | None) -> bool:
        """Return whether a message of `rank` that has this group's id and the name `name` is about this group."""
        return rank in self.ranks and (name is None or self.name is None or name == self.name)


class _Record(Goodbyes):
    """A closed group, and its members that may still send frames (`frames`) or control messages (`notes`)."""

    __slots__ = ()

    @property
    def is_complete(self) -> bool:
        return not self.frames and not self.notes


class ClosedGroups:
    """The groups that one endpoint has closed, recorded while messages about them may still arrive.

    Args:
        dropped: callback for a dropped record; its arguments are the group's id and members.
    """

    def __init__(self, dropped: Callable[[int, Collection[int]], None]) -> None:
        self._dropped = dropped
        # Each value is a list, because several groups may have the same id.
        self._records: dict[int, list[_Record]] = {}
        self._recent: dict[int, str | None] = {}

    def __len__(self) -> int:
        return sum(map(len, self._records.values()))

    def close(self, identity: int, goodbyes: Goodbyes, members: Iterable[int]) -> None:
        """Record that this rank has left a group; `members` may still send frames or messages about it."""
        others = set(members)
        record = _Record(goodbyes.name, goodbyes.ranks)
        record.frames, record.notes = others - goodbyes.frames, others - goodbyes.notes
        self._records.setdefault(identity, []).append(record)
        self._drop_complete(identity)
        if len(self._records) > RECORDS:
            oldest = next(iter(self._records))
            for each in self._records[oldest]:
                each.frames.clear()
                each.notes.clear()
            self._drop_complete(oldest)

    def is_known(self, identity: int) -> bool:
        """Return whether this rank has left a group with this id, and still remembers the id."""
        return identity in self._records or identity in self._recent

    def name(self, identity: int) -> str | None:
        """Return the name of the closed group with this id; None if no more messages about this group can arrive."""
        return next((record.name or "?" for record in self._records.get(identity, ())), None)

    def reuse(self, identity: int) -> None:
        """Forget the id of a closed group, because a new group has the same id."""
        self._recent.pop(identity, None)

    def sends_frames(self, identity: int, peer: int) -> bool:
        """Return whether `peer` may still send frames about a closed group with this id."""
        return any(peer in record.frames for record in self._records.get(identity, ()))

    def sends_notes(self, identity: int, peer: int, direct: bool, name: str | None = None) -> bool:
        """Return whether a message of `peer` is about a closed group.

        `direct` is True if the message arrived on the data link.
        """
        for record in self._records.get(identity, ()):
            if peer in (record.frames if direct else record.notes) and record.matches(peer, name):
                return True
        return identity in self._recent and name in (None, self._recent[identity])

    def mark(self, identity: int, rank: int, name: str | None, frames: bool, notes: bool) -> bool:
        """Record a member's goodbye; return whether the goodbye was about a closed group."""
        for record in self._records.get(identity, ()):
            awaited = (frames and rank in record.frames) or (notes and rank in record.notes)
            if awaited and record.matches(rank, name):
                if frames:
                    record.frames.discard(rank)
                if notes:
                    record.notes.discard(rank)
                self._drop_complete(identity)
                return True
        return self.sends_notes(identity, rank, frames, name)

    def end(self, ranks: Collection[int], frames: bool = True, notes: bool = True) -> None:
        """Record that `ranks` send no more frames, or no more control messages (`notes`), about any group."""
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
