"""Call order of a group that launches calls on CUDA arrays before it compares them: messages and errors.

called, confirmed       the last call of a rank; the last call that is equal on all ranks
pace, halted            rank 0 halts or releases all ranks; the position at which a rank halted
compare, differs        hashes of rank 0, in which the rank finds the first difference; its call at that position
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import index
from typing import Any

from aiocoll.engine.communicator import Communicator
from aiocoll.engine.control.messages import DEVICE
from aiocoll.engine.operations.differences import mismatch_error
from aiocoll.errors import CollectiveMismatchError
from aiocoll.gpu.calls.call_comparison import CallComparison
from aiocoll.gpu.calls.pacing import Pacing
from aiocoll.gpu.calls.program_order import ProgramOrder

__all__ = ["CallOrder"]

_KINDS = ("called", "confirmed", "pace", "halted", "compare", "differs")


class CallOrder:
    """The order of a group's calls on CUDA arrays, as known to one rank.

    Args:
        comm: this rank's part in the group.
        number: as rank 0, assigns the next number on every rank; takes whether NCCL carries out the call.
        hold: calls a function once everything with a lower number has started; see `DeviceState.hold`.
        moved: called when calls have started.
        can_stage: whether calls that wait too long for their place may be staged.
        is_shared: whether other groups use the device of a rank.
    """

    def __init__(
        self,
        comm: Communicator,
        number: Callable[[bool], dict[int, int]],
        hold: Callable[[int, Callable[[bool], None], bool], None],
        moved: Callable[[], None],
        *,
        can_stage: bool,
        is_shared: bool,
    ) -> None:
        self._comm = comm
        self._number = number
        self._hold = hold
        self.program = ProgramOrder(self._report, comm.before_turn_ends, moved, alone=len(comm.ranks) == 1)
        if is_shared:
            self.program.through = 0
        self._comparison: CallComparison | None = None
        if comm.rank == 0:
            size = len(comm.ranks)
            pacing = Pacing(size, self._confirm, self._pace, comm.call_later, can_stage=can_stage, is_shared=is_shared)
            self._comparison = CallComparison(size, self.program, pacing, self._compare)

    def place(self, begin: Callable[[bool], None]) -> None:
        """Start an operation at the same position among all calls on every rank; only rank 0 calls this.

        See `Pacing.place`.
        """
        self._require_comparison().pacing.place(begin)

    def share(self, on_shared: Callable[[], None]) -> None:
        """Stop all ranks from launching calls before they are compared; only rank 0 calls this.

        See `Pacing.share`.
        """
        self._require_comparison().pacing.share(on_shared)

    def needs(self, peer: int, position: int) -> bool:
        """Return whether an unconfirmed call needs `peer`, which is leaving the group."""
        return peer == 0 if self._comparison is None else not self._comparison.has_called(peer, position)

    def on_departure(self) -> None:
        """Handle a rank that has closed the group."""
        if self._comparison is not None:
            self._comparison.pacing.on_departure()

    def end(self) -> None:
        """Forget all calls, because the group has ended."""
        self.program.clear()
        if self._comparison is not None:
            self._comparison.end()

    # -- messages

    @staticmethod
    def is_own_message(message: dict[str, Any]) -> bool:
        """Return whether `message` is one of this class's messages, about the order of calls."""
        return any(kind in message for kind in _KINDS)

    def handle(self, peer: int, message: dict[str, Any]) -> None:
        """Handle another rank's message about the order of calls.

        Raises:
            ValueError: the message is invalid from that rank, or for this rank; also TypeError, KeyError, IndexError.
        """
        if "called" in message:
            self._check_seq(peer, index(message["called"]), index(message["seq"]))
            self._require_comparison().reported(peer, index(message["called"]), index(message["hash"]))
        elif "halted" in message:
            self._require_comparison().pacing.on_halt(peer, index(message["halted"]))
        elif "differs" in message:
            self._require_comparison()
            self._mismatch(index(message["position"]), {**message["differs"], "rank": peer})
        elif peer:
            raise ValueError("call order: only rank 0 may send this message")
        elif "confirmed" in message:
            self.program.confirm(index(message["confirmed"]))
        elif "pace" in message:
            self._follow_pace(message["number"], message["pace"], index(message["through"]), index(message["upto"]))
        else:
            self._find(index(message["position"]), message["compare"])

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        self._comm.channels[rank].send_control({"t": DEVICE, "g": self._comm.id, **message})

    def _require_comparison(self) -> CallComparison:
        if self._comparison is None:
            raise ValueError("call order: only rank 0 may receive this message")
        return self._comparison

    # -- as any rank

    def _report(self, position: int, found: int, seq: int) -> None:
        if self._comparison is None:
            self._send(0, {"called": position, "hash": found, "seq": seq})
        else:
            self._comparison.compare_reports()

    def _follow_pace(self, number: int, pace: str, through: int, confirmed: int) -> None:
        """Apply rank 0's launch limit once all operations with launch numbers below the limit have started."""

        def obey(staged: bool) -> None:
            program = self.program
            program.is_staged = staged
            if pace == "halt":
                program.through = program.started
                self._report_halt(program.started)
            else:
                program.through = None if pace == "ahead" else through
            program.confirm(confirmed)

        self._hold(number, obey, pace == "placed")

    def _report_halt(self, position: int) -> None:
        if self._comparison is None:
            self._send(0, {"halted": position})
        else:
            self._comparison.pacing.on_halt(0, position)

    def _find(self, start: int, theirs: Sequence[int]) -> None:
        """Report to rank 0 this rank's first call whose hash differs from rank 0's hash."""
        mine = self.program.hashes(start, start + len(theirs) - 1)
        offset = next(at for at, (one, two) in enumerate(zip(mine, theirs, strict=True)) if one != two)
        self._send(0, {"differs": self.program.call_at(start + offset).describe(), "position": start + offset})

    # -- as rank 0

    def _confirm(self, position: int) -> None:
        for rank in self._comm.others:
            self._send(rank, {"confirmed": position})
        self.program.confirm(position)

    def _pace(self, pace: str, through: int, confirmed: int) -> None:
        numbers = self._number(pace == "placed")
        for rank in self._comm.others:
            self._send(rank, {"number": numbers[rank], "pace": pace, "through": through, "upto": confirmed})
        self._follow_pace(numbers[0], pace, through, confirmed)

    def _compare(self, rank: int, start: int, hashes: Sequence[int]) -> None:
        self._send(rank, {"compare": list(hashes), "position": start})

    def _check_seq(self, peer: int, position: int, seq: int) -> None:
        """Fail the group if `peer` made a call on CUDA arrays where this rank made one on host arrays."""
        comm = self._comm
        if position > self.program.called and seq <= comm.entered:
            record = comm.record(seq)
            if record is not None and record.signature.device == "cpu" and record.signature.members is None:
                comm.mismatches.disagree(peer, seq, record.describe(comm.rank))

    def _mismatch(self, position: int, theirs: dict[str, Any]) -> None:
        """Fail the group with `CollectiveMismatchError`: this rank and another made different calls at `position`."""
        comm = self._comm
        mine = self.program.call_at(position).describe()
        found = mismatch_error(comm.name, {**mine, "debug": None}, {**theirs, "debug": None})
        comm.revoke(
            CollectiveMismatchError(
                f"{found}. Arrays on CUDA devices of these calls and of all later ones are undefined: they may have "
                'been launched before they were compared, which GroupOptions(verify="before") prevents',
                op=found.op,
                seq=found.seq,
                group=comm.name,
                ranks=found.ranks,
            )
        )
