"""Machine model: four costs per medium, from which `select` and `cost` compute size limits and predicted durations.

The numbers are those of LogGP. A message of any length takes `alpha` from one rank to the next. Each further message
that a rank has in flight at the same time costs its processor `overhead`. Each byte costs `beta` on a link, and `gamma`
where it is reduced or copied. All ranks of a group must use the same numbers, or they choose different algorithms.

Hockney, "The communication challenge for MPP" (Parallel Computing 1994); Alexandrov, Ionescu, Schauser and Scheiman,
"LogGP: incorporating long messages into the LogP model" (SPAA 1995).
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias

__all__ = ["MEDIA", "PIECE", "Machine", "Medium", "SingleCopy", "Tuning"]

Medium: TypeAlias = Literal["tcp", "unix", "shm"]

MEDIA: tuple[Medium, ...] = ("tcp", "unix", "shm")


PIECE = 256 * 1024
"""Number of bytes after which a streaming algorithm forwards arriving data: the engine's segment."""


class Machine(NamedTuple):
    """The costs of sending messages over one medium.

    Attributes:
        alpha: seconds from the send of a message of a few bytes to its receipt, including wake-ups.
        overhead: processor seconds of a rank per message. Less than `alpha`, which includes two overheads.
        beta: seconds per byte of a long message.
        gamma: seconds per byte of input that is reduced or copied.
    """

    alpha: float
    overhead: float
    beta: float
    gamma: float

    @property
    def n_half(self) -> float:
        """The number of bytes whose transfer takes `alpha` seconds."""
        return self.alpha / self.beta

    @property
    def fan(self) -> float:
        """The number of messages that a rank can send or receive in `alpha` seconds."""
        return self.alpha / self.overhead


class SingleCopy(NamedTuple):
    """Minimum message sizes in bytes for reading a message directly in the memory of another process on the host.

    At or above a limit, the receiver reads the message in the sender's memory. The kernel does that page by page, at
    half the speed at which a core copies from memory that both processes map. But for mapped memory, the sender has to
    copy first, while the receiver can read parts that are ready. So reading in place is faster if one of the two ranks
    has more work to do, and for messages larger than the caches.

    Attributes:
        moved: limit for a message that is copied.
        spread: limit for a message that is copied while its sender or receiver copies others, too.
        reduced: limit for a message that is reduced.
    """

    moved: float = 2.0 * 1024 * 1024
    spread: float = 512.0 * 1024
    reduced: float = math.inf

    def limit(self, kind: str, size: int, *, reduces: bool) -> float:
        """Return the minimum message size in bytes for reading in place, in a collective among `size` ranks."""
        if reduces:
            return self.reduced
        return self.moved if size == 2 and kind in ("gather", "broadcast") else self.spread


class Tuning(NamedTuple):
    """The machine's costs, by which `choose` selects an algorithm; the same on all ranks of a group.

    The defaults are measurements of two cores of 2024 under Python, rounded so that n_half is 64 KiB over sockets. That
    is twenty times more than under MPI, so the limits are ten to thirty times those in the MPI literature.

    Attributes:
        tcp, unix, shm: the numbers of each medium. "tcp" has those of the loopback interface, or of the slowest link
            between the hosts of a group (`rendezvous.measured_links`).
        medium: the medium of the group's messages.
        single_copy: size limits for reading in place on one host.
        crowd: ranks per core, at least 1. Processor times are multiplied by it.
    """

    tcp: Machine = Machine(40e-6, 13e-6, 40e-6 / 65536, 0.1e-9)
    unix: Machine = Machine(25e-6, 8e-6, 25e-6 / 65536, 0.1e-9)
    shm: Machine = Machine(5e-6, 2.5e-6, 0.1e-9, 0.05e-9)
    medium: Medium = "tcp"
    crowd: float = 1.0
    single_copy: SingleCopy = SingleCopy()

    @property
    def machine(self) -> Machine:
        """The costs of the group's medium, scaled by `crowd`, the number of ranks per core."""
        alone: Machine = getattr(self, self.medium)
        alpha, overhead, beta, gamma = alone
        return Machine(alpha, overhead * self.crowd, beta * self.crowd, gamma * self.crowd)

    def over(self, medium: Medium) -> Tuning:
        """Return a copy of these costs for a group whose messages use `medium`."""
        return self._replace(medium=medium)
