"""Choice of a group's transport from the options of this rank and the cards of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from aiocoll.errors import BackendUnavailableError, RendezvousError
from aiocoll.log import logger
from aiocoll.transport.base import Card
from aiocoll.transport.registry import AUTO, CarrierRequest, DataCarrier, TransportProvider, find_transport, transports

__all__ = ["TransportChoice"]


class TransportChoice:
    """The transport that this rank's options request, and the carrier (a plugin's data links) that this rank offers.

    Args:
        name: the option `transport`.

    Attributes:
        provider: the registered transport of that name.
        is_auto: whether `name` is "auto", so that the cards determine the transport.
    """

    def __init__(self, name: str) -> None:
        self.provider = find_transport(name)
        self.is_auto = name == AUTO
        # The transport whose carrier this rank offers to the other ranks.
        self._carrier_name, self._carrier_provider = name, self.provider
        if self.is_auto:
            self._carrier_name, self._carrier_provider = max(
                _candidates(), key=lambda found: found[1].auto_rank, default=("", self.provider)
            )

    def make_carrier(self, request: CarrierRequest) -> DataCarrier | None:
        """Make the carrier that this rank offers. Return None if it offers none, or if "auto" finds it unavailable.

        Raises:
            BackendUnavailableError: the options name a transport whose carrier is unavailable.
        """
        make = self._carrier_provider.make_carrier
        try:
            return None if make is None else make(request)
        except (BackendUnavailableError, OSError) as error:
            if not self.is_auto:
                raise
            logger.warning(
                "rank %d does not use transport %r: %s",
                request.rank,
                self._carrier_name,
                error,
                extra={"rank": request.rank},
            )
            self._carrier_name, self._carrier_provider = "", self.provider
            return None

    @property
    def carries_all(self) -> bool:
        """Return whether the carrier makes all data links, instead of only the data links between hosts."""
        return not self.is_auto and self.provider.make_carrier is not None

    @property
    def card(self) -> Card:
        """Card fields that publish the carrier of this rank; empty without a carrier."""
        if self._carrier_provider.make_carrier is None:
            return {}
        return {"offers" if self.is_auto else "carrier": self._carrier_name}

    def agree(self, cards: Mapping[int, Card]) -> bool:
        """Return whether the ranks agree to use the carrier. The result is the same on every rank.

        Raises:
            RendezvousError: some ranks request a carrier by name, and others do not.
        """
        named = {rank: card.get("carrier", "") for rank, card in cards.items()}
        if len(names := {*named.values()}) > 1:
            name = max(names)
            others = [rank for rank, other in named.items() if other != name]
            raise RendezvousError(
                f"transport={name!r} on some ranks, but not on {_format_ranks(others)}: set the same transport on "
                "every rank"
            )
        if not self.is_auto:
            return self.carries_all
        offered = {card.get("offers", "") for card in cards.values()}
        hosts = {card["host"] for card in cards.values()}
        return offered == {self._carrier_name} != {""} and len(hosts) > 1


def _candidates() -> Iterable[tuple[str, TransportProvider]]:
    """Yield the registered transports that "auto" may use between hosts."""
    for name in transports.names():
        provider = transports.get(name)
        if provider.make_carrier is not None and provider.auto_rank > 0:
            yield name, provider


def _format_ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {names}"
