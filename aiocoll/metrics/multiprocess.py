"""Sample files for the multiprocess mode of prometheus_client, where one process exports for all.

That collector reads the files of all processes in PROMETHEUS_MULTIPROC_DIR. It does not call the collectors of this
process. So a thread writes the samples to a file about once a second, also while the event loop of the process is
blocked.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from prometheus_client import multiprocess, values

from aiocoll.log import logger

__all__ = ["SampleFiles", "open_sample_files"]

_mark_process_dead: Final[Any] = multiprocess.mark_process_dead
#: Seconds between two writes of the sample files.
PERIOD: Final = 1.0


class SampleFiles:
    """The sample files of this process, and the thread that writes them.

    Counters of ended processes remain. Gauges have the mode "livesum": `mark_process_dead` removes the gauges of one
    process. The thread calls it for each ended process.

    Args:
        directory: directory of the files.
        collect: returns the metric families, whose counters must not decrease.
    """

    def __init__(self, directory: Path, collect: Callable[[], Iterable[Any]]) -> None:
        self._directory = directory
        self._collect = collect
        self._lock = threading.Lock()
        #: For each sample name and labels: the value object of the file, and the value last collected.
        self._written: dict[tuple[str, ...], tuple[Any, float]] = {}
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_warned = False

    def start(self) -> None:
        """Start the writing thread, unless it is running already."""
        if self._thread is None or not self._thread.is_alive():  # a forked child has no threads of its parent
            self._thread = threading.Thread(target=self._run, name="aiocoll metrics", daemon=True)
            try:
                self._thread.start()
            except RuntimeError as error:  # too many threads
                self._thread = None
                self._warn(error)

    def write(self) -> None:
        """Write the current samples of all metrics to the sample files."""
        try:
            with self._lock:
                for family in self._collect():
                    self._write_family(family)
        except Exception as error:  # a full disk or a removed directory must not fail a group
            self._warn(error)

    def close(self) -> None:
        """Stop the writing thread, and wait until it has ended."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._closing.is_set():
            self.write()
            self._mark_dead_processes()
            self._closing.wait(PERIOD)

    def _write_family(self, family: Any) -> None:
        below = 0.0
        for sample in family.samples:
            value = sample.value
            if sample.name.endswith("_bucket"):  # sample files have the count of each bucket alone
                value, below = value - below, value
            elif sample.name.endswith("_count"):  # `MultiProcessCollector` sums the buckets instead
                below = 0.0
                continue
            self._write(family, sample, value)

    def _write(self, family: Any, sample: Any, value: float) -> None:
        key = sample.name, *sample.labels.values()
        known = self._written.get(key)
        if known is None:
            names, labels = tuple(sample.labels), tuple(sample.labels.values())
            entry = values.ValueClass(
                *(family.type, family.name, sample.name, names, labels, family.documentation),
                multiprocess_mode="livesum" if family.type == "gauge" else "",
            )
            before = 0.0
        else:
            entry, before = known
        if family.type == "gauge":
            if value != before:
                entry.set(value)
        elif value > before:
            entry.inc(value - before)  # the file may have counts of an ended process with this process id
        else:
            value = before
        self._written[key] = entry, value

    def _mark_dead_processes(self) -> None:
        """Remove the gauges of processes that have ended."""
        found = {path.stem.rpartition("_")[2] for path in self._directory.glob("gauge_live*_*.db")}
        if str(os.getpid()) not in found:
            return  # the program does not name files by process id
        for name in found:
            if name.isdecimal() and _has_ended(int(name)):
                with suppress(OSError):  # another process has removed the file, or it belongs to another user
                    _mark_process_dead(int(name), str(self._directory))

    def _warn(self, error: Exception) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning("cannot write metrics to PROMETHEUS_MULTIPROC_DIR=%s: %s", self._directory, error)


def _has_ended(pid: int) -> bool:
    if os.name != "posix":
        return False  # on Windows, signal 0 is Ctrl-C
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False  # the process belongs to another user
    return False


def open_sample_files(collect: Callable[[], Iterable[Any]]) -> SampleFiles | None:
    """Return the `SampleFiles` of this process; None if prometheus_client is not in multiprocess mode.

    Raises:
        ValueError: the directory does not exist.
    """
    path = os.environ.get("PROMETHEUS_MULTIPROC_DIR") or os.environ.get("prometheus_multiproc_dir")  # noqa: SIM112
    if not path:
        return None
    if not getattr(values.ValueClass, "_multiprocess", False):
        logger.warning(
            "PROMETHEUS_MULTIPROC_DIR=%s was set after prometheus_client was imported, so this process writes no "
            "metrics there; set it in the environment that starts the program",
            path,
        )
        return None
    directory = Path(path)
    if not directory.is_dir():
        raise ValueError(f"PROMETHEUS_MULTIPROC_DIR={path!r} is not a directory; create it before the program starts")
    return SampleFiles(directory, collect)
