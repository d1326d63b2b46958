"""Two-level algorithms: correct results for any split of ranks over hosts, and their traffic between hosts."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest

from aiocoll.algorithms.machine import Machine, Tuning
from aiocoll.algorithms.program import ActionKind
from aiocoll.algorithms.select import ALGORITHMS as FLAT
from aiocoll.algorithms.select import choose
from aiocoll.algorithms.two_level import select as two_level
from aiocoll.algorithms.two_level.hosts import Hosts, host_numbers

from ..each import each
from .cases import Case, cases
from .interpreter import execute
from .proof import Proof
from .simulated_machine import SimulatedMachine

ALL = sorted(two_level.ALGORITHMS)
TCP = Tuning().tcp
KIB, MIB = 1024, 1024 * 1024
#: Host numbers of the ranks: even, uneven and alternating splits, and several small hosts next to a large one.
SPLITS = [
    (0, 0, 1, 1),
    (0, 0, 0, 1),
    (0, 1, 0, 1, 0, 1),
    (0, 0, 0, 0, 1, 1, 1),
    (0, 1, 2, 2, 2, 2, 2),
    (0, 1, 1, 2, 2, 2),
    (0, 0, 1, 1, 2, 2, 3, 3, 4, 4),
    (0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
]
EVEN = [(number, per_host) for number in range(2, 8) for per_host in range(1, 18) if number * per_host <= 17]
EVEN = [(number, per_host) for number, per_host in EVEN if per_host > 1]


def splits(world_size: int) -> Iterator[tuple[int, ...]]:
    """Yield every split of `world_size` ranks over hosts that permits two levels."""
    for names in product(*(range(rank + 1) for rank in range(world_size))):
        if host_numbers(names) == names and two_level.has_two_levels(names):
            yield names


def random_split(world_size: int, random: Random) -> tuple[int, ...]:
    """Return a random split of ranks over several hosts, at least one of which has several ranks."""
    while True:
        names = [random.randrange(random.randint(2, world_size)) for _ in range(world_size)]
        if two_level.has_two_levels(names):
            return host_numbers(names)


def check_case(case: Case, seed: int) -> None:
    programs = case.programs()
    proof = Proof(programs)
    if case.kind == "barrier":
        world = set(range(case.world_size))
        assert all(proof.predecessors(rank) | {rank} == world for rank in world)
    after = execute(programs, case.memory(), seed=seed, rendezvous=False)
    case.check(after)
    for rank, program in enumerate(programs):
        assert program.algorithm == case.algorithm
        written = {action.region.buffer for action in program.actions if action.verb is not ActionKind.SEND}
        assert case.kind != "reduce" or rank == case.root or 0 not in written


def crossing(case: Case) -> list[int]:
    """Return the element counts of all messages between ranks on different hosts."""
    return [
        action.region.count
        for rank, program in enumerate(case.programs())
        for action in program.actions
        if action.verb is ActionKind.SEND and case.hosts[rank] != case.hosts[action.peer]
    ]


def works_without_buffering(case: Case) -> bool:
    """Return whether a case completes if sends block until their receive; an allreduce by "leaders" does not."""
    return (case.kind, case.algorithm) != ("allreduce", "leaders")


def whole(kind: str, algorithm: str, hosts: tuple[int, ...], block: int = 3) -> Case:
    """Return a case with root 0 and `block` elements per rank."""
    world_size = len(hosts)
    return Case(kind, algorithm, world_size, 0, block * world_size, counts=(block,) * world_size, hosts=hosts)


@each("hosts", SPLITS)
@pytest.mark.parametrize(("kind", "algorithm"), ALL)
def test_two_level_result_does_not_depend_on_the_order_of_events(
    kind: str, algorithm: str, hosts: tuple[int, ...]
) -> None:
    for number, case in enumerate(cases(kind, algorithm, len(hosts))):
        placed = replace(case, hosts=hosts)
        check_case(placed, number)
        if number % 3 == 0 and works_without_buffering(placed):
            placed.check(execute(placed.programs(), placed.memory(), seed=number, rendezvous=True))


@pytest.mark.parametrize("world_size", [3, 4, pytest.param(5, marks=pytest.mark.slow)])
@each(("kind", "algorithm"), ALL)
def test_two_level_result_is_correct_for_every_split_of_few_ranks_over_hosts(
    kind: str, algorithm: str, world_size: int
) -> None:
    random = Random(world_size)
    sized = list(cases(kind, algorithm, world_size))
    for number, hosts in enumerate(splits(world_size)):
        for case in random.sample(sized, min(len(sized), 8)):
            check_case(replace(case, hosts=hosts), number)


@pytest.mark.slow
@each("world_size", range(6, 18))
@pytest.mark.parametrize(("kind", "algorithm"), ALL)
def test_two_level_result_is_correct_for_random_splits_of_ranks_over_hosts(
    kind: str, algorithm: str, world_size: int
) -> None:
    random = Random(world_size)
    for number, case in enumerate(cases(kind, algorithm, world_size)):
        check_case(replace(case, hosts=random_split(world_size, random)), number)


@each("hosts", [*SPLITS, (0, 1) * 8, (0, 1, 2, 2) * 4])
@each(("kind", "algorithm"), ALL)
def test_number_of_bytes_between_hosts_depends_only_on_the_number_of_hosts(
    kind: str, algorithm: str, hosts: tuple[int, ...]
) -> None:
    block = 60  # divisible by all numbers of lanes and hosts
    for root in (0, len(hosts) - 1):
        sizes = crossing(replace(whole(kind, algorithm, hosts, block), root=root))
        nbytes = 0 if kind == "barrier" else block * len(hosts)
        assert sum(sizes) == two_level.bytes_between_hosts(algorithm, kind, nbytes, hosts)


def test_allreduce_traffic_between_hosts_matches_the_formula_and_is_equal_per_lane() -> None:
    """Check that every host sends 2n(h-1)/h elements, in equal parts per rank."""
    number, per_host, count = 4, 3, 4 * 3 * 10
    hosts = tuple(rank % number for rank in range(number * per_host))
    for algorithm in ("lanes", "lines"):
        for rank, program in enumerate(Case("allreduce", algorithm, 12, 0, count, hosts=hosts).programs()):
            sent = [
                action.region.count
                for action in program.actions
                if action.verb is ActionKind.SEND and hosts[action.peer] != hosts[rank]
            ]
            assert sum(sent) == 2 * count * (number - 1) // number // per_host


@each(("number", "per_host"), [(2, 2), (2, 8), (3, 4), (5, 3)])
def test_number_of_messages_between_hosts_does_not_grow_with_the_ranks_per_host(number: int, per_host: int) -> None:
    hosts = tuple(rank // per_host for rank in range(number * per_host))
    rounds = (number - 1).bit_length()
    assert len(crossing(whole("allreduce", "leaders", hosts))) == number * rounds
    assert len(crossing(whole("barrier", "leaders", hosts))) == number * rounds
    assert len(crossing(whole("reduce", "leaders", hosts))) == number - 1
    assert len(crossing(whole("broadcast", "leaders", hosts))) == number - 1
    assert len(crossing(whole("allgather", "leaders", hosts))) == number * (number - 1 if number <= 4 else rounds)
    # "lanes" and "lines" send one message per lane between hosts.
    assert len(crossing(whole("allreduce", "lines", hosts))) == 2 * number * (number - 1) * per_host
    assert len(crossing(whole("broadcast", "lanes", hosts))) == (number - 1) * per_host
    assert len(crossing(whole("reduce", "lines", hosts))) == (number - 1) * per_host
    # Each rank's block is sent between hosts as a separate message.
    assert len(crossing(whole("allgather", "lanes", hosts))) == (number - 1) * number * per_host
    assert len(crossing(whole("reduce_scatter", "lines", hosts))) == (number - 1) * number * per_host


@each(("kind", "flat"), [("allreduce", "ring"), ("allgather", "ring"), ("barrier", "dissemination")])
def test_two_level_algorithm_sends_fewer_bytes_between_hosts_than_a_flat_algorithm(kind: str, flat: str) -> None:
    for hosts in ((0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 0, 1, 1, 1, 1)):
        algorithm = two_level.choose(kind, 16 * MIB, hosts, ordered=False, portable=True, machine=TCP)
        assert algorithm is not None
        two, one = crossing(whole(kind, algorithm, hosts)), crossing(whole(kind, flat, hosts))
        assert (sum(two), len(two)) < (sum(one), len(one))


@pytest.mark.parametrize(("number", "per_host"), EVEN)
@pytest.mark.parametrize(("kind", "algorithm"), ALL)
def test_cost_formulas_of_two_level_algorithms_equal_the_costs_of_the_programs(
    kind: str, algorithm: str, number: int, per_host: int
) -> None:
    hosts = tuple(rank // per_host for rank in range(number * per_host))
    case = whole(kind, algorithm, hosts, block=number * per_host)
    programs = case.programs()
    sent = [
        sum(action.region.count for action in program.actions if action.verb is ActionKind.SEND) for program in programs
    ]
    nbytes = 0 if kind == "barrier" else case.count
    assert two_level.cost(algorithm, kind, nbytes, hosts) == (Proof(programs).steps, max(sent))


def test_cost_of_an_empty_call_is_zero() -> None:
    assert two_level.cost("lanes", "allreduce", 0, (0, 0, 1)) == (0, 0)
    assert two_level.cost("leaders", "barrier", 0, (0, 0, 1, 1)) == (3, 0)


@each("hosts", [(0, 0, 1, 1), (0, 0, 0, 1), (0, 0, 0, 0, 1, 1, 1, 1), (0, 1, 2, 2, 2, 2, 2)])
@each("kind", sorted({kind for kind, _ in ALL}))
def test_predicted_times_of_two_level_algorithms_approximate_the_simulated_times(
    kind: str, hosts: tuple[int, ...]
) -> None:
    """Check that predicted times are between 0.45 and 1.8 times the simulated times."""
    for nbytes in (0,) if kind == "barrier" else (64, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB):
        algorithm = two_level.choose(kind, nbytes, hosts, ordered=False, portable=True, machine=TCP)
        if algorithm is not None:
            case = whole(kind, algorithm, hosts, block=max(nbytes // len(hosts), 1))
            taken = SimulatedMachine(case.programs(), TCP).seconds
            predicted = two_level.predict(algorithm, kind, case.count if nbytes else 0, hosts, TCP)
            assert 0.45 * taken <= predicted <= 1.8 * taken, (algorithm, nbytes, predicted / taken)


def test_two_level_chain_streams_pieces_and_uses_no_scratch_memory() -> None:
    for program in whole("allreduce", "lines", (0, 0, 1, 1)).programs():
        assert program.scratch == ()
        assert not any(action.after for action in program.actions)


# -- the selection of algorithms


@each("kind", sorted({kind for kind, _ in FLAT}))
def test_algorithm_selection_does_not_change_if_two_levels_are_impossible(kind: str) -> None:
    for hosts in ((), (0, 0, 0, 0), (0, 1, 2, 3)):
        for nbytes in (0, 4, 64 * KIB, MIB, 16 * MIB):
            for ordered, portable in product((False, True), repeat=2):
                needs = {"ordered": ordered, "portable": portable}
                assert choose(kind, nbytes, 4, **needs, hosts=hosts) == choose(kind, nbytes, 4, **needs)


@each("kind", sorted({kind for kind, _ in FLAT}))
def test_ops_that_need_rank_order_use_a_flat_algorithm(kind: str) -> None:
    reducing = kind in ("allreduce", "reduce", "reduce_scatter", "scan", "exscan")
    for nbytes in (0, 4, 64 * KIB, MIB, 16 * MIB):
        name = choose(kind, nbytes, 4, ordered=True, hosts=(0, 0, 1, 1))
        assert not reducing or name == choose(kind, nbytes, 4, ordered=True)


@each(
    ("kind", "nbytes", "expected"),
    [
        ("allreduce", 4, "leaders"),
        ("allreduce", 256 * KIB, "leaders"),
        ("allreduce", 256 * KIB + 4, "lanes"),
        ("allreduce", 16 * MIB, "lines"),
        ("reduce", 256 * KIB, "leaders"),
        ("reduce", 256 * KIB + 4, "lines"),
        ("reduce", 16 * MIB, "lines"),
        ("reduce_scatter", 16 * MIB, "lines"),
        ("broadcast", 512 * KIB, "leaders"),
        ("broadcast", 16 * MIB, "lanes"),
        ("allgather", 4 * KIB, "leaders"),
        ("allgather", 16 * MIB, "lanes"),
        ("barrier", 0, "leaders"),
    ],
)
@each("hosts", [(0, 0, 1, 1), (0, 1, 1, 1), (0, 1, 0, 1)])
def test_two_level_selection_matches_the_expected_table(
    kind: str, nbytes: int, expected: str, hosts: tuple[int, ...]
) -> None:
    assert choose(kind, nbytes, 4, hosts=hosts) == expected


def test_size_limit_of_the_leaders_algorithm_falls_with_the_number_of_hosts() -> None:
    hosts = (0, 0, 1, 2, 3, 4)
    assert choose("allreduce", 16 * KIB, 6, hosts=hosts) == "leaders"
    assert choose("allreduce", 16 * KIB + 4, 6, hosts=hosts) == "lanes"


@each("kind", ["reduce_scatter", "monitored_barrier", "gather", "scatter", "alltoall", "scan"])
def test_flat_algorithm_is_selected_where_two_levels_save_no_time(kind: str) -> None:
    """Check kinds without a two-level algorithm, and small reduce_scatter calls, where two levels save no time."""
    for nbytes in (0, 4, 4 * KIB) if kind == "reduce_scatter" else (0, 4 * KIB, 16 * MIB):
        assert choose(kind, nbytes, 4, hosts=(0, 0, 1, 1)) == choose(kind, nbytes, 4)


def test_size_limits_of_two_level_algorithms_scale_with_the_network_latency() -> None:
    """Check that ten times the TCP latency makes size limits ten times as large, even with medium "shm"."""
    tuning = Tuning(tcp=Machine(TCP.alpha * 10, TCP.overhead, TCP.beta, TCP.gamma), medium="shm")
    assert choose("allreduce", 2560 * KIB, 4, hosts=(0, 0, 1, 1), tuning=tuning) == "leaders"
    assert choose("allreduce", 2560 * KIB + 4, 4, hosts=(0, 0, 1, 1), tuning=tuning) == "lanes"


def test_size_limit_of_the_lanes_algorithm_grows_with_the_number_of_lanes() -> None:
    for lanes in (2, 4, 8):
        hosts = (0,) * lanes + (1,) * lanes
        assert choose("allreduce", lanes * 512 * KIB, 2 * lanes, hosts=hosts) == "lanes"
        assert choose("allreduce", lanes * 512 * KIB + 4, 2 * lanes, hosts=hosts) == "lines"


def test_allreduce_whose_result_depends_on_the_machine_reduces_each_element_on_one_rank() -> None:
    hosts = (0, 0, 1, 1)
    assert choose("allreduce", 4, 4, portable=False, hosts=hosts) == "lanes"
    for algorithm in ("lanes", "lines"):
        programs = whole("allreduce", algorithm, hosts).programs()
        assert sum(action.region.count for program in programs for action in program.actions if action.final) == 12


def test_each_two_level_algorithm_is_selected_for_some_call() -> None:
    chosen = {
        (kind, two_level.choose(kind, nbytes, (0, 0, 1, 1), ordered=False, portable=True, machine=TCP))
        for kind in two_level.RULES
        for nbytes in (0, 512 * KIB, 64 * MIB)
    }
    assert {pair for pair in chosen if pair[1]} == set(two_level.ALGORITHMS)
    assert {(kind, rule.algorithm) for kind, rules in two_level.RULES.items() for rule in rules if rule.algorithm} == (
        set(two_level.ALGORITHMS)
    )


# -- hosts


def test_hosts_are_numbered_in_the_order_of_their_lowest_ranks() -> None:
    assert host_numbers(["b", "a", "b", "c", "a"]) == (0, 1, 0, 2, 1)
    assert host_numbers([]) == ()
    assert not two_level.has_two_levels(())
    assert not two_level.has_two_levels((0, 0))
    assert not two_level.has_two_levels((0, 1))
    assert two_level.has_two_levels((0, 1, 1))


def test_teams_and_lanes_are_derived_from_the_hosts_of_the_ranks() -> None:
    hosts = Hosts((0, 1, 0, 1, 0, 0, 1))
    assert hosts.teams == ((0, 2, 4, 5), (1, 3, 6))
    assert hosts.place == (0, 0, 1, 1, 2, 3, 2)
    assert hosts.leaders == (0, 1)
    assert [hosts.gates(lane) for lane in range(hosts.lanes)] == [[0, 1], [2, 1], [4, 3], [5, 6]]
    assert [hosts.counterparts(rank) for rank in (0, 2, 4, 5)] == [[0, 1], [2, 1], [4, 3], [5, 6]]
    assert [hosts.counterparts(rank) for rank in (1, 3, 6)] == [[0, 1], [2, 3], [4, 6]]
    assert hosts.rotated_team(4) == [4, 5, 0, 2]
    assert hosts.rotated_hosts(1) == [1, 0]
