"""`aiocoll doctor` on several hosts, which are tasks of one process, or processes, on the loopback."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from aiocoll.cli.doctor_hosts import meet_hosts
from aiocoll.cli.hosts import Hosts
from aiocoll.cli.main import main
from aiocoll.cli.reach import HostsMet, findings
from aiocoll.errors import RendezvousError, StoreUnavailableError
from aiocoll.options import GroupOptions
from aiocoll.store import PrefixStore, StoreServer, TCPStore
from aiocoll.transport.byte_stream import ByteStream

from ..internals import Limits, replace_parts
from ..pages import ROOT
from ..ports import free_port
from ..ranks import wait_until

KEY = b"of this test and no other"
LIMIT = 60
#: Facts about a host that has arrived, but has not reported its address.
FACTS = ["elsewhere", "1 cores", "auto", "", "", "it has not reported its address; see its output"]

Meet = Callable[..., Awaitable[HostsMet]]


def options(**given: Any) -> GroupOptions:
    return GroupOptions.resolve(GroupOptions(**given), {})


@pytest.fixture
def meet(port: int) -> Meet:
    """Return a function that meets the other hosts as the host with a given number."""

    def start(
        number: int, nnodes: int, timeout: float = LIMIT, key: bytes = KEY, at: str = "127.0.0.1", **given: Any
    ) -> Awaitable[HostsMet]:
        hosts = Hosts(nnodes, number, (at, port), key, "this test")
        return meet_hosts(hosts, options(**given), timeout, lambda text: None)

    return start


@asynccontextmanager
async def store_server(port: int) -> AsyncIterator[None]:
    """Serve the store in place of host 0."""
    server = StoreServer("127.0.0.1", port, key=KEY, job="this test")
    server.start()
    yield
    await server.aclose()


@asynccontextmanager
async def doctor_store(port: int) -> AsyncIterator[PrefixStore]:
    """Open the store as a program other than doctor does."""
    store = TCPStore("127.0.0.1", port, timeout=LIMIT, wait_for_workers=False, key=KEY, job="this test")
    async with store:
        yield PrefixStore("doctor", store)


def advice(met: HostsMet) -> dict[str, str]:
    return {each.name: each.advice for each in findings(met) if each.advice}


def packed(value: Any) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


# -- hosts as tasks


@pytest.mark.parametrize("at", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("encryption", ["auto", "none"])
async def test_doctor_reports_hosts_that_reach_each_other(meet: Meet, at: str, encryption: str) -> None:
    first, *others = await asyncio.gather(*(meet(each, 3, at=at, encryption=encryption) for each in (0, 1, 2)))
    assert others == [first] * 2, "the hosts report different results"
    assert advice(first) == {}
    assert {(a, b) for a, row in first.rows.items() for b in row} == {
        (a, b) for a in (0, 1, 2) for b in {0, 1, 2} - {a}
    }
    for number, facts in first.hosts.items():
        assert facts.name == socket.gethostname()
        assert re.fullmatch(rf"{at} port \d+", facts.where)
        assert all(0 < attempt.seconds < LIMIT for attempt in first.rows[number].values())


async def test_doctor_reports_no_connections_for_a_single_host(meet: Meet) -> None:
    met = await meet(0, 1)
    assert (met.rows, advice(met)) == ({0: {}}, {})


async def test_doctor_reports_different_encryption_options_of_hosts(meet: Meet) -> None:
    """Use the loopback, where the store is not encrypted by default, so that both hosts can open it."""
    first, second = await asyncio.gather(meet(0, 2), meet(1, 2, encryption="none"))
    assert first == second
    assert advice(first)["encryption"].startswith(
        "host(s) 1 have encryption='none' (AIOCOLL_ENCRYPTION), and host(s) 0"
    )


async def test_doctor_reports_a_host_without_a_free_port(meet: Meet, port: int) -> None:
    ports = (port, port)
    met, _ = await asyncio.gather(meet(0, 2), meet(1, 2, port_range=ports))
    name = socket.gethostname()
    assert advice(met)["host 1"].startswith(
        f"host 1 ({name}) cannot be dialled: cannot listen on 127.0.0.1: no port of port_range={ports} is free"
    )
    assert met.rows[0] == {}
    assert met.reaches(1, 0)


async def test_doctor_reports_a_transport_without_a_listener(meet: Meet) -> None:
    met, _ = await asyncio.gather(meet(0, 2), meet(1, 2, transport="shm"))
    assert "transport='shm' opens no TCP listener; use transport='auto' or 'tcp'" in advice(met)["host 1"]
    ((target, attempt),) = met.rows[1].items()
    assert target == 0
    assert "transport='shm' on rank 1, but rank 0 is on" in attempt.trouble


async def test_doctor_reports_a_missing_host(meet: Meet) -> None:
    met = await meet(0, 2, timeout=0.5)
    assert "host(s) 1 of 2 did not come within 0.5 s" in advice(met)["missing"]
    assert met.store.startswith("127.0.0.1 port ")


async def test_doctor_refuses_a_store_with_another_job_key(meet: Meet, port: int) -> None:
    async with store_server(port):
        message = r"cannot use the store at 127\.0\.0\.1:\d+: .* did not prove that it holds this job's key"
        with pytest.raises(StoreUnavailableError, match=message):
            await meet(1, 3, key=b"of another test, or so")


async def test_doctor_reports_a_missing_store(meet: Meet) -> None:
    with pytest.raises(
        StoreUnavailableError, match=r"no store at 127\.0\.0\.1:\d+: nothing listens .*refused.*tried for"
    ):
        await meet(1, 2, timeout=0.1)


async def test_doctor_reports_another_program_at_the_store_port(meet: Meet, port: int) -> None:
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(StoreUnavailableError, match=r"the store cannot listen on .*another program uses it"),
    ):
        await meet(0, 2)


async def test_doctor_reports_a_store_that_another_program_hosts(meet: Meet, limits: Limits, port: int) -> None:
    """Use the store of a running job, in which no host 0 of `aiocoll doctor` takes part."""
    limits(doctor_slack=0.1)
    async with store_server(port):
        with pytest.raises(
            RendezvousError,
            match=r"host 0 serves a store, but has not completed this step of the check within 0\.2 s: check that",
        ):
            await meet(1, 2, timeout=0.1)


async def test_doctor_refuses_a_second_host_with_the_same_number(meet: Meet) -> None:
    first, one, other = await asyncio.gather(meet(0, 2), meet(1, 2), meet(1, 2), return_exceptions=True)
    assert isinstance(first, HostsMet)
    assert advice(first) == {}
    (error,) = (each for each in (one, other) if isinstance(each, Exception))
    assert isinstance(error, RendezvousError)
    assert re.match(r"host number 1 is taken by .* \(process \d+\): give each host its own --node-rank", str(error))


async def test_doctor_refuses_a_host_with_a_different_number_of_hosts(meet: Meet, limits: Limits) -> None:
    limits(doctor_slack=0.2)
    first, second = await asyncio.gather(meet(0, 2), meet(1, 3), return_exceptions=True)
    assert str(second) == "--nnodes 3: host 0 was given --nnodes 2; use the same on all hosts"
    assert isinstance(first, HostsMet)
    assert advice(first)["host 1"].endswith("cannot be dialled: it has not reported its address; see its output")


async def test_doctor_refuses_a_host_that_comes_too_late(meet: Meet, port: int) -> None:
    async with store_server(port), doctor_store(port) as store:
        await store.set("came", packed({0: packed({"nnodes": 2})}))
        with pytest.raises(
            RendezvousError, match="host 1 came too late: the other hosts have started without it; run the command"
        ):
            await meet(1, 2)


# -- hosts that stop, or report wrong results


async def publish_as_host_1(port: int, *values: Any) -> None:
    """Publish `values` as the records of host 1 in the first rounds, beginning with the record of the last round."""
    async with doctor_store(port) as store:
        records = dict(zip(("came/1", "listening/1", "row/1", "left/1"), map(packed, values), strict=False))
        await store.multi_set([*reversed(records)], [*reversed(records.values())])


CAME = {"nnodes": 2, "store": "127.0.0.1", "listens": "", "facts": FACTS}


#: The connection results of host 1, which reaches host 0.
REACHED = {0: (0.1, "")}


def listening_record(port: int) -> Any:
    return {"host": "elsewhere", "unix": None, "tcp": ["127.0.0.1", port], "process": [0, 0, 0], "piece": 0}, ""


@pytest.mark.parametrize(
    ("rounds", "name", "text"),
    [
        (1, "host 1", "host 1 (elsewhere) cannot be dialled: it has not reported its address; see its output"),
        (2, "from 1", "host 1 (elsewhere) has not reported which hosts it reaches; see its output"),
    ],
)
async def test_doctor_reports_a_host_that_stops(
    meet: Meet, limits: Limits, port: int, rounds: int, name: str, text: str
) -> None:
    limits(doctor_dial_timeout=0.1, doctor_slack=0.3, doctor_ping_time=0.1)
    values = [CAME, listening_record(free_port())][:rounds]
    met, _ = await asyncio.gather(meet(0, 2), publish_as_host_1(port, *values))
    assert advice(met)[name] == text


async def test_doctor_reports_a_refused_connection(meet: Meet, limits: Limits, port: int) -> None:
    limits(doctor_dial_timeout=0.3)
    unused_port = free_port()
    met, _ = await asyncio.gather(
        meet(0, 2), publish_as_host_1(port, CAME, listening_record(unused_port), REACHED, None)
    )
    (text,) = advice(met).values()
    assert re.fullmatch(
        rf"host 0 \(.*\) cannot reach host 1 \(elsewhere\) at 127\.0\.0\.1 port {unused_port}, which other hosts "
        r"cannot reach: Connection refused \(tried for [\d.]+ s\); a job does not need this connection: "
        r"host 1 dials host 0",
        text,
    )
    assert [each.value for each in findings(met) if each.name == "0 to 1"] == ["refused"]


async def test_doctor_reports_another_program_at_a_host_port(meet: Meet, limits: Limits, port: int) -> None:
    limits(doctor_dial_timeout=0.3)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request, and so on and on and on")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        card = listening_record(server.sockets[0].getsockname()[1])
        met, _ = await asyncio.gather(meet(0, 2), publish_as_host_1(port, CAME, card, REACHED, None))
    ((_, attempt),) = met.rows[0].items()
    assert "TLS: " in attempt.trouble


async def test_doctor_reports_a_connection_without_an_answer(
    meet: Meet, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accept connections, but send no byte back."""
    limits(doctor_ping_time=0.1)

    async def close_at_once(stream: ByteStream) -> None:
        stream.close()

    replace_parts(monkeypatch, echo_bytes=close_at_once)
    met, _ = await asyncio.gather(meet(0, 2), meet(1, 2))
    assert met.rows[1][0].trouble == ": the connection was made, and then no byte came back"


# -- hosts as processes


class Doctors:
    """Processes of `aiocoll doctor`, one per host, each with one test rank."""

    def __init__(self, path: Path, port: int, stack: ExitStack) -> None:
        self._stack = stack
        self._key = path / "job.key"
        self._key.touch(mode=0o600)
        self._key.write_bytes(KEY)
        self._port = str(port)

    def arguments(self, number: int, *more: str, nnodes: int = 2, master: str = "127.0.0.1") -> list[str]:
        hosts = ["--nnodes", str(nnodes), "--node-rank", str(number), "--master-addr", master]
        return ["doctor", "-n", "1", *hosts, "--master-port", self._port, "--job-key-file", str(self._key), *more]

    def start(self, number: int, *more: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "aiocoll", *self.arguments(number, *more)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(end, process)
        return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


@pytest.fixture
def doctors(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doctors]:
    for name in [name for name in os.environ if name.startswith(("AIOCOLL_", "MASTER_", "RANK", "WORLD_SIZE"))]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("PYTHONASYNCIODEBUG", raising=False)
    with ExitStack() as stack:
        yield Doctors(tmp_path, port, stack)


@pytest.mark.slow
def test_doctor_processes_report_equal_findings_as_text_and_as_json(doctors: Doctors) -> None:
    first, second = doctors.start(0), doctors.start(1, "--json")
    (output, errors), (json_output, other_errors) = (
        first.communicate(timeout=LIMIT),
        second.communicate(timeout=LIMIT),
    )
    assert (errors, other_errors) == ("", "")
    found = json.loads(json_output)
    assert [(each["from"], each["to"], each["trouble"]) for each in found["hosts"]] == [(0, 1, ""), (1, 0, "")]
    assert all(each["seconds"] > 0 for each in found["hosts"])
    between = [each for each in found["findings"] if each["topic"] == "between hosts"]
    assert (between[-1]["name"], between[-1]["value"]) == ("a job", "would meet on these hosts")
    assert found["fine"] == (second.returncode == 0)
    text = output[output.index("\nhost 0 listens on 127.0.0.1 port ") :]
    assert re.search(r" for the others, and waits for them for 30 s\nbetween hosts\n  host 0  ", text)
    for each in between:
        assert re.search(rf"^  {each['name']}\s+{re.escape(each['value'])}$", text, re.MULTILINE), text
    assert output.endswith("all fine\n") == (first.returncode == 0)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_ends_a_doctor_that_waits_for_other_hosts(doctors: Doctors, number: int) -> None:
    process = doctors.start(number)
    assert process.stdout is not None
    while "host 0" not in (line := process.stdout.readline()):
        assert line
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=LIMIT)
    assert (process.returncode, errors) == (130, "")


@pytest.mark.slow
def test_doctor_host_without_a_reachable_store_reports_a_problem(
    doctors: Doctors, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(doctors.arguments(1, "--timeout", "1")) == 1
    output = capsys.readouterr().out
    assert re.search(
        r"PROBLEM: no store at 127\.0\.0\.1:\d+: nothing listens there .*\(tried for 1\.\d s\)\n1 problem", output
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--node-rank", "1"], "--node-rank 1: must be from 0 to 0, one less than --nnodes"),
        (["--nnodes", "2"], "--master-addr: needed with several hosts"),
        (["--nnodes", "2", "--master-addr", "h"], "pass --job-key-file job.key"),
        (["--timeout", "0"], "argument --timeout: 0 is not a positive number"),
    ],
)
def test_doctor_explains_wrong_arguments(
    doctors: Doctors, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["doctor", *arguments])
    assert message in capsys.readouterr().err


def test_doctor_help_explains_the_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["doctor", "--help"])
    output = " ".join(capsys.readouterr().out.split())
    assert (
        "0 all is fine: a job would meet and run 1 something fails or is slower than it could be, or output" in output
    )


def test_doctor_does_not_print_the_job_key() -> None:
    assert repr(KEY) not in repr(Hosts(2, 0, ("127.0.0.1", 1), KEY, "this test"))


async def test_doctor_lists_the_arrived_hosts_at_a_terminal(
    meet: Meet, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    limits(progress_interval=0.0)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", terminal := Terminal())
    first = asyncio.create_task(meet(0, 2))  # type: ignore[arg-type]
    await wait_until(lambda: "\x1b[K1 of 2 hosts have come, " in terminal.getvalue())
    met = await asyncio.gather(first, meet(1, 2))
    assert [each.reaches(0, 1) for each in met] == [True, True]
    shown = terminal.getvalue()
    assert shown.startswith("\r\x1b[Klooking for host 0, 0 s\r\x1b[K")
    assert shown.endswith("\r\x1b[K")
