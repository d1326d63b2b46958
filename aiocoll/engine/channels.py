"""The channels of a group by rank: all at once in a small group, each when it is first needed in a large one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from aiocoll.engine.channel import Channel

if TYPE_CHECKING:
    from aiocoll.engine.endpoint import Endpoint

__all__ = ["channels"]

#: Ranks up to which all channels are made with the group: a plain list is read fastest, at every call. A channel takes
#: a kilobyte, and a rank of a thousand talks to few of them.
FEW = 64


def channels(endpoint: Endpoint, ranks: Sequence[int]) -> list[Channel]:
    """Return the channels to `ranks`, in their order; iterating over many gives those that there are."""
    return [endpoint.channel(rank) for rank in ranks] if len(ranks) <= FEW else _Lazy(endpoint, ranks)


class _Lazy(list[Channel]):
    def __init__(self, endpoint: Endpoint, ranks: Sequence[int]) -> None:
        super().__init__([None] * len(ranks))  # type: ignore[list-item]
        self._endpoint = endpoint
        self._ranks = ranks
        endpoint.channel(endpoint.rank)  # as in a small group; it is never linked

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        if found is None:
            found = self[index] = self._endpoint.channel(self._ranks[index])
        return found

    def __iter__(self) -> Iterator[Channel]:
        # Those that others have opened, too: what is in their hands has to be taken back as well.
        return self._endpoint.channels_to(self._ranks)
