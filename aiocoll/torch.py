"""Backend "aio" of torch.distributed: `import aiocoll.torch`, then `init_process_group("aio")`."""

from aiocoll.integrations.torch import Overlap, attach, group, loop_thread, register

__all__ = ["Overlap", "attach", "group", "loop_thread", "register"]
