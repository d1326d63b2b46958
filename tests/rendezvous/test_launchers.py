"""Tests of `env://` with the environment variables of each launcher. `test_pmi.py` tests the PMI protocol."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiocoll import AuthenticationError, GroupOptions, RendezvousError
from aiocoll import distributed as dist
from aiocoll.endpoints import parse_endpoint
from aiocoll.rendezvous import same_host
from aiocoll.rendezvous.launchers import LAUNCHERS, common_parent, local_numbers, recognise
from aiocoll.rendezvous.parameters import RendezvousParameters, find_parameters

OPTIONS = GroupOptions.resolve(None, {})

#: Environment variables that launchers set for rank 1 of 3 ranks, if its host has two of the ranks.
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "AIOCOLL_PORT": "29600",
    "RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
EXPLICIT = {name: TORCHRUN[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
MPICH = {"PMI_FD": "9", "PMI_RANK": "1", "PMI_SIZE": "3", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "prterun-login-node-0.cluster-4711@1",
    "PMIX_SERVER_URI41": "prterun-login-node-0.cluster-4711@0.1;tcp4://127.0.0.1:51467",
}
OPEN_MPI_4 = OPEN_MPI_5 | {
    "PMIX_NAMESPACE": "456392705",
    "OMPI_MCA_orte_hnp_uri": "456392704.0;tcp://10.78.0.1,192.168.1.1:41355",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "train-it-1", "AIOCOLL_WORLD_SIZE": "3"}
SLURM = {
    "SLURM_JOB_ID": "17",
    "SLURM_STEP_ID": "2",
    "SLURM_STEP_NODELIST": "n[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_GTIDS": "0,1",
}
#: Name, environment variables and store address of each launcher, in order of precedence.
ROWS = [
    ("torchrun", TORCHRUN, ("node0", 29600)),
    ("explicit variables", EXPLICIT, ("node0", 29500)),
    ("PMI-1", MPICH, ("", 0)),
    ("Open MPI", OPEN_MPI_5, ("login-node-0.cluster", None)),
    ("Open MPI", OPEN_MPI_4, ("10.78.0.1", None)),
    ("Kubernetes", KUBERNETES, ("train-it-0.train-it", 29500)),
    ("Slurm", SLURM, ("n01", None)),
]
NAMES = ["torchrun", "explicit variables", "PMI-1", "Open MPI", "Kubernetes", "Slurm"]


@pytest.fixture(autouse=True)
def _private_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a separate private directory for the sockets of each test."""
    tmp_path.chmod(0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def parameters_of(env: dict[str, str]) -> RendezvousParameters:
    return find_parameters(None, None, None, None, env, "")


def store_address(where: RendezvousParameters) -> tuple[str, int]:
    """Return host and port of a TCP store, or the unix socket name and port 0."""
    place = where.url.removeprefix("tcp://")
    return (place, 0) if place.startswith("unix:") else parse_endpoint(place)


@pytest.mark.parametrize(("name", "env", "place"), ROWS, ids=[name for name, _, _ in ROWS])
def test_launcher_is_recognised_by_its_environment_variables(
    name: str, env: dict[str, str], place: tuple[str, int | None]
) -> None:
    launcher = recognise(env)
    assert launcher is not None
    assert launcher.name == name
    assert launcher.mark(env) in env
    where = parameters_of(env)
    assert (where.rank, where.world_size, where.scheme) == (1, 3, "tcp")
    if name == "PMI-1":
        assert where.url == "tcp://:0"
    else:
        host, port = store_address(where)
        assert host == place[0]
        assert port == place[1] or (place[1] is None and 61440 <= port <= 65535)
    assert (where.ask is not None) == where.hosted == (name == "PMI-1")
    assert where.hosts is False
    if name != "PMI-1":
        first = env | {launcher.rank: "0", "HOSTNAME": "train-it-0"}
        assert (parameters_of(first).url, parameters_of(first).hosts) == (where.url, True)


def test_launchers_have_a_fixed_precedence() -> None:
    assert [launcher.name for launcher in LAUNCHERS] == NAMES
    together: dict[str, str] = {}
    for name, env, _ in reversed(ROWS):
        together |= env
        launcher = recognise(together)
        assert launcher is not None
        assert launcher.name == name


def test_environment_without_a_launcher_is_not_recognised() -> None:
    for env in (
        {},
        {"AIOCOLL_WORLD_SIZE": "3", "HOSTNAME": "x-1"},
        # Variables of a Slurm batch script and of a shell that salloc started, where no launcher started the process.
        {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_NODELIST": "n1"},
        {"OMPI_MCA_btl": "tcp", "PMIX_RANK": "0", "KUBERNETES_SERVICE_HOST": "10.0.0.1"},
        {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    ):
        assert recognise(env) is None
        with pytest.raises(
            ValueError, match=r"`aiocoll run`, torchrun, mpiexec or srun, or set AIOCOLL_SINGLETON=1 to run"
        ):
            parameters_of(env)
        assert parameters_of(env | {"AIOCOLL_SINGLETON": "1"}).world_size == 1


def test_aiocoll_singleton_variable_is_ignored_under_a_launcher() -> None:
    for _, env, _ in ROWS:
        assert parameters_of(env | {"AIOCOLL_SINGLETON": "1"}).world_size == 3


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({name: text for name, text in MPICH.items() if name != "PMI_RANK"}, "PMI_RANK is missing .* PMI_FD .* PMI-1"),
        (MPICH | {"PMI_FD": ""}, "PMI_FD is missing"),
        (MPICH | {"PMI_RANK": "3"}, "PMI_RANK=3, PMI_SIZE=3: PMI-1 set an invalid rank"),
        (MPICH | {"PMI_SIZE": "three"}, r"PMI_SIZE='three' in the environment must be a number \(PMI-1 sets it\)"),
        (MPICH | {"MPI_LOCALNRANKS": "x"}, "MPI_LOCALNRANKS='x' in the environment must be a number"),
        (OPEN_MPI_5 | {"OMPI_COMM_WORLD_SIZE": "0"}, "OMPI_COMM_WORLD_RANK=1, OMPI_COMM_WORLD_SIZE=0: Open MPI set"),
        (OPEN_MPI_5 | {"PMIX_NAMESPACE": ""}, "PMIX_NAMESPACE is missing .* shows that Open MPI started"),
        (KUBERNETES | {"JOB_COMPLETION_INDEX": "-1"}, "JOB_COMPLETION_INDEX=-1, AIOCOLL_WORLD_SIZE=3"),
        (
            {"JOB_COMPLETION_INDEX": "1", "HOSTNAME": "a-1"},
            "AIOCOLL_WORLD_SIZE is missing in the environment, but JOB_COMPLETION_INDEX shows that Kubernetes started "
            "this process: give the container that variable, with the `completions` of the Job",
        ),
        (
            KUBERNETES | {"HOSTNAME": "train-it-2"},
            "HOSTNAME='train-it-2' .* must end with -1, the JOB_COMPLETION_INDEX",
        ),
        (KUBERNETES | {"HOSTNAME": ""}, "HOSTNAME is missing"),
        (KUBERNETES | {"AIOCOLL_PORT": "0"}, "AIOCOLL_PORT='0' in the environment must be a port number"),
        (SLURM | {"SLURM_PROCID": "1_0"}, "SLURM_PROCID='1_0' in the environment must be a number"),
        (SLURM | {"SLURM_STEP_NUM_NODES": "some"}, "SLURM_STEP_NUM_NODES='some' in the environment must be a number"),
        (SLURM | {"SLURM_STEP_NODELIST": "n[1-2"}, r"SLURM_STEP_NODELIST='n\[1-2' in the environment must be a list"),
        (SLURM | {"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST is missing"),
        ({name: text for name, text in SLURM.items() if name != "SLURM_JOB_ID"}, "SLURM_JOB_ID is missing"),
    ],
)
def test_error_names_a_missing_or_invalid_launcher_variable(env: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parameters_of(env)


def test_open_mpi_without_a_host_name_is_refused() -> None:
    for job in ("456392705", "prterun-vm@1", "slurm.pmix.1.0"):
        with pytest.raises(RendezvousError, match=r"Open MPI .* name no host .* MASTER_PORT .* `aiocoll run`"):
            parameters_of(OPEN_MPI_5 | {"PMIX_NAMESPACE": job})
    uri = "1314521088.0;tcp6://[fe80::b9b,2620:10d::3]:43370"
    assert store_address(parameters_of(OPEN_MPI_4 | {"OMPI_MCA_orte_hnp_uri": uri}))[0] == "fe80::b9b"


def test_incomplete_variables_are_not_mixed_with_a_launcher() -> None:
    """Check that the error advises to unset the incomplete variables in order to use the launcher's variables."""
    with pytest.raises(ValueError, match="world_size is missing") as caught:
        parameters_of(SLURM | {"MASTER_ADDR": "n01", "MASTER_PORT": "29500"})
    assert str(caught.value).endswith(
        "; Slurm started this process (SLURM_STEP_ID): to use its variables, omit rank= and world_size= and unset"
        " MASTER_ADDR, MASTER_PORT"
    )
    without_port = {name: text for name, text in EXPLICIT.items() if name != "MASTER_PORT"}
    with pytest.raises(ValueError, match=r"^MASTER_PORT missing .*; PMI-1 started this process \(PMI_FD\)"):
        parameters_of(SLURM | MPICH | without_port)
    with pytest.raises(ValueError, match=r"^world_size is missing.*; Kubernetes .* world_size=$"):
        find_parameters(None, None, 1, None, KUBERNETES, "")
    with pytest.raises(ValueError, match=r"^MASTER_ADDR missing in the environment: [^;]*$"):
        parameters_of({name: text for name, text in EXPLICIT.items() if name != "MASTER_ADDR"})


def test_rendezvous_arguments_take_precedence_over_launcher_variables() -> None:
    env = SLURM | {"MASTER_ADDR": "n07", "MASTER_PORT": "29500"}
    where = find_parameters(None, None, 2, 5, env, "")
    assert (where.rank, where.world_size, *store_address(where)) == (2, 5, "n07", 29500)
    assert find_parameters("tcp://n08:1", None, 2, 5, SLURM, "").url == "tcp://n08:1"


# -- URLs and addresses


@pytest.mark.parametrize("scheme", ["tcp://n08:1", "file:///there", "env://"])
@pytest.mark.parametrize(
    ("query", "rank", "world_size"),
    [
        ("rank=1&world_size=3", None, None),
        ("world_size=3&rank=1", None, None),
        ("rank=1", None, 3),
        ("world_size=3", 1, None),
    ],
)
def test_url_query_sets_rank_and_world_size(scheme: str, query: str, rank: int | None, world_size: int | None) -> None:
    env = {"MASTER_ADDR": "n08", "MASTER_PORT": "1", "RANK": "7", "WORLD_SIZE": "9"}
    where = find_parameters(f"{scheme}?{query}", None, rank, world_size, env, "")
    assert (where.rank, where.world_size) == (1, 3)
    assert where == find_parameters(scheme, None, 1, 3, env, "")


@pytest.mark.parametrize(
    ("query", "rank", "world_size", "message"),
    [
        ("rank=1&world_size=3", 1, None, "contains rank, and rank= is given: pass only one of them"),
        ("rank=1&world_size=3", None, 3, "contains world_size, and world_size= is given"),
        ("rank=one&world_size=3", None, None, "rank must be a number, not 'one'"),
        ("rank=3&world_size=3", None, None, "rank=3, world_size=3: world_size must be positive and rank 0 to"),
        ("rank=1", None, None, "world_size is missing: give world_size="),
    ],
)
def test_error_names_invalid_numbers_in_a_url(
    query: str, rank: int | None, world_size: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        find_parameters(f"tcp://n08:1?{query}", None, rank, world_size, {}, "")


def test_unknown_query_of_a_file_url_is_part_of_the_file_name() -> None:
    assert find_parameters("file:///there?rank#1", None, 0, 1, {}, "").url == "file:///there?rank#1"


def test_rank_0_hosts_the_store_if_the_program_changed_the_port() -> None:
    launched = EXPLICIT | {"RANK": "0", "AIOCOLL_STORE": "launcher", "AIOCOLL_STORE_PORT": "29500"}
    assert not parameters_of(launched).hosts
    assert not parameters_of(launched | {"MASTER_ADDR": "localhost"}).hosts
    changed = parameters_of(launched | {"MASTER_ADDR": "localhost", "MASTER_PORT": "29501"})
    assert (changed.hosts, *store_address(changed)) == (True, "localhost", 29501)
    del launched["AIOCOLL_STORE_PORT"]
    assert not parameters_of(launched | {"MASTER_PORT": "29501"}).hosts


def test_jobs_on_one_host_use_private_unix_sockets(tmp_path: Path) -> None:
    """Check that each job gets a different socket name in the private directory."""
    alone = {"XDG_RUNTIME_DIR": str(tmp_path)}
    slurm = SLURM | alone | {"SLURM_STEP_NUM_NODES": "1"}
    places = {
        store_address(parameters_of(env))[0]
        for env in (
            slurm,
            slurm | {"SLURM_PROCID": "0"},
            slurm | {"SLURM_STEP_ID": "3"},
            slurm | {"SLURM_JOB_ID": "18"},
            OPEN_MPI_5 | alone | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
            OPEN_MPI_4 | alone | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"},
        )
    }
    assert len(places) == 5
    assert all(re.fullmatch(f"unix:{re.escape(str(tmp_path))}/aiocoll-[0-9a-f]{{16}}", place) for place in places)
    assert not parameters_of(slurm).several_hosts


def test_slurm_jobs_on_several_hosts_use_different_ports() -> None:
    ports = [store_address(parameters_of(SLURM | {"SLURM_JOB_ID": str(job)}))[1] for job in range(200)]
    ports += [store_address(parameters_of(SLURM | {"SLURM_STEP_ID": str(step)}))[1] for step in range(3, 200)]
    # With 397 jobs and 4,096 possible ports, about 19 jobs get the port of another job.
    assert len(ports) - len(set(ports)) < 40
    assert all(61440 <= port <= 65535 for port in ports)
    assert store_address(parameters_of(SLURM | {"AIOCOLL_PORT": "31000"}))[1] == 31000
    assert store_address(parameters_of(OPEN_MPI_5 | {"AIOCOLL_PORT": "31000"}))[1] == 31000


@pytest.mark.parametrize("env", [OPEN_MPI_5, KUBERNETES, SLURM], ids=["Open MPI", "Kubernetes", "Slurm"])
def test_store_between_hosts_needs_a_job_key(env: dict[str, str]) -> None:
    launcher = recognise(env)
    assert launcher is not None
    with pytest.raises(AuthenticationError, match=f"^{launcher.name} started .* AIOCOLL_JOB_KEY_FILE.*mpi=pmi2"):
        parameters_of(env).open(1.0, None, OPTIONS)
    parameters_of(env).open(1.0, b"sixteen bytes or more", OPTIONS)


def test_master_address_can_be_a_kubernetes_service_name() -> None:
    assert store_address(parameters_of(KUBERNETES | {"AIOCOLL_SERVICE": "mesh"}))[0] == "train-it-0.mesh"
    assert (
        store_address(parameters_of(KUBERNETES | {"HOSTNAME": "train-it-1.mesh.default.svc"}))[0]
        == "train-it-0.train-it"
    )
    assert store_address(parameters_of(KUBERNETES | {"AIOCOLL_PORT": "31000"}))[1] == 31000


# -- host lists of Slurm


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("x1", "x1"),
        ("node001,host2", "node001"),
        ("node[01-03,07],x1", "node01"),
        ("node[7],x1", "node7"),
        ("node[08,10-11]", "node08"),
        ("rack[0-1]node[3-4]-ib,other[1-2]", "rack0node3-ib"),
        ("a.b-c_d[0-12].example", "a.b-c_d0.example"),
        ("[1-3]", "1"),
    ],
)
def test_first_host_of_a_slurm_list_is_found(nodes: str, first: str) -> None:
    assert store_address(parameters_of(SLURM | {"SLURM_STEP_NODELIST": nodes}))[0] == first


@pytest.mark.parametrize(
    "nodes", [",a", "a[", "a[]", "a[1-]", "a[-1]", "a[1", "a]", "a[x]", "a b", "a[1]]", "é1", "a\n"]
)
def test_invalid_slurm_list_is_refused(nodes: str) -> None:
    with pytest.raises(ValueError, match="must be a list of hosts"):
        parameters_of(SLURM | {"SLURM_STEP_NODELIST": nodes})


NAME = st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True)
RANGE = st.tuples(st.integers(0, 999), st.integers(0, 99), st.integers(1, 4)).map(
    lambda drawn: (f"{drawn[0]:0{drawn[2]}}", f"{drawn[0]:0{drawn[2]}}-{drawn[0] + drawn[1]:0{drawn[2]}}")
)
RANGES = st.lists(st.one_of(RANGE, st.integers(0, 99).map(lambda n: (str(n), str(n)))), min_size=1, max_size=4)
#: Pairs of strings: a part of the first host's name, and the corresponding part of the Slurm host list.
PART = st.one_of(
    NAME.map(lambda name: (name, name)),
    RANGES.map(lambda ranges: (ranges[0][0], f"[{','.join(text for _, text in ranges)}]")),
)
HOST = st.lists(PART, min_size=1, max_size=4)


@settings(deadline=None)
@given(st.lists(HOST, min_size=1, max_size=4))
def test_first_host_of_any_generated_slurm_list_is_found(hosts: list[list[tuple[str, str]]]) -> None:
    nodes = ",".join("".join(text for _, text in host) for host in hosts)
    assert store_address(parameters_of(SLURM | {"SLURM_STEP_NODELIST": nodes}))[0] == "".join(
        first for first, _ in hosts[0]
    )


@settings(deadline=None)
@given(st.text("ab0-[], \n", min_size=1, max_size=20))
def test_any_text_is_parsed_or_refused_as_slurm_list(nodes: str) -> None:
    try:
        host = store_address(parameters_of(SLURM | {"SLURM_STEP_NODELIST": nodes}))[0]
    except ValueError as error:
        assert str(error).startswith("SLURM_STEP_NODELIST=")  # noqa: PT017
    else:
        assert re.fullmatch("[ab0-]+", host)


# -- local ranks


def test_local_rank_and_local_world_size_are_read_from_launcher_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, env, _ in ROWS[0], *ROWS[2:]:
        assert local_numbers(env) == ((0, 1) if name == "Kubernetes" else (1, 2))
    assert local_numbers({}) == local_numbers(EXPLICIT) == (None, None)
    assert local_numbers({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "5"}) == (3, 5)
    assert local_numbers(SLURM | {"LOCAL_RANK": "3"}) == (3, 2)
    # srun with PMI.
    assert local_numbers(SLURM | {"PMI_FD": "9", "PMI_RANK": "1", "PMI_SIZE": "3"}) == (1, 2)
    with pytest.raises(ValueError, match="SLURM_LOCALID='x' in the environment must be a number"):
        local_numbers(SLURM | {"SLURM_LOCALID": "x"})
    for name in [name for name in os.environ if name.startswith(("LOCAL_", "RANK", "WORLD_", "MASTER_"))]:
        monkeypatch.delenv(name)
    for name, text in SLURM.items():
        monkeypatch.setenv(name, text)
    assert dist.get_node_local_rank() == 1


@pytest.mark.parametrize(("name", "env", "address"), ROWS, ids=[name for name, _, _ in ROWS])
def test_single_copy_permits_memory_reads_only_to_children_of_the_launcher(
    name: str, env: dict[str, str], address: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check that only the launcher's child processes may read memory, and no process if `single_copy` is off."""
    named: list[int] = []
    monkeypatch.setattr(same_host, "permit_reading", named.append)
    by_hand = env is EXPLICIT
    assert common_parent(env) == (None if by_hand else os.getppid())
    assert same_host.single_copy(GroupOptions.resolve(None, {}), env)
    assert named == [] if by_hand else [os.getppid()]
    hosted = env | {"AIOCOLL_STORE": "launcher"}
    assert common_parent(hosted) == os.getppid()
    named.clear()
    assert not same_host.single_copy(GroupOptions.resolve(GroupOptions(single_copy=False), {}), hosted)
    assert named == []
    assert common_parent({}) is None
