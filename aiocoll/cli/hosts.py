"""Command-line arguments about the hosts of a job: number of hosts, number of this host, store address, job key."""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field

from aiocoll.cli.arguments import integer, positive
from aiocoll.options import GroupOptions, job_key, read_key_file
from aiocoll.runtime import Runtime, running_loop
from aiocoll.security.keys import KEY_SIZE
from aiocoll.store import StoreServer, TCPStore
from aiocoll.store.listening import find_address
from aiocoll.store.tcp import security_arguments

__all__ = ["Hosts", "add_host_arguments", "reach_store", "read_hosts", "serve"]

#: The default port of the store with several hosts, as in torchrun. With one host, the store takes a free port.
_DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True)
class Hosts:
    """The common parameters of the hosts of a job, and the number of this host.

    Attributes:
        nnodes: number of hosts.
        node_rank: number of this host, from 0.
        master: address and port of the store, which host 0 serves.
        key: the job key.
        name: name of the job.
    """

    nnodes: int
    node_rank: int
    master: tuple[str, int]
    key: bytes = field(repr=False)
    name: str


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command-line arguments about the hosts of a job, which `read_hosts` reads."""
    parser.add_argument("--nnodes", type=positive, default=1, metavar="N", help="number of hosts (default: 1)")
    parser.add_argument(
        "--node-rank", type=integer, default=0, metavar="K", help="number of this host, from 0 (default: 0)"
    )
    parser.add_argument("--master-addr", metavar="HOST", help="address of host 0, as every host can reach it")
    parser.add_argument(
        "--master-port",
        type=integer,
        metavar="PORT",
        help=f"port of the store (default: a free one; with several hosts {_DEFAULT_PORT})",
    )
    parser.add_argument("--job-key-file", metavar="PATH", help="file with the job key, readable by you alone")


def read_hosts(args: argparse.Namespace, environ: MutableMapping[str, str]) -> Hosts:
    """Check the arguments and return the hosts of the job; remove a job key from `environ`.

    Raises:
        ValueError: an argument is missing or wrong; the message names it.
    """
    if not 0 <= args.node_rank < args.nnodes:
        raise ValueError(f"--node-rank {args.node_rank}: must be from 0 to {args.nnodes - 1}, one less than --nnodes")
    if args.nnodes > 1 and args.master_addr is None:
        raise ValueError("--master-addr: needed with several hosts; give the address of host 0")
    port = args.master_port if args.master_port is not None else _DEFAULT_PORT if args.nnodes > 1 else 0
    if not (args.nnodes > 1) <= port <= 65535:
        raise ValueError(f"--master-port {port}: must be from 1 to 65535; 0 (any free port) is for one host only")
    given = job_key(environ, None)
    key = read_key_file(args.job_key_file, "--job-key-file") if args.job_key_file else given
    if key is None and args.nnodes > 1:
        raise ValueError(
            "several hosts need one job key, which keeps unknown processes out: make one with "
            '`(umask 077; python -c "import secrets; print(secrets.token_hex(32))" > job.key)`, '
            "copy the file to every host, and pass --job-key-file job.key (or set AIOCOLL_JOB_KEY)"
        )
    host = args.master_addr or "127.0.0.1"
    return Hosts(
        nnodes=args.nnodes,
        node_rank=args.node_rank,
        master=(host, port),
        key=key or secrets.token_bytes(KEY_SIZE),
        # Several hosts must derive the same job name without communication. On one host, each job gets a new name.
        name=environ.get("AIOCOLL_JOB_ID") or (f"{host}:{port}" if args.nnodes > 1 else secrets.token_hex(8)),
    )


async def serve(
    hosts: Hosts, world_size: int, options: GroupOptions, timeout: float, trouble: Callable[[str], None]
) -> StoreServer:
    """Start the server of the store on host 0.

    Args:
        hosts: the hosts of the job.
        world_size: number of ranks of the job.
        options: the resolved options.
        timeout: seconds in which the name of host 0 must become resolvable on host 0.
        trouble: called once with each reason for a wait.

    Raises:
        AiocollError: the store cannot listen on that address and port.
        ValueError: the files of the user's CA cannot be used.
    """
    reported: set[str] = set()

    def warn(why: str) -> None:
        if why not in reported:
            reported.add(why)
            trouble(why)

    host, _ = await find_address(
        hosts.master[0],
        options.bind if hosts.nnodes > 1 else None,
        key=hosts.key,
        runtime=Runtime.of(running_loop()),
        timeout=timeout,
        trouble=warn,
    )
    server = StoreServer(
        host,
        hosts.master[1],
        key=hosts.key,
        job=hosts.name,
        world_size=world_size,
        **security_arguments(options),
    )
    server.start()
    return server


def reach_store(hosts: Hosts, options: GroupOptions, where: tuple[str, int], timeout: float) -> TCPStore:
    """Return a client of the store whose address is `where`; the caller opens it."""
    return TCPStore(
        *where,
        timeout=timeout,
        wait_for_workers=False,
        key=hosts.key,
        job=hosts.name,
        **security_arguments(options),
    )
