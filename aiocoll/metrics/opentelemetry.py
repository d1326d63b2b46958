"""Export to OpenTelemetry: observable instruments for the statistics of groups, and optionally a span per operation.

    meter = aiocoll.metrics.opentelemetry.GroupMeter()  # the global meter provider; all groups of this process

Metrics have the attributes ``aiocoll.group`` and ``aiocoll.rank``. Metrics of operations also have ``aiocoll.op``,
``aiocoll.algorithm``, ``aiocoll.transport`` and ``aiocoll.outcome``, each with few values. ``aiocoll.peer`` is the
number of a rank. Metrics have no keys, sequence numbers or addresses; spans have keys and sequence numbers. At most 100
group names are exported. A program that keeps making groups lets them share a name: ``add(pg, name="workers")``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from aiocoll.errors import BackendUnavailableError
from aiocoll.group.parts import parts_of
from aiocoll.group.process_group import ProcessGroup
from aiocoll.group.stats import GroupStats
from aiocoll.hooks import HookHandle, OperationInfo
from aiocoll.metrics.watched import WatchedGroups

try:
    from opentelemetry import context, metrics, trace
except ImportError as error:
    raise BackendUnavailableError(
        "aiocoll.metrics.opentelemetry needs opentelemetry-api: pip install 'aiocoll[otel]'"
    ) from error

__all__ = ["GroupMeter"]

#: Function that yields the values of one instrument for one group, with their attributes.
_Values = Callable[[GroupStats], Iterator[tuple[float, Mapping[str, Any]]]]


class GroupMeter:
    """OpenTelemetry instruments for all groups of this process, or only for groups passed to `add`.

    One meter is enough: a provider keeps its instruments forever. A group that `shrink`, `grow` or `elastic` makes from
    another one keeps the exported name, without the ``~1`` at its end. Groups with the same name on the same rank are
    exported as one, whose counters never decrease.

    Args:
        meter_provider: an OpenTelemetry meter provider; None: the global one.
        tracer_provider: an OpenTelemetry tracer provider, for spans; None: the global one.
        spans: make a span of each ended operation, with its bytes, key, sequence number and error. The parent is the
            span that is current at the call of `add`, or else where the meter is made. That takes about ten
            microseconds per operation.
    """

    def __init__(self, meter_provider: Any = None, tracer_provider: Any = None, *, spans: bool = False) -> None:
        self._watched = WatchedGroups(self._on_start, self._on_stop)
        self._hooks: WeakKeyDictionary[ProcessGroup, HookHandle] = WeakKeyDictionary()
        #: Parent context of the spans of each added group and its successors, by exported name. All others use
        #: `_context`.
        self._contexts: dict[str, context.Context] = {}
        self._context = context.get_current()
        self._adding: context.Context | None = None
        self._tracer = trace.get_tracer("aiocoll", tracer_provider=tracer_provider) if spans else None
        meter = metrics.get_meter("aiocoll", meter_provider=meter_provider)
        counter, gauge = meter.create_observable_counter, meter.create_observable_gauge
        counter("aiocoll.operations", [self._observe(_operations)], "{operation}", "Operations that have ended.")
        counter("aiocoll.operation.io", [self._observe(_nbytes)], "By", "Bytes of the main arrays of operations.")
        counter("aiocoll.operation.time", [self._observe(_seconds)], "s", "Total duration of operations, in seconds.")
        counter("aiocoll.waits", [self._observe(_waits)], "{collective}", "Collectives that a peer's data completed.")
        counter("aiocoll.wait.time", [self._observe(_waited)], "s", "Seconds from their start to the data's arrival.")
        gauge("aiocoll.operations.pending", [self._observe(_pending)], "{operation}", "Operations in flight.")
        gauge("aiocoll.operations.oldest", [self._observe(_oldest)], "s", "Age of the oldest operation in flight.")
        gauge("aiocoll.missing", [self._observe(_missing)], "{collective}", "Collectives in which a peer is missing.")
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
        self._adding = context.get_current()
        try:
            self._watched.add(pg, name)
        finally:
            self._adding = None

    def remove(self, pg: ProcessGroup) -> None:
        """Stop exporting a group and its successors.

        Args:
            pg: the group. Nothing happens if it is not exported.
        """
        self._watched.remove(pg)

    def close(self) -> None:
        """Stop exporting all groups."""
        self._watched.close()

    def _on_start(self, pg: ProcessGroup, name: str) -> None:
        if self._tracer is None:
            return
        if self._adding is not None:
            self._contexts[name] = self._adding
        parent = self._contexts.get(name, self._context)
        self._hooks[pg] = pg.add_hook(_Spans(self._tracer, parts_of(pg).comm.runtime.wall, parent))

    def _on_stop(self, pg: ProcessGroup, name: str) -> None:
        if (hook := self._hooks.pop(pg, None)) is not None:
            hook.remove()

    def _observe(self, values: _Values) -> Callable[[Any], Iterable[Any]]:
        def observe(_: Any) -> Iterable[Any]:
            return [
                metrics.Observation(value, {**_group(group), **attributes})
                for group in self._watched.stats()
                for value, attributes in values(group)
            ]

        return observe


class _Spans:
    """A hook that creates one span per operation.

    Args:
        tracer: makes the spans.
        wall: returns the wall-clock time.
        parent: the context of the spans.
    """

    def __init__(self, tracer: Any, wall: Callable[[], float], parent: context.Context) -> None:
        self._tracer = tracer
        self._wall = wall
        self._context = parent

    def on_end(self, info: OperationInfo) -> None:
        """Create a span for an operation that has ended."""
        assert info.seconds is not None
        end = self._wall()
        details = {"key": info.key, "seq": info.seq, "nbytes": info.nbytes, "dtype": info.dtype}
        attributes = {
            "aiocoll.group": info.group,
            "aiocoll.rank": info.rank,
            "aiocoll.op": info.op,
            "aiocoll.algorithm": info.algorithm or "",
            "aiocoll.transport": info.transport,
            **{f"aiocoll.{name}": value for name, value in details.items() if value is not None},
        }
        start = int((end - info.seconds) * 1e9)
        span = self._tracer.start_span(info.op, self._context, attributes=attributes, start_time=start)
        if info.error is not None:
            if isinstance(info.error, Exception):
                span.record_exception(info.error, timestamp=int(end * 1e9))
            span.set_status(trace.Status(trace.StatusCode.ERROR, f"{type(info.error).__name__}: {info.error}"))
        span.end(int(end * 1e9))


def _group(group: GroupStats) -> dict[str, Any]:
    return {"aiocoll.group": group.group, "aiocoll.rank": group.rank}


def _kinds(group: GroupStats) -> Iterator[tuple[Any, dict[str, Any]]]:
    for each in group.operations:
        algorithm = each.algorithm or ""
        yield each, {"aiocoll.op": each.op, "aiocoll.algorithm": algorithm, "aiocoll.transport": each.transport}


def _operations(group: GroupStats) -> Iterator[tuple[float, Mapping[str, Any]]]:
    for each, kind in _kinds(group):
        yield each.calls, {**kind, "aiocoll.outcome": "completed"}
        yield each.failures, {**kind, "aiocoll.outcome": "failed"}


def _nbytes(group: GroupStats) -> Iterator[tuple[float, Mapping[str, Any]]]:
    for each, kind in _kinds(group):
        yield each.nbytes, kind


def _seconds(group: GroupStats) -> Iterator[tuple[float, Mapping[str, Any]]]:
    for each, kind in _kinds(group):
        yield each.seconds, kind


def _waits(group: GroupStats) -> Iterator[tuple[float, Mapping[str, Any]]]:
    for each in group.peers:
        yield each.times, {"aiocoll.peer": each.rank}


def _waited(group: GroupStats) -> Iterator[tuple[float, Mapping[str, Any]]]:
    for each in group.peers:
        yield each.seconds, {"aiocoll.peer": each.rank}


def _missing(group: GroupStats) -> Iterator[tuple[float, Mapping[str, Any]]]:
    for each in group.peers:
        yield each.missing, {"aiocoll.peer": each.rank}


def _pending(group: GroupStats) -> Iterator[tuple[float, Mapping[str, Any]]]:
    yield group.pending, {}


def _oldest(group: GroupStats) -> Iterator[tuple[float, Mapping[str, Any]]]:
    yield group.oldest, {}
