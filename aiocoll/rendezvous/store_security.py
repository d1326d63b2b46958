"""How connections to a store are secured, by the options of a group."""

from __future__ import annotations

from typing import Any

from aiocoll.options import GroupOptions

__all__ = ["store_security"]


def store_security(options: GroupOptions) -> dict[str, Any]:
    """Return those arguments of `TCPStore` and `StoreServer` that say so."""
    return {name: getattr(options, name) for name in ("encryption", "tls_ca", "tls_certificate", "tls_key")}
