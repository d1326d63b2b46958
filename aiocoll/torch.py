"""`import aiocoll.torch` makes aiocoll a backend of torch.distributed: `init_process_group("aio")`."""

from aiocoll.integrations.torch import group, loop_thread, register

__all__ = ["group", "loop_thread", "register"]
