"""`aiocoll run`: start the ranks of a program on this host and let them meet.

The launcher hosts the store, so a free port needs no guessing and rendezvous outlives rank 0. Ranks get torchrun's
variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR`, `MASTER_PORT`) and

    NODE_RANK              this host among the hosts, the same as GROUP_RANK
    AIOCOLL_JOB_ID         what tells this job's connections from another's, unless it was set before
    AIOCOLL_STORE          "launcher": the store at MASTER_ADDR:MASTER_PORT is there, rank 0 must not start one
    AIOCOLL_JOB_KEY_FD     a pipe that holds the job key; other processes cannot read it, unlike argv or environment
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from contextlib import ExitStack

from aiocoll.cli.arguments import positive
from aiocoll.cli.hosts import Hosts, add_host_arguments, read_hosts, serve
from aiocoll.cli.supervise import supervise
from aiocoll.errors import AiocollError
from aiocoll.options import GroupOptions
from aiocoll.store.listening import local_address

__all__ = ["add_parser"]

#: Seconds in which the name of host 0 must become known there.
_KNOWN_WITHIN = 60.0


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
    add_host_arguments(parser)
    parser.add_argument("script", metavar="SCRIPT", help="Python program, or a module with -m")
    parser.add_argument("args", nargs=argparse.REMAINDER, metavar="ARG", help="its arguments")
    parser.set_defaults(command=lambda args: _run(args, parser))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        hosts = read_hosts(args, os.environ)
        command = _command(args)
        options = GroupOptions.resolve(None, os.environ)
    except ValueError as error:
        parser.error(str(error))
    environ = dict(os.environ)
    environ.pop("AIOCOLL_JOB_KEY_FILE", None)
    with ExitStack() as stack:
        host, port = hosts.master
        if hosts.node_rank == 0:
            try:
                server = asyncio.run(serve(hosts, args.nproc * hosts.nnodes, options, _KNOWN_WITHIN, _say))
            except (AiocollError, ValueError) as error:
                _say(str(error))
                return 1
            host, port = local_address(server.host), server.port
            stack.callback(server.close)
        first = hosts.node_rank * args.nproc
        environments = {
            first + local: environ | _variables(hosts, args.nproc, local, host, port) for local in range(args.nproc)
        }
        return supervise(command, environments, hosts.key)


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    if args.module:
        return ("-m", args.script, *args.args)
    if not os.path.isfile(args.script):
        raise ValueError(f"{args.script}: no such file (-m runs a module)")
    return (args.script, *args.args)


def _say(trouble: str) -> None:
    print(f"aiocoll run: {trouble}", file=sys.stderr)


def _variables(hosts: Hosts, nproc: int, local_rank: int, host: str, port: int) -> dict[str, str]:
    return {
        "RANK": str(hosts.node_rank * nproc + local_rank),
        "WORLD_SIZE": str(hosts.nnodes * nproc),
        "LOCAL_RANK": str(local_rank),
        "LOCAL_WORLD_SIZE": str(nproc),
        "NODE_RANK": str(hosts.node_rank),
        "GROUP_RANK": str(hosts.node_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "AIOCOLL_JOB_ID": hosts.name,
        "AIOCOLL_STORE": "launcher",
        "PYTHONUNBUFFERED": "1",
    }
