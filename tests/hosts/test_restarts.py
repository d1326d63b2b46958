"""`aiocoll run --max-restarts` on several hosts with encryption: all launchers agree, even if a host is cut off."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.cli.repairing_programs import REPAIRING, enough, states
from tests.hosts.network import Network, Process
from tests.ranks import wait_until

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks

pytest.importorskip("cryptography", reason="needs cryptography, for TLS between hosts")


async def start_launchers(ranks: Ranks, network: Network, listed: str, script: str, folder: Path) -> list[Process]:
    """Start an `aiocoll run` launcher on each host; return the launcher processes."""
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    where = ("--nproc-list", listed, "--master-addr", network.hosts[0].ipv4, "--max-restarts", "2")
    return [
        await ranks.start_program(
            host, "-m", "aiocoll", "run", *where, "--node-rank", str(host.number), str(file), str(enough(folder))
        )
        for host in network.hosts
    ]


def members(folder: Path) -> dict[str, int]:
    """Return the process id of each rank of the group; the rank of a newcomer is "new"."""
    return {name.split()[1]: int(name.split()[2]) for name in os.listdir(folder) if name.startswith("member ")}


async def test_restart_after_a_failure_includes_all_hosts(
    network: Callable[[int], Network], ranks: Ranks, tmp_path: Path
) -> None:
    net = network(3)
    script = """
        import asyncio, os, signal
        import aiocoll

        async def main():
            async with aiocoll.new_group() as pg:
                print("start", os.environ["AIOCOLL_RESTART_COUNT"], await pg.allreduce(2 ** pg.rank()))
                await pg.barrier()
                if pg.rank() == 3 and os.environ["AIOCOLL_RESTART_COUNT"] == "0":
                    os.kill(os.getpid(), signal.SIGKILL)
                await pg.barrier()

        asyncio.run(main())
    """
    started = await start_launchers(ranks, net, "1,2,1", script, tmp_path)
    ends = [await process.wait_output() for process in started]
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    lines = sorted(line for _, out, _ in ends for line in out.splitlines())
    assert lines == [f"[{rank}] start {count} 15" for rank in range(4) for count in range(2)]
    for host, (_, _, complaints) in enumerate(ends):
        by = "" if host == 2 else "host 2: rank 3 was killed by SIGKILL; "
        assert complaints.splitlines()[-1] == f"aiocoll run: {by}all ranks are started again (restart 1 of 2)"


@pytest.mark.parametrize("victim", ["0", pytest.param("2", marks=pytest.mark.soak), "5"])
async def test_launcher_starts_a_newcomer_for_a_self_repairing_group(
    network: Callable[[int], Network], ranks: Ranks, tmp_path: Path, victim: str
) -> None:
    net = network(3)
    started = await start_launchers(ranks, net, "2,2,2", REPAIRING, tmp_path)
    await wait_until(lambda: len(members(tmp_path)) == 6)
    os.kill(members(tmp_path)[victim], signal.SIGKILL)
    await wait_until(lambda: "new" in members(tmp_path))
    enough(tmp_path).touch()
    ends = [await process.wait_output() for process in started]
    assert [code for code, _, _ in ends] == [0, 0, 0], ends
    found = states("".join(out for _, out, _ in ends))
    assert found == found[:1] * 6
    assert found[0]["sum"] == found[0]["steps"] * 63
    assert [complaints for _, _, complaints in ends if complaints] == [
        f"aiocoll run: rank {victim} was killed by SIGKILL; a newcomer is started in its place (restart 1 of 2)\n"
    ]


async def test_host_that_is_cut_off_is_reported_lost(
    network: Callable[[int], Network], ranks: Ranks, tmp_path: Path
) -> None:
    """Check that the launcher of the lost host reports the loss, too."""
    net = network(3)
    script = """
        import os, signal, sys
        from pathlib import Path
        Path(sys.argv[1]).with_name(f"member {os.environ['RANK']} {os.getpid()}").touch()
        signal.pause()
    """
    started = await start_launchers(ranks, net, "1,1,1", script, tmp_path)
    await wait_until(lambda: len(members(tmp_path)) == 3)
    net.unplug(2)
    ends = [await process.wait_output() for process in started]
    assert [code for code, _, _ in ends] == [1, 1, 1], ends
    for host, (_, _, complaints) in enumerate(ends):
        stopped, why = complaints.splitlines()
        assert stopped == f"aiocoll run: rank {host} was ended by the launcher (SIGTERM)"
        lost = "host 0 is lost: .*" if host == 2 else "host 2 is lost: its launcher has not reported for 6 s"
        assert re.fullmatch(f"aiocoll run: {lost}", why), why
