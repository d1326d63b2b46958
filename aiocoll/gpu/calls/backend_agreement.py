"""Agreement of a group's ranks on one backend for CUDA arrays: NCCL, or staging through the host.

    each rank     sends the card of its device, at its first call on a CUDA array ->
        rank 0        decides once it has all cards, gets NCCL's id of the communicator, requests a turn of each rank
        all ranks                                                                 <- the decision, before all calls

Creating a communicator blocks the launcher of a device until all ranks create it. So groups with common ranks must
create their communicators in the same order. A device creates one communicator at a time, and rank 0 requests the
turns in the order of hosts and devices. That order is the same for all groups, even for those of other jobs, so no two
groups wait for each other.

If a rank leaves before its turn, the others do not wait for it and do not use NCCL. A rank that had its turn waits for
the decision, since other ranks may already be creating the communicator. If the group fails meanwhile, the rank still
creates it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from operator import index
from typing import Any

from aiocoll.engine.communicator import Communicator
from aiocoll.engine.control.messages import DEVICE
from aiocoll.gpu.api import DeviceError, Nccl
from aiocoll.gpu.calls.cards import Card, Decision, card, decide, read_card, read_decision
from aiocoll.gpu.calls.communicator import connect_at_once
from aiocoll.gpu.device import Device
from aiocoll.gpu.provider import missing_nccl_reason
from aiocoll.gpu.turns import Turn

__all__ = ["BackendAgreement"]

#: Maximum seconds for which a closing rank waits for rank 0's decision on the backend.
PARTING = 5.0


class BackendAgreement:
    """The state of one rank in the agreement on the group's backend for CUDA arrays.

    Args:
        comm: this rank's part in the group.
        device: device of the arrays.
        nccl: the NCCL library; None if there is none.
        ahead: whether this rank launches calls before they are compared, if all ranks do.
        number: as rank 0, assigns the decision a number on each rank.
        follow: follows the decision, given its number on this rank.
    """

    def __init__(
        self,
        comm: Communicator,
        device: Device,
        nccl: Nccl | None,
        ahead: bool,
        number: Callable[[], dict[int, int]],
        follow: Callable[[int, Decision], None],
    ) -> None:
        self._comm = comm
        self._device = device
        self._nccl = nccl
        self._number = number
        self._follow = follow
        self._card = card(device.cuda, nccl, device.ordinal, missing_nccl_reason() or "", ahead)
        self._turn: Turn | None = None
        #: Future that ends with the agreement, decided or not. None before this rank has reported that it has its turn
        #: to create a communicator.
        self._settled: asyncio.Future[None] | None = None
        #: Whether the agreement has ended: the backend is decided, or the group or rank 0 is gone.
        self._is_settled = False
        #: Used on rank 0: the device cards by rank; the ranks whose turn rank 0 has not requested yet, last one first;
        #: and the rank whose turn it requested last.
        self._cards: dict[int, Card] = {}
        self._turns: list[int] = []
        self._asked: int | None = None
        self._decision: Decision | None = None

    def start(self) -> None:
        """Send this rank's device card to rank 0."""
        self._send(0, {"card": self._card})

    def handle(self, peer: int, message: dict[str, Any]) -> None:
        """Handle another rank's message about the backend agreement.

        Raises:
            ValueError: the message is invalid from that rank, or for this rank; also TypeError and KeyError.
        """
        is_for_rank_0 = "card" in message or "ready" in message
        if (self._comm.rank if is_for_rank_0 else peer) != 0:
            raise ValueError("backend agreement: only rank 0 decides on the backend")
        if "card" in message:
            self._cards[peer] = read_card(message["card"])
            if len(self._cards) == len(self._comm.ranks):
                self._decide()
        elif "turn" in message:
            if not self._is_settled:
                self._turn = self._device.turns.take(self._on_turn)
        elif "ready" in message:
            if not self._is_settled and peer == self._asked:
                self._is_ready(bool(message["shares"]))
        else:
            number, decision = index(message["number"]), read_decision(message["decision"])
            self._settle()
            if not decision.native or decision.shared:
                self.end_turn()  # not created here: never, or in its slot
            self._follow(number, decision)

    def handle_late(self, message: dict[str, Any]) -> None:
        """Handle a message that arrives after the group has failed on this rank.

        Other ranks may be creating the communicator.

        They would never return from that call. So this rank creates the communicator, too, and aborts it.
        """
        if "decision" in message and self._settled is not None:
            decision = read_decision(message["decision"])
            if decision.native:
                self._device.run_in_thread(lambda: self._make_and_abort(decision.unique_id))

    def _make_and_abort(self, unique_id: bytes) -> None:
        assert self._nccl is not None
        connect_at_once()
        with contextlib.suppress(DeviceError):
            self._nccl.init(len(self._comm.ranks), unique_id, self._comm.rank).abort()

    def on_departure(self, rank: int) -> None:
        """Handle the departure of a rank, which may have closed the group before the decision."""
        if self._is_settled:
            return
        if rank == 0:
            self.end()
        elif self._decision is not None:
            self._conclude(_decide_without(rank))

    async def settle(self) -> None:
        """Wait for the backend decision, if other ranks may need this rank to create the communicator."""
        if self._settled is not None and self._comm.rank:
            await asyncio.wait([self._settled], timeout=PARTING)

    def end_turn(self) -> None:
        """End this rank's turn on the device, after the communicator was created or given up."""
        if self._turn is not None:
            self._turn.end()
            self._turn = None

    def end(self) -> None:
        """End the agreement, because the group has ended or rank 0 has left."""
        self._settle()
        self.end_turn()

    def _on_turn(self) -> None:
        """Report to rank 0 that this rank now has its turn to create a communicator on its device."""
        self._settled = asyncio.get_running_loop().create_future()
        self._send(0, {"ready": True, "shares": self._device.order.is_used})

    def _settle(self) -> None:
        self._is_settled = True
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    def _send(self, rank: int, message: dict[str, Any]) -> None:
        comm = self._comm
        if rank == comm.rank:
            self.handle(rank, message)
        else:
            comm.endpoint.control.send(comm.ranks[rank], {"t": DEVICE, "g": comm.id, **message})

    # -- as rank 0

    def _decide(self) -> None:
        """Decide on the backend from the device cards of all ranks; only rank 0 calls this."""
        self._decision = decide([self._cards[rank] for rank in range(len(self._cards))], self._comm.hosts)
        if self._decision.native and self._comm.left:
            self._conclude(_decide_without(min(self._comm.left)))
        elif self._decision.native:
            assert self._nccl is not None
            self._turns = sorted(self._cards, key=self._place, reverse=True)
            self._device.run(self._nccl.unique_id).add_done_callback(self._on_unique_id)
        else:
            self._conclude(self._decision)

    def _place(self, rank: int) -> tuple[str, str]:
        """Return the sort key of a rank: its host, and the PCI bus id of its device."""
        comm = self._comm
        return comm.endpoint.cards[comm.ranks[rank]]["host"], self._cards[rank]["bus"]

    def _on_unique_id(self, named: asyncio.Future[bytes]) -> None:
        if self._is_settled or named.cancelled():
            return
        assert self._decision is not None
        if (error := named.exception()) is not None:
            self._conclude(Decision(False, f"rank 0: {error}"))
        else:
            self._decision = self._decision._replace(unique_id=named.result())
            self._request_next_turn()

    def _is_ready(self, crowded: bool) -> None:
        """Record that a rank has its turn on its device; `crowded` means that other groups use the device."""
        assert self._decision is not None
        self._decision = self._decision._replace(shared=self._decision.shared or crowded)
        self._request_next_turn()

    def _request_next_turn(self) -> None:
        """Request the next rank's turn on its device; when all ranks have their turns, send the decision."""
        assert self._decision is not None
        if self._turns:
            self._asked = self._turns.pop()
            self._send(self._asked, {"turn": True})
        else:
            self._conclude(self._decision)

    def _conclude(self, decision: Decision) -> None:
        for rank, number in self._number().items():
            self._send(rank, {"number": number, "decision": decision})


def _decide_without(rank: int) -> Decision:
    return Decision(False, f"rank {rank} has left")
