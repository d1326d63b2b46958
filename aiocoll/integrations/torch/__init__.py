"""Backend "aio" of torch.distributed. Programs import it as `aiocoll.torch`."""

from aiocoll.errors import BackendUnavailableError

try:
    import torch.distributed  # noqa: F401
except ImportError as error:
    raise BackendUnavailableError("aiocoll.torch needs torch: pip install 'aiocoll[torch]'") from error

from aiocoll.integrations.torch.attachment import attach
from aiocoll.integrations.torch.overlap import Overlap
from aiocoll.integrations.torch.process import process
from aiocoll.integrations.torch.registration import register
from aiocoll.integrations.torch.world import group
from aiocoll.loops import LoopThread

__all__ = ["Overlap", "attach", "group", "loop_thread", "register"]


def loop_thread() -> LoopThread:
    """Return the thread whose event loop carries out the calls of all torch groups.

    Groups that `attach` made use the event loop of the program instead.
    """
    return process.thread()


register()
