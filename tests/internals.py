"""Access to private limits, functions and objects of aiocoll, for tests."""

from __future__ import annotations

import builtins
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from pkgutil import resolve_name
from typing import Any, Protocol
from unittest import mock

import pytest

from aiocoll import ProcessGroup
from aiocoll.engine.communicator import Communicator
from aiocoll.group.dispatch.dispatcher import Dispatcher
from aiocoll.group.parts import parts_of
from aiocoll.work import completion_of

__all__ = [
    "LIMITS",
    "PARTS",
    "Limits",
    "callbacks_of",
    "channels_of",
    "comm_of",
    "disable_accelerator",
    "dispatcher_of",
    "early_bytes",
    "group_of",
    "is_native",
    "links_of",
    "make_calls_fail",
    "make_methods_fail",
    "matched_units",
    "matching_of",
    "native_calls_of",
    "nccl_end",
    "observe_calls",
    "observe_methods",
    "pending_waits",
    "plan_without_accelerator",
    "plans_of",
    "replace_call",
    "replace_parts",
    "set_limits",
    "set_nccl_only",
    "socket_of",
    "ungranted_bytes",
    "unmade_groups",
    "use_same_slots",
    "waiter_of",
    "waiting_bytes",
    "wrap_methods",
    "wrap_parts",
]

#: Internal limits (seconds, sizes and counts) that tests change: for each short name, all module attributes to set.
LIMITS = {
    # links between ranks, and data kept for one peer
    "ready_window": ("aiocoll.engine.links.flow_control.ASK_WINDOW", "aiocoll.engine.links.channel.ASK_WINDOW"),
    "group_id_bits": ("aiocoll.engine.job.ids.GROUP_BITS",),
    "early_grants": ("aiocoll.engine.links.flow_control.EARLY_GRANTS",),
    "link_window": ("aiocoll.engine.links.flow_control.LINK_WINDOW", "aiocoll.engine.links.channel.LINK_WINDOW"),
    "unmade_groups": ("aiocoll.engine.control.unmade_groups.GROUPS",),
    "window_batch": ("aiocoll.engine.links.channel.WINDOW_LOT",),
    # sizes of objects
    "max_object_bytes": (
        "aiocoll.engine.matching.posted.MAX_BYTES",
        "aiocoll.engine.operations.object_exchange.ObjectExchange.LIMIT",
        "aiocoll.engine.operations.verify.VerifiedOperation.LIMIT",
    ),
    "max_sparse_inline": ("aiocoll.group.sparse_reduce.INLINE",),
    # failure
    "blocked_after": ("aiocoll.engine.failure.watchdog.BLOCKED_AFTER",),
    "reconnect_interval": ("aiocoll.engine.failure.failure_detector.CONNECT_AGAIN",),
    "departure_timeout": ("aiocoll.engine.control.departure.PARTING",),
    "dial_retry_time": ("aiocoll.transport.stream.dial._DOUBT",),
    "linger": ("aiocoll.engine.failure.refusal.LINGER", "aiocoll.engine.endpoint.LINGER"),
    "report_after": ("aiocoll.engine.failure.deadlines.REPORT_AFTER",),
    "chunk_count": ("aiocoll.transport.shm.layout.CHUNKS",),
    "report_strays_after": ("aiocoll.engine.stray_posts.AFTER",),
    "unreachable_after": ("aiocoll.engine.failure.watchdog.UNREACHABLE_AFTER",),
    "watchdog_interval": ("aiocoll.engine.failure.watchdog.ROUND", "aiocoll.engine.failure.failure_detector.ROUND"),
    # seconds for which one packing, decoding or chunk queue callback may block the event loop
    "loop_budget": (
        "aiocoll.engine.fusion.packer.BUDGET",
        "aiocoll.engine.operations.incremental.BUDGET",
        "aiocoll.engine.operations.shm_ring.BUDGET",
    ),
    # stores
    "redis_read_interval": ("aiocoll.redis.store._READ_EVERY",),
    "redis_max_wait": ("aiocoll.redis.store.MAX_WAIT", "aiocoll.redis.client.MAX_WAIT"),
    "redis_renew_interval": ("aiocoll.redis.client._RENEW_EVERY",),
    "max_store_entries": ("aiocoll.store.core.MAX_ENTRIES",),
    "store_handshake_timeout": (
        "aiocoll.store.client.HANDSHAKE_TIMEOUT",
        "aiocoll.store.server.HANDSHAKE_TIMEOUT",
        "aiocoll.store.session.HANDSHAKE_TIMEOUT",
    ),
    "max_store_bytes": ("aiocoll.store.core.MAX_TOTAL_BYTES",),
    # devices
    "backend_decision_timeout": ("aiocoll.gpu.calls.backend_agreement.PARTING",),
    "device_abort_timeout": ("aiocoll.gpu.calls.communicator.ABORTING",),
    "device_check_interval": ("aiocoll.gpu.calls.communicator.CHECK_EVERY",),
    "device_exit_timeout": ("aiocoll.gpu.device.EXITING",),
    "device_poll_count": ("aiocoll.gpu.waiter.LOOKS",),
    "device_departure_timeout": ("aiocoll.gpu.calls.communicator.PARTING",),
    "device_batch_wait": ("aiocoll.gpu.calls.matching.MAX_WAIT",),
    "device_release_timeout": ("aiocoll.gpu.calls.device_state.RELEASE",),
    "device_slot_wait": ("aiocoll.gpu.calls.slots.MAX_WAIT",),
    "max_free_staging_bytes": ("aiocoll.gpu.staging.KEPT",),
    # commands and testing
    "doctor_dial_timeout": ("aiocoll.cli.doctor_hosts._DIAL",),
    "doctor_slack": ("aiocoll.cli.doctor_hosts._SLACK",),
    "doctor_ping_time": ("aiocoll.cli.doctor_hosts._PING_FOR",),
    "doctor_max_wait": ("aiocoll.cli.doctor._MAX_WAIT",),
    "progress_interval": ("aiocoll.cli.terminal._AGAIN",),
    "run_grace_period": ("aiocoll.cli.supervise.GRACE",),
    "run_repeated_signal_time": ("aiocoll.cli.signals.TWICE",),
    "run_release_timeout": ("aiocoll.cli.supervise.RELEASE",),
    "run_replace_after": ("aiocoll.cli.supervise.SETTLE",),
    "testing_release_timeout": ("aiocoll.testing.team.RELEASE",),
    "tune_time_limit": ("aiocoll.cli.tune.ENOUGH",),
}

#: Internal functions that tests observe, replace or make fail: for each short name, the attribute to patch. Public
#: methods and functions are not listed: tests patch them at their class or module.
PARTS = {
    # properties of the machine and the operating system
    "gpu_count": "aiocoll.testing.skips._gpus",
    "populate_memory": "aiocoll.transport.shm.region._populate",
    "processors_file": "aiocoll.tuning._PROCESSORS",
    "round_trip": "aiocoll.transport.stream.link_table.round_trip",
    # messages and frames on links, and the environment of a rank
    "send_control_message": "aiocoll.engine.control.star.send_message",
    "receive_memory_frame": "aiocoll.transport.memory.MemoryLink._arrive",
    "rank_environment": "aiocoll.testing.team._environment",
    # operations
    "is_watching": "aiocoll.completion._watching",
    "choose_algorithm": "aiocoll.group.dispatch.planner.choose",
    "dump_object": "aiocoll.group.objects.dumps",
    "read_object": "aiocoll.group.objects.reading",
    "probe_layout": "aiocoll.engine.matching.probe.record_by_code",
    "probe_dtype": "aiocoll.engine.matching.probe.array_dtype",
    "gather_entries": "aiocoll.group.sparse_reduce.gather_entries",
    "merge_entries": "aiocoll.group.sparse_reduce.merge_entries",
    "scatter_entries": "aiocoll.group.sparse_reduce.scatter_entries",
    "unpack_entries": "aiocoll.group.sparse_reduce.unpack",
    "complete_stepped_operation": "aiocoll.engine.operations.stepped.SteppedOperation._complete",
    # failure
    "answer_stall_requests": "aiocoll.engine.failure.stall_inspector.StallInspector._answer_waiting",
    # certificates
    "certificate_clock": "aiocoll.security.user_ca.clock",
    "refuse_certificate": "aiocoll.security.user_ca._refuse",
    "prepare_client_tls": "aiocoll.store.tcp.prepare",
    "prepare_rank_tls": "aiocoll.transport.stream.tls_stream.prepare",
    "prepare_server_tls": "aiocoll.store.server.prepare",
    # stores and commands
    "send_store_reply": "aiocoll.store.session.Session._reply",
    "all_frames": "aiocoll.testing.frames._all_frames",
    "run_bench_processes": "aiocoll.cli.bench.run_processes",
    "echo_bytes": "aiocoll.cli.doctor_hosts._echo_bytes",
    "run_doctor_checks": "aiocoll.cli.doctor.look",
    "check_machine_load": "aiocoll.cli.doctor.check_load",
    "run_doctor_rendezvous": "aiocoll.cli.doctor._meeting",
    "collect_dumps": "aiocoll.cli.trace.collect",
    # devices
    "check_device_error": "aiocoll.gpu.calls.communicator.DeviceCommunicator._check_async_error",
    "on_backend_decision": "aiocoll.gpu.calls.device_state.DeviceState._on_backend_decision",
    "yield_to_launcher": "aiocoll.gpu.calls.communicator.DeviceCommunicator._yield_to_launcher",
    "wait_for_device_peers": "aiocoll.gpu.calls.communicator.DeviceCommunicator._wait_for_peers",
    "stage_inputs": "aiocoll.gpu.calls.agreed.Agreed._stage",
}


class Limits(Protocol):
    """The type of the fixture `limits`, which changes limits in `LIMITS` for one test."""

    def __call__(self, **values: float) -> None: ...


def set_limits(patch: pytest.MonkeyPatch, **values: float) -> None:
    """Set internal limits, given by their names in `LIMITS`."""
    _check_names(values, LIMITS)
    for name, value in values.items():
        for place in LIMITS[name]:
            patch.setattr(place, value)


def replace_parts(patch: pytest.MonkeyPatch, **parts: Any) -> None:
    """Replace internal functions, given by their names in `PARTS`."""
    _check_names(parts, PARTS)
    for name, part in parts.items():
        patch.setattr(PARTS[name], part)


def wrap_parts(patch: pytest.MonkeyPatch, **calls: Callable[..., Any]) -> None:
    """Replace functions in `PARTS` by wrappers that get the original function as first argument."""
    _check_names(calls, PARTS)
    for name, call in calls.items():
        replace_parts(patch, **{name: _wrap(resolve_name(PARTS[name]), call)})


def observe_calls(patch: pytest.MonkeyPatch, **spies: Callable[..., object]) -> None:
    """Let each function in `PARTS` first call a spy with the same arguments; the spy may raise."""
    wrap_parts(patch, **{name: _call_before(spy) for name, spy in spies.items()})


def make_calls_fail(patch: pytest.MonkeyPatch, error: BaseException, *parts: str) -> None:
    """Make functions in `PARTS` raise `error` whenever they are called."""
    replace_parts(patch, **dict.fromkeys(parts, _raising(error)))


def wrap_methods(patch: pytest.MonkeyPatch, owner: type, **calls: Callable[..., Any]) -> None:
    """Replace methods of a class by wrappers that get the original method as first argument."""
    for name, call in calls.items():
        patch.setattr(owner, name, _wrap(getattr(owner, name), call))


def observe_methods(patch: pytest.MonkeyPatch, owner: type, **spies: Callable[..., object]) -> None:
    """Let each method first call a spy with the same arguments; the spy may raise."""
    wrap_methods(patch, owner, **{name: _call_before(spy) for name, spy in spies.items()})


def make_methods_fail(patch: pytest.MonkeyPatch, error: BaseException, owner: type, *names: str) -> None:
    """Make methods of a class raise `error` whenever they are called."""
    for name in names:
        patch.setattr(owner, name, _raising(error))


@contextmanager
def replace_call(module: str, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace a function for the calls of one module; other modules still call the original function.

    Args:
        module: name of the calling module.
        name: the function: a built-in one, "open", or as the module writes it, "os.kill".
        make: returns the replacement, given the original function.
    """
    owner, _, function = name.rpartition(".")
    holder = resolve_name(f"{module}.{owner}") if owner else builtins
    instead = make(getattr(holder, function))
    if owner:
        with mock.patch(f"{module}.{owner}", _ModuleWithReplacement(holder, function, instead)):
            yield
    else:
        with mock.patch(f"{module}.{name}", instead, create=True):
            yield


class _ModuleWithReplacement:
    """A stand-in for a module or class in which one function is replaced."""

    def __init__(self, holder: Any, function: str, instead: Callable[..., Any]) -> None:
        self._holder = holder
        setattr(self, function, instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._holder, name)


def _wrap(original: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def instead(*args: Any, **named: Any) -> Any:
        return call(original, *args, **named)

    return instead


def _call_before(spy: Callable[..., object]) -> Callable[..., Any]:
    def call(original: Callable[..., Any], *args: Any, **named: Any) -> Any:
        spy(*args, **named)
        return original(*args, **named)

    return call


def _raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def _check_names(given: Mapping[str, object], known: Mapping[str, object]) -> None:
    if unknown := given.keys() - known.keys():
        raise ValueError(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")


def comm_of(holder: Any) -> Communicator:
    """Return the communicator of a group, or of an internal object that a group owns."""
    comm: Communicator = parts_of(holder).comm if isinstance(holder, ProcessGroup) else holder._comm
    return comm


def use_same_slots(pg: ProcessGroup) -> None:
    """Choose slots of a group by the sequence number alone, so that two groups use the same slots."""
    comm = comm_of(pg)
    comm.slots._shift = 0
    if comm.in_flight.native is not None:
        comm.in_flight.native.shift = 0


def native_calls_of(pg: ProcessGroup) -> Any:
    """Return the table of a group's calls in the C accelerator, or None without the accelerator."""
    return comm_of(pg).in_flight.native


def is_native(work: Any) -> bool:
    """Return whether the C accelerator alone carries out, or has carried out, the call of a work."""
    kinds = {type(each).__name__ for each in gc.get_referents(work)}
    return "Calls" in kinds and "Completion" not in kinds


def disable_accelerator(pg: ProcessGroup) -> None:
    """Disable the C accelerator for a group that has made no call yet."""
    comm, dispatcher = comm_of(pg), dispatcher_of(pg)
    if (native := comm.in_flight.native) is None:
        return
    assert native.count == 0
    del comm.polling.readers[native]
    comm.in_flight.native = dispatcher.native = None
    pg._one = dispatcher.one
    native.close()


def plan_without_accelerator(pg: ProcessGroup) -> None:
    """Plan the calls of a group as if some rank had no C accelerator, so that most large calls run in Python."""
    comm = comm_of(pg)
    # Copy the ranks' cards, since all ranks of one process share the same card objects.
    comm.endpoint.cards = {rank: {**card, "native": False} for rank, card in comm.endpoint.cards.items()}


def clear_stall_reports(pg: ProcessGroup) -> None:
    """Delete the stall reports that a rank keeps, since some remain after each pause of a rank."""
    stalls = comm_of(pg).stalls
    for table in (stalls._reports, stalls._findings, stalls._asked, stalls.asked_early):
        table.clear()


def dispatcher_of(pg: ProcessGroup) -> Dispatcher:
    """Return the dispatcher of a group, which starts all calls of the group."""
    return parts_of(pg).dispatcher


def group_of(part: Any) -> Any:
    """Return the group that owns an internal object."""
    return part._group


def callbacks_of(work: Any) -> Any:
    """Return the completion callbacks of a work: None, a list, or a placeholder for a waiting thread."""
    return completion_of(work).callbacks


def channels_of(pg: ProcessGroup) -> dict[int, Any]:
    """Return the channels (message queues) of a rank, by peer rank."""
    return comm_of(pg).endpoint.channels._channels


def early_bytes(pg: ProcessGroup) -> int:
    """Return the number of bytes received for collectives that this rank has not called yet."""
    return sum(len(payload) for frames in comm_of(pg).early.values() for _, _, payload in frames)


def links_of(pg: ProcessGroup) -> list[Any]:
    """Return all links of a rank, including control links."""
    return list(comm_of(pg).endpoint._all_links())


def matched_units(pg: ProcessGroup) -> Any:
    """Return the matched units of device messages that have not started."""
    return matching_of(pg)._units


def matching_of(pg: ProcessGroup) -> Any:
    """Return the object of a group that matches sends and receives of device arrays."""
    return dispatcher_of(pg).device_calls.state.messages._matching  # type: ignore[union-attr]


def nccl_end(pg: ProcessGroup) -> Any:
    """Return the NCCL communicator handle of a rank."""
    return dispatcher_of(pg).device_calls.state.communicator._tools.end  # type: ignore[union-attr]


def plans_of(pg: ProcessGroup) -> Any:
    """Return the plans in the call cache of a group."""
    return dispatcher_of(pg).plans.known.values()


def socket_of(link: Any) -> Any:
    """Return the socket of a stream link."""
    return link._stream.sock


def ungranted_bytes(channel: Any) -> int:
    """Return the number of eager bytes sent over a channel that the receiver has not granted yet."""
    return channel._unasked


def unmade_groups(pg: ProcessGroup) -> Any:
    """Return the messages for groups that this rank has not created yet, by group id."""
    return comm_of(pg).endpoint.registry.early._unmade


def waiter_of(device: Any, stream: int) -> Any:
    """Return the object that waits for the device calls on one CUDA stream."""
    return device._waiters[stream]


def waiting_bytes(channel: Any) -> int:
    """Return the number of bytes received over a channel for which no receive exists yet."""
    return channel._waiting._nbytes


def pending_waits(store: Any) -> Any:
    """Return the pending waits for keys of an in-process store, by wait number."""
    return store._waits


def set_nccl_only(pg: ProcessGroup, on: bool) -> None:
    """Set whether a group must use NCCL for CUDA arrays, as with backend="nccl"."""
    dispatcher_of(pg)._backends = {"cpu": "aio", "cuda": "nccl" if on else "aio"}
