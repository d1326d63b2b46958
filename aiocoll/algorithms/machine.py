"""A machine in four numbers per medium, from which the limits of `select` and the predictions of `cost` follow.

The numbers are those of LogGP: a message costs `alpha` from one rank to the next however short it is, each further
message that a rank has under way at the same time costs its processor `overhead`, and each byte `beta` on a link and
`gamma` where it is reduced or copied. All ranks of a group must use the same numbers, or they choose differently.

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
"""Bytes after which a streaming algorithm passes on what arrives: the engine's segment."""


class Machine(NamedTuple):
    """The cost of messages over one medium.

    Attributes:
        alpha: seconds from the send of a message of a few bytes to its receipt: wake-ups included, where there are any.
        overhead: seconds of a rank's processor per message; less than `alpha`, which has two of them.
        beta: seconds per byte of a long message.
        gamma: seconds per byte of input that is reduced into something, or copied.
    """

    alpha: float
    overhead: float
    beta: float
    gamma: float

    @property
    def n_half(self) -> float:
        """Bytes that take as long to send as their message takes to get started."""
        return self.alpha / self.beta

    @property
    def fan(self) -> float:
        """Messages that a rank sends or receives in the time that one takes to the other end."""
        return self.alpha / self.overhead


class SingleCopy(NamedTuple):
    """Bytes of a message between processes of one host from which the receiver reads it in the sender's memory.

    The kernel does that page by page, at half the speed at which a core copies from memory that both map, to which the
    sender has to copy first. While it copies, though, the receiver can take what is there. So reading in place pays
    where one of the two has more to do, and for what is larger than the caches.

    Attributes:
        moved: of a message that is copied.
        spread: of one that is copied while its sender or its receiver has others to copy, too.
        reduced: of one that is reduced into something.
    """

    moved: float = 2.0 * 1024 * 1024
    spread: float = 512.0 * 1024
    reduced: float = math.inf

    def limit(self, kind: str, size: int, *, reduces: bool) -> float:
        """Return that of the messages of a collective among `size` ranks."""
        if reduces:
            return self.reduced
        return self.moved if size == 2 and kind in ("gather", "broadcast") else self.spread


class Tuning(NamedTuple):
    """The machine's numbers for `choose`; the same on all ranks of a group.

    The defaults are what two cores of 2024 do under Python, rounded so that n_half is 64 KiB over sockets: twenty times
    more than under MPI, hence limits ten to thirty times those in its literature.

    Attributes:
        tcp, unix, shm: the numbers of each medium. Those of "tcp" are of the loopback interface, or of the slowest link
            between the hosts of a group (`rendezvous.measured_links`).
        medium: what the group's messages go over.
        single_copy: from which size on messages of one host are copied once.
        crowd: ranks per core, if more than one: processor time is multiplied by it.
    """

    tcp: Machine = Machine(40e-6, 13e-6, 40e-6 / 65536, 0.1e-9)
    unix: Machine = Machine(25e-6, 8e-6, 25e-6 / 65536, 0.1e-9)
    shm: Machine = Machine(5e-6, 2.5e-6, 0.1e-9, 0.05e-9)
    medium: Medium = "tcp"
    crowd: float = 1.0
    single_copy: SingleCopy = SingleCopy()

    @property
    def machine(self) -> Machine:
        """The numbers of the group's medium, for ranks that share cores as these do."""
        alone: Machine = getattr(self, self.medium)
        alpha, overhead, beta, gamma = alone
        return Machine(alpha, overhead * self.crowd, beta * self.crowd, gamma * self.crowd)

    def over(self, medium: Medium) -> Tuning:
        """Return the same numbers for a group whose messages go over `medium`."""
        return self._replace(medium=medium)
