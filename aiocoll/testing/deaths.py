"""Expected deaths of ranks in tests, and texts about how a rank's process ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping

__all__ = ["Death", "check_deaths", "describe_end", "describe_expected", "is_death"]

#: A signal that kills a process, or the exit code of a process that ends before its function returns.
Death = signal.Signals | int


def check_deaths(expected: Mapping[int, Death] | None, world_size: int) -> dict[int, Death]:
    """Check the argument `expect_death`, and return the expected deaths by rank.

    Raises:
        TypeError: `expected` is not a mapping from ranks to signals or exit codes.
        ValueError: there is no such rank, or a process cannot end like that.
    """
    if expected is None:
        return {}
    if not isinstance(expected, Mapping):
        raise TypeError(f"expect_death must be like {{2: signal.SIGKILL}}, not {type(expected).__name__}")
    given = f"expect_death={dict(expected)}"
    for rank, death in expected.items():
        if type(rank) is not int or not 0 <= rank < world_size:
            raise ValueError(f"{given}: {rank!r} is not one of {world_size} ranks, 0 to {world_size - 1}")
        if isinstance(death, bool) or not isinstance(death, int):
            raise TypeError(f"{given}: give a signal, like signal.SIGKILL, or an exit code, for rank {rank}")
        if not isinstance(death, signal.Signals) and not 0 <= death <= 255:
            raise ValueError(f"{given}: {death} is not an exit code; give a signal as signal.SIGKILL")
    return dict(expected)


def is_death(code: int, death: Death) -> bool:
    """Return whether a process that ended with `code` (negative: a signal) died in the way `death`."""
    return code == (-death if isinstance(death, signal.Signals) else death)


def describe_end(code: int, *, returned: bool = False) -> str:
    """Return a text about the end of a process; `returned`: whether the test function had returned before."""
    if code == 0:
        return "returned" if returned else "exited with code 0 before its function had returned"
    if code > 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def describe_expected(death: Death) -> str:
    """Return a text about an expected death, to follow "was expected to"."""
    return f"be killed by {death.name}" if isinstance(death, signal.Signals) else f"exit with code {death}"
