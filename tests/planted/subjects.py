"""What is planted where, and which tests concern it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from .places import Package

__all__ = ["COUNT", "SUBJECTS", "Subject", "files", "found", "quota"]

#: Mutants that are drawn.
COUNT = 150


class Subject(NamedTuple):
    """A part of the package.

    Attributes:
        names: functions, by their qualified names, of the modules that belong to it, one of each.
        tests: runs of pytest, one after the other until one fails: files and folders by their names, wherever in
            `tests/` they are, and options.
    """

    names: tuple[str, ...]
    tests: tuple[tuple[str, ...], ...]


SUBJECTS: Mapping[str, Subject] = MappingProxyType(
    {
        "store core": Subject(
            ("StoreCore.apply",),
            (("test_core.py",), ("store/test_contract.py", "-k", "hash"), ("test_tcp.py",)),
        ),
        "codec": Subject(
            ("_Encoder.put", "_Decoder.list_hook", "_join_array"),
            (("test_roundtrip.py", "test_refusals.py"), ("group/test_objects.py",)),
        ),
        "relay": Subject(
            ("Relay.look",),
            (
                ("test_relay.py", "test_shared_memory.py"),
                ("test_empty.py", "-k", "fail or read or counts_around and shm"),
            ),
        ),
        "exchange": Subject(
            ("Exchange.take",),
            (
                ("test_overlong.py", "test_virtual.py"),
                ("group/test_collectives.py", "test_algorithms_at_work.py"),
                ("test_windows.py", "test_relay.py", "test_uneven.py"),
            ),
        ),
        "channel": Subject(
            ("Channel.pump",),
            (
                ("test_windows.py", "-k", "not any_mix"),
                ("test_overlong.py", "test_goodbye.py", "test_virtual.py", "test_cancellation.py"),
                ("test_relay.py", "test_oneshot.py", "test_point_to_point.py", "test_pressure.py"),
            ),
        ),
        "handshake": Subject(
            ("ServerHandshake.verify",),
            (("test_handshake.py",), ("test_stream.py", "test_tcp.py")),
        ),
        "shrink": Subject(
            ("Agreement.vote",),
            (("test_paxos.py", "engine/test_shrink.py"), ("group/test_recovery.py",)),
        ),
        "coordinator": Subject(
            ("Coordinator.consider",),
            (("test_paxos.py", "engine/test_shrink.py"), ("group/test_recovery.py",)),
        ),
        "endpoint": Subject(
            ("Endpoint.died",),
            (
                ("test_goodbye.py", "engine/test_shrink.py", "test_virtual.py", "test_connect.py"),
                ("test_windows.py", "-k", "window_back or failed_group"),
                ("group/test_recovery.py", "test_subgroups.py", "group/test_group.py", "test_waiting.py"),
                ("integration/test_alive.py", "integration/test_ends.py", "integration/test_recovery.py"),
            ),
        ),
        "session": Subject(("Session.message_received",), (("test_tcp.py",),)),
        "control": Subject(("Control.flood",), (("test_goodbye.py",),)),
    }
)
#: Of the last ones there are faults by hand only.
BY_HAND = ("session", "control")


def quota() -> dict[str, int]:
    """Return how many mutants of each subject are drawn."""
    drawn = [name for name in SUBJECTS if name not in BY_HAND]
    return {name: COUNT // len(drawn) + (place < COUNT % len(drawn)) for place, name in enumerate(drawn)}


def files(package: Package, subject: str) -> set[Path]:
    """Return the modules of a subject."""
    found = {path for name in SUBJECTS[subject].names for path, _ in package.functions.get(name, ())}
    if len(found) < len(SUBJECTS[subject].names):
        raise LookupError(f"{subject}: there is no {' or no '.join(SUBJECTS[subject].names)}; see `SUBJECTS`")
    return found


def found(tests: Path, run: tuple[str, ...]) -> list[str]:
    """Return the arguments of a run of pytest, with files and folders found by name."""
    arguments = []
    for each in run:
        if not each.endswith(".py"):
            arguments.append(each)
            continue
        paths = sorted(path for path in tests.rglob(each.rpartition("/")[2]) if path.match(each))
        if len(paths) != 1:
            raise LookupError(f"{each}: {len(paths)} files of that name in {tests}; see `SUBJECTS`")
        arguments.append(str(paths[0]))
    return arguments
