"""What a decision about a group needs of the endpoint."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple, Protocol

from aiocoll.engine.control.messages import ControlMessage
from aiocoll.engine.job.context import Context
from aiocoll.errors import GroupError

__all__ = ["Group", "Links", "Parts", "Ranks"]


class Group(Protocol):
    """A group that the ranks decide about.

    Attributes:
        name: of the group.
        ranks: of the group, numbered as in the job.
        left: those that have left, numbered as in the group.
        growths: how often it has grown.
    """

    name: str
    ranks: tuple[int, ...]
    left: set[int]
    growths: int

    def revoke(self, cause: GroupError, tell: bool = True) -> None:
        """Fail with `cause`."""

    def crashed(self, error: Exception) -> None:
        """Fail, since code of the library has raised what it should not."""


class Ranks(Protocol):
    """What is known of the other ranks.

    Attributes:
        dead: how each lost rank was lost, and what tells so.
    """

    dead: dict[int, tuple[str, str]]

    @property
    def over(self) -> Container[int]:
        """Ranks that have ended or are lost."""

    @property
    def suspected(self) -> set[int]:
        """The lost ranks that may still live."""

    def died(self, rank: int, detail: str, tell: bool = True, how: str = "killed") -> None:
        """A rank is lost."""

    def restored(self, rank: int) -> None:
        """A rank that was lost is heard again."""


class Links(Protocol):
    """Links between this rank and another one, be that lost."""

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
        flood: sends a message to some ranks that may be linked to this one or not.
        look: looks whether the process of a rank is gone.
        groups: of the endpoint.
    """

    context: Context
    ranks: Ranks
    links: Links
    flood: Callable[[ControlMessage, Sequence[int]], None]
    look: Callable[[int], None]
    groups: Mapping[int, Group]
