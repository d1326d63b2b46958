"""Where tests reach into a group: the only file that knows the names of its private parts."""

from __future__ import annotations

from typing import Any, Protocol

import pytest

from aiocoll import ProcessGroup
from aiocoll.engine.communicator import Communicator
from aiocoll.group.dispatch.dispatcher import Dispatcher

__all__ = ["LIMITS", "Limits", "comm_of", "dispatcher_of", "set_limits"]

#: Seconds, sizes and counts that tests change, by a plain name: where each is read.
LIMITS = {
    # the links of a group, and what is kept of a peer
    "ask_window": ("aiocoll.engine.links.flow_control.ASK_WINDOW", "aiocoll.engine.links.channel.ASK_WINDOW"),
    "early_grants": ("aiocoll.engine.links.flow_control.EARLY_GRANTS",),
    "link_window": ("aiocoll.engine.links.flow_control.LINK_WINDOW", "aiocoll.engine.links.channel.LINK_WINDOW"),
    "unmade_groups": ("aiocoll.engine.control.unmade_groups.GROUPS",),
    "window_lot": ("aiocoll.engine.links.channel.WINDOW_LOT",),
    # sizes of objects
    "compared_size": ("aiocoll.engine.operations.verify.Compared.LIMIT",),
    "exchanged_size": ("aiocoll.engine.operations.object_exchange.ObjectExchange.LIMIT",),
    "received_size": ("aiocoll.engine.matching.posted.MAX_BYTES",),
    "sparse_inline": ("aiocoll.group.sparse_reduce.INLINE",),
    # failure
    "blocked_after": ("aiocoll.engine.failure.watchdog.BLOCKED_AFTER",),
    "connect_again": ("aiocoll.engine.failure.failure_detector.CONNECT_AGAIN",),
    "control_parting": ("aiocoll.engine.control.star.PARTING",),
    "linger": ("aiocoll.engine.failure.refusal.LINGER", "aiocoll.engine.endpoint.LINGER"),
    "ring_budget": ("aiocoll.engine.operations.shm_ring.BUDGET",),
    "report_after": ("aiocoll.engine.failure.deadlines.REPORT_AFTER",),
    "stream_grace": ("aiocoll.transport.stream.transport._GRACE",),
    "unreachable_after": ("aiocoll.engine.failure.watchdog.UNREACHABLE_AFTER",),
    "watchdog_round": ("aiocoll.engine.failure.watchdog.ROUND", "aiocoll.engine.failure.failure_detector.ROUND"),
    # stores
    "store_entries": ("aiocoll.store.core.MAX_ENTRIES",),
    "store_handshake": ("aiocoll.store.client.HANDSHAKE_TIMEOUT", "aiocoll.store.session.HANDSHAKE_TIMEOUT"),
    "store_size": ("aiocoll.store.core.MAX_TOTAL_BYTES",),
    # devices
    "agreement_parting": ("aiocoll.group.cuda.backend_agreement.PARTING",),
    "device_aborting": ("aiocoll.group.cuda.communicator.ABORTING",),
    "device_ask_every": ("aiocoll.group.cuda.communicator.ASK_EVERY",),
    "device_finishing": ("aiocoll.group.cuda.communicator.FINISHING",),
    "device_kept_calls": ("aiocoll.group.cuda.device_state.KEPT",),
    "device_looks": ("aiocoll.gpu.waiter.LOOKS",),
    "device_parting": ("aiocoll.group.cuda.communicator.PARTING",),
    "device_patience": ("aiocoll.group.cuda.matching.PATIENCE",),
    "device_release": ("aiocoll.group.cuda.device_state.RELEASE",),
    "staging_kept": ("aiocoll.gpu.staging.KEPT",),
    # commands and testing
    "doctor_patience": ("aiocoll.cli.doctor._PATIENCE",),
    "run_drain": ("aiocoll.cli.supervise.DRAIN",),
    "run_grace": ("aiocoll.cli.supervise.GRACE",),
    "run_release": ("aiocoll.cli.supervise.RELEASE",),
    "testing_release": ("aiocoll.testing.team.RELEASE",),
    "tune_enough": ("aiocoll.cli.tune.ENOUGH",),
}


class Limits(Protocol):
    """The fixture `limits`: change limits of `LIMITS` for one test."""

    def __call__(self, **values: float) -> None: ...


def set_limits(patch: pytest.MonkeyPatch, **values: float) -> None:
    """Change limits of `LIMITS`, by their names there."""
    if unknown := values.keys() - LIMITS.keys():
        raise ValueError(f"no limits: {', '.join(sorted(unknown))}; there are: {', '.join(sorted(LIMITS))}")
    for name, value in values.items():
        for place in LIMITS[name]:
            patch.setattr(place, value)


def comm_of(holder: Any) -> Communicator:
    """Return the communicator of a group, or of a part of one."""
    comm: Communicator = holder._comm
    return comm


def dispatcher_of(pg: ProcessGroup) -> Dispatcher:
    """Return what all calls of a group go through."""
    return pg._dispatcher
