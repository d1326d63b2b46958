"""Meter of the machine's CPU load: other processes, steal time, CPU pressure and the cgroup's CPU quota.

A benchmark reads a `LoadMeter` before its first launch and after each launch. CPU time of the benchmark's own process
tree does not count as load. A value that the system does not report is None, and is shown as "unknown".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path

__all__ = [
    "MAX_LOAD", "LoadMeter", "MachineLoad", "load_average", "show_cores", "show_quota", "show_share", "usable_cores",
]  # fmt: skip

#: Number of cores lost to other work above which timings cannot be trusted.
MAX_LOAD = 0.3

#: Indices in a "cpu" line of /proc/stat, after the name: user, nice, system, irq, softirq; then steal.
_BUSY = (0, 1, 2, 5, 6)
_STEAL = 7
#: Indices in /proc/<pid>/stat, after the name: the parent; CPU time of the process and of its reaped children.
_PARENT = 1
_TIMES = slice(11, 15)


@dataclass(frozen=True, slots=True)
class MachineLoad:
    """The load of the cores that this process may use, during an interval.

    Attributes:
        others: cores that processes outside the own process tree used.
        steal: cores that the hypervisor gave to other virtual machines.
        pressure: share of the time in which a task waited for a core ("some" of /proc/pressure/cpu). The own process
            tree counts, too.
        quota: cores that the control group may use; `inf` without a limit.
    """

    others: float | None
    steal: float | None
    pressure: float | None
    quota: float | None

    @property
    def total(self) -> float | None:
        """Number of cores lost to other processes and to steal time; None if other processes cannot be measured."""
        return None if self.others is None else self.others + (self.steal or 0.0)

    @property
    def is_high(self) -> bool:
        """True if timings of the interval cannot be trusted, because other work took more than `MAX_LOAD` cores."""
        return self.total is not None and self.total > MAX_LOAD

    def __str__(self) -> str:
        return ", ".join(
            (
                f"other processes {show_cores(self.others)}",
                f"steal {show_cores(self.steal)}",
                f"CPU pressure {show_share(self.pressure)}",
                f"CPU quota {show_quota(self.quota)}",
            )
        )


@dataclass(frozen=True, slots=True)
class _Reading:
    """The system's CPU time counters at one moment, in seconds; None for a counter that the system does not report."""

    uptime: float | None
    busy: float | None
    own: float | None
    steal: float | None
    stalled: float | None


class LoadMeter:
    """A meter of the CPU load between two calls of `lap`.

    Args:
        root: the directory that contains `proc` and `sys`.
        pid: the root of the own process tree; by default this process.
    """

    def __init__(self, root: Path = Path("/"), pid: int | None = None) -> None:
        self._proc = root / "proc"
        self._cgroups = root / "sys/fs/cgroup"
        self._pid = os.getpid() if pid is None else pid
        self._last = self._read()

    def lap(self) -> MachineLoad:
        """Return the load since the last call, or since the meter was created."""
        before, after = self._last, self._read()
        self._last = after
        passed = _difference(before.uptime, after.uptime)
        busy, own = _difference(before.busy, after.busy), _difference(before.own, after.own)
        return MachineLoad(
            _rate(_difference(own, busy), passed),
            _rate(_difference(before.steal, after.steal), passed),
            _rate(_difference(before.stalled, after.stalled), passed),
            self._quota(),
        )

    def _read(self) -> _Reading:
        busy, steal = self._core_times()
        return _Reading(self._uptime(), busy, self._own_time(), steal, self._stalled())

    def _uptime(self) -> float | None:
        with suppress(OSError, ValueError, IndexError):
            return float((self._proc / "uptime").read_text().split()[0])
        return None

    def _core_times(self) -> tuple[float | None, float | None]:
        """Return the seconds for which the usable cores were busy, and the seconds stolen by other virtual machines."""
        names = {f"cpu{core}" for core in usable_cores()}
        with suppress(OSError, ValueError, IndexError):
            lines = [line.split() for line in (self._proc / "stat").read_text().splitlines()]
            cores = [[int(field) for field in times] for name, *times in filter(None, lines) if name in names]
            if cores:
                busy = sum(times[index] for times in cores for index in _BUSY)
                return busy / _ticks(), sum(times[_STEAL] for times in cores) / _ticks()
        return None, None

    def _own_time(self) -> float | None:
        """Return the CPU seconds of the measured process tree, including children that have ended."""
        parents: dict[int, int] = {}
        times: dict[int, int] = {}
        for path in self._stat_files():
            with suppress(OSError, ValueError, IndexError):
                # Split after the last parenthesis: the process name may contain any characters, including parentheses.
                fields = path.read_text(errors="replace").rpartition(")")[2].split()
                user, system, children_user, children_system = map(int, fields[_TIMES])
                pid = int(path.parent.name)
                parents[pid], times[pid] = int(fields[_PARENT]), user + system + children_user + children_system
        if self._pid not in times:
            return None
        tree, children = set[int](), {self._pid}
        while children:
            tree |= children
            children = {pid for pid, parent in parents.items() if parent in children} - tree
        return sum(times[pid] for pid in tree) / _ticks()

    def _stat_files(self) -> Iterator[Path]:
        with suppress(OSError):
            for folder in self._proc.iterdir():
                if folder.name.isdecimal():
                    yield folder / "stat"

    def _stalled(self) -> float | None:
        with suppress(OSError, ValueError):
            for line in (self._proc / "pressure/cpu").read_text().splitlines():
                kind, *fields = line.split()
                if kind == "some":
                    return int(dict(field.split("=") for field in fields)["total"]) / 1e6
        return None

    def _quota(self) -> float | None:
        """Return the smallest CPU quota of the control group and its parents, in cores; `inf` without a quota."""
        found = []
        with suppress(OSError, ValueError):
            for line in (self._proc / "self/cgroup").read_text().splitlines():
                _, controllers, path = line.split(":", 2)
                names = controllers.split(",")
                if not controllers:
                    mounts = [self._cgroups, self._cgroups / "unified"]
                elif "cpu" in names:
                    mounts = [self._cgroups / "cpu", self._cgroups / controllers]
                else:
                    continue
                group = Path(path.lstrip("/"))
                for folder in [mount / each for mount in mounts for each in (group, *group.parents)]:
                    with suppress(OSError, ValueError):
                        found.append(_quota_of(folder))
        return min(found, default=None)


def _quota_of(group: Path) -> float:
    """Return the CPU quota of one control group in cores, from cgroup version 2 or 1.

    Raises:
        OSError: the group has no file for it.
        ValueError: the file is malformed.
    """
    with suppress(FileNotFoundError):
        quota, period = (group / "cpu.max").read_text().split()
        return inf if quota == "max" else int(quota) / int(period)
    quota, period = ((group / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
    return inf if int(quota) < 0 else int(quota) / int(period)


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def _rate(seconds: float | None, passed: float | None) -> float | None:
    # Times of cores and of processes are counted separately, so a difference may be some ticks below 0.
    return None if seconds is None or not passed else max(0.0, seconds / passed)


def _ticks() -> int:
    """Return the number of clock ticks per second in /proc."""
    return os.sysconf("SC_CLK_TCK")


def load_average() -> float | None:
    """Return the load average of the last minute; None where the system does not report it."""
    with suppress(AttributeError, OSError):
        return os.getloadavg()[0]
    return None


def usable_cores() -> set[int]:
    """Return the numbers of the CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def show_cores(value: float | None) -> str:
    """Return a number of cores as text, "unknown" for None."""
    return "unknown" if value is None else f"{value:.2f} cores"


def show_share(value: float | None) -> str:
    """Return a share of the time as text in percent, "unknown" for None."""
    return "unknown" if value is None else f"{value:.0%}".replace("%", " %")


def show_quota(value: float | None) -> str:
    """Return a CPU quota in cores as text, "none" for no quota."""
    return "none" if value == inf else show_cores(value)
