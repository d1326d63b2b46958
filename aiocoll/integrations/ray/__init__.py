from aiocoll.errors import BackendUnavailableError

try:
    import ray  # noqa: F401
except ImportError as error:
    raise BackendUnavailableError("aiocoll.integrations.ray needs Ray: pip install 'aiocoll[ray]'") from error

from aiocoll.integrations.ray.actors import group
from aiocoll.integrations.ray.collective import register
from aiocoll.integrations.ray.members import BlockingMember, Member

__all__ = ["BlockingMember", "Member", "group", "register"]
