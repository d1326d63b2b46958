"""Encryption between hosts: captured traffic, different options, and certificates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.certificates import Authority, as_variables
from tests.hosts.network import Network

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks

#: Texts that occur in the data of tensors, objects, messages and store commands.
SECRETS = (b"a tensor is secret", b"an object is secret", b"a message is secret", b"aiocoll/")


@pytest.mark.parametrize("encryption", ["auto", "none"])
async def test_captured_traffic_between_hosts_contains_no_plain_text(
    network: Callable[..., Network], ranks: Ranks, encryption: str
) -> None:
    """Check that a capture with encryption has none of the secret texts, and a capture without has all of them."""
    net = network(2)
    with net.capture_traffic(1) as captured:
        started = await ranks.start_all(net, "send_secrets", AIOCOLL_ENCRYPTION=encryption)
        assert [await process.result() for process in started] == [3, 2]
    (crossed,) = captured
    assert len(crossed) > 190_000
    assert [secret in crossed for secret in SECRETS] == [encryption == "none"] * len(SECRETS)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
async def test_captured_traffic_between_copies_of_a_machine_contains_no_plain_text(
    network: Callable[..., Network], ranks: Ranks, transport: str
) -> None:
    """Give both hosts the same host id, so that their ranks first assume that they are on one host."""
    net = network(2)
    with net.capture_traffic(1) as captured:
        started = await ranks.start_all(net, "send_secrets", AIOCOLL_HOST_ID="copied", AIOCOLL_TRANSPORT=transport)
        assert [await process.result() for process in started] == [3, 2]
    (crossed,) = captured
    assert len(crossed) > 190_000
    assert not [secret for secret in SECRETS if secret in crossed]


async def test_different_encryption_options_of_hosts_are_reported(
    network: Callable[..., Network], ranks: Ranks
) -> None:
    """Check the errors of the store connection, since ranks connect to the store first."""
    net = network(2)
    method = f"tcp://{net.hosts[0].ipv4}:29500"
    for first, second, reasons in (("none", "tls", "does not use TLS|reset"), ("tls", "none", "closes the connection")):
        serving = await ranks.start(net.hosts[0], "total", 0, 2, method, AIOCOLL_ENCRYPTION=first)
        failing = await ranks.start(net.hosts[1], "total", 1, 2, method, TIMEOUT="3", AIOCOLL_ENCRYPTION=second)
        _, complaints = await failing.end()
        assert f"check that the server also uses encryption='{second}' (AIOCOLL_ENCRYPTION)" in complaints
        assert any(each in complaints for each in reasons.split("|"))
        await serving.kill()


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def certificate_environment(authority: Authority, *parts: str, file: str = "own") -> dict[str, str]:
    """Return the environment of a process whose certificate names `parts`, such as "rank/0", of the job "train"."""
    names = (f"aiocoll://train/{part}" for part in parts)
    return {"AIOCOLL_JOB_ID": "train", **as_variables(authority.make(*names, file=file))}


@pytest.mark.parametrize(("size", "with_launcher"), [(2, False), (3, False), (2, True)])
async def test_hosts_with_certificates_of_one_ca_meet(
    network: Callable[..., Network], ranks: Ranks, authority: Authority, size: int, with_launcher: bool
) -> None:
    """Give each host a certificate for its ranks; the certificate of host 0 also names the store."""
    net = network(size)
    started = []
    for host in net.hosts:
        each = 2 if with_launcher else 1
        parts = [f"rank/{rank}" for rank in range(each * host.number, each * (host.number + 1))]
        environment = certificate_environment(
            authority, *parts, *([] if host.number else ["store"]), file=str(host.number)
        )
        master = net.hosts[0].ipv4
        if with_launcher:
            started.append(await ranks.start_launcher(net, host, "total", master, each, **environment))
        else:
            started.append(await ranks.start(host, "total", host.number, size, f"tcp://{master}:29500", **environment))
    world = size * (2 if with_launcher else 1)
    for process in started:
        reports = [await process.next_line() for _ in range(2)] if with_launcher else [await process.next_line()]
        assert reports == [[world * (world + 1) / 2] * 2] * len(reports)
        assert await process.end() == (0, "")


async def test_captured_traffic_with_user_certificates_contains_no_plain_text(
    network: Callable[..., Network], ranks: Ranks, authority: Authority
) -> None:
    """Check that the names in the certificates do not occur in the traffic, since TLS 1.3 encrypts certificates."""
    net = network(2)
    with net.capture_traffic(1) as captured:
        started = await ranks.start_all(net, "send_secrets", **certificate_environment(authority, "rank/*", "store"))
        assert [await process.result() for process in started] == [3, 2]
    (crossed,) = captured
    assert len(crossed) > 190_000
    assert not [secret for secret in (*SECRETS, b"aiocoll:", b"train", b"rank/") if secret in crossed]


@pytest.mark.parametrize("part", ["rank/0", "store"])
async def test_certificate_of_another_rank_is_refused_on_both_hosts(
    network: Callable[..., Network], ranks: Ranks, authority: Authority, part: str
) -> None:
    net = network(2)
    method = f"tcp://{net.hosts[0].ipv4}:29500"
    good, bad = (
        certificate_environment(authority, "rank/*", "store", file="good"),
        certificate_environment(authority, part, file="bad"),
    )
    serving = await ranks.start(net.hosts[0], "total", 0, 2, method, **good)
    failing = await ranks.start(net.hosts[1], "total", 1, 2, method, **bad)
    for code, complaints in await asyncio.gather(failing.end(), serving.end()):
        assert code == 1
        assert f"bad.pem' names aiocoll://train/{part}, but aiocoll://train/rank/1 was expected" in complaints


async def test_host_with_another_job_or_ca_is_refused_at_the_store(
    network: Callable[..., Network], ranks: Ranks, authority: Authority, tmp_path: Path
) -> None:
    """Check the error on each refused host, and check that rank 0 logs the names of a refused certificate."""
    net = network(2)
    method = f"tcp://{net.hosts[0].ipv4}:29500"
    serving = await ranks.start(
        net.hosts[0], "total", 0, 2, method, **certificate_environment(authority, "rank/*", "store")
    )
    other = as_variables(authority.make("aiocoll://other/rank/*", file="other"))
    foreign = as_variables(Authority(tmp_path, "foreign").make("aiocoll://train/rank/*", file="stranger"))
    for environment, message in (
        # Test this case first, since the store logs only the first few warnings.
        ({"AIOCOLL_JOB_ID": "train"}, "an end that accepts only certificates of a CA"),
        ({"AIOCOLL_JOB_ID": "other", **other}, "names aiocoll://train/rank/*, aiocoll://train/store, but"),
        (
            {"AIOCOLL_JOB_ID": "train", **foreign},
            "the certificate of the server is not signed by the CA in tls_ca of this process",
        ),
    ):
        failing = await ranks.start(net.hosts[1], "total", 1, 2, method, TIMEOUT="2", **environment)
        code, complaints = await failing.end()
        assert code == 1
        assert message in complaints
    joining = await ranks.start(
        net.hosts[1], "total", 1, 2, method, **certificate_environment(authority, "rank/1", file="late")
    )
    assert await joining.result() == await serving.next_line() == [3.0, 3.0]
    _, complaints = await serving.end()
    assert f"refused a connection: {net.hosts[1].ipv4} presented no certificate: give it" in complaints
