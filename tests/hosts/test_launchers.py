"""The README's program on two hosts, started by mpiexec with a stand-in for ssh."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.hosts.network import LIMIT, Network
from tests.integration.launchers import AS_ROOT, mpiexec
from tests.pages import code

if TYPE_CHECKING:
    from tests.hosts.conftest import Ranks

SUM = "[6. 6. 6.] ['rank 0', 'rank 1', 'rank 2']\n"
#: A stand-in for ssh. Arguments: options, the host, and the command to run on this host.
AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
case $1 in %s) name=%s;; *) name=%s;; esac
shift
exec ip netns exec $name sh -c "$*"
"""


@pytest.mark.parametrize("library", ["mpich", "openmpi"])
async def test_mpiexec_starts_ranks_on_two_hosts(
    library: str, network: Callable[..., Network], ranks: Ranks, tmp_path: Path
) -> None:
    program = mpiexec(library)
    if program is None:
        pytest.skip(f"needs {library}: python3 -m venv .venv-{library} && .venv-{library}/bin/pip install {library}")
    net = network(2)
    first, second = net.hosts
    agent = tmp_path / "agent"
    agent.write_text(AGENT % (first.ipv4, first.name, second.name))
    agent.chmod(0o700)
    (tmp_path / "hello.py").write_text(code("README.md", "Twelve lines"))
    given = {"PYTHONUNBUFFERED": ""}  # empty, so that the output of a rank is buffered and arrives in one piece
    if library == "mpich":
        # Pass no job key, since rank 0 sends a key to the other ranks through the PMI connection to mpiexec.
        how = ["-launcher", "ssh", "-launcher-exec", str(agent), "-hosts", f"{first.ipv4},{second.ipv4}", "-ppn", "1"]
    else:
        given["AIOCOLL_JOB_KEY_FILE"] = str(tmp_path / "job.key")
        (tmp_path / "job.key").touch(mode=0o600)
        (tmp_path / "job.key").write_bytes(b"of this test and no other")
        name = socket.gethostname()
        second.file("hosts", f"127.0.0.1 localhost\n{first.ipv4} {name}\n")
        how = ["--prtemca", "plm_ssh_agent", str(agent), "--prtemca", "prte_if_include", "eth0", "--map-by", "node"]
        how += ["--host", f"{first.ipv4}:2,{second.ipv4}:2"]
        for variable in ("PYTHONPATH", "PYTHONWARNINGS", "AIOCOLL_JOB_KEY_FILE"):
            how += ["-x", variable]
    process = await asyncio.create_subprocess_exec(
        *first.command(program, *how, "-n", "3", sys.executable, str(tmp_path / "hello.py")),
        env=ranks.environment | AS_ROOT | given,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(LIMIT):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.communicate()
    assert (out.decode(), process.returncode) == (SUM * 3, 0), err.decode()
