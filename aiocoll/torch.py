"""`import aiocoll.torch` makes aiocoll a backend of torch.distributed: `init_process_group("aio")`."""

from aiocoll.integrations.torch import Overlap, attach, group, loop_thread, register

__all__ = ["Overlap", "attach", "group", "loop_thread", "register"]
