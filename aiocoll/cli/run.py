"""`aiocoll run`: start the ranks of a program on this host and let them meet.

The launcher hosts the store, so a free port needs no guessing and rendezvous outlives rank 0. Ranks get torchrun's
variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR`, `MASTER_PORT`) and

    NODE_RANK              this host among the hosts, the same as GROUP_RANK
    AIOCOLL_JOB_ID         what tells this job's connections from another's
    AIOCOLL_STORE          "launcher": the store at MASTER_ADDR:MASTER_PORT is there, rank 0 must not start one
    AIOCOLL_JOB_KEY_FD     a pipe that holds the job key; other processes cannot read it, unlike argv or environment
"""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import sys
from collections.abc import MutableMapping
from contextlib import ExitStack
from dataclasses import dataclass

from aiocoll.cli.arguments import integer, positive
from aiocoll.cli.supervise import supervise
from aiocoll.errors import AiocollError
from aiocoll.options import GroupOptions, job_key, read_key_file
from aiocoll.runtime import Runtime, running_loop
from aiocoll.store import StoreServer
from aiocoll.store.listening import find_address, local_address

__all__ = ["add_parser"]

#: torchrun's, for several hosts; one host takes a free port.
_DEFAULT_PORT = 29500
#: 256 bits, the width of the hash that the handshake uses.
_KEY_SIZE = 32
#: Seconds in which the name of host 0 must become known there.
_KNOWN_WITHIN = 60.0


@dataclass(frozen=True, slots=True)
class _Job:
    """What all ranks on this host share."""

    command: tuple[str, ...]
    nproc: int
    nnodes: int
    node_rank: int
    master: tuple[str, int]
    key: bytes
    name: str


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `run` to the subcommands."""
    parser = commands.add_parser(
        "run",
        help="start the ranks of a program",
        usage="aiocoll run -n N [options] (SCRIPT | -m MODULE) [ARG ...]",
        description="Start N ranks of a Python program on this host. Their output is prefixed with [RANK]; their "
        "standard input is empty. A rank that fails stops the others. The first that failed by itself is shown last, "
        "with its traceback, and its exit code is the launcher's.",
        epilog="Several hosts: run the same command on each, with its own --node-rank; host 0 holds the store. All "
        "need one job key, in a file (--job-key-file) or in AIOCOLL_JOB_KEY.",
    )
    parser.add_argument("-n", "--nproc", type=positive, required=True, metavar="N", help="ranks on this host")
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    parser.add_argument("--nnodes", type=positive, default=1, metavar="N", help="number of hosts (default: 1)")
    parser.add_argument("--node-rank", type=integer, default=0, metavar="K", help="which of them this one is (from 0)")
    parser.add_argument("--master-addr", metavar="HOST", help="address of host 0, as every host can reach it")
    parser.add_argument(
        "--master-port",
        type=integer,
        metavar="PORT",
        help=f"port of the store (default: a free one; with several hosts {_DEFAULT_PORT})",
    )
    parser.add_argument("--job-key-file", metavar="PATH", help="file with the job key, readable by you alone")
    parser.add_argument("script", metavar="SCRIPT", help="Python program, or a module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARG", help="its arguments")
    parser.set_defaults(command=lambda args: _run(args, parser))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        job = _job(args, os.environ)
        encryption = GroupOptions.resolve(None, os.environ).encryption
    except ValueError as error:
        parser.error(str(error))
    environ = dict(os.environ)
    environ.pop("AIOCOLL_JOB_KEY_FILE", None)
    with ExitStack() as stack:
        host, port = job.master
        if job.node_rank == 0:
            try:
                host = asyncio.run(_where_to_listen(job, environ.get("AIOCOLL_BIND")))
                size = job.nproc * job.nnodes
                server = StoreServer(host, port, key=job.key, job=job.name, world_size=size, encryption=encryption)
                _, port = server.start()
            except AiocollError as error:
                print(f"aiocoll run: {error}", file=sys.stderr)
                return 1
            host = local_address(host)
            stack.callback(server.close)
        first = job.node_rank * job.nproc
        environments = {first + local: environ | _variables(job, local, host, port) for local in range(job.nproc)}
        return supervise(job.command, environments, job.key)


def _job(args: argparse.Namespace, environ: MutableMapping[str, str]) -> _Job:
    """Check the arguments; takes a job key out of `environ`.

    Raises:
        ValueError: says which argument to change.
    """
    if not 0 <= args.node_rank < args.nnodes:
        raise ValueError(f"--node-rank {args.node_rank}: must be from 0 to {args.nnodes - 1}, one less than --nnodes")
    if args.nnodes > 1 and args.master_addr is None:
        raise ValueError("--master-addr: needed with several hosts; give the address of host 0")
    port = args.master_port if args.master_port is not None else _DEFAULT_PORT if args.nnodes > 1 else 0
    if not (args.nnodes > 1) <= port <= 65535:
        raise ValueError(f"--master-port {port}: must be from 1 to 65535 (0, a free one, only with one host)")
    if not args.module and not os.path.isfile(args.script):
        raise ValueError(f"{args.script}: no such file (-m runs a module)")
    given = job_key(environ, None)
    key = read_key_file(args.job_key_file, "--job-key-file") if args.job_key_file else given
    if key is None and args.nnodes > 1:
        raise ValueError(
            "several hosts need one job key, or any stranger could join them: make one with "
            '`(umask 077; python -c "import secrets; print(secrets.token_hex(32))" > job.key)`, '
            "copy the file to every host, and pass --job-key-file job.key (or set AIOCOLL_JOB_KEY)"
        )
    host = args.master_addr or "127.0.0.1"
    return _Job(
        command=("-m", args.script, *args.args) if args.module else (args.script, *args.args),
        nproc=args.nproc,
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        master=(host, port),
        key=key or secrets.token_bytes(_KEY_SIZE),
        # All hosts must come to the same name without talking; on one host, jobs that follow each other differ.
        name=f"{host}:{port}" if args.nnodes > 1 else secrets.token_hex(8),
    )


async def _where_to_listen(job: _Job, bind: str | None) -> str:
    said: set[str] = set()

    def say(trouble: str) -> None:
        if trouble not in said:
            said.add(trouble)
            print(f"aiocoll run: {trouble}", file=sys.stderr)

    host, _ = await find_address(
        job.master[0],
        bind if job.nnodes > 1 else None,
        key=job.key,
        runtime=Runtime.of(running_loop()),
        timeout=_KNOWN_WITHIN,
        trouble=say,
    )
    return host


def _variables(job: _Job, local_rank: int, host: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(job.node_rank * job.nproc + local_rank),
        "WORLD_SIZE": str(job.nnodes * job.nproc),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(job.nproc),
        "NODE_RANK": str(job.node_rank),
        "GROUP_RANK": str(job.node_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "AIOCOLL_JOB_ID": job.name,
        "AIOCOLL_STORE": "launcher",
        "PYTHONUNBUFFERED": "1",
    }
