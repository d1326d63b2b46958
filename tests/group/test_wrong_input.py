"""Wrong arguments: each error names the argument and a remedy, and the refused call has no side effects.

One table has the cases of all calls. Other files test dtypes of buffers, options and addresses.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from aiocoll import (
    BackendUnavailableError,
    GroupOptions,
    HashStore,
    ProcessGroup,
    Recv,
    ReduceOp,
    RendezvousError,
    Send,
    SerializationError,
    new_group,
)
from aiocoll.elements.buffers import clash

from ..ranks import LINKS, parametrize_transports, run_in_fork, run_ranks

Row = tuple[Callable[[ProcessGroup], object], type[Exception], str]


def ones(count: int = 4, dtype: Any = "float64") -> Any:
    return np.ones(count, dtype)


def read_only_ones(count: int = 4) -> Any:
    array = ones(count)
    array.flags.writeable = False
    return array


READ_ONLY = "is read-only, but the result is written to it; pass a writable copy"
WHOLE = ones(8)
HEAD, TAIL = WHOLE[:4], WHOLE[4:]

#: Wrong calls with their errors. Rank 0 makes them in a group of two ranks; rank 1 does not.
WRONG: list[Row] = [
    # memory that cannot be written
    (lambda pg: pg.allreduce(read_only_ones()), ValueError, f"tensor {READ_ONLY}"),
    (lambda pg: pg.reduce(read_only_ones(), 0), ValueError, f"tensor {READ_ONLY}"),
    (lambda pg: pg.broadcast(read_only_ones(), 1), ValueError, f"tensor {READ_ONLY}"),
    (lambda pg: pg.scan(b"12"), ValueError, f"tensor {READ_ONLY}"),
    (lambda pg: pg.allgather([ones(), read_only_ones()], ones()), ValueError, r"outputs\[1\] " + READ_ONLY),
    (lambda pg: pg.allgather_into_tensor(read_only_ones(8), ones()), ValueError, f"output {READ_ONLY}"),
    (lambda pg: pg.gather([read_only_ones(), ones()], ones(), 0), ValueError, r"outputs\[0\] " + READ_ONLY),
    (lambda pg: pg.scatter(read_only_ones(), [ones()] * 2, 0), ValueError, f"output {READ_ONLY}"),
    (lambda pg: pg.reduce_scatter(read_only_ones(), [ones()] * 2), ValueError, f"output {READ_ONLY}"),
    (lambda pg: pg.reduce_scatter_tensor(read_only_ones(), ones(8)), ValueError, f"output {READ_ONLY}"),
    (lambda pg: pg.alltoall([ones(), read_only_ones()], [ones()] * 2), ValueError, r"outputs\[1\] " + READ_ONLY),
    (lambda pg: pg.alltoall_base(read_only_ones(), ones()), ValueError, f"output {READ_ONLY}"),
    (lambda pg: pg.recv(read_only_ones(), 1), ValueError, f"tensor {READ_ONLY}"),
    (lambda pg: pg.recv_anysource(bytes(3)), ValueError, f"tensor {READ_ONLY}"),
    (
        lambda pg: pg.batch([Send(ones(), 1), Recv(read_only_ones(), 1)]),
        ValueError,
        r"operations\[1\].tensor " + READ_ONLY,
    ),
    # outputs of a wrong size or dtype
    (lambda pg: pg.allgather([ones(3), ones()], ones()), ValueError, r"outputs\[0\] has 3 elements, tensor has 4"),
    (lambda pg: pg.allgather_into_tensor(ones(7), ones()), ValueError, "output has 7 elements, expected 8, 2 times"),
    (lambda pg: pg.gather([ones(5), ones()], ones(), 0), ValueError, r"outputs\[0\] has 5 elements, tensor has 4"),
    (lambda pg: pg.scatter(ones(3), [ones()] * 2, 0), ValueError, r"inputs\[0\] has 4 elements, output has 3"),
    (lambda pg: pg.reduce_scatter(ones(3), [ones()] * 2), ValueError, r"inputs\[0\] has 4 elements, output has 3"),
    (lambda pg: pg.reduce_scatter_tensor(ones(), ones(9)), ValueError, "input has 9 elements, expected 8"),
    (
        lambda pg: pg.alltoall([ones()], [ones()] * 2),
        ValueError,
        "outputs needs exactly one array per rank: 2, not 1",
    ),
    (lambda pg: pg.alltoall_base(ones(5), ones()), ValueError, "output has 5 rows.*pass output_split_sizes"),
    (lambda pg: pg.alltoall_base(ones(), ones(), [1.5, 2.5]), TypeError, "output_split_sizes must be a list of ints"),
    (lambda pg: pg.alltoall_base(ones(), ones(), "22"), TypeError, "output_split_sizes must be a list of ints"),
    (lambda pg: pg.alltoall_base(ones(), ones(), None, [5, -1]), ValueError, r"input_split_sizes=\[5, -1\] must be 2"),
    (lambda pg: pg.allgather([ones(), ones(4, int)], ones()), TypeError, r"outputs\[1\] has dtype int64, expected fl"),
    # arguments that are not lists
    (lambda pg: pg.allgather(7, ones()), ValueError, "outputs needs exactly one array per rank: 2, not int"),
    (
        lambda pg: pg.allgather({0: ones(), 1: ones()}, ones()),
        ValueError,
        "outputs needs exactly one array .*, not dict",
    ),
    (
        lambda pg: pg.alltoall([ones()] * 2, iter([])),
        ValueError,
        "inputs needs exactly one array .*, not list_iterator",
    ),
    (lambda pg: pg.alltoall([ones()] * 2, 7), ValueError, "inputs needs exactly one array per rank: 2, not int"),
    (lambda pg: pg.gather(ones(8).reshape(2, 4), ones(), 1), ValueError, r"outputs must be None or \[\] on rank 0: on"),
    (lambda pg: pg.scatter(ones(), ones(8), 1), ValueError, r"inputs must be None or \[\] on rank 0: only .* rank 1"),
    (lambda pg: pg.scatter_object({5, 6}, 0), ValueError, "objs needs exactly one object per rank: 2, not set"),
    (lambda pg: pg.alltoall_object(7), ValueError, "objs needs exactly one object per rank: 2, not int"),
    (lambda pg: pg.batch(None), TypeError, "operations must be a list of Send and Recv, not NoneType"),
    (lambda pg: pg.batch(Send(ones(), 1)), TypeError, "operations must be a list of Send and Recv, not Send"),
    (lambda pg: pg.batch([Send(ones(), 1), ones()]), TypeError, r"operations\[1\] must be a Send or a Recv, not ndarr"),
    # memory that appears twice in a call
    (lambda pg: pg.allgather([WHOLE, WHOLE], ones(8)), ValueError, r"outputs\[0\] and outputs\[1\] share memory: pass"),
    (lambda pg: pg.allgather([HEAD, TAIL], TAIL), ValueError, "tensor shares memory with the output of rank 1"),
    (lambda pg: pg.allgather_into_tensor(WHOLE, TAIL), ValueError, "tensor shares memory with the output of rank 1"),
    (lambda pg: pg.gather([HEAD, TAIL], TAIL, 0), ValueError, "tensor shares memory with the output of rank 1"),
    (
        lambda pg: pg.scatter(TAIL, [HEAD, TAIL], 0),
        ValueError,
        r"output shares memory with inputs\[1\]: it would be ov",
    ),
    (lambda pg: pg.alltoall([ones(), HEAD], [TAIL, HEAD]), ValueError, r"outputs\[1\] shares memory with inputs\[1\]"),
    (lambda pg: pg.alltoall_base(WHOLE, WHOLE), ValueError, "output shares memory with input: alltoall_base needs sep"),
    (lambda pg: pg.batch([Send(HEAD, 1), Recv(WHOLE, 1)]), ValueError, r"operations\[0\].tensor and operations\[1\]"),
    # ranks
    (lambda pg: pg.broadcast(ones(), 2), ValueError, "root=2 is not a rank of group 'world:0': ranks are 0 to 1"),
    (lambda pg: pg.reduce(ones(), -1), ValueError, "root=-1 is not a rank of group 'world:0': ranks are 0 to 1"),
    (lambda pg: pg.gather(None, ones(), 2), ValueError, "root=2 is not a rank"),
    (lambda pg: pg.scatter(ones(), None, 2), ValueError, "root=2 is not a rank"),
    (lambda pg: pg.broadcast_object("a", 2), ValueError, "root=2 is not a rank"),
    (lambda pg: pg.gather_object("a", 1.0), TypeError, r"root must be a rank \(int\), not float"),
    (lambda pg: pg.send(ones(), -1), ValueError, "dst=-1 is not a rank of group 'world:0': ranks are 0 to 1"),
    (lambda pg: pg.send_object("a", -1), ValueError, "dst=-1 is not a rank"),
    (lambda pg: pg.recv(ones(), -1), ValueError, "src=-1 is not a rank"),
    (lambda pg: pg.recv_object(2), ValueError, "src=2 is not a rank of group 'world:0'"),
    (lambda pg: pg.recv(ones(), None), TypeError, r"src must be a rank \(int\), not NoneType"),
    (lambda pg: pg.batch([Send(ones(), 1), Send(ones(), -1)]), ValueError, r"operations\[1\].dst=-1 is not a rank"),
    (lambda pg: pg.batch([Send(ones(), 1), Recv(ones(), 7)]), ValueError, r"operations\[1\].src=7 is not a rank"),
    # tags, keys, timeouts
    (
        lambda pg: pg.send(ones(), 1, 2**30),
        ValueError,
        r"tag=1073741824 is out of range: tags are from 0 to 2\*\*30 - 1",
    ),
    (lambda pg: pg.recv_anysource(ones(), -1), ValueError, "tag=-1 is out of range"),
    (lambda pg: pg.recv_object(1, True), TypeError, "tag must be an int, not bool"),
    (lambda pg: pg.batch([Send(ones(), 1), Send(ones(), 1, "a")]), TypeError, r"operations\[1\].tag must be an int, n"),
    (lambda pg: pg.barrier(key=b"k"), TypeError, "key must be a str or None, not bytes"),
    (
        lambda pg: pg.allreduce(ones(), key="\ud800"),
        ValueError,
        "key='.ud800' is not valid text: it has a lone surrogate",
    ),
    (lambda pg: pg.barrier(timeout=-1), ValueError, r"timeout=-1: must be >= 0 seconds \(inf = never\)"),
    (lambda pg: pg.barrier(timeout=float("nan"), key="k"), ValueError, "timeout=nan: must be >= 0 seconds"),
    (lambda pg: pg.monitored_barrier("soon"), TypeError, "timeout must be seconds, a timedelta or None, not str"),
    (lambda pg: pg.monitored_barrier(timedelta(seconds=-1)), ValueError, "timeout=-1.0: must be >= 0 seconds"),
    (lambda pg: pg.allgather_object(1, timeout=True), TypeError, "timeout must be seconds, .*, not bool"),
    (lambda pg: pg.send(ones(), 1, timeout=-1), ValueError, "timeout=-1: must be >= 0 seconds"),
    (lambda pg: pg.batch([Send(ones(), 1)], timeout=-1), ValueError, "timeout=-1: must be >= 0 seconds"),
    (lambda pg: pg.batch([], timeout=-1), ValueError, "timeout=-1: must be >= 0 seconds"),
    # ops and dtypes
    (
        lambda pg: pg.allreduce(ones(2, "complex64"), ReduceOp.MAX),
        TypeError,
        "op MAX is not defined on complex64; it accepts",
    ),
    (
        lambda pg: pg.allreduce(ones(2, bool), ReduceOp.AVG),
        TypeError,
        "op AVG is not defined on bool; it accepts signed",
    ),
    (lambda pg: pg.reduce(ones(), 1, ReduceOp.BXOR), TypeError, "op BXOR is not defined on float64; it accepts bool"),
    (lambda pg: pg.scan(ones(), "SUM"), TypeError, "op must be a ReduceOp, such as ReduceOp.SUM, not str"),
    (lambda pg: pg.exscan(ones(), ReduceOp.AVG), ValueError, "op=ReduceOp.AVG is not defined for exscan: use SUM and"),
    (lambda pg: pg.allreduce(ReduceOp.SUM), TypeError, "tensor must be a NumPy array, .*, not ReduceOp"),
    (lambda pg: pg.allreduce(np.array([None])), TypeError, "tensor: dtype object contains Python objects"),
    (lambda pg: pg.send(np.zeros(2, "f4,O"), 1), TypeError, "tensor: dtype .* contains Python objects"),
    (
        lambda pg: pg.recv(np.zeros(2, ">f4"), 1),
        TypeError,
        "tensor: dtype '>f4' is float32 in foreign byte order; conv",
    ),
    (lambda pg: pg.send(3.5, 1), TypeError, "tensor must be a NumPy array, .*, not float"),
    (lambda pg: pg.allreduce(2**63), OverflowError, "the int 9223372036854775808 does not fit in int64; pass an array"),
    (lambda pg: pg.send_object([print, {1: object()}], 1), SerializationError, r"cannot send obj\[0\]"),
    (lambda pg: pg.backend_for("tpu"), ValueError, "device='tpu' has no backend in group 'world:0'; available: "),
]


@pytest.mark.ranks(2)
@parametrize_transports(*LINKS)
async def test_refused_call_does_not_affect_later_calls(pg: ProcessGroup) -> None:
    """Check after each refused call that ordered calls, keyed calls and messages still match."""
    for number, (call, error, message) in enumerate(WRONG, start=1):
        if pg.rank() == 0:
            with pytest.raises(error, match=message):
                call(pg)
            assert pg.pending() == []
        ordered, keyed = pg.allreduce(number), pg.allreduce(-number, key="k")
        assert (ordered.seq, keyed.seq) == (number, number)
        assert (await ordered, await keyed) == (2 * number, -2 * number)
        if pg.rank() == 0:
            await pg.send(np.full(1, number), 1)
        else:
            await pg.recv(got := np.zeros(1, int), 0)
            assert got[0] == number


async def test_narrow_float_error_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that bfloat16 outputs that aiocoll allocates need the package ml_dtypes."""
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)

    async def rank(pg: ProcessGroup) -> None:
        for call in (pg.allgather, lambda outputs, tensor: pg.gather(outputs, tensor, pg.rank())):
            with pytest.raises(BackendUnavailableError, match="bfloat16 need ml_dtypes: pip install ml_dtypes"):
                call(None, ones(3, ml_dtypes.bfloat16))
        assert await pg.allreduce(1) == 2

    await run_ranks(2, rank)


def test_overlap_check_finds_any_two_arrays_that_share_memory() -> None:
    whole = np.zeros(100)
    parts = [whole[start : start + 10] for start in range(0, 100, 10)]
    assert clash(parts) is None
    assert clash(parts, [np.zeros(3), whole[5:5]]) is None
    for first in range(10):
        for second in range(first + 1, 10):
            doubled = [*parts[:second], parts[first], *parts[second + 1 :]]
            assert clash(doubled) == (first, second)
            assert clash(doubled[:second], doubled[second:]) == (first, second)
            assert clash([], doubled) is None
    assert clash([parts[7]], [parts[1], whole[:75], parts[2], parts[3]]) == (0, 2)
    assert clash([parts[0]], [parts[0]]) == (0, 1)


# -- other threads and processes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", ["barrier", "abort", "drain", "wait_revoked", "shutdown", "incoming", "await"])
async def test_calls_from_another_thread_are_refused(pg: ProcessGroup, name: str) -> None:
    work = pg.allreduce(1) if pg.rank() == 0 else None
    refused = []

    async def call() -> None:
        if name == "await":
            await (work or pg.pending()[0])
        elif name == "incoming":
            await anext(pg.incoming())
        else:
            made = getattr(pg, name)()
            if made is not None:
                await made

    def call_in_another_loop() -> None:
        try:
            asyncio.run(call())
        except RuntimeError as error:
            refused.append(str(error))

    if pg.rank() == 0:
        thread = threading.Thread(target=call_in_another_loop)
        thread.start()
        thread.join()
        assert len(refused) == 1
        assert "belongs to another event loop" in refused[0]
        assert "asyncio.run_coroutine_threadsafe" in refused[0]
    assert await (work or pg.allreduce(1)) == 2


@pytest.mark.ranks(2)
@parametrize_transports("unix")
async def test_group_calls_in_a_forked_child_are_refused_without_disturbing_ranks(pg: ProcessGroup) -> None:
    if pg.rank() == 0:
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(into, "\n".join(_error_texts(pg)).encode())
            os._exit(0)
        os.close(into)
        with os.fdopen(out, "rb") as pipe:
            messages = pipe.read().decode().splitlines()
        os.waitpid(child, 0)  # noqa: ASYNC222 - the child has closed its pipe, and exits at once
        assert len(messages) == 4
        assert all("a forked child cannot use it: make a new group in the child" in each for each in messages)
    assert await pg.allreduce(1) == 2


@pytest.mark.ranks(2)
@parametrize_transports("unix")
async def test_forked_child_that_awaits_a_work_receives_no_data_of_its_parent(pg: ProcessGroup) -> None:
    """Check that the child does not read from the connections that it shares with its parent."""
    if pg.rank() == 1:
        await pg.recv(ones(), 0)
        await pg.send(ones(), 0)
        return
    work = pg.recv(tensor := np.zeros(4), 1)
    assert "belongs to another event loop" in run_in_fork(lambda: next(work.__await__()))
    await pg.send(ones(), 1)
    await work
    assert tensor.tolist() == ones().tolist()


def _error_texts(pg: ProcessGroup) -> Iterator[str]:
    calls: list[Callable[[], object]] = [
        pg.barrier,
        pg.abort,
        lambda: pg.send(ones(), 1),
        lambda: pg.shutdown().send(None),
    ]
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            yield str(error)


# -- making a group


@pytest.fixture
def port() -> int:
    """Return a free port, on which no process listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        number: int = server.getsockname()[1]
        return number


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Set the environment variables of rank 1 of 2 with a master that does not exist; return the patch."""
    for name in list(os.environ):
        if name.startswith(("AIOCOLL_", "TORCHELASTIC_")) and name != "AIOCOLL_TEST_LOOP":
            monkeypatch.delenv(name)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9", "RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": "0"}, "rank must be an int, not str"),
        ({"rank": True}, "rank must be an int, not bool"),
        ({"rank": 1.0}, "rank must be an int, not float"),
        ({"world_size": "2"}, "world_size must be an int, not str"),
        ({"name": 7}, "name must be a str or None, not int"),
        ({"options": {"transport": "tcp"}}, "options must be a GroupOptions or None, not dict"),
        ({"store": "127.0.0.1"}, "store must be a Store or None, not str"),
        ({"init_method": 29500}, "init_method must be a str or None, not int"),
        ({"timeout": "1"}, "timeout must be seconds, a timedelta or None, not str"),
    ],
)
def test_new_group_refuses_arguments_of_a_wrong_type(
    given: dict[str, Any], message: str, environment: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError, match=message):
        new_group(**{"rank": 1, "world_size": 2, **given})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("RANK", "", "RANK='' in the environment must be a number"),
        ("RANK", "1.0", "RANK='1.0' in the environment must be a number"),
        ("RANK", "-1", "RANK=-1, WORLD_SIZE=2: world_size must be positive and rank 0 to world_size - 1"),
        ("RANK", "2", "RANK=2, WORLD_SIZE=2: world_size must be positive"),
        ("WORLD_SIZE", "two", "WORLD_SIZE='two' in the environment must be a number"),
        ("WORLD_SIZE", "0", "RANK=1, WORLD_SIZE=0: world_size must be positive"),
        ("MASTER_PORT", "0", "MASTER_PORT='0' in the environment must be a port number from 1 to 65535"),
        ("MASTER_PORT", "65536", "MASTER_PORT='65536' in the environment must be a port number"),
        ("MASTER_PORT", "", "MASTER_PORT='' in the environment must be a port number"),
        ("MASTER_ADDR", "", "MASTER_ADDR='' in the environment must be the host name or address of rank 0"),
        ("AIOCOLL_PORT", "http", "AIOCOLL_PORT='http' in the environment must be a port number"),
    ],
)
def test_invalid_environment_variable_is_refused(
    variable: str, value: str, message: str, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        new_group()


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("AIOCOLL_SPIN_US", "fast", "AIOCOLL_SPIN_US='fast': must be a number"),
        ("AIOCOLL_WARN_AFTER", "-1", "AIOCOLL_WARN_AFTER=-1.0: must be >= 0"),
        ("AIOCOLL_ALLOW_PICKLE", "maybe", "AIOCOLL_ALLOW_PICKLE='maybe'"),
        ("AIOCOLL_TIMEOUT", "3", "AIOCOLL_TIMEOUT='3': unknown variable; use one of .*AIOCOLL_SPIN_US"),
        ("AIOCOLL_JOB_KEY_FILE", "/nowhere", "AIOCOLL_JOB_KEY_FILE='/nowhere': cannot be opened"),
    ],
)
async def test_invalid_option_in_the_environment_is_refused(
    variable: str, value: str, message: str, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv(variable, value)
    with pytest.raises(ValueError, match=message):
        await new_group()


@pytest.mark.parametrize("host", ["127.0.0.1", "no such host"])
async def test_unreachable_master_address_is_reported_with_the_reason(
    host: str, port: int, environment: pytest.MonkeyPatch
) -> None:
    environment.setenv("MASTER_ADDR", host)
    environment.setenv("MASTER_PORT", str(port))
    why = {
        "127.0.0.1": (
            "nothing listens there (connection refused); check that rank 0 or the launcher runs at this address"
        ),
        "no such host": "the host name 'no such host' cannot be resolved",
    }[host]
    expected = f"rank 1 of 2 did not meet the others within 0.3 s: no store at {host}:{port}: {why}"
    with pytest.raises(RendezvousError, match=f"^{re.escape(expected)}"):
        await new_group(timeout=0.3)


async def test_error_reports_a_master_that_does_not_answer(environment: pytest.MonkeyPatch) -> None:
    """Fill the backlog of the port, so that the connection attempt gets no answer, as with a firewall."""
    with socket.socket() as server, socket.socket() as first:
        server.bind(("127.0.0.1", 0))
        server.listen(0)
        first.connect(server.getsockname())
        environment.setenv("MASTER_PORT", str(server.getsockname()[1]))
        with pytest.raises(
            RendezvousError, match=r"within 0.3 s: no store at .*: no answer to the connection attempt; check t"
        ):
            await new_group(timeout=0.3)


async def test_master_address_on_another_host_without_a_job_key_is_refused(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("MASTER_ADDR", "192.0.2.1")
    with pytest.raises(
        ConnectionError, match=r"192\.0\.2\.1 can be reached from other machines, and there is no job key"
    ):
        await new_group(timeout=5)


async def test_different_world_sizes_are_reported_and_a_retry_succeeds() -> None:
    """Retry on the same store after the failure."""
    store = HashStore()

    async def rank(number: int, world_size: int) -> Any:
        options = GroupOptions(transport="unix")
        return await new_group(store=store, rank=number, world_size=world_size, timeout=0.3, options=options)

    results = await asyncio.gather(rank(0, 2), rank(1, 3), return_exceptions=True)
    assert all(isinstance(each, RendezvousError) for each in results)
    expected = (
        "rank 1 was started with world_size=3, others with world_size=2; start all ranks with the same world_size"
    )
    assert expected in {str(each) for each in results}
    with pytest.raises(RendezvousError, match=r"rank 0 waited 0\.3 s for rank\(s\) 1 of 2"):
        await rank(0, 2)
    await store.aclose()
