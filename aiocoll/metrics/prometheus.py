"""Prometheus: the numbers of groups in a registry of `prometheus_client`, read at each scrape.

    collector = aiocoll.metrics.prometheus.GroupCollector()  # in prometheus_client.REGISTRY; all groups of this process

The program serves the registry. A scrape may come in any thread. In the multiprocess mode of `prometheus_client` the
numbers are also written to the files of this process, once a second, for its `MultiProcessCollector`.

Labels: `group` and `rank`; `op`, `algorithm`, `transport` and `outcome` of operations, of which there are few; `peer`
is the number of a rank. No label has a key, a sequence number or an address. There are at most 100 names of groups: a
program that makes groups forever lets them share names, ``add(pg, name="workers")``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from aiocoll.errors import BackendUnavailableError
from aiocoll.group.process_group import ProcessGroup
from aiocoll.group.stats import GroupStats, OperationStats
from aiocoll.metrics.watched import WatchedGroups

try:
    from prometheus_client import REGISTRY
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    from aiocoll.metrics.multiprocess import open_sample_files
except ImportError as error:
    raise BackendUnavailableError(
        "aiocoll.metrics.prometheus needs prometheus_client: pip install 'aiocoll[prometheus]'"
    ) from error

__all__ = ["GroupCollector"]

#: Bounds of the buckets of a histogram, in seconds: each fourth of those that are counted, from 4 µs to 64 s.
_BOUNDS: Final = [2.0**exponent for exponent in range(-18, 7, 2)]
_GROUP: Final = ("group", "rank")
_KIND: Final = (*_GROUP, "op", "algorithm", "transport")
_PEER: Final = (*_GROUP, "peer")


class GroupCollector:
    """A collector of the numbers of all groups of this process, or of those that are added.

    A group that `shrink`, `grow` or `elastic` makes of another one is exported under the same name, without the
    ``~1`` at its end. Groups that have one name on one rank are exported as one, whose counters only grow.

    Args:
        registry: a `prometheus_client.CollectorRegistry`; None: the one of the process.

    Raises:
        ValueError: the registry has such a collector already, and one is enough; or PROMETHEUS_MULTIPROC_DIR is not a
            directory.
    """

    def __init__(self, registry: Any = None) -> None:
        self._watched = WatchedGroups(self._began, self._ended)
        self._files = open_sample_files(lambda: _families(self._watched.stats(closed=True)))
        self._registry: Any = REGISTRY if registry is None else registry
        self._registry.register(self)
        self._watched.start()

    def add(self, pg: ProcessGroup, *, name: str | None = None) -> None:
        """Export a group until this rank closes it, and its successors; from now on no others but those added.

        Args:
            pg: the group.
            name: the name to export it under, in place of its own. Groups may share one: they are added up.

        Raises:
            TypeError: `pg` is no group, or `name` no text.
            RuntimeError: it was made with ``GroupOptions(stats=False)``.
            GroupClosedError: this rank has closed it.
            ValueError: there have been 100 names.
        """
        self._watched.add(pg, name)

    def remove(self, pg: ProcessGroup) -> None:
        """Export a group and its successors no more.

        Args:
            pg: the group; it need not be exported.
        """
        self._watched.remove(pg)

    def close(self) -> None:
        """Export nothing any more, and leave the registry."""
        self._watched.close()
        if self._files is not None:
            self._files.close()
        self._registry.unregister(self)

    def describe(self) -> Iterable[Any]:
        """Return what it exports without its numbers, as `prometheus_client` asks for."""
        return _families([])

    def collect(self) -> Iterable[Any]:
        """Return what it exports now, as `prometheus_client` asks for."""
        return _families(self._watched.stats())

    def _began(self, pg: ProcessGroup, name: str) -> None:
        if self._files is not None:
            self._files.start()

    def _ended(self, pg: ProcessGroup, name: str) -> None:
        if self._files is not None:
            self._files.write()


def _families(groups: list[GroupStats]) -> Iterator[Any]:
    operations = CounterMetricFamily(
        "aiocoll_operations", "Operations that have ended on this rank.", labels=(*_KIND, "outcome")
    )
    nbytes = CounterMetricFamily(
        "aiocoll_operation_bytes", "Bytes of the main arrays of operations that have completed.", labels=_KIND
    )
    seconds = HistogramMetricFamily(
        "aiocoll_operation_seconds", "Seconds from the start of an operation to its completion.", labels=_KIND
    )
    waits = CounterMetricFamily(
        "aiocoll_waits", "Collectives that the arrival of the peer's data has completed here.", labels=_PEER
    )
    waited = CounterMetricFamily(
        "aiocoll_wait_seconds", "Seconds from the start of these collectives to that arrival.", labels=_PEER
    )
    pending = GaugeMetricFamily("aiocoll_pending_operations", "Operations in flight.", labels=_GROUP)
    oldest = GaugeMetricFamily(
        "aiocoll_oldest_pending_seconds", "Seconds for which the oldest of these has been.", labels=_GROUP
    )
    missing = GaugeMetricFamily(
        "aiocoll_missing", "Pending collectives in which the peer is known to be missing.", labels=_PEER
    )
    for group in groups:
        this = [group.group, str(group.rank)]
        pending.add_metric(this, group.pending)
        oldest.add_metric(this, group.oldest)
        for each in group.operations:
            kind = [*this, each.op, each.algorithm or "", each.transport]
            operations.add_metric([*kind, "completed"], each.calls)
            operations.add_metric([*kind, "failed"], each.failures)
            nbytes.add_metric(kind, each.nbytes)
            seconds.add_metric(kind, _buckets(each), each.seconds)
        for peer in group.peers:
            labels = [*this, str(peer.rank)]
            waits.add_metric(labels, peer.times)
            waited.add_metric(labels, peer.seconds)
            missing.add_metric(labels, peer.missing)
    yield from (operations, nbytes, seconds, waits, waited, pending, oldest, missing)


def _buckets(each: OperationStats) -> list[tuple[str, float]]:
    """Return the histogram as Prometheus has it: each bucket counts those before it, too."""
    found: list[tuple[str, float]] = [
        (repr(limit), sum(calls for bound, calls in each.histogram if bound <= limit)) for limit in _BOUNDS
    ]
    return [*found, ("+Inf", each.calls)]
