"""One rank's membership of one group: what is in flight, what came early, and whether the group still stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import nan
from typing import TYPE_CHECKING, Any

from aiocoll.algorithms.hosts import host_numbers
from aiocoll.algorithms.machine import Tuning
from aiocoll.engine.channel import Channel
from aiocoll.engine.channels import channels
from aiocoll.engine.control import UNREADABLE
from aiocoll.engine.diagnosis import Diagnosis, cause_of, error_from
from aiocoll.engine.disagreement import Disputes, called, mismatch
from aiocoll.engine.mailbox import Mailbox
from aiocoll.engine.operation import KEYED, P2P, Operation
from aiocoll.engine.recorder import ENDED, HISTORY, Recorder
from aiocoll.engine.watch import REPORT_AFTER
from aiocoll.errors import CollectiveTimeoutError, GroupError, GroupRevokedError, PeerLostError
from aiocoll.log import logger
from aiocoll.transport.frame import EAGER, FrameKind, Header
from aiocoll.transport.shm.layout import SMALLER

if TYPE_CHECKING:
    from aiocoll.engine.endpoint import Endpoint
    from aiocoll.engine.lineage import Split

__all__ = ["Membership"]

_DATA = int(FrameKind.DATA)


class Membership:
    """This rank in a group.

    Args:
        endpoint: what the groups of this rank share.
        identity: the group on the wire: hash of its name.
        name: the group's name.
        ranks: rank in the job of each rank of the group.
        piece_nbytes: of the blocks in memory that all ranks share, where they do; else 0.
        timeout: seconds an operation may take unless its call says otherwise.
        warn_after: seconds after which an operation that waits is reported in the log.
        tuning: what the machine and the medium of the group's messages can do, the same on all ranks.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: int,
        name: str,
        ranks: Sequence[int],
        piece_nbytes: int,
        timeout: float,
        warn_after: float,
        tuning: Tuning,
    ) -> None:
        self.endpoint = endpoint
        self.id = identity
        self.name = name
        self.ranks = tuple(ranks)
        self.piece_nbytes = piece_nbytes
        self.small_nbytes = piece_nbytes // SMALLER
        self.timeout = timeout
        #: The timeout of operations that expire in the order of entry, and that the watch need not be told of.
        self.unhurried = timeout if timeout >= REPORT_AFTER else nan
        self.warn_after = warn_after
        self.tuning = tuning
        self.rank = self.ranks.index(endpoint.rank)
        #: Says in the log whose a record is.
        self.whose = {"group": name, "rank": self.rank}
        #: Host number of each rank, alike on all ranks: the cards are.
        self.hosts = host_numbers(endpoint.cards[rank]["host"] for rank in self.ranks)
        self.position = {rank: index for index, rank in enumerate(self.ranks)}
        self.channels = channels(endpoint, self.ranks)
        self.others = [rank for rank in range(len(self.ranks)) if rank != self.rank]
        self.operations: dict[int, Operation] = {}
        self.pending: dict[Operation, None] = {}
        #: The number of the last ordered operation; who makes one takes the next.
        self.entered = 0
        self.recorder = Recorder()
        self.cause: GroupError | None = None
        #: Collectives that the revocation has failed, by number, or key and count; all others this rank entered were
        #: complete by then. By their works, since a collective may have several operations, one after another.
        self.unfinished: frozenset[int | tuple[str, int]] = frozenset()
        #: Collectives that have failed without revoking the group, since the ranks' calls differed; named alike.
        self.refused: set[int | tuple[str, int]] = set()
        #: How this group was split off, from the first group on; and this rank's calls that split it.
        self.lineage: tuple[Split, ...] = ()
        self.splits: list[Split] = []
        self.on_revoked: list[Callable[[], None]] = []
        #: Called with each rank that leaves.
        self.on_departed: list[Callable[[int], None]] = []
        #: Hears a note about CUDA devices, and whose it is; until something here does, those that have come are kept.
        self.heard_on_device: Callable[[int, dict[str, Any]], None] = self._keep_device_note
        self._device_notes: list[tuple[int, dict[str, Any]]] = []
        self.left: set[int] = set()
        self.mailbox = Mailbox(self)
        self.diagnosis = Diagnosis(self)
        self.disputes = Disputes(self)
        self.stamp = endpoint.runtime.stamp
        self._collectives = self.recorder.collectives
        self._messages = self.recorder.messages
        self._watch = endpoint.watch
        self._early: dict[int, list[tuple[Channel, Header, bytes]]] = {}
        # Keyed operations that have ended; of ordered ones the number tells.
        self._ended: dict[int, None] = {}
        self._counts: dict[str, int] = {}

    # -- entering

    def keyed_id(self, key: str) -> tuple[int, int]:
        """Take the next count of `key`; return the operation id and the count."""
        count = self._counts.get(key, 0) + 1
        identity = KEYED | self.endpoint.hash62(f"{key}\0{count}")
        self._counts[key] = count
        return identity, count

    def counts(self, limit: int) -> dict[str, int]:
        """Return how often this rank has called each key, of the last `limit` keys that it has called first."""
        counts = self._counts.copy()
        return {key: counts[key] for key in list(counts)[-limit:]}

    def enter(self, operation: Operation) -> None:
        """Put an operation in flight: from here on its id and fingerprint answer every frame and question."""
        operation.entered = now = self.stamp()
        self.pending[operation] = None
        identity = operation.id
        work = operation.work
        terms, shape, code, instruction = operation.terms, operation.shape, work._code, work._instruction
        # The fields of a `Record`, written out: a call per operation would cost more than all else in here.
        if identity < P2P:
            self.operations[identity] = operation
            entry = [identity, now, terms, shape, work.key, work.seq, code, instruction, None, None]
            self._collectives.append(entry)
        else:
            entry = [identity, now, terms, shape, None, None, code, instruction, None, None, operation.peer, None]
            self._messages.append(entry)
        operation.entry = entry
        watch = self._watch
        if watch.timer is None or operation.timeout != self.unhurried:
            watch.entered(operation)
        if self.diagnosis.asked_early:
            self.diagnosis.entered(operation)
        if self.left:
            # Later: what they sent before they left may be all that is needed.
            self.endpoint.runtime.call_soon(self._missed, operation)
        operation.enter()
        if self._early and (frames := self._early.pop(identity, None)):
            for channel, header, payload in frames:
                self.frame(channel, header, memoryview(payload))
                if header[1] & EAGER:
                    channel.consume(len(payload))

    def forget(self, operation: Operation) -> None:
        """The operation has ended."""
        del self.pending[operation]
        operation.entry[ENDED] = self.stamp()
        if operation.timeout != self.unhurried:
            self._watch.ended(operation)
        identity = operation.id
        if identity < P2P:
            del self.operations[identity]
            if identity >= KEYED:
                if len(self._ended) >= HISTORY:
                    del self._ended[next(iter(self._ended))]
                self._ended[identity] = None

    # -- frames

    def place(self, peer: int, header: Header) -> tuple[Operation | None, memoryview | None]:
        """Find the caller's memory for a payload that is arriving, and whose it is."""
        _, _, step, _, op, fingerprint, offset, length, total = header
        if op & P2P:
            return self.mailbox.place(self.position[peer], header)
        operation = self.operations.get(op)
        if operation is None or operation.fingerprint != fingerprint:
            return None, None
        return operation, operation.place(self.position[peer], step, offset, total, length)

    def frame(self, channel: Channel, header: Header, payload: memoryview | None) -> bool:
        """Take a frame for this group; False if it has to wait here, and counts against its sender's window."""
        kind, _, step, _, op, fingerprint, _, length, total = header
        peer = self.position[channel.peer]
        operation = self.operations.get(op)
        if operation is None:
            return self._frame_without_operation(channel, peer, header, payload)
        if kind == _DATA:
            if operation.fingerprint != fingerprint or not operation.take(peer, step, total, payload, length):
                self.disputes.disagree(peer, op, operation.describe())
        elif kind == FrameKind.GRANT:
            channel.grant(operation)
        elif operation.fingerprint != fingerprint:
            self.disputes.disagree(peer, op, operation.describe())
        else:
            operation.promise(peer)
        return True

    def _frame_without_operation(self, channel: Channel, peer: int, header: Header, payload: memoryview | None) -> bool:
        op = header[4]
        if self.cause is not None:
            return True
        if op & P2P:
            return self.mailbox.frame(channel, peer, header, payload)
        if op <= self.entered or op in self._ended:
            # An operation that has ended here has had all its messages: the peer means another one.
            if header[0] != FrameKind.GRANT and (record := self.recorder.find(op)) is not None:
                self.disputes.disagree(peer, op, record.describe(self.rank))
            return True
        self._early.setdefault(op, []).append((channel, header, b"" if payload is None else bytes(payload)))
        return False

    def hear_device_notes(self, hear: Callable[[int, dict[str, Any]], None]) -> None:
        """Let `hear` take notes about CUDA devices, those that have come first.

        One that cannot be read is as if its link had broken for it.
        """
        self.heard_on_device = hear
        notes, self._device_notes = self._device_notes, []
        for peer, note in notes:
            try:
                hear(peer, note)
            except UNREADABLE as error:
                self.endpoint.died(self.ranks[peer], f"it sent a control message that cannot be read: {error!r}")

    def _keep_device_note(self, peer: int, note: dict[str, Any]) -> None:
        self._device_notes.append((peer, note))

    def _drop_early(self) -> None:
        """Give its senders back the part of their windows that nobody will ask for any more."""
        early, self._early = self._early, {}
        for frames in early.values():
            for channel, header, payload in frames:
                if header[1] & EAGER:
                    channel.consume(len(payload))

    def _purge(self) -> None:
        """Give back what peers have left for this group in shared memory."""
        for channel in self.channels:
            if channel.shared is not None:
                channel.shared.purge(self.id)

    # -- failing

    def raise_if_revoked(self) -> None:
        """Refuse a call on a group that has failed."""
        if self.cause is not None:
            raise GroupRevokedError(
                f"group {self.name!r} on rank {self.rank} was revoked: {self.cause}",
                group=self.name,
                ranks=self.cause.ranks,
                op=self.cause.op,
                seq=self.cause.seq,
            ) from self.cause

    def revoke(self, cause: GroupError, tell: bool = True) -> None:
        """Fail everything pending with `cause`, refuse what comes, and tell all ranks; the first cause stays."""
        if self.cause is not None:
            return
        self.cause = cause
        works = [operation.work for operation in self.pending if not operation.id & P2P]
        failed = {work.seq if work.key is None else (work.key, work.seq) for work in works if work.seq is not None}
        self.unfinished = frozenset(failed | self.refused)
        logger.info(
            "group %r on rank %d was revoked: %s (%s)",
            self.name,
            self.rank,
            cause,
            self.recorder.hint,
            extra=self.whose,
        )
        if tell:
            self.endpoint.control.flood({"t": "revoke", "g": self.id, "cause": cause_of(cause)}, self.ranks)
        for operation in list(self.pending):
            operation.fail(error_from(cause_of(cause), cause))
        self._drop_early()
        self._purge()
        self.mailbox.clear()
        for callback in self.on_revoked:
            callback()

    def lost(self, rank: int, detail: str, how: str) -> None:
        """A rank of the group (numbered as in the job) is dead, or as good as that."""
        peer = self.position[rank]
        if peer not in self.left:
            state = "is gone" if how == "killed" else "is lost"
            text = f"rank {peer} of group {self.name!r} {state}: {detail}"
            self.revoke(PeerLostError(text, group=self.name, ranks=[peer], how=how))

    def torn(self, rank: int) -> None:
        """The connection to a rank of the group (numbered as in the job) broke, and both live."""
        peer = self.position[rank]
        if peer not in self.left:
            ends = sorted((peer, self.rank))
            text = (
                f"the connection between ranks {ends[0]} and {ends[1]} of group {self.name!r} broke, though both live"
            )
            self.revoke(PeerLostError(text, group=self.name, ranks=ends, how="unreachable"))

    def departed(self, rank: int) -> None:
        """A rank of the group (numbered as in the job) has left in order: whatever needs it fails."""
        peer = self.position[rank]
        self.left.add(peer)
        for callback in self.on_departed:
            callback(peer)
        for operation in list(self.pending):
            operation.reported = 0.0  # it was the one who collects the reports, perhaps
            self._missed(operation)

    def _missed(self, operation: Operation) -> None:
        """Fail `operation` if it needs a rank that has left."""
        peer = next((rank for rank in sorted(self.left) if not operation.done and operation.needs(rank)), None)
        if peer is None:
            return
        error = PeerLostError(
            f"{operation.work.op} on rank {self.rank} of group {self.name!r} needs rank {peer}, which has left",
            how="left",
            op=operation.work.op,
            seq=operation.work.key or operation.work.seq,
            group=self.name,
            ranks=[peer],
        )
        if operation.id & P2P:
            operation.fail(error)
        else:
            self.revoke(error)

    def timed_out(self, operation: Operation) -> None:
        """A collective took too long: say who is missing, on every rank."""
        missing, detail = self.diagnosis.missing(operation)
        self.revoke(
            CollectiveTimeoutError(
                f"{operation.title()} of group {self.name!r} did not complete within "
                f"{operation.timeout:g} s on rank {self.rank}, which called {called(operation.describe())}: {detail}",
                op=operation.work.op,
                seq=operation.work.key or operation.work.seq,
                group=self.name,
                ranks=missing,
            )
        )

    def broke(self, operation: Operation, error: Exception) -> None:
        """The function of a custom op has raised `error`."""
        name = operation.work.key or operation.work.seq
        cause = GroupError(
            f"{operation.work.op} (sequence {name!r}) of group {self.name!r} failed on rank {self.rank}: "
            f"its reduce function raised {type(error).__name__}: {error}",
            op=operation.work.op,
            seq=name,
            group=self.name,
            ranks=[self.rank],
        )
        cause.__cause__ = error
        self.revoke(cause)

    def disagreement(self, mine: dict[str, Any], theirs: dict[str, Any]) -> None:
        """Two ranks called operations that do not belong together."""
        self.revoke(mismatch(self.name, mine, theirs))

    def close(self) -> None:
        """Leave: nothing arrives any more."""
        self._drop_early()
        self._purge()
        self.mailbox.clear()
