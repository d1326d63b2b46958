"""Communicator: the state of one rank in one group: operations in flight, early frames, and the cause of a failure."""

from __future__ import annotations

from array import array
from asyncio import TimerHandle
from collections.abc import Callable, Sequence
from functools import partial
from math import nan
from typing import Any, Final

from aiocoll.algorithms.machine import Tuning
from aiocoll.algorithms.two_level.hosts import host_numbers
from aiocoll.engine.control.causes import failure_by, revocation
from aiocoll.engine.control.device_inbox import DeviceInbox
from aiocoll.engine.control.unmade_groups import BufferedFrame
from aiocoll.engine.endpoint import Endpoint
from aiocoll.engine.failure.deadlines import REPORT_AFTER
from aiocoll.engine.failure.failures import (
    broken_connection_error,
    crashed_error,
    left_error,
    lost_error,
    raised_error,
    revoked_error,
)
from aiocoll.engine.failure.mismatch import MismatchReports
from aiocoll.engine.failure.sender import Sender
from aiocoll.engine.failure.stall_inspector import StallInspector
from aiocoll.engine.group_spec import GroupSpec
from aiocoll.engine.in_flight import InFlight
from aiocoll.engine.job.ids import StrangerError, hash62
from aiocoll.engine.journal import Journal, Record
from aiocoll.engine.links.channel import Channel
from aiocoll.engine.matching.matching import Matching
from aiocoll.engine.native_reasons import log_reasons
from aiocoll.engine.operations.base import Operation
from aiocoll.engine.operations.operation_info import operation_info
from aiocoll.engine.operations.signature import KEYED, P2P
from aiocoll.engine.operations.slots import Slots
from aiocoll.engine.split_history import Splits
from aiocoll.errors import GroupError
from aiocoll.hooks import Hooks, OperationInfo
from aiocoll.log import logger
from aiocoll.native.layout import CHUNKS, LARGE_CHUNKS
from aiocoll.transport.frame import FrameKind, Header

__all__ = ["BARRED", "DIVERTS", "ENTERED", "Communicator"]

#: Indices into `gate`, an array that every call of a group checks. ENTERED: the sequence number of the last ordered
#: operation. BARRED: 1 if calls must run the slow checks, because the group has failed or a hook is running. DIVERTS: 1
#: if calls must take the slow path, because the group is closed or has interceptors.
ENTERED: Final = 0
BARRED: Final = 1
DIVERTS: Final = 2

_DATA: Final = int(FrameKind.DATA)


class _RankPositions(dict[int, int]):
    """A map from ranks in the job to ranks in the group. Looking up a rank outside the group raises `StrangerError`."""

    def __missing__(self, rank: int) -> int:
        raise StrangerError(f"received a message about rank {rank}, which is not in the group of ranks {sorted(self)}")


class Communicator:
    """The engine's state for one rank in one group. `ProcessGroup` is built on it.

    Args:
        endpoint: the parts that all groups of this rank share.
        identity: id of the group on the wire: a hash of its name.
        ranks: the group's ranks, numbered as in the job.
        spec: the group's name and options.
        chunk_nbytes: size of the smallest chunks in shared memory if all ranks share memory; else 0.
        tuning: measured speed of the machine and of the group's transport, equal on all ranks.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        identity: int,
        ranks: Sequence[int],
        spec: GroupSpec,
        chunk_nbytes: int,
        tuning: Tuning,
    ) -> None:
        assert spec.name is not None
        self.endpoint = endpoint
        self.context = endpoint.context
        self.id = identity
        self.name = name = spec.name
        self.ranks = tuple(ranks)
        self.timeout = spec.timeout
        #: The timeout of operations that expire in the order of their calls, so that `Deadlines` needs no entry for
        #: each of them. It is nan if every operation needs an entry.
        self.default_timeout = nan
        self.warn_after = spec.options.warn_after
        self.tuning = tuning
        self.rank = self.ranks.index(endpoint.rank)
        #: Extra fields of log records: the group and the rank.
        self.log_extra = {"group": name, "rank": self.rank}
        #: The host number of each rank. All ranks compute the same numbers, because all ranks have the same cards (the
        #: data that each rank has published).
        self.hosts = host_numbers(endpoint.cards[rank]["host"] for rank in self.ranks)
        #: Whether arithmetic produces the same NaN bit patterns on all ranks.
        self.makes_same_nans = len({endpoint.cards[rank].get("nans", 0) for rank in self.ranks}) == 1
        self.position = _RankPositions((rank, index) for index, rank in enumerate(self.ranks))
        self.channels = endpoint.channels.for_ranks(self.ranks)
        self.slots = Slots(self.channels, identity, chunk_nbytes)
        natives = sum(endpoint.cards[rank].get("native", False) for rank in self.ranks)
        # Chunk queues to or from a rank without the C accelerator have fewer and larger chunks.
        self.chunk_nbytes = chunk_nbytes if natives > 1 else chunk_nbytes * CHUNKS // LARGE_CHUNKS
        self.others = [rank for rank in range(len(self.ranks)) if rank != self.rank]
        self._operations: dict[int, Operation] = {}
        self._pending: dict[Operation, None] = {}
        self.in_flight = InFlight(self._pending, self._operations)
        self.journal = Journal(self.channels, self.in_flight.snapshot, endpoint.runtime.stamp(), spec.options.stats)
        self.cause: GroupError | None = None
        #: An array instead of attributes, because the C accelerator also reads and writes these values.
        self.gate = array("q", [0, False, False])
        self.hooks = Hooks(name, self.rank, partial(log_reasons, self))
        #: Reasons that were already logged: why collectives run in Python although the group uses the C accelerator.
        self.python_reasons: set[str] = set()
        #: The collectives that failed because the group was revoked, by sequence number, or by key and count. All other
        #: collectives that this rank entered had completed before. The set is made from completions, because one
        #: collective may run as several operations.
        self.unfinished: frozenset[int | tuple[str, int]] = frozenset()
        #: The collectives that failed without revoking the group, because the calls of the ranks differed; identified
        #: as in `unfinished`.
        self.refused: set[int | tuple[str, int]] = set()
        #: This rank's calls of `split_group` and `split` on this group.
        self.splits = Splits()
        self.on_revoked: list[Callable[[], None]] = []
        #: Callbacks, called with each rank that leaves the group.
        self.on_departed: list[Callable[[int], None]] = []
        self.left: set[int] = set()
        #: Number of times the group has grown.
        self.growths = 0
        #: Control messages about the CUDA devices of the group's ranks.
        self.devices = DeviceInbox(self.ranks, self.position, endpoint.attempt)
        self.set_timeout(spec.timeout)
        self.matching = Matching(self)
        #: The sender of control messages about operations to other ranks of the group.
        self.sender = Sender(identity, self.ranks, self.channels, endpoint.control, endpoint.direct)
        self.mismatches = MismatchReports(self, self.sender)
        self.stalls = StallInspector(
            self, self.journal, self.mismatches, self.sender, endpoint.runtime, endpoint.failure_detector
        )
        self.runtime = endpoint.runtime
        self.scratch = endpoint.scratch
        self.polling = endpoint.polling
        self.registered_memory = endpoint.registered_memory
        self.stamp = endpoint.runtime.stamp
        self._watch = endpoint.watch
        self.early: dict[int, list[BufferedFrame]] = {}
        self._counts: dict[str, int] = {}

    def is_on_all_cards(self, ability: str) -> bool:
        """Return whether all ranks of the group have an ability, according to the cards (published data) of the ranks.

        Args:
            ability: "reads" (the ranks read each other's memory) or "native" (they run the native accelerator).
        """
        return all(self.endpoint.cards[rank].get(ability, False) for rank in self.ranks)

    def set_timeout(self, timeout: float) -> None:
        """Set the default timeout of later operations, in seconds."""
        self.timeout = timeout
        # Operations in flight may have longer timeouts, so later operations may expire before them.
        self.default_timeout = nan if len(self.in_flight) or timeout < REPORT_AFTER else timeout
        log_reasons(self)

    # -- entering

    @property
    def entered(self) -> int:
        """Return the sequence number of the last ordered operation; the next operation takes the next number."""
        return self.gate[ENTERED]

    def keyed_id(self, key: str) -> tuple[int, int]:
        """Count a new call with `key`; return the id of its operation, and the number of calls with `key` so far."""
        count = self._counts.get(key, 0) + 1
        identity = KEYED | hash62(f"{key}\0{count}")
        self._counts[key] = count
        return identity, count

    def counts(self, limit: int) -> dict[str, int]:
        """Return the number of calls with each key, for the `limit` most recently introduced keys."""
        counts = self._counts.copy()
        return {key: counts[key] for key in list(counts)[-limit:]}

    def enter(self, operation: Operation) -> None:
        """Put an operation in flight: from now on, frames with the operation's id are checked and delivered to it."""
        operation.entered = self.stamp()
        self._pending[operation] = None
        identity = operation.id
        if identity < P2P:
            self._operations[identity] = operation
        watch = self._watch
        if not watch.armed[0] or operation.timeout != self.default_timeout:
            watch.entered(self, operation)
        if self.stalls.asked_early:
            self.stalls.entered(operation)
        if self.left:
            # Check in the next loop iteration, because data that the departed ranks sent earlier may still complete
            # this operation.
            self.call_soon(self._fail_if_left, operation)
        if self.hooks.active and operation.parent is None:
            self._call_hooks(self.hooks.start, operation, None, None)
        try:
            operation.enter()
        except Exception as error:
            self.revoke_after_crash(error)
        if self.early and (frames := self.early.pop(identity, None)):
            take = partial(self.deliver, is_early=True)
            for channel, header, payload in frames:
                self.endpoint.attempt(channel.peer, channel.redeliver, take, header, payload)

    def ended(self, operation: Operation, error: BaseException | None) -> None:
        """Handle an operation that has ended. Every operation calls this method exactly once."""
        now = self.stamp()
        self.journal.ended(operation, error, now)
        del self._pending[operation]
        if operation.timeout != self.default_timeout:
            self._watch.ended(operation)
        identity = operation.id
        if identity < P2P:
            del self._operations[identity]
            if identity >= KEYED:
                self.in_flight.remember(identity, operation.root.id)
        if self.hooks.started:
            self._call_hooks(self.hooks.end, operation, error, now - operation.entered)

    def _call_hooks(
        self,
        call: Callable[[Operation, Callable[[], OperationInfo]], None],
        operation: Operation,
        error: BaseException | None,
        seconds: float | None,
    ) -> None:
        """Call the hooks for an operation. While hooks run, the program must not make calls on this group."""
        self.gate[BARRED] = True
        try:
            call(operation, lambda: operation_info(operation, error, seconds))
        finally:
            self.gate[BARRED] = self.cause is not None

    def record(self, op: int) -> Record | None:
        """Return the record of a collective or a send; for a child operation, the record of the user's call."""
        operation = self.in_flight.find(op)
        if operation is not None:
            return Record.of(operation.root)
        return self.journal.find(self.in_flight.root_of(op))

    # -- frames

    def route(self, peer: int, header: Header) -> tuple[Operation | None, memoryview | None]:
        """Return the operation that receives an arriving payload, and the memory for the payload."""
        _, _, step, _, op, fingerprint, offset, length, total = header
        if op & P2P:
            return self.matching.route(self.position[peer], header)
        operation = self._operations.get(op) or self.in_flight.find(op)
        if operation is None or operation.fingerprint != fingerprint:
            return None, None
        return operation, operation.route(self.position[peer], step, offset, total, length)

    def deliver(self, channel: Channel, header: Header, payload: memoryview | None, is_early: bool = False) -> bool:
        """Deliver a frame to this group; return False if it is buffered and counts towards its sender's window."""
        kind, _, step, _, op, fingerprint, _, length, total = header
        peer = self.position[channel.peer]
        operation = self._operations.get(op) or self.in_flight.find(op)
        if operation is None:
            return self._deliver_unentered(channel, peer, header, payload)
        if not is_early:  # an early frame arrived before the call, so the call did not wait for it
            operation.set_waited_for(peer)
        if kind == _DATA:
            if operation.fingerprint != fingerprint or not operation.deliver(peer, step, total, payload, length):
                self.mismatches.disagree(peer, op, operation.describe())
        elif kind == FrameKind.GRANT:
            channel.grant(operation)
        elif operation.fingerprint != fingerprint:
            self.mismatches.disagree(peer, op, operation.describe())
        else:
            operation.promise(peer)
        operation.set_waited_for(-1)
        return True

    def _deliver_unentered(self, channel: Channel, peer: int, header: Header, payload: memoryview | None) -> bool:
        op = header[4]
        if self.cause is not None:
            return True
        if op & P2P:
            return self.matching.deliver(channel, peer, header, payload)
        if op <= self.entered or self.in_flight.has_ended(op):
            # An operation ends only when it has received all its messages. A further frame means that the peer has made
            # a different call.
            if header[0] != FrameKind.GRANT and (record := self.record(op)) is not None:
                self.mismatches.disagree(peer, op, record.describe(self.rank))
            return True
        channel.hold(header)
        self.early.setdefault(op, []).append((channel, header, b"" if payload is None else bytes(payload)))
        return False

    def _drop_early(self) -> None:
        """Drop the early frames, which no operation will use; they no longer count towards their senders' windows."""
        for frames in self.early.values():
            for channel, header, _ in frames:
                channel.release(header)
        self.early.clear()

    def _purge(self) -> None:
        """Free the shared-memory slots and chunks that peers have posted for this group."""
        for channel in self.channels:
            channel.purge(self.id, self.position.get(channel.peer) in self.left)

    def is_usable(self) -> bool:
        """Return whether the group is usable: neither revoked nor closed."""
        return self.cause is None and self.endpoint.groups.get(self.id) is self

    # -- failing

    def raise_if_revoked(self) -> None:
        """Raise an error if the group has failed."""
        if self.cause is not None:
            raise revoked_error(self.name, self.rank, self.cause)

    def revoke(self, cause: GroupError, notify: bool = True) -> None:
        """Fail all pending operations, reject new calls and notify all ranks. Do nothing if the group is revoked."""
        if self.cause is not None:
            return
        self.cause = cause
        self.gate[BARRED] = True
        calls = [operation.completion for operation in self.in_flight.pending if not operation.id & P2P]
        failed = {call.seq if call.key is None else (call.key, call.seq) for call in calls if call.seq is not None}
        self.unfinished = frozenset(failed | self.refused)
        logger.info(
            "group %r on rank %d was revoked: %s (%s)",
            self.name,
            self.rank,
            cause,
            self.journal.hint,
            extra=self.log_extra,
        )
        if notify:
            self.endpoint.control.send_to_others(revocation(self.id, self.name, cause), self.ranks)
        for operation in list(self.in_flight.pending):
            operation.fail(failure_by(cause))
        self._drop_early()
        self._purge()
        self.matching.clear()
        for callback in self.on_revoked:
            callback()

    def lost(self, rank: int, detail: str, how: str) -> None:
        """Handle the loss of a rank of the group (numbered as in the job)."""
        peer = self.position[rank]
        if peer not in self.left:
            self.revoke(lost_error(self.name, peer, detail, how))

    def on_connection_broken(self, rank: int) -> None:
        """Handle a broken connection to a living rank of the group (numbered as in the job)."""
        peer = self.position[rank]
        if peer not in self.left:
            self.revoke(broken_connection_error(self.name, self.rank, peer))

    def on_departure(self, rank: int) -> None:
        """Fail the operations that need a rank (numbered as in the job), because that rank has closed the group."""
        peer = self.position[rank]
        self.left.add(peer)
        self.endpoint.channels.on_departure(rank, self.id)
        if self.cause is not None:
            self.endpoint.channels.release(rank, self.id)
        for callback in self.on_departed:
            callback(peer)
        for operation in list(self.in_flight.pending):
            operation.reported = 0.0  # report again: the departed rank may have been the coordinator of stall reports
            self._fail_if_left(operation)

    def _fail_if_left(self, operation: Operation) -> None:
        """Fail `operation` if it needs a rank that has closed the group."""
        peer = next((rank for rank in sorted(self.left) if not operation.done and operation.needs(rank)), None)
        if peer is None:
            return
        error = left_error(self.name, self.rank, peer, operation.completion)
        if operation.id & P2P:
            operation.fail(error)
        else:
            self.revoke(error)

    def revoke_after_error(self, operation: Operation, error: BaseException, what: str = "") -> None:
        """Revoke the group, because a computation of `operation` on this rank has raised `error`."""
        self.revoke(raised_error(self.name, self.rank, operation.completion, error, what))

    def revoke_after_crash(self, error: Exception) -> None:
        """Revoke the group, because library code has raised the unexpected exception `error`."""
        self.revoke(crashed_error(self.name, self.rank, error))

    def attempt(self, callback: Callable[..., object], *args: Any) -> None:
        """Call `callback` on behalf of this group. If `callback` raises an exception, revoke the group."""
        try:
            callback(*args)
        except Exception as error:
            self.revoke_after_crash(error)

    def divert(self, operation: Operation) -> None:
        """Stop receiving into the memory of `operation`, because the caller may use this memory again."""
        for channel in self.channels:
            channel.drop(operation)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        """Run a callback through `attempt` in the next iteration of the loop, in the engine's context variables."""
        self.runtime.call_soon(self.attempt, callback, *args, context=self.context.quiet.copy())

    def before_turn_ends(self, callback: Callable[[], object]) -> None:
        """Run a callback through `attempt` at the end of this loop iteration, or when an await polls.

        It runs in the engine's context variables.
        """
        self.runtime.before_turn_ends(lambda: self.context.run_quietly(self.attempt, callback))

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> TimerHandle:
        """Run a callback through `attempt` in `delay` seconds, in the engine's context variables."""
        return self.runtime.call_later(delay, self.attempt, callback, *args, context=self.context.quiet.copy())

    def linked(self) -> None:
        """Update cached media and native lanes after a data link to any rank has been opened."""
        self.journal.linked()
        if self.in_flight.native is not None:
            self.in_flight.native.relink()

    def close(self) -> None:
        """Close the communicator, because this rank leaves the group. Afterwards, it receives nothing."""
        if self.in_flight.native is not None:
            self.polling.readers.pop(self.in_flight.native, None)
            self.polling.lookers.pop(self.in_flight.native, None)
        self.in_flight.close()
        self.polling.rescan()
        self._drop_early()
        self._purge()
        self.matching.clear()
