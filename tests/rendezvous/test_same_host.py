"""Tests of ranks with the same host id that cannot connect by unix sockets: they use TCP and need a job key."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import msgpack
import numpy as np
import pytest

from aiocoll import AuthenticationError, GroupOptions, ProcessGroup, RendezvousError, new_group
from aiocoll.store import HashStore, Store

from ..internals import comm_of

KEY = b"k" * 32
NOBODY = 65534


class CopiedMachineStore(Store):
    """A store handle for ranks on one copy of a machine; it replaces unix socket names of the other copies."""

    def __init__(self, store: Store, owners: dict[str, int], number: int) -> None:
        super().__init__(store.timeout)
        self._store = store
        self._owners = owners
        self._number = number

    async def aclose(self) -> None:
        pass

    def _visible_name(self, name: str) -> str:
        return name if self._owners[name] == self._number else f"@aiocoll-{name[-8:]}-elsewhere"

    async def _call(self, command: str, arguments: tuple[Any, ...]) -> Any:
        key = arguments[0]
        if command == "compare_set" and "/unix/" in key:
            self._owners[arguments[2].decode()] = self._number
            return self._visible_name((await self._store._call(command, arguments)).decode()).encode()
        return await self._store._call(command, arguments)

    async def _wait(self, command: str, arguments: tuple[Any, ...], timeout: float) -> Any:
        found = await self._store._wait(command, arguments, timeout)
        if command != "multi_get" or "/card/" not in arguments[0][0]:
            return found
        cards = [msgpack.unpackb(data) for data in found]
        # Give each rank a separate loop name, since ranks of one event loop would exchange data in memory.
        return [
            msgpack.packb({**card, "unix": self._visible_name(card["unix"]), "loop": f"loop {rank}"})
            for rank, card in enumerate(cards)
        ]


def transport_names(pg: ProcessGroup) -> list[tuple[str, str | None]]:
    transport = comm_of(pg).endpoint.context.transport
    return [transport.carrier(peer) for peer in range(pg.size()) if peer != pg.rank()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("machines", ["01", "001", "010", "0101", "0012", "0123"])
async def test_copies_of_one_machine_count_as_several_hosts(machines: str) -> None:
    """Give all copies of the machine the same host id; ranks on different copies must use TCP."""
    store, owners, size = HashStore(), {}, len(machines)

    async def rank(number: int) -> list[tuple[str, str | None]]:
        options = GroupOptions(job_key=KEY, host_id="one")
        view = CopiedMachineStore(store, owners, int(machines[number]))
        async with new_group(store=view, rank=number, world_size=size, timeout=30, options=options) as pg:
            got = await pg.allreduce(np.full(100_000, number + 1.0))
            np.testing.assert_array_equal(got, np.full(100_000, size * (size + 1) / 2))
            await pg.alltoall_object(list(range(size)))
            found = transport_names(pg)
            await pg.barrier()
        return found

    results = await asyncio.gather(*map(rank, range(size)))
    for number, found in enumerate(results):
        others = [each for each in range(size) if each != number]
        for peer, (carrier, trouble) in zip(others, found, strict=True):
            together = machines[number] == machines[peer]
            assert carrier == ("shm" if together else "tcp")
            if not together:
                assert any(
                    "elsewhere cannot be reached" in (why or "") for why in (trouble, *dict(results[peer]).values())
                )
    await store.aclose()


@pytest.mark.parametrize("transport", ["unix", "shm"])
async def test_transport_for_one_host_is_refused_with_the_reason(transport: str) -> None:
    store, owners = HashStore(), {}

    async def rank(number: int) -> None:
        options = GroupOptions(transport=transport, job_key=KEY, host_id="one")
        await new_group(
            store=CopiedMachineStore(store, owners, number), rank=number, world_size=2, timeout=30, options=options
        )

    for error in await asyncio.gather(*map(rank, range(2)), return_exceptions=True):
        assert isinstance(error, RendezvousError)
        assert f"transport='{transport}', but the ranks are on 2 hosts" in str(error)
        assert "elsewhere cannot be reached (Connection refused)" in str(error)
    await store.aclose()


PROGRAM = f"""
import asyncio, concurrent.futures.thread, encodings.idna, os, sys  # nothing of it can be read by the other user
import numpy as np
import aiocoll, aiocoll.rendezvous.new_group, aiocoll.security.tls, aiocoll.store, aiocoll.transport.shm.link
from aiocoll import GroupOptions, new_group

async def main(port, key):
    options = GroupOptions(job_key=key.encode() or None)
    there = f"tcp://127.0.0.1:{{port}}"
    async with new_group(init_method=there, rank=1, world_size=2, timeout=30, options=options) as pg:
        got = await pg.allreduce(np.full(100_000, 2.0))
        await pg.barrier()
        print(got[0], got[-1], pg._parts.comm.endpoint.context.transport.carrier(0)[0])

aiocoll.security.tls.make_own_contexts()
os.setresuid({NOBODY}, {NOBODY}, {NOBODY})
asyncio.run(main(*sys.argv[1:]))
"""


def start_other_user(*arguments: str) -> subprocess.Popen[bytes]:
    """Start rank 1 as a process of an unprivileged user."""
    command = [sys.executable, "-c", PROGRAM, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("key", [KEY, None])
async def test_rank_of_another_user_needs_a_job_key(key: bytes | None, port: int) -> None:
    """Check that ranks of two users meet by TCP if both have the job key, and that both fail at once without a key."""
    there = f"tcp://127.0.0.1:{port}"
    group = new_group(init_method=there, rank=0, world_size=2, timeout=30, options=GroupOptions(job_key=key))
    with start_other_user(str(port), "" if key is None else key.decode()) as other:
        try:
            if key is None:
                with pytest.raises((RendezvousError, AuthenticationError), match=r"as another user .* user .*job_key="):
                    await group
            else:
                async with group as pg:
                    got = await pg.allreduce(np.full(100_000, 1.0))
                    np.testing.assert_array_equal(got, np.full(100_000, 3.0))
                    assert transport_names(pg)[0][0] == "tcp"
                    await pg.barrier()
            out, errors = await asyncio.to_thread(other.communicate, timeout=30)
        finally:
            other.kill()
    if key is None:
        assert b"job_key=" in errors
    else:
        assert out == b"3.0 3.0 tcp\n", errors
