"""How the ranks of a group agree on one backend for CUDA arrays: NCCL, or staging through the host.

    each rank     describes its device, when it is first called with a CUDA array ->
        rank 0        decides when all have, makes NCCL's id of the communicator, and asks each rank for its turn
        all ranks                                                                 <- the decision, before all calls

Making a communicator blocks the launcher of a device until all ranks make it. So groups that have ranks in common must
not make theirs in different orders: a device makes one at a time, and rank 0 asks for turns in the order of
hosts and devices. That order is the same for all groups, even those of other jobs, so no two wait for each other.

A rank that leaves before its turn is not waited for: the others do without NCCL. One that had its turn waits for the
decision, since the others may have begun to make the communicator; if the group fails meanwhile, it still makes it.
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
from aiocoll.gpu.provider import why_no_nccl
from aiocoll.gpu.turns import Turn

__all__ = ["BackendAgreement"]

#: Seconds that a rank which closes the group waits for the decision, at most.
PARTING = 5.0


class BackendAgreement:
    """One rank's part in the agreement.

    Args:
        comm: this rank's part in the group.
        device: where its arrays are.
        nccl: the library; None if there is none.
        ahead: this rank launches calls before they are compared, if all ranks do.
        number: as rank 0, assigns the decision its numbers.
        follow: carries out the decision, given its number on this rank.
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
        self._card = card(device.cuda, nccl, device.ordinal, why_no_nccl() or "", ahead)
        self._turn: Turn | None = None
        #: Ends when it is decided, or will not be; None before this rank has announced its turn.
        self._settled: asyncio.Future[None] | None = None
        #: It is decided, or will not be.
        self._is_decided = False
        #: As rank 0: the card of each rank; the ranks whose turns are still to be asked for, the next one last; and
        #: the rank that was asked.
        self._cards: dict[int, Card] = {}
        self._turns: list[int] = []
        self._asked: int | None = None
        self._decision: Decision | None = None

    def start(self) -> None:
        """Send this rank's card."""
        self._tell(0, {"card": self._card})

    def handle(self, peer: int, message: dict[str, Any]) -> None:
        """Handle a message of a rank.

        Raises:
            ValueError: it is invalid from that rank, or for this rank; also TypeError and KeyError.
        """
        is_for_rank_0 = "card" in message or "ready" in message
        if (self._comm.rank if is_for_rank_0 else peer) != 0:
            raise ValueError("only rank 0 decides")
        if "card" in message:
            self._cards[peer] = read_card(message["card"])
            if len(self._cards) == len(self._comm.ranks):
                self._decide()
        elif "turn" in message:
            if not self._is_decided:
                self._turn = self._device.turns.take(self._begun)
        elif "ready" in message:
            if not self._is_decided and peer == self._asked:
                self._is_ready(bool(message["shares"]))
        else:
            number, decision = index(message["number"]), read_decision(message["decision"])
            self._settle()
            if not decision.native or decision.shared:
                self.made()  # or will be in the order that all groups on the devices have
            self._follow(number, decision)

    def missed(self, message: dict[str, Any]) -> None:
        """Handle a message after the group has failed here: others may be making the communicator already.

        They would never return from that call; so it is made here, too, and aborted.
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

    def departed(self, rank: int) -> None:
        """A rank has closed the group, perhaps before the decision."""
        if self._is_decided:
            return
        if rank == 0:
            self.end()
        elif self._decision is not None:
            self._conclude(_without(rank))

    async def settle(self) -> None:
        """Wait for the decision, if the others depend on this rank; without rank 0 there is none."""
        if self._settled is not None and self._comm.rank:
            await asyncio.wait([self._settled], timeout=PARTING)

    def made(self) -> None:
        """The communicator has been made, or will not be."""
        if self._turn is not None:
            self._turn.end()
            self._turn = None

    def end(self) -> None:
        """The group has ended, or nobody decides any more."""
        self._settle()
        self.made()

    def _begun(self) -> None:
        """This rank has its turn."""
        self._settled = asyncio.get_running_loop().create_future()
        self._tell(0, {"ready": True, "shares": self._device.order.is_used})

    def _settle(self) -> None:
        self._is_decided = True
        if self._settled is not None and not self._settled.done():
            self._settled.set_result(None)

    def _tell(self, rank: int, message: dict[str, Any]) -> None:
        comm = self._comm
        if rank == comm.rank:
            self.handle(rank, message)
        else:
            comm.endpoint.control.tell(comm.ranks[rank], {"t": DEVICE, "g": comm.id, **message})

    # -- as rank 0

    def _decide(self) -> None:
        """All ranks have sent their cards."""
        self._decision = decide([self._cards[rank] for rank in range(len(self._cards))], self._comm.hosts)
        if self._decision.native and self._comm.left:
            self._conclude(_without(min(self._comm.left)))
        elif self._decision.native:
            assert self._nccl is not None
            self._turns = sorted(self._cards, key=self._place, reverse=True)
            self._device.run(self._nccl.unique_id).add_done_callback(self._named)
        else:
            self._conclude(self._decision)

    def _place(self, rank: int) -> tuple[str, str]:
        """Return where the device of a rank is."""
        comm = self._comm
        return comm.endpoint.cards[comm.ranks[rank]]["host"], self._cards[rank]["bus"]

    def _named(self, named: asyncio.Future[bytes]) -> None:
        if self._is_decided or named.cancelled():
            return
        assert self._decision is not None
        if (error := named.exception()) is not None:
            self._conclude(Decision(False, f"rank 0: {error}"))
        else:
            self._decision = self._decision._replace(unique_id=named.result())
            self._go_on()

    def _is_ready(self, crowded: bool) -> None:
        """A rank has its turn; other groups use its device, or not."""
        assert self._decision is not None
        self._decision = self._decision._replace(shared=self._decision.shared or crowded)
        self._go_on()

    def _go_on(self) -> None:
        """Ask for the next turn; if there is none, let all make the communicator."""
        assert self._decision is not None
        if self._turns:
            self._asked = self._turns.pop()
            self._tell(self._asked, {"turn": True})
        else:
            self._conclude(self._decision)

    def _conclude(self, decision: Decision) -> None:
        for rank, number in self._number().items():
            self._tell(rank, {"number": number, "decision": decision})


def _without(rank: int) -> Decision:
    return Decision(False, f"rank {rank} has left")
