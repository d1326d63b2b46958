"""Registration of the implementations that ship with the package; none of them is imported here."""

from __future__ import annotations

from aiocoll.plugins import COMMAND_VERSION, STORE_VERSION, TRANSPORT_VERSION, Command, commands, stores, transports

__all__: list[str] = []

stores.register_all(
    {
        "tcp": "aiocoll.store.tcp:TCP_OPENER",
        "file": "aiocoll.store.file:FILE_OPENER",
        "redis": "aiocoll.redis.store:REDIS_OPENER",
        "rediss": "aiocoll.redis.store:REDIS_OPENER",
    },
    version=STORE_VERSION,
)
transports.register_all(
    {
        "tcp": "aiocoll.transport.registry:TCP",
        "unix": "aiocoll.transport.registry:UNIX",
        "shm": "aiocoll.transport.registry:SHM",
    },
    version=TRANSPORT_VERSION,
)
commands.register_all(
    {
        "run": Command("start the ranks of a program", "aiocoll.cli.run:configure"),
        "bench": Command("measure the collectives on this machine", "aiocoll.cli.bench:configure"),
        "doctor": Command(
            "check this host, and the ways to others, for problems and for causes of slowness",
            "aiocoll.cli.doctor:configure",
        ),
        "top": Command("watch the ranks of a running job", "aiocoll.cli.top.command:configure"),
        "trace": Command(
            "find in the dumps of ranks which collective diverged first and which ranks are missing",
            "aiocoll.cli.trace:configure",
        ),
    },
    version=COMMAND_VERSION,
)
