"""The listening address of a store, for host names that resolve late, to loopback, or to another machine."""

from __future__ import annotations

from typing import Any

import pytest

from aiocoll.errors import AuthenticationError, StoreUnavailableError
from aiocoll.store import TCPStore
from aiocoll.store.listening import find_address, local_address

from ..name_server import NameServer

KEY = b"of this test and no other"
#: An address reserved for documentation, which no machine has.
FOREIGN = "192.0.2.7"


class SleepingClock:
    """A runtime whose clock advances only when the code under test sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def time(self) -> float:
        return self.now

    async def sleep(self, delay: float) -> None:
        self.slept.append(delay)
        self.now += delay


async def found_address(
    monkeypatch: pytest.MonkeyPatch, host: str, names: NameServer, bind: str | None = None, key: bytes | None = KEY
) -> tuple[str, str | None]:
    names.install(monkeypatch)
    clock: Any = SleepingClock()
    return await find_address(host, bind, key=key, runtime=clock, timeout=3.0, trouble=lambda _: None)


async def test_host_name_that_resolves_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    NameServer("127.0.0.1", unknown=3).install(monkeypatch)
    clock: Any = SleepingClock()
    troubles: list[str] = []
    where = await find_address("localhost", None, key=None, runtime=clock, timeout=3.0, trouble=troubles.append)
    assert where == ("127.0.0.1", None)
    assert clock.slept == [0.5] * 3
    assert (
        troubles
        == ["the store cannot listen yet on 'localhost', which cannot be resolved (Name or service not known)"] * 3
    )


async def test_unknown_host_name_raises_an_error_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    message = (
        r"the store cannot listen on 'master', which cannot be resolved \(Name or service not known\); tried for "
        r"3\.0 s: it must be a name or an address of this machine, where rank 0 hosts the store"
    )
    with pytest.raises(StoreUnavailableError, match=message):
        await found_address(monkeypatch, "master", NameServer(unknown=100))


async def test_store_chooses_the_address_of_this_host_among_several_addresses_of_a_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert await found_address(monkeypatch, "localhost", NameServer(FOREIGN, "127.0.0.1")) == ("127.0.0.1", None)


@pytest.mark.parametrize("bind", [None, "127.0.0.1"])
async def test_store_with_a_loopback_host_name_listens_on_bind_or_all_addresses(
    monkeypatch: pytest.MonkeyPatch, bind: str | None
) -> None:
    where, drawback = await found_address(monkeypatch, "myhost", NameServer("127.0.1.1"), bind)
    assert drawback is None
    assert where in ("::", "0.0.0.0") if bind is None else where == bind
    assert local_address(where) == "127.0.0.1"


async def test_error_explains_a_loopback_host_name_without_a_job_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await found_address(monkeypatch, "myhost", NameServer("127.0.1.1"), key=None) == (
        "127.0.1.1",
        "the store listens on 127.0.1.1 only, since 'myhost' resolves to it here (see /etc/hosts), so ranks on other "
        "hosts cannot reach it: pass its real address, and a job key",
    )


@pytest.mark.parametrize("name", ["localhost", "LOCALHOST", "localhost.localdomain", "ip6-localhost"])
async def test_store_on_localhost_listens_on_the_loopback(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    assert await found_address(monkeypatch, name, NameServer("127.0.0.1")) == ("127.0.0.1", None)


async def test_store_refuses_to_listen_on_the_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    message = rf"cannot listen on service, which means {FOREIGN} here: it is not an address of this machine, where rank"
    with pytest.raises(StoreUnavailableError, match=message):
        await found_address(monkeypatch, "service", NameServer(FOREIGN))
    with pytest.raises(AuthenticationError, match=f"{FOREIGN} can be reached from other machines"):
        await found_address(monkeypatch, "service", NameServer(FOREIGN), key=None)
    assert await found_address(monkeypatch, "service", NameServer(FOREIGN), "127.0.0.1") == ("127.0.0.1", None)
    assert (await found_address(monkeypatch, "service", NameServer(FOREIGN), "any"))[0] in ("::", "0.0.0.0")


async def test_master_connects_to_its_own_store_by_the_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    async with TCPStore(FOREIGN, 0, is_master=True, bind="any", key=KEY) as store:
        await store.set("k", b"v")
        assert await store.get("k") == b"v"
        assert store.reached == "127.0.0.1"
        async with TCPStore("127.0.0.1", store.port, key=KEY) as other:
            assert await other.get("k") == b"v"


async def test_trouble_property_explains_a_listener_on_the_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    NameServer("127.0.0.1").install(monkeypatch)
    async with TCPStore("myhost", 0, is_master=True) as store:
        assert store.trouble is not None
        assert "the store listens on 127.0.0.1 only, since 'myhost' resolves to it here" in store.trouble
