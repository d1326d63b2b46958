"""The specifications of collectives, compared with the schedules and with independent lists; unknown kinds."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from aiocoll.algorithms.program import ActionKind, Program, Region
from aiocoll.algorithms.select import ALGORITHMS, RULES, build, choose
from aiocoll.algorithms.spec import PROGRAMS, SPECS, Method, Spec, spec_of
from aiocoll.algorithms.two_level import select as two_level
from aiocoll.cli.workload import Case as Benchmark
from aiocoll.cli.workload import Workload, bus_factor
from aiocoll.engine.operations.comparison import SHAPED
from aiocoll.engine.operations.plan import Plan
from aiocoll.engine.operations.program_executor import ProgramExecutor
from aiocoll.engine.operations.signature import Signature
from aiocoll.gpu.api import NcclCommunicator
from aiocoll.gpu.calls.native import PACKED, make_enqueue, way_of
from aiocoll.group.dispatch.planner import Planner
from aiocoll.group.interceptors.fuse import Fuser

from ..each import each
from .cases import BARRIERS, PER_RANK, REDUCING, ROOTED, Case, supported_world_size

WORLDS = (1, 2, 3, 4, 7)
PRIVATE = {"gather", "scatter", "alltoall"}


def cases(kind: str, algorithm: str) -> Iterator[Case]:
    """Yield a case for every world size and root, with a different count on each rank."""
    levels = (kind, algorithm) in two_level.ALGORITHMS
    for world_size in dict.fromkeys(supported_world_size(algorithm, size) for size in WORLDS if size > 2 or not levels):
        world = range(world_size)
        counts = tuple(5 + rank for rank in world)
        matrix = tuple(tuple(1 + world_size * rank + peer for peer in world) for rank in world)
        for root in world if kind in ROOTED else (0,):
            hosts = tuple(rank % 2 for rank in world) if levels else ()
            yield Case(kind, algorithm, world_size, root, 11, counts, matrix, hosts)


def sizes(case: Case, rank: int) -> tuple[Any, ...]:
    """Return the element counts that `rank` knows; counts of other ranks' blocks are 0 if the root alone knows them."""
    given = case._sizes(rank)
    if case.kind in ("gather", "scatter") and rank != case.root:
        return (tuple(count if each == rank else 0 for each, count in enumerate(given[0])),)
    return given


def touched(program: Program, buffers: int) -> tuple[set[tuple[int, int]], set[tuple[int, int]]]:
    """Return two sets of user buffer elements: read before any write by the schedule, and written by it."""
    read: set[tuple[int, int]] = set()
    written: set[tuple[int, int]] = set()

    def elements(region: Region) -> set[tuple[int, int]]:
        numbers = range(region.start, region.stop) if region.buffer < buffers else ()
        return {(region.buffer, number) for number in numbers}

    for action in program.actions:
        sources = action.sources
        if action.verb is ActionKind.SEND or (action.verb is ActionKind.COMBINE and not sources):
            sources = (action.region,)
        for source in sources:
            read |= elements(source) - written
        if action.verb is not ActionKind.SEND:
            written |= elements(action.region)
    return read, written


def whole(buffers: tuple[int, ...], memory: list[list[Any]]) -> set[tuple[int, int]]:
    return {(buffer, number) for buffer in buffers for number in range(len(memory[buffer]))}


def test_specification_table_covers_every_kind_that_has_selection_rules() -> None:
    assert list(SPECS) == [spec.kind for spec in SPECS.values()]
    assert {spec.kind for spec in PROGRAMS} == set(RULES) == {kind for kind, _ in ALGORITHMS}
    assert {kind for kind, spec in SPECS.items() if spec.method is Method.PROGRAM} == set(RULES)
    assert set(SPECS) >= set(two_level.RULES)


def test_specifications_match_the_definitions_of_the_collectives() -> None:
    def kinds(condition: Callable[[Spec], object]) -> set[str]:
        return {spec.kind for spec in PROGRAMS if condition(spec)}

    assert kinds(lambda spec: spec.reduces) == REDUCING
    assert kinds(lambda spec: spec.rooted) == ROOTED
    assert kinds(lambda spec: spec.private) == PRIVATE
    assert kinds(lambda spec: spec.in_blocks) == PER_RANK | {"alltoall"}
    assert kinds(lambda spec: spec.input is None) == kinds(lambda spec: spec.output is None) == set(BARRIERS)
    shaped = {kind for kind in RULES if kind.upper() in SHAPED}
    assert shaped == {"allreduce", "reduce", "broadcast", "scan", "exscan"}


def test_specifications_name_the_nccl_function_of_each_collective() -> None:
    native = {kind: spec.native for kind, spec in SPECS.items() if spec.native is not None}
    assert set(native) == set(RULES) - {*BARRIERS, "scan", "exscan"}
    assert {kind for kind, call in native.items() if call == "send_recv"} == PRIVATE
    calls = set(native.values()) - {"send_recv"}
    assert calls == {name for name in calls if hasattr(NcclCommunicator, name)}
    assert {kind: call.replace("_", "") for kind, call in native.items() if call != "send_recv"} == {
        kind: kind.replace("_", "") for kind in set(native) - PRIVATE
    }


@each(("kind", "algorithm"), sorted({**ALGORITHMS, **two_level.ALGORITHMS}))
def test_programs_read_all_inputs_and_write_all_outputs(kind: str, algorithm: str) -> None:
    spec = spec_of(kind)
    for case in cases(kind, algorithm):
        memory, size = case.memory(), case.world_size
        for rank, program in enumerate(case.programs()):
            inputs, outputs = spec.inputs(rank, size, case.root), spec.outputs(rank, size, case.root)
            read, written = touched(program, len(memory[rank]))
            assert read <= whole(inputs, memory[rank])
            assert written <= whole(outputs, memory[rank])
            # A program of a single rank has no action. No rank uses the exscan input of the last rank.
            if size > 1:
                assert written == whole(outputs, memory[rank])
                if (kind, rank) != ("exscan", size - 1):
                    assert read == whole(inputs, memory[rank])


@each(("kind", "algorithm"), sorted(ALGORITHMS))
def test_element_counts_of_the_specification_match_the_buffer_sizes(kind: str, algorithm: str) -> None:
    spec = spec_of(kind)
    for case in cases(kind, algorithm):
        memory, programs = case.memory(), case.programs()
        for rank in range(case.world_size):
            known = sizes(case, rank)
            sends, receives = spec.lengths(known, rank, case.root)
            agreed = () if kind in PRIVATE else known[0] if kind in PER_RANK else known
            counts = spec.counts(agreed, sends, receives, rank, case.root)
            assert [count or 0 for count in counts] == [len(buffer) for buffer in memory[rank]]
            given = spec.sizes(counts, rank)
            assert given == known
            assert build(kind, algorithm, rank, case.world_size, *given, root=case.root) == programs[rank]


@each(("kind", "algorithm"), sorted(pair for pair in ALGORITHMS if pair[0] in PRIVATE))
def test_private_blocks_are_exchanged_with_the_peer_named_by_the_specification(kind: str, algorithm: str) -> None:
    spec = spec_of(kind)
    for case in cases(kind, algorithm):
        size = case.world_size
        for rank, program in enumerate(case.programs()):
            sends, receives = spec.lengths(sizes(case, rank), rank, case.root)
            for action in program.actions:
                if action.verb is not ActionKind.COPY:
                    assert action.peer == spec.peer(action.region.buffer, size, case.root)
                    lengths = sends if action.verb is ActionKind.SEND else receives
                    assert action.region.count == lengths[action.peer]


@each("kind", RULES)
def test_program_depends_on_the_root_only_if_its_specification_is_rooted(kind: str) -> None:
    cases = [Case(kind, choose(kind, 44, 3), 3, root, 11, (5, 6, 7), ((1,) * 3,) * 3) for root in range(2)]
    first, second = (case.programs() for case in cases)
    assert (first == second) is not spec_of(kind).rooted


@each("kind", RULES)
def test_program_has_reduction_actions_only_if_its_specification_reduces(kind: str) -> None:
    case = Case(kind, choose(kind, 44, 3), 3, 0, 11, (5, 6, 7), ((1,) * 3,) * 3)
    verbs = {action.verb for program in case.programs() for action in program.actions}
    assert bool(verbs & {ActionKind.COMBINE, ActionKind.FOLD}) is spec_of(kind).reduces


def unknown() -> Plan:
    return Plan(Signature("ROTATE", "uint8", (4,), None, None), Program(()), None, None, ProgramExecutor)


MEMBER: Any = SimpleNamespace(rank=0, ranks=[0, 1], hosts=(), chunk_nbytes=0)

READERS: dict[str, Callable[[], object]] = {
    "the table": lambda: spec_of("rotate"),
    "choosing": lambda: choose("rotate", 4, 2),
    "building": lambda: build("rotate", "ring", 0, 2, 4),
    "planning": lambda: Planner(MEMBER, dry=False).plan("rotate", None, (4,)),
    "fusing one": lambda: Fuser(MEMBER, Planner(MEMBER, dry=False)).layout((unknown(),)),
    "fusing several": lambda: Fuser(MEMBER, Planner(MEMBER, dry=False)).layout((unknown(), unknown())),
    "the call on a device": lambda: way_of(unknown(), False),
    "a device": lambda: make_enqueue(unknown(), PACKED),
    "a benchmark's sizes": lambda: Benchmark("rotate", 4).count(2),
    "a benchmark's arrays": lambda: Workload(Benchmark("rotate", 4), 0, 2),
    "a benchmark's bandwidth": lambda: bus_factor("rotate", 2),
}


@each("reader", READERS)
def test_unknown_collective_kind_raises_an_error_that_lists_the_known_kinds(reader: str) -> None:
    with pytest.raises(ValueError, match=r"kind='rotate' is not a collective; use one of allreduce, reduce, "):
        READERS[reader]()


def test_nccl_call_for_a_collective_that_nccl_lacks_is_refused() -> None:
    plan = Plan(Signature("SCAN", "uint8", (4,), None, "SUM"), Program(()), None, None, ProgramExecutor)
    with pytest.raises(ValueError, match="NCCL cannot carry out scan: stage it"):
        make_enqueue(plan, PACKED)
