"""The timeout of a handshake between ranks, which the store uses, too."""

from aiocoll.security.patience import Patience

__all__ = ["Patience"]
