"""`aiocoll run`: the launcher, which starts a program's ranks on this host.

The launcher serves the store. It can therefore take any free port, and the store outlives rank 0. Ranks get torchrun's
variables (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`, `GROUP_RANK`, `MASTER_ADDR`, `MASTER_PORT`) and

    NODE_RANK              this host among the hosts, the same as GROUP_RANK
    AIOCOLL_JOB_ID         the name of the job, which separates its connections from other jobs; kept if set before
    AIOCOLL_STORE          "launcher": the launcher serves the store at MASTER_ADDR:MASTER_PORT, so rank 0 must not
    AIOCOLL_STORE_PORT     the port of that store; if a program changes MASTER_PORT, rank 0 starts a store there
    AIOCOLL_RESTART_COUNT  number of restarts of the job before this process was started
    AIOCOLL_JOIN           "1", instead of RANK: replace a lost rank in a group that grows
    AIOCOLL_TOP_DIR        the folder in which `aiocoll top` finds the ranks; kept if set before
    AIOCOLL_JOB_KEY_FD     a pipe with the job key; other processes cannot read it, unlike argv and the environment
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

from aiocoll.cli.arguments import describe_command, natural_number, positive, positives, seconds
from aiocoll.cli.hosts import Hosts, add_host_arguments, reach_store, read_hosts, serve
from aiocoll.cli.hosts_link import HostsLink
from aiocoll.cli.logs import Logs
from aiocoll.cli.program import Program, RankStart
from aiocoll.cli.restarts import Restarts, SingleHostRestarts
from aiocoll.cli.shutdown import KILL_AFTER
from aiocoll.cli.supervise import supervise
from aiocoll.cli.terminal import write_stderr
from aiocoll.cli.top.jobs import JobFolder, job_folder
from aiocoll.errors import AiocollError
from aiocoll.options import GroupOptions
from aiocoll.store.listening import local_address

__all__ = ["configure"]

#: Timeout in seconds within which host 0 must become able to resolve its own name.
_KNOWN_WITHIN = 60.0


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `run`; see `aiocoll.plugins.Command`."""
    describe_command(
        parser,
        codes={
            0: "all ranks have exited with code 0",
            "N": "exit code of the rank that failed first by itself; 1 if it raised an exception",
            "128+N": "signal N ended that rank, or the launcher",
            1: "no rank could be started, the rank that failed is on another host, or output could not be written",
            2: "the command line is wrong",
        },
        usage="aiocoll run (-n N | --nproc-list N,N,...) [options]\n                   (SCRIPT | -m MODULE) [ARG ...]",
        description="Start N ranks of a Python program on this host. Their output is prefixed with [RANK]; their "
        "standard input is empty. When a rank fails, the others are stopped. The rank that failed first by itself is "
        "shown last, with its traceback, and the launcher exits with its code. With --max-restarts all ranks are then "
        "started again. In an elastic group (aiocoll.elastic), only the rank that failed is replaced.",
        epilog="Several hosts: run the same command on each, with its own --node-rank; host 0 holds the store. All "
        "need one job key, in a file (--job-key-file) or in AIOCOLL_JOB_KEY.",
    )
    ranks = parser.add_mutually_exclusive_group()
    ranks.add_argument("-n", "--nproc", type=positive, metavar="N", help="ranks on this host, and on every other one")
    ranks.add_argument(
        "--nproc-list",
        type=positives,
        metavar="N,N,...",
        help="ranks on each host, in the order of --node-rank, where hosts differ",
    )
    parser.add_argument("-m", dest="module", action="store_true", help="run a module, as python -m does")
    add_host_arguments(parser)
    parser.set_defaults(nnodes=None)
    parser.add_argument(
        "--max-restarts",
        type=natural_number,
        default=0,
        metavar="N",
        help="largest number of restarts in the whole job, of all ranks or of a single one (default: 0)",
    )
    parser.add_argument(
        "--kill-after",
        type=seconds,
        default=KILL_AFTER,
        metavar="SECONDS",
        help="time from Ctrl-C or SIGTERM until ranks that still run are killed; a second one kills them at once "
        f"(default: {KILL_AFTER:g})",
    )
    parser.add_argument(
        "--log-dir",
        metavar="DIR",
        help="keep the output of each rank in files of its own as well, in a new folder in DIR that only you can read",
    )
    parser.add_argument("-v", "--verbose", action="store_true", help="show the tracebacks of all ranks that fail")
    program = parser.add_argument(
        "program",
        nargs=argparse.PARSER,
        metavar="SCRIPT",
        help="Python program, or a module with -m; all arguments after it are passed to it",
    )
    program.required = False  # `_check` reports it together with -n
    parser.set_defaults(command=lambda args: _run(args, parser))


def _run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    try:
        _check(args)
        nprocs = _nprocs(args)
        hosts = read_hosts(args, os.environ)
        command = _command(args)
        options = GroupOptions.resolve(None, os.environ)
        logs = _logs(args.log_dir)
    except ValueError as error:
        parser.error(str(error))
    environ = dict(os.environ)
    for name in ("AIOCOLL_JOB_KEY_FILE", "AIOCOLL_JOIN", "RANK"):
        environ.pop(name, None)
    with ExitStack() as stack:
        (host, port), server = hosts.master, None
        if hosts.node_rank == 0:
            try:
                server = asyncio.run(serve(hosts, sum(nprocs), options, _KNOWN_WITHIN, _print_trouble))
            except (AiocollError, ValueError) as error:
                _print_trouble(str(error))
                return 1
            host, port = local_address(server.host), server.port
            stack.callback(server.close)
        ranks = range(sum(nprocs[: hosts.node_rank]), sum(nprocs[: hosts.node_rank + 1]))
        record_end = None
        if "AIOCOLL_TOP_DIR" not in environ and (watched := _make_job_folder(stack, command, len(ranks))) is not None:
            environ["AIOCOLL_TOP_DIR"], record_end = watched
        program = Program(
            command,
            ranks,
            lambda start: environ | _variables(start, hosts, nprocs, (host, port)),
            hosts.key,
            environ.get("AIOCOLL_TOP_DIR"),
            logs,
            record_end,
        )
        if hosts.nnodes > 1 and args.max_restarts:
            same = f"--nproc-list {','.join(map(str, nprocs))} --max-restarts {args.max_restarts}"
            reach = partial(reach_store, hosts, options, (host, port))
            restarts: Restarts = HostsLink(hosts, same, args.max_restarts, reach, server)
        else:
            restarts = SingleHostRestarts(args.max_restarts, server)
        code = supervise(program, restarts, args.kill_after, verbose=args.verbose)
        return code or int(logs is not None and not logs.complete)


def _check(args: argparse.Namespace) -> None:
    """Raise ValueError if the number of ranks, the program or both are missing on the command line."""
    missing = []
    if args.nproc is None and args.nproc_list is None:
        missing.append("the number of ranks (-n N, or --nproc-list N,N,... for several hosts)")
    if args.program and args.program[0] == "--":
        del args.program[0]
    if not args.program:
        missing.append("MODULE after -m" if args.module else "SCRIPT")
    if missing:
        raise ValueError(f"missing: {' and '.join(missing)}; for example: aiocoll run -n 2 train.py")


def _nprocs(args: argparse.Namespace) -> tuple[int, ...]:
    """Return the number of ranks of each host. Without --nnodes, set `args.nnodes` to the number of hosts."""
    listed: tuple[int, ...] | None = args.nproc_list
    if listed is None:
        args.nnodes = args.nnodes or 1
        listed = (args.nproc,) * args.nnodes
    args.nnodes = args.nnodes or len(listed)
    if len(listed) != args.nnodes:
        raise ValueError(
            f"--nproc-list {','.join(map(str, listed))}: has {len(listed)} numbers for --nnodes {args.nnodes}; give "
            "one for each host"
        )
    return listed


def _command(args: argparse.Namespace) -> tuple[str, ...]:
    if args.module:
        return ("-m", *args.program)
    if not os.path.isfile(args.program[0]):
        raise ValueError(f"{args.program[0]}: no such file; to run a module, write -m before its name")
    return tuple(args.program)


def _print_trouble(trouble: str) -> None:
    write_stderr([f"aiocoll run: {trouble}"])


def _logs(parent: str | None) -> Logs | None:
    if parent is None:
        return None
    try:
        logs = Logs(parent, _print_trouble)
    except OSError as error:
        raise ValueError(
            f"--log-dir {parent}: {error.strerror}; choose a directory where you can create subdirectories"
        ) from None
    _print_trouble(f"output of the ranks is kept in {logs.path}")
    return logs


def _make_job_folder(stack: ExitStack, command: Sequence[str], ranks: int) -> JobFolder | None:
    """Make the folder in which `aiocoll top` finds the job; `stack` removes it. Return None if it cannot be made."""
    if sys.platform != "linux":
        return None
    try:
        return stack.enter_context(job_folder(os.environ, command, ranks))
    except (AiocollError, OSError) as error:
        _print_trouble(f"aiocoll top will not find this job: {error}")
        return None


def _variables(start: RankStart, hosts: Hosts, nprocs: Sequence[int], store: tuple[str, int]) -> dict[str, str]:
    host, port = store
    return {
        **({"AIOCOLL_JOIN": "1"} if start.joins else {"RANK": str(start.rank)}),
        "WORLD_SIZE": str(sum(nprocs)),
        "LOCAL_RANK": str(start.rank - sum(nprocs[: hosts.node_rank])),
        "LOCAL_WORLD_SIZE": str(nprocs[hosts.node_rank]),
        "NODE_RANK": str(hosts.node_rank),
        "GROUP_RANK": str(hosts.node_rank),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "AIOCOLL_JOB_ID": hosts.name,
        "AIOCOLL_STORE": "launcher",
        "AIOCOLL_STORE_PORT": str(port),
        "AIOCOLL_RESTART_COUNT": str(start.restarts),
        "PYTHONUNBUFFERED": "1",
    }
