"""OpenTelemetry: the numbers of groups as instruments that are observed, and a span per operation on request.

    meter = aiocoll.metrics.opentelemetry.GroupMeter()  # the global meter provider; all groups of this process

Attributes of metrics: ``aiocoll.group`` and ``aiocoll.rank``; ``aiocoll.op``, ``aiocoll.algorithm``,
``aiocoll.transport`` and ``aiocoll.outcome`` of operations, of which there are few; ``aiocoll.peer`` is the number of a
rank. None has a key, a sequence number or an address; spans have the first two. There are at most 100 names of groups:
a program that makes groups forever lets them share names, ``add(pg, name="workers")``.
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

#: What an instrument observes of one group: values with their attributes.
_Values = Callable[[GroupStats], Iterator[tuple[float, Mapping[str, Any]]]]


class GroupMeter:
    """Instruments for the numbers of all groups of this process, or of those that are added.

    One is enough: a provider keeps its instruments forever. A group that `shrink`, `grow` or `elastic` makes of another
    one is exported under the same name, without the ``~1`` at its end. Groups that have one name on one rank are
    exported as one, whose counters only grow.

    Args:
        meter_provider: of OpenTelemetry; None: the global one.
        tracer_provider: likewise, for spans.
        spans: make a span of each operation when it has ended, with its bytes, key, number and error. They are children
            of the span that is current where `add` is called, or else where the meter is made. That takes some ten
            microseconds per operation.
    """

    def __init__(self, meter_provider: Any = None, tracer_provider: Any = None, *, spans: bool = False) -> None:
        self._watched = WatchedGroups(self._began, self._ended)
        self._hooks: WeakKeyDictionary[ProcessGroup, HookHandle] = WeakKeyDictionary()
        #: Where spans are made: by the exported name of an added group and its successors, and for all others.
        self._contexts: dict[str, context.Context] = {}
        self._context = context.get_current()
        self._adding: context.Context | None = None
        self._tracer = trace.get_tracer("aiocoll", tracer_provider=tracer_provider) if spans else None
        meter = metrics.get_meter("aiocoll", meter_provider=meter_provider)
        counter, gauge = meter.create_observable_counter, meter.create_observable_gauge
        counter("aiocoll.operations", [self._observe(_operations)], "{operation}", "Operations that have ended.")
        counter("aiocoll.operation.io", [self._observe(_nbytes)], "By", "Bytes of the main arrays of operations.")
        counter("aiocoll.operation.time", [self._observe(_seconds)], "s", "Seconds that operations took together.")
        counter("aiocoll.waits", [self._observe(_waits)], "{collective}", "Collectives that a peer's data completed.")
        counter("aiocoll.wait.time", [self._observe(_waited)], "s", "Seconds from the start of these to that arrival.")
        gauge("aiocoll.operations.pending", [self._observe(_pending)], "{operation}", "Operations in flight.")
        gauge("aiocoll.operations.oldest", [self._observe(_oldest)], "s", "Seconds for which the oldest has been.")
        gauge("aiocoll.missing", [self._observe(_missing)], "{collective}", "Collectives in which a peer is missing.")
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
        self._adding = context.get_current()
        try:
            self._watched.add(pg, name)
        finally:
            self._adding = None

    def remove(self, pg: ProcessGroup) -> None:
        """Export a group and its successors no more.

        Args:
            pg: the group; it need not be exported.
        """
        self._watched.remove(pg)

    def close(self) -> None:
        """Export nothing any more."""
        self._watched.close()

    def _began(self, pg: ProcessGroup, name: str) -> None:
        if self._tracer is None:
            return
        if self._adding is not None:
            self._contexts[name] = self._adding
        parent = self._contexts.get(name, self._context)
        self._hooks[pg] = pg.add_hook(_Spans(self._tracer, parts_of(pg).comm.runtime.wall, parent))

    def _ended(self, pg: ProcessGroup, name: str) -> None:
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
    """A hook that makes a span of each operation.

    Args:
        tracer: makes them.
        wall: returns the time.
        parent: the context in which they are made.
    """

    def __init__(self, tracer: Any, wall: Callable[[], float], parent: context.Context) -> None:
        self._tracer = tracer
        self._wall = wall
        self._context = parent

    def on_end(self, info: OperationInfo) -> None:
        """Make the span of an operation that has ended."""
        assert info.seconds is not None
        end = self._wall()
        told = {"key": info.key, "seq": info.seq, "nbytes": info.nbytes, "dtype": info.dtype}
        attributes = {
            "aiocoll.group": info.group,
            "aiocoll.rank": info.rank,
            "aiocoll.op": info.op,
            "aiocoll.algorithm": info.algorithm or "",
            "aiocoll.transport": info.transport,
            **{f"aiocoll.{name}": value for name, value in told.items() if value is not None},
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
