"""Device cards (each rank's data about its CUDA device), and the backend decision based on the cards."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

from aiocoll.engine.operations.comparison import SHOWN
from aiocoll.gpu.api import Cuda, Nccl

__all__ = ["Decision", "card", "decide", "read_card", "read_decision"]

#: Environment variable that makes NCCL calls nonblocking if it is 0. That is rejected, because CuPy cannot wait for
#: nonblocking calls to complete.
_BLOCKING = "NCCL_COMM_BLOCKING"

#: Minimum NCCL version, and minimum compute capability of all devices, for reductions of float8.
_FLOAT8_VERSION, _FLOAT8_CAPABILITY = 22400, (9, 0)

Card = dict[str, Any]
_KINDS: dict[str, type[Any]] = {
    "library": int,
    "why": str,
    "bus": str,
    "unfinished": bool,
    "float8": bool,
    "ahead": bool,
}

T = TypeVar("T")


class Decision(NamedTuple):
    """Rank 0's decision on the backend for a group's calls on CUDA arrays.

    Attributes:
        native: whether NCCL carries out calls where possible; otherwise all are staged through the host.
        why: the reason, as text.
        unique_id: NCCL's id of the communicator; b"" without one.
        refused: whether all calls fail until the reason has changed.
        float8: whether NCCL and all devices can reduce float8.
        ahead: whether calls are launched before they are compared.
        shared: whether other groups also use the device of a rank.
    """

    native: bool
    why: str
    unique_id: bytes = b""
    refused: bool = False
    float8: bool = False
    ahead: bool = False
    shared: bool = False

    @property
    def description(self) -> str:
        """The decision in words, as shown in the log: "go by NCCL", for example."""
        return "are refused" if self.refused else "go by NCCL" if self.native else "go through the host"

    def refusal(self, group: str, forced: bool) -> str | None:
        """Return the reason why all calls of a group fail; None if calls are possible.

        Args:
            group: name of the group.
            forced: whether the group must use NCCL.
        """
        if self.refused:
            return f"group {group!r} cannot use CUDA arrays: {self.why}"
        return f"group {group!r} must use NCCL, but {self.why}" if forced and not self.native else None


def card(cuda: Cuda, nccl: Nccl | None, device: int, missing: str, ahead: bool) -> Card:
    """Return this rank's device card: a dict that describes its CUDA device and its NCCL library.

    Args:
        cuda: the CUDA runtime.
        nccl: the NCCL library; None if there is none.
        device: ordinal of the device of the call.
        missing: reason why there is no NCCL.
        ahead: whether this rank launches calls before they are compared, if all ranks do.

    Returns:
        A dict with the version of NCCL, 0 for none; the reason why there is none; the identity of the device on its
        host; whether NCCL's calls would return before they are complete; whether NCCL and the device can reduce float8;
        and `ahead`.
    """
    version, why = (0, missing) if nccl is None else (nccl.version(), "")
    unfinished = os.environ.get(_BLOCKING, "").strip() == "0"
    float8 = version >= _FLOAT8_VERSION and cuda.capability(device) >= _FLOAT8_CAPABILITY
    return {
        "library": version,
        "why": why,
        "bus": cuda.bus_id(device),
        "unfinished": unfinished,
        "float8": float8,
        "ahead": ahead,
    }


def read_card(given: Any) -> Card:
    """Decode and check another rank's device card.

    Raises:
        TypeError, KeyError: `given` is not a card.
    """
    return {name: _check_type(given[name], kind) for name, kind in _KINDS.items()}


def read_decision(given: Any) -> Decision:
    """Decode and check a decision of rank 0.

    Raises:
        TypeError, ValueError: `given` is not a decision.
    """
    native, why, unique_id, *rest = given
    refused, float8, ahead, shared = (_check_type(each, bool) for each in rest)
    return Decision(
        _check_type(native, bool), _check_type(why, str), _check_type(unique_id, bytes), refused, float8, ahead, shared
    )


def _check_type(given: Any, kind: type[T]) -> T:
    if not isinstance(given, kind):
        raise TypeError(f"{given!r} is not of type {kind.__name__}")
    return given


def decide(cards: Sequence[Card], hosts: Sequence[int]) -> Decision:
    """Decide on the backend from the device cards of all ranks.

    The decision has no NCCL communicator id yet.

    Args:
        cards: cards of all ranks, in rank order.
        hosts: number of each rank's host.
    """
    if setting := [rank for rank, each in enumerate(cards) if each["unfinished"]]:
        return Decision(
            False,
            f"{_ranks_have(setting)} {_BLOCKING}=0, with which NCCL's calls return before their end; unset it and make "
            "a new group",
            refused=True,
        )
    for rank, each in enumerate(cards):
        if not each["library"]:
            return Decision(False, f"rank {rank}: {each['why']}")
    first = cards[0]["library"]
    for rank, each in enumerate(cards):
        if each["library"] != first:
            return Decision(False, f"rank 0 has NCCL {_version(first)}, rank {rank} has {_version(each['library'])}")
    owners: dict[tuple[int, str], int] = {}
    for rank, (host, each) in enumerate(zip(hosts, cards, strict=True)):
        other = owners.setdefault((host, each["bus"]), rank)
        if other != rank:
            return Decision(False, f"ranks {other} and {rank} use the same device, {each['bus']}, which NCCL refuses")
    return Decision(
        True,
        f"all ranks have NCCL {_version(first)} and a device each",
        float8=all(each["float8"] for each in cards),
        ahead=all(each["ahead"] for each in cards),
    )


def _ranks_have(ranks: Sequence[int]) -> str:
    """Return a text such as "ranks 0, 2 have"; a long list of ranks is cut off."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - SHOWN} more" if len(ranks) > SHOWN else ""
    return f"ranks {', '.join(map(str, ranks[:SHOWN]))}{more} have"


def _version(number: int) -> str:
    """Format an NCCL version number: 22809 becomes "2.28.9"."""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"
