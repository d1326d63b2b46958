"""The subjects of mutation testing: parts of aiocoll, each with the tests that must catch its faults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from .places import Package

__all__ = ["COUNT", "SUBJECTS", "Subject", "files", "pytest_arguments", "quota"]

#: The number of randomly drawn mutants in all subjects together.
COUNT = 150


class Subject(NamedTuple):
    """A part of aiocoll to plant faults in, and the tests that must catch them.

    Attributes:
        names: one function of each module that belongs to the subject, by qualified name.
        tests: runs of pytest, made in order until one fails. Each has options, and files by name, anywhere in `tests/`.
        native: whether the tests run with the accelerator, which would bypass the code of most other subjects.
    """

    names: tuple[str, ...]
    tests: tuple[tuple[str, ...], ...]
    native: bool = False


WINDOWS = (
    "test_windows.py",
    "-k",
    "(memory or closed_group or interleaved) and not keyed_calls and not large_messages and not never",
)
GOODBYE = ("test_goodbye.py", "-k", "2 or 3")
EVERY_CALL = ("test_virtual.py", "-k", "every_call and not 8 or has_left or missing")
RECOVERY = ("group/test_recovery.py", "engine/test_shrink.py", "-k", "not at_any_message")
AGREEMENT = (
    ("test_agreement.py",),
    ("test_paxos.py", "-k", "not despite"),
    RECOVERY,
    ("test_paxos.py", "engine/test_shrink.py", "-k", "despite or at_any_message"),
)

SUBJECTS: Mapping[str, Subject] = MappingProxyType(
    {
        "native": Subject(
            ("InFlight.adopt", "native_calls", "SlotProgram.adopt", "Relay.of"),
            (
                ("native/test_declined.py", "native/test_works.py", "native/test_reasons.py"),
                ("native/test_mixed.py", "native/test_waiting_calls.py", "native/test_direct.py"),
                ("native/test_relays.py", "-k", "over or between or gather"),
            ),
            native=True,
        ),
        "works": Subject(("Work.add_done_callback",), (("tests/test_work.py",),)),
        "store core": Subject(
            ("StoreCore.apply", "_compare_set"),
            (
                ("test_core.py", "store/test_contract.py", "-k", "hash and not prefix or put_back"),
                ("test_tcp.py", "-k", "cut_off or cancelled or vanishes or limited or wait"),
            ),
        ),
        "codec": Subject(
            ("_Encoder.put", "_Decoder._list", "_join_array"),
            (("test_roundtrip.py", "-k", "not 65537 and not 32769"), ("test_refusals.py",), ("codec/test_reading.py",)),
        ),
        "relay": Subject(
            ("ShmRing.look", "take_chunk"),
            (
                ("test_relay.py", "test_shared_memory.py"),
                (
                    "test_empty.py",
                    "-k",
                    "read and not schedule or written_after or function_raises or counts_near and shm and not 7",
                ),
            ),
        ),
        "exchange": Subject(
            ("ProgramExecutor.deliver",),
            (
                EVERY_CALL,
                ("test_overlong.py", "-k", "memory or unix"),
                WINDOWS,
                ("test_uneven.py",),
                ("group/test_collectives.py", "-k", "memory"),
            ),
        ),
        "channel": Subject(
            ("Channel.pump",),
            (
                WINDOWS,
                ("test_overlong.py", "-k", "memory or unix"),
                GOODBYE,
                EVERY_CALL,
                ("test_cancellation.py", "-k", "not sockets"),
                ("test_slot_program.py", "test_relay.py", "-k", "frames or link or order or raises"),
                ("test_bounds.py", "-k", "fits and not shm"),
            ),
        ),
        "handshake": Subject(
            ("ServerHandshake.verdict",),
            (
                ("test_handshake.py", "test_loop_timeout.py", "test_dialler.py"),
                ("test_stream.py",),
                ("test_blocked_handshakes.py",),
            ),
        ),
        "shrink": Subject(("Voter.shrink",), AGREEMENT),
        "coordinator": Subject(("Coordinator.consider",), AGREEMENT),
        "endpoint": Subject(
            (
                "Endpoint.add",
                "Channels.lost",
                "Groups.on_rank_end",
                "Context.spawn",
                "Roster.record_loss",
                "UnmadeGroups.keep_frame",
            ),
            (
                ("test_goodbye.py", "engine/test_deaths.py", "-k", "2 or 3"),
                RECOVERY,
                ("test_windows.py", "-k", "memory and (precedes or failed_group) or closed_group"),
                ("group/test_group.py", "test_subgroups.py", "test_connect.py", "test_waiting.py"),
                ("test_bounds.py", "-k", "per_peer"),
            ),
        ),
        "session": Subject(
            ("Session.message_received",),
            (
                ("test_tcp.py", "-k", "cut_off or no_handshake_deadline or never_wins"),
                ("test_claim.py", "-k", "server"),
            ),
        ),
        "control": Subject(("ControlPlane.send_to_others", "Departure.on_end", "Receiver.receive"), (GOODBYE,)),
        "slots": Subject(
            (
                "_Writer.reserve",
                "Slots.look_at",
                "Round.of",
                "SlotProgram._fold",
                "ProgramExecutor.look",
                "ObjectExchange.look",
                "StrayPosts._look",
                "ChunkQueueWriter.take",
            ),
            (
                ("test_shm_slots.py", "test_stray_posts.py", "test_round.py", "test_outbox.py"),
                ("test_slot_program.py", "test_slot_program_blocks.py", "test_slot_program_tensor.py", "-k", "not 7"),
                ("test_slot_program_central.py", "-k", "not 7"),
                ("test_slot_program_moves.py", "test_unsized.py", "-k", "not 7"),
            ),
        ),
        "failure detector": Subject(
            ("PidFd.has_ended", "Watchdog._do_round", "FailureDetector.linked"),
            (("test_process.py",), ("test_detector_faults.py", "-k", "not 5000"), ("test_watchdog.py",)),
        ),
        "sharing memory": Subject(
            ("propose", "SharedRegion.open", "Doorbell.__init__"),
            (("test_shm_dial.py",), ("test_shm_region.py",)),
        ),
        "single copy": Subject(
            ("ReferenceWriter.write", "PeerMemory.read"),
            (
                ("test_shm_references.py",),
                ("test_shm_process_memory.py", "-k", "not unprivileged"),
                ("test_in_place.py", "-k", "not 7"),
                ("test_single_copy.py", "-k", "one_frame"),
            ),
        ),
        "plans by arrays": Subject(
            ("CallCache.parts",),
            (("test_array_parts.py",), ("test_call_cache.py",)),
        ),
        "prepared calls": Subject(
            ("PlannedCall.prepare_again", "Batch.take"),
            (("test_prepared_call.py",), ("group/test_plans.py",), ("test_coalescing.py",)),
        ),
        "what is kept": Subject(
            (
                "Packer._drop_references",
                "Batch.__aexit__",
                "Completion.finish",
                "Recording.settle",
                "PostedReceive.succeed",
                "ProgramExecutor._progress",
                "VerifiedOperation._conclude",
                "_AnnouncedSend.succeed",
                "DeviceSend.succeed",
            ),
            (("group/test_garbage.py",), ("gpu/test_garbage.py",)),
        ),
        "signals": Subject(("signals_to", "_handle"), (("cli/test_signals.py",), ("dump/test_signals.py",))),
        "codec keys": Subject(("check_keys",), (("test_key_costs.py",),)),
        "users": Subject(("peer_trouble",), (("tests/test_users.py",),)),
        "output": Subject(("Sink.write", "OutputRelay.drain"), (("cli/test_output.py", "-m", "not slow"),)),
        "redis store": Subject(
            ("RedisStore._wait", "RedisClient.call", "RedisAddress.refusal"),
            (("redis/test_redis.py",), ("store/test_contract.py", "-k", "redis and not prefix and missing")),
        ),
        "elastic": Subject(
            ("_ElasticRank._grow", "await_assignment", "find_assignment", "Store._call_checked"),
            (
                ("meeting/test_growth.py", "tests/test_elastic.py"),
                ("group/test_growth.py",),
                ("test_stopped_stores.py", "-k", "False or users_store"),
            ),
        ),
        "tickets": Subject(
            ("Meeting.ticket", "Membership._stay_in_group", "Claims._claim"),
            (("test_claim.py", "test_exchange.py"), ("test_tickets.py", "test_membership.py")),
        ),
        "machine load": Subject(("LoadMeter.lap",), (("test_machine_load.py",),)),
        "tls": Subject(("make_own_contexts", "RenewedContexts.get"), (("test_tls.py", "test_user_ca.py"),)),
        "blocking": Subject(
            ("LoopThread.post", "BlockingGroup.submit"), (("test_blocking.py", "test_loop_thread.py"),)
        ),
        "sparse messages": Subject(("_AnnouncedSend._on_payload",), (("test_sparse_messages.py",),)),
        "steps": Subject(("SteppedOperation.fail", "Children.start"), (("test_stepped.py",),)),
        "devices": Subject(
            (
                "Device.page_locked",
                "CompletionThread.admit",
                "LaunchThread.attempt",
                "Staging.give",
                "Events.record",
                "EndWord.follow",
            ),
            (
                ("test_bounce.py", "test_contexts.py", "test_stalls.py", "test_driver.py", "test_looks.py"),
                ("gpu/test_device.py", "test_device_ends.py", "gpu/test_staging.py"),
                ("gpu/test_ahead.py", "gpu/test_communicator.py"),
                ("gpu/test_groups.py", "test_groups_failing.py", "test_groups_sends.py"),
            ),
        ),
        "order on devices": Subject(
            (
                "LaunchOrder.settle",
                "Slots.turn",
                "CallComparison.compare_reports",
                "Pacing.on_halt",
                "ProgramOrder.add",
                "CallOrder.handle",
            ),
            (("test_launch_order.py", "gpu/test_ahead.py"), ("test_overlapping.py",)),
        ),
        "nccl": Subject(
            ("DeviceCommunicator.launch", "CtypesCommunicator.finish", "_Nccl.init"),
            (
                ("test_ctypes_api.py", "test_cupy_api.py", "gpu/test_communicator.py", "test_looks.py"),
                ("gpu/test_adapters.py", "test_contexts.py", "test_bounce.py", "gpu/test_ahead.py"),
            ),
        ),
        "adapters": Subject(
            ("_Adapters._forget_types", "Dispatcher._check_arrays", "same_place"),
            (("elements/test_adapters.py", "dispatch/test_devices.py"), ("elements/test_device.py",)),
        ),
        "group ids": Subject(("ClosedGroups.close",), (("test_group_ids.py", "-k", "not 5"),)),
        "wrong reports": Subject(
            ("Roster.on_own_death",), (("test_wrong_reports.py", "test_reports.py", "-k", "not more and not many"),)
        ),
        "nans": Subject(("nan_fingerprint",), (("group/test_nans.py",), ("integration/test_nans.py",))),
        "arguments": Subject(
            ("to_int",), (("test_numpy_arguments.py", "elements/test_buffers.py"), ("group/test_asyncio.py",))
        ),
        "user code": Subject(("contain",), (("test_user_code.py",), ("test_blocking.py", "test_loop_thread.py"))),
        "journal": Subject(
            ("Journal.ended", "Communicator.ended", "Children.start"),
            (("engine/test_journal.py", "engine/test_recorder.py"), ("group/test_stats.py",)),
        ),
        "unclosed groups": Subject(("LoopEnd.add",), (("test_unclosed.py",), ("test_user_code.py", "-k", "exit"))),
    }
)
#: Subjects whose faults are all written by hand, not drawn.
BY_HAND = (
    "session",
    "control",
    "slots",
    "failure detector",
    "sharing memory",
    "single copy",
    "redis store",
    "elastic",
    "tickets",
    "machine load",
    "tls",
    "blocking",
    "sparse messages",
    "steps",
    "devices",
    "order on devices",
    "nccl",
    "plans by arrays",
    "prepared calls",
    "what is kept",
    "signals",
    "adapters",
    "group ids",
    "wrong reports",
    "output",
    "users",
    "codec keys",
    "user code",
    "journal",
    "unclosed groups",
    "nans",
    "arguments",
    "native",
    "works",
)


def quota() -> dict[str, int]:
    """Return the number of mutants to draw for each subject that is not in `BY_HAND`."""
    drawn = [name for name in SUBJECTS if name not in BY_HAND]
    return {name: COUNT // len(drawn) + (place < COUNT % len(drawn)) for place, name in enumerate(drawn)}


def files(package: Package, subject: str) -> set[Path]:
    """Return the paths of a subject's modules."""
    found = {path for name in SUBJECTS[subject].names for path, _ in package.functions.get(name, ())}
    if len(found) < len(SUBJECTS[subject].names):
        raise LookupError(
            f"{subject}: not every function exists: {', '.join(SUBJECTS[subject].names)}; update `SUBJECTS`"
        )
    return found


def pytest_arguments(tests: Path, run: tuple[str, ...]) -> list[str]:
    """Return the arguments of a pytest run, with file names replaced by paths."""
    arguments = []
    for each in run:
        if not each.endswith(".py"):
            arguments.append(each)
            continue
        paths = sorted(path for path in tests.rglob(each.rpartition("/")[2]) if path.match(each))
        if len(paths) != 1:
            raise LookupError(f"{each}: {len(paths)} files of that name in {tests}; update `SUBJECTS`")
        arguments.append(str(paths[0]))
    return arguments
