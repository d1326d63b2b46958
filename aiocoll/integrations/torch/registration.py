"""Registration of backend "aio" with torch."""

from __future__ import annotations

import torch.distributed as dist

from aiocoll.integrations.torch.carriers import BACKEND
from aiocoll.integrations.torch.rendezvous import meet_under_launcher
from aiocoll.integrations.torch.world import make_group

__all__ = ["register"]


def register() -> None:
    """Register backend "aio" with torch.

    `import aiocoll.torch` calls this function. From version 2.14 on, torch calls it at the first use of the name.
    """
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, make_group, extended_api=True, devices=["cpu"])
        meet_under_launcher()
