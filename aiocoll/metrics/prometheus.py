"""Export to Prometheus: a `prometheus_client` collector that reads the statistics of groups at each scrape.

    collector = aiocoll.metrics.prometheus.GroupCollector()  # in prometheus_client.REGISTRY; all groups of this process

The program serves the registry. Any thread may scrape it. In the multiprocess mode of `prometheus_client` the values
are also written once a second to the files of this process, for its `MultiProcessCollector`.

Metrics have the labels `group` and `rank`. Metrics of operations also have `op`, `algorithm`, `transport` and
`outcome`, each with few values. `peer` is the number of a rank. Labels contain no keys, sequence numbers or addresses.
At most 100 group names are exported. A program that keeps making groups lets them share a name:
``add(pg, name="workers")``.
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

#: Upper bounds of the exported histogram buckets in seconds: from 4 µs to 64 s, each four times the previous one.
_BOUNDS: Final = [2.0**exponent for exponent in range(-18, 7, 2)]
_GROUP: Final = ("group", "rank")
_KIND: Final = (*_GROUP, "op", "algorithm", "transport")
_PEER: Final = (*_GROUP, "peer")


class GroupCollector:
    """A Prometheus collector for all groups of this process, or only for groups passed to `add`.

    A group that `shrink`, `grow` or `elastic` makes from another one keeps the exported name, without the ``~1`` at its
    end. Groups with the same name on the same rank are exported as one, whose counters never decrease.

    Args:
        registry: a `prometheus_client.CollectorRegistry`; None: the one of the process.

    Raises:
        ValueError: the registry has such a collector already, and one is enough; or PROMETHEUS_MULTIPROC_DIR is not a
            directory.
    """

    def __init__(self, registry: Any = None) -> None:
        self._watched = WatchedGroups(self._on_start, self._on_stop)
        self._files = open_sample_files(lambda: _families(self._watched.stats(closed=True)))
        self._registry: Any = REGISTRY if registry is None else registry
        self._registry.register(self)
        self._watched.start()

    def add(self, pg: ProcessGroup, *, name: str | None = None) -> None:
        """Export a group and its successors until this rank closes them; from now on, export only added groups.

        Args:
            pg: the group.
            name: the exported name, instead of the group's own. Groups that share a name are added up.

        Raises:
            TypeError: `pg` is not a group, or `name` is not a string.
            RuntimeError: the group was made with ``GroupOptions(stats=False)``.
            GroupClosedError: this rank has closed the group.
            ValueError: 100 names have been exported already.
        """
        self._watched.add(pg, name)

    def remove(self, pg: ProcessGroup) -> None:
        """Stop exporting a group and its successors.

        Args:
            pg: the group. Nothing happens if it is not exported.
        """
        self._watched.remove(pg)

    def close(self) -> None:
        """Stop exporting all groups, and unregister this collector."""
        self._watched.close()
        if self._files is not None:
            self._files.close()
        self._registry.unregister(self)

    def describe(self) -> Iterable[Any]:
        """Return the metric families without values; `prometheus_client` calls this."""
        return _families([])

    def collect(self) -> Iterable[Any]:
        """Return the metric families with current values; `prometheus_client` calls this."""
        return _families(self._watched.stats())

    def _on_start(self, pg: ProcessGroup, name: str) -> None:
        if self._files is not None:
            self._files.start()

    def _on_stop(self, pg: ProcessGroup, name: str) -> None:
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
        "aiocoll_waits", "Collectives that this rank completed when the peer's data arrived.", labels=_PEER
    )
    waited = CounterMetricFamily(
        "aiocoll_wait_seconds", "Seconds from the start of those collectives to the arrival.", labels=_PEER
    )
    pending = GaugeMetricFamily("aiocoll_pending_operations", "Operations in flight.", labels=_GROUP)
    oldest = GaugeMetricFamily(
        "aiocoll_oldest_pending_seconds", "Seconds since the start of the oldest operation in flight.", labels=_GROUP
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
    """Return the cumulative histogram for Prometheus, in which each bucket includes all smaller ones."""
    found: list[tuple[str, float]] = [
        (repr(limit), sum(calls for bound, calls in each.histogram if bound <= limit)) for limit in _BOUNDS
    ]
    return [*found, ("+Inf", each.calls)]
