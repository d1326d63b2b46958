"""Collectives you can await: the ranks of a program exchange and reduce arrays with `await pg.allreduce(x)`.

    import asyncio
    import numpy as np
    import aiocoll


    async def main():
        async with aiocoll.new_group() as pg:  # meets the other ranks
            x = np.full(3, pg.rank() + 1.0)
            work = pg.allreduce(x)  # starts at the call
            names = await pg.allgather_object(f"rank {pg.rank()}")
            print(await work, names)  # x itself, now the sum


    asyncio.run(main())

``aiocoll run -n 2 hello.py`` starts two ranks of it. torchrun, mpiexec and srun also start ranks.

    new_group             form a group with the other ranks; `GroupOptions` configures its communication
    ProcessGroup          its calls: allreduce, broadcast, allgather, send, recv, allgather_object, shrink, ...
    Work                  what a call returns: await it, or go on and await it later
    ReduceOp              SUM, AVG, MIN, MAX, ..., and operations of your own
    Send, Recv            messages for `ProcessGroup.batch`
    CallPlan              a call that is checked once and started often: what `ProcessGroup.plan` makes
    CartesianGroup        ranks that form a grid: what `ProcessGroup.cart` makes
    PROC_NULL             in place of a rank: the message ends at once
    Envelope              the header of a message, from `ProcessGroup.probe`
    process_group         make a group the current one of a context; `current_process_group` returns it
    Meeting               lets processes become ranks that something else starts, with a `Ticket` each
    elastic               ``async for pg in aiocoll.elastic()``: another group whenever a rank is lost
    BlockingGroup         calls that wait, for programs without an event loop
    Store                 where ranks meet: `TCPStore`, `FileStore`, `RedisStore`, `HashStore`, `PrefixStore`
    errors                every exception; all of them are here, too
    hooks                 functions of your own, called when operations start and end: `hooks.add_hook`
    register_backend      groups of another kind: `Backend`, `BackendConfig`

Modules: `aiocoll.distributed` has the names of torch.distributed, `aiocoll.testing` runs ranks in tests,
`aiocoll.typing` has the types of what calls take, `aiocoll.plugins` has the registries for other packages.
"""

# The layers are in docs/architecture.md: a module imports only from layers below its own, or from its own folder.

from importlib import import_module
from typing import TYPE_CHECKING, Any

from aiocoll import errors, native, registry  # noqa: F401 - `native` fails if AIOCOLL_NATIVE=1 cannot be met
from aiocoll.errors import *  # noqa: F403 - errors.__all__ is the list of them
from aiocoll.loading import loading

if TYPE_CHECKING:
    from aiocoll import hooks
    from aiocoll.backends import Backend, BackendConfig, register_backend
    from aiocoll.blocking import BlockingGroup
    from aiocoll.elastic_groups import elastic
    from aiocoll.elements.ops import ReduceOp
    from aiocoll.engine.matching.probe import Envelope
    from aiocoll.group.cartesian import CartesianGroup
    from aiocoll.group.current import current_process_group, process_group
    from aiocoll.group.dispatch.dispatcher import PROC_NULL
    from aiocoll.group.messages import Recv, Send
    from aiocoll.group.plans import CallPlan
    from aiocoll.group.process_group import ProcessGroup
    from aiocoll.options import GroupOptions
    from aiocoll.rendezvous.new_group import new_group
    from aiocoll.rendezvous.tickets import Meeting, Ticket
    from aiocoll.store import FileStore, HashStore, PrefixStore, RedisStore, Store, TCPStore
    from aiocoll.work import Work

registry.shipped = "aiocoll.shipped"

__version__ = "0.2.0"

__all__ = [
    "PROC_NULL",
    "Backend",
    "BackendConfig",
    "BlockingGroup",
    "CallPlan",
    "CartesianGroup",
    "Envelope",
    "FileStore",
    "GroupOptions",
    "HashStore",
    "Meeting",
    "PrefixStore",
    "ProcessGroup",
    "Recv",
    "RedisStore",
    "ReduceOp",
    "Send",
    "Store",
    "TCPStore",
    "Ticket",
    "Work",
    "current_process_group",
    "elastic",
    "hooks",
    "new_group",
    "process_group",
    "register_backend",
]
__all__ += errors.__all__


#: The module that defines each public name; it is imported at the first use of the name. None for a public submodule.
_MODULES: dict[str, str | None] = {
    "PROC_NULL": "aiocoll.group.dispatch.dispatcher",
    "Backend": "aiocoll.backends",
    "BackendConfig": "aiocoll.backends",
    "BlockingGroup": "aiocoll.blocking",
    "CallPlan": "aiocoll.group.plans",
    "CartesianGroup": "aiocoll.group.cartesian",
    "Envelope": "aiocoll.engine.matching.probe",
    "FileStore": "aiocoll.store",
    "GroupOptions": "aiocoll.options",
    "HashStore": "aiocoll.store",
    "Meeting": "aiocoll.rendezvous.tickets",
    "PrefixStore": "aiocoll.store",
    "ProcessGroup": "aiocoll.group.process_group",
    "Recv": "aiocoll.group.messages",
    "RedisStore": "aiocoll.store",
    "ReduceOp": "aiocoll.elements.ops",
    "Send": "aiocoll.group.messages",
    "Store": "aiocoll.store",
    "TCPStore": "aiocoll.store",
    "Ticket": "aiocoll.rendezvous.tickets",
    "Work": "aiocoll.work",
    "backends": None,
    "current_process_group": "aiocoll.group.current",
    "distributed": None,
    "elastic": "aiocoll.elastic_groups",
    "hooks": None,
    "launcher": None,
    "loops": None,
    "metrics": None,
    "new_group": "aiocoll.rendezvous.new_group",
    "options": None,
    "plugins": None,
    "process_group": "aiocoll.group.current",
    "register_backend": "aiocoll.backends",
    "store": None,
    "testing": None,
    "typing": None,
}


def __getattr__(name: str) -> Any:
    """Import a public name or submodule at its first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with loading(f"`aiocoll.{name}`"):
        module = _MODULES[name]
        found = import_module(f"aiocoll.{name}") if module is None else getattr(import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """Return all names of this module, including the names that are imported at their first use."""
    return sorted({*globals(), *_MODULES})
