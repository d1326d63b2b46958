"""What an agreement about a group needs of the endpoint."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple, Protocol

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.job.context import Context
from aiocoll.errors import GroupError

__all__ = ["Group", "Links", "Parts", "Ranks"]


class Group(Protocol):
    """A group whose successor the ranks agree on.

    Attributes:
        name: of the group.
        ranks: of the group, numbered as in the job.
        left: ranks that have closed it, numbered as in the group.
        growths: how many times it has grown.
    """

    name: str
    ranks: tuple[int, ...]
    left: set[int]
    growths: int

    def revoke(self, cause: GroupError, tell: bool = True) -> None:
        """Fail with `cause`."""

    def crashed(self, error: Exception) -> None:
        """Revoke the group, since code of the library raised an unexpected error."""


class Ranks(Protocol):
    """The state of the other ranks.

    Attributes:
        dead: how each lost rank was lost, and the evidence for it.
    """

    dead: dict[int, tuple[str, str]]

    @property
    def over(self) -> Container[int]:
        """Ranks that have ended or are lost."""

    @property
    def out(self) -> str | None:
        """Why other ranks take this one for dead; None: they do not."""

    @property
    def suspected(self) -> set[int]:
        """Lost ranks that may still be alive."""

    @property
    def doubted(self) -> set[int]:
        """Ranks taken for dead that may still show that they live."""

    def died(self, rank: int, detail: str, tell: bool = True, how: str = "killed") -> None:
        """A rank is lost."""

    def restored(self, rank: int) -> None:
        """A lost rank is reachable again."""


class Links(Protocol):
    """Links between this rank and another one, even a lost one."""

    def send(self, rank: int, message: ControlMessage) -> None:
        """Send a message to a rank."""

    def reach(self, rank: int) -> None:
        """Find out whether a lost rank can be reached again."""


class Parts(NamedTuple):
    """What the voters of an endpoint need of it.

    Attributes:
        context: of the endpoint.
        ranks: the others.
        links: carry the messages.
        flood: sends a message to ranks that may or may not be linked to this one.
        look: checks whether the process of a rank still exists.
        groups: of the endpoint.
    """

    context: Context
    ranks: Ranks
    links: Links
    flood: Callable[[ControlMessage, Sequence[int]], None]
    look: Callable[[int], None]
    groups: Mapping[int, Group]
